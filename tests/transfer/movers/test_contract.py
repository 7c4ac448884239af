"""The movers of one host keep the contract of all movers (tests/support/transfer/contract.py)."""

from __future__ import annotations

from tests.support.transfer.contract import MoverContract
from tests.support.transfer.roads import READV, SHM


class TestReadv(MoverContract):
    road = READV


class TestShm(MoverContract):
    road = SHM
