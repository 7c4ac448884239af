"""The mover over NIXL keeps the contract; in an environment that has the engine."""

from __future__ import annotations

from tests.support.transfer.contract import MoverContract
from tests.support.transfer.engines.nixl_road import NIXL


class TestNixl(MoverContract):
    road = NIXL
