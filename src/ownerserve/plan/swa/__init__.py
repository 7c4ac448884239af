"""Checkpoint policies say where to checkpoint point state, under one contract
(tests/plan/test_swa_contract): the fixed ones in one file, the adaptive one in its own.

Which boundaries' point state is written below the device, and what that wears and saves.
"""
