"""Checkpoint policies say where to checkpoint point state: one file a policy, one contract
(tests/plan/test_swa_contract).

Which boundaries' point state is written below the device, and what that wears and saves.
"""
