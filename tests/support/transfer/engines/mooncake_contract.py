"""The mover over Mooncake keeps the contract; in an environment that has the engine."""

from __future__ import annotations

from ownerserve.transfer.vocabulary import ReadFailure
from tests.support.transfer.contract import MoverContract
from tests.support.transfer.engines.mooncake_road import MOONCAKE


class TestMooncake(MoverContract):
    road = MOONCAKE
    forged_is = ReadFailure.PEER_LOST  # it says of every failure that it failed
