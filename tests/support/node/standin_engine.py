"""Stands in for `mooncake.engine`: engines of one process, which read its memory when the test lets
them. It writes into what is registered alone, as a device would.
"""

from __future__ import annotations

import ctypes
from itertools import count
from threading import Event

from tests.support.waits import WAIT_S

_ports = count(1)


class TransferEngine:
    """What OpenMooncake needs of the real one. Of all of them: `goes_on` lets calls return, `fails`
    is how many calls from now on fail, with half of their bytes written."""

    goes_on = Event()
    fails = 0
    at: dict[str, TransferEngine]

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int:
        assert (metadata, protocol, device) == ("P2PHANDSHAKE", "tcp", "")
        self._memory: list[range] = []
        self._port = next(_ports)
        self.at[f"{host}:{self._port}"] = self
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, size: int, /) -> int:
        self._memory.append(range(address, address + size))
        return 0

    def holds(self, address: int, size: int) -> bool:
        return any(address in one and address + size <= one.stop for one in self._memory)

    def batch_transfer_sync_read(
        self, peer: str, goals: list[int], sources: list[int], lengths: list[int], /
    ) -> int:
        assert self.goes_on.wait(WAIT_S)
        each = list(zip(goals, sources, lengths, strict=True))
        assert all(self.holds(goal, size) for goal, _, size in each)
        assert all(self.at[peer].holds(source, size) for _, source, size in each)
        fails, TransferEngine.fails = self.fails, max(0, self.fails - 1)
        for goal, source, size in each:
            ctypes.memmove(goal, source, size // 2 if fails else size)
        return -1 if fails else 0


def begin() -> None:
    """Begin anew: no engine is open, all calls return, none fails."""
    TransferEngine.at, TransferEngine.fails = {}, 0
    TransferEngine.goes_on.set()
