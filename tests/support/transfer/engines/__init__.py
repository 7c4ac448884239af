"""Transfer engines that are not ours, as the contract's tests open them; each in an environment of
its own, where `pytest tests/support/transfer/engines/NAME_contract.py` holds its mover against the
contract of all movers. tests/transfer/movers/test_engines.py does that.
"""
