"""What NIXL says, and what its mover makes of it. The agent is the test's; the real one is held
against the contract of movers by test_engines.py.
"""

from __future__ import annotations

import base64
import ctypes
import logging
import sys
import weakref
from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.transfer.movers.arena import Slot, StagingMemory
from ownerserve.transfer.movers.digests import Xxh3, digest_of
from ownerserve.transfer.movers.nixl import NixlProgress, nixl_mover, open_agent, told_by
from ownerserve.transfer.vocabulary import (
    Ended,
    FramePiece,
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadQuiet,
    ReadUnproven,
)
from tests.support.transfer.reading import LONG_S, runs_of, the_end_of
from tests.support.waits import WAIT_S, until

SIZE = 8192


class NixlError(Exception):
    """NIXL's errors have no base of their own."""


class Handle:
    """A transfer: rows of address, bytes and device on both sides."""

    def __init__(self, goals: np.ndarray, sources: np.ndarray) -> None:
        self.goals, self.sources = goals, sources

    def land(self) -> None:
        for goal, source in zip(self.goals.tolist(), self.sources.tolist(), strict=True):
            ctypes.memmove(goal[0], source[0], goal[1])


class ToldAgent:
    """An agent that says what the test has it say, and reads this process's memory."""

    def __init__(self) -> None:
        self.known: list[bytes] = []
        self.said: list[str | Exception] = ["DONE"]
        self.handles: list[weakref.ref[Handle]] = []
        self.not_begun: Exception | None = None
        self.is_asked = Event()

    def get_agent_metadata(self) -> bytes:
        return b"how this agent is reached"

    def add_remote_agent(self, metadata: bytes, /) -> bytes:
        self.known.append(metadata)
        if metadata != self.get_agent_metadata():
            raise NixlError("NIXL_ERR_BACKEND")
        return b"peer"

    def get_xfer_descs(self, rows: np.ndarray, memory: str, /) -> np.ndarray:
        assert memory == "DRAM" and rows.dtype == np.uint64 and rows.shape[1] == 3
        return rows

    def initialize_xfer(
        self, operation: str, local: np.ndarray, remote: np.ndarray, peer: bytes, notice: bytes, /
    ) -> Handle:
        assert (operation, peer, notice) == ("READ", b"peer", b"")
        if self.not_begun is not None:
            raise self.not_begun
        handle = Handle(local, remote)
        self.handles.append(weakref.ref(handle))
        return handle

    def transfer(self, handle: Handle, /) -> str:
        return self.says(handle)

    def check_xfer_state(self, handle: Handle, /) -> str:
        return self.says(handle)

    def says(self, handle: Handle) -> str:
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        if said == "DONE":
            handle.land()
        return said

    def get_new_notifs(self) -> object:
        self.is_asked.set()
        return {}


class Scene:
    def __init__(self) -> None:
        self.agent = ToldAgent()
        self.arena = StagingMemory(4 * SIZE)
        self.source = np.arange(SIZE, dtype=np.uint8)
        self.mover = nixl_mover(self.agent, told_by(self.agent), arena=self.arena, digests=Xxh3())

    def end(self) -> Ended:
        self.start(LONG_S)
        return the_end_of(self.mover)

    def start(self, deadline_s: float) -> None:
        runs = runs_of([(int(self.source.ctypes.data), SIZE)])
        piece, digest = FramePiece(bytes(32), 0, 1, 0, 1), digest_of(runs, Xxh3())
        goal = self.arena.runs(Slot(1, 0, SIZE))
        self.mover.start(Read(1, 1, piece, goal, runs, digest, 1e9 + deadline_s))


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Iterator[Scene]:
    scene = Scene()
    with caplog.at_level(logging.CRITICAL, "ownerserve.transfer"):
        yield scene
        if hasattr(scene, "mover"):
            scene.mover.close()


def test_a_transfer_that_is_done_has_landed_and_its_handle_is_let_go(scene: Scene) -> None:
    scene.agent.said = ["PROC", "PROC", "DONE"]
    assert scene.end() == ReadLanded(1, SIZE)
    until(lambda: scene.agent.handles[0]() is None, what="a handle that is let go")


@pytest.mark.parametrize("said", ["ERR", NixlError("NIXL_ERR_REMOTE_DISCONNECT")], ids=str)
@pytest.mark.parametrize("before", [[], ["PROC"]], ids=["at once", "amid"])
def test_one_that_failed_is_unproven_and_keeps_its_handle(
    scene: Scene, said: str | Exception, before: list[str]
) -> None:
    scene.agent.said = [*before, said]
    assert scene.end() == ReadUnproven(1, ReadFailure.PEER_LOST)
    scene.mover.close()
    assert scene.mover.ended() == [], "nothing says that it is quiet"
    del scene.mover
    assert scene.agent.handles[0]() is not None, "as long as the arena is there"


def test_one_that_is_under_way_when_its_mover_is_closed_keeps_its_handle(scene: Scene) -> None:
    scene.agent.said = ["PROC"]
    scene.start(LONG_S)
    until(lambda: bool(scene.agent.handles), what="a transfer")
    scene.mover.close()
    assert scene.mover.ended() == [ReadUnproven(1, ReadFailure.CANCELLED)]
    del scene.mover
    assert scene.agent.handles[0]() is not None


def test_one_that_is_cancelled_is_quiet_when_it_is_done(scene: Scene) -> None:
    scene.agent.said = ["PROC"]
    scene.start(LONG_S)
    until(lambda: bool(scene.agent.handles), what="a transfer")
    scene.mover.cancel(1)
    assert the_end_of(scene.mover) == ReadUnproven(1, ReadFailure.CANCELLED)
    assert scene.agent.handles[0]() is not None
    scene.agent.said = ["DONE"]
    assert the_end_of(scene.mover) == ReadQuiet(1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("NIXL_ERR_NOT_FOUND", ReadFailure.REFUSED),
        ("NIXL_ERR_REMOTE_DISCONNECT", ReadFailure.PEER_LOST),
        ("NIXL_ERR_BACKEND", ReadFailure.UNABLE),
    ],
)
def test_one_that_is_not_begun_has_failed(scene: Scene, error: str, reason: ReadFailure) -> None:
    scene.agent.not_begun = NixlError(error)
    assert scene.end() == ReadFailed(1, reason)


def test_an_address_that_is_not_whole_is_not_told_to_the_agent(scene: Scene) -> None:
    """An agent that hears half of what it knows of a peer forgets the peer for ever."""
    whole = told_by(scene.agent)
    cut = base64.b64encode(base64.b64decode(whole)[:-3]).decode()
    scene.agent.known.clear()
    for address in (cut, whole[:-1], "", "127.0.0.1:7800", "ü"):
        scene.mover.close()
        scene.mover = nixl_mover(scene.agent, address, arena=scene.arena, digests=Xxh3())
        assert scene.end() == ReadFailed(1, ReadFailure.UNABLE)
    assert scene.agent.known == []


def test_a_peer_that_the_agent_does_not_take_can_not_be_read(scene: Scene) -> None:
    other = ToldAgent()
    other.get_agent_metadata = lambda: b"of another back end"  # type: ignore[method-assign]
    scene.mover.close()
    scene.mover = nixl_mover(scene.agent, told_by(other), arena=scene.arena, digests=Xxh3())
    assert scene.end() == ReadFailed(1, ReadFailure.UNABLE)


def test_a_lender_is_moved_on_only_while_something_is_lent() -> None:
    agent = ToldAgent()
    progress = NixlProgress(agent)
    progress.resume()
    assert agent.is_asked.wait(WAIT_S)
    progress.pause()
    progress.close()
    agent.is_asked.clear()
    closed = NixlProgress(agent)
    closed.close()
    assert not agent.is_asked.is_set(), "nothing was lent"


def test_without_the_package_an_agent_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(InvalidInput, match="nixl"):
        open_agent("worker")
