"""The TCP mover keeps the contract of movers."""

from __future__ import annotations

from tests.support.transfer.contract import MoverContract
from tests.support.transfer.tcp_road import TCP


class TestTcp(MoverContract):
    road = TCP
