"""Who owns what in a schedule: the directory, and each node's word with it.

real   `EmbeddedDirectory`, `Ownership` with all that it decides; its thread is a fiber
not    the sockets between them, the terms' file
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.messages import DirectoryRefusal, Outcome, Refused, Request
from ownerserve.directory.owner import doors
from ownerserve.directory.port import DirectoryStatus
from ownerserve.directory.terms import TermFile
from ownerserve.kv.messages import Term
from ownerserve.kv.wire.rpc import HandOver, Moved, Reject, Released, ReleaseSession
from ownerserve.node.ownership import ownership
from ownerserve.node.ownership.ownership import MARGIN_S, MoveTold, Ownership
from tests.support.node.lending_nodes import B
from tests.support.node.schedules.clock import (
    FiberEvent,
    FiberQueue,
    FiberThread,
    VirtualLoop,
    running_for,
    waited,
)
from tests.support.removals import Instead

if TYPE_CHECKING:
    from tests.support.node.schedules.moving_node import MovingNode
    from tests.support.node.schedules.moving_world import MovingWorld

LEASE_S = 4.0
ASKED_S = 1.0
"""So long a node waits for the directory's answer to a frame."""
SLOW_S = 0.7
"""So late come the answers to a node that is about to be cut off."""
ASKED_FOR_S = 2 * LEASE_S
LOOK_S = LEASE_S / 4
"""How often an idle one looks whether something is due; a switch of threads is dear."""
DRIFT = MARGIN_S / LEASE_S * 0.8
"""By so much a node's clock may go faster or slower than the directory's."""


class Terms(TermFile):
    """A file of terms that comes back with the directory, or is lost with it."""

    def __init__(self, world: MovingWorld) -> None:
        self._world = world
        self._ordinal = 0
        self.is_kept = world.draw.random() < 0.5

    def start(self, above: Term | None = None) -> Term:
        floor = max(self._ordinal if self.is_kept else 0, above.ordinal if above else 0)
        self._ordinal = floor + 1
        return Term(floor + 1, self._world.draw.randrange(1 << 40))


class SimDirectory:
    """The directory's process, and those that come after it."""

    def __init__(self, world: MovingWorld) -> None:
        self._world = world
        self._terms = Terms(world)
        self._away_until_s = 0.0
        self.memory = 0
        """Grows with each process."""
        self._begin(0.0)

    def now(self) -> float:
        return self._world.loop.time()

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        return self._directory.execute(requests)

    @property
    def is_away(self) -> bool:
        return self.now() < self._away_until_s

    def dies(self, away_s: float) -> None:
        """Its memory is gone, and another begins after `away_s`."""
        self._away_until_s = max(self._away_until_s, self.now() + away_s)
        self._world.loop.call_at(self._away_until_s, self._begin, LEASE_S)

    def arrives(self, requests: Sequence[Request], answer: Callable[[list[Outcome]], None]) -> None:
        if not self.is_away:
            outcomes = self.execute(requests)
            self._world.look_at_records()
            answer(outcomes)

    def _begin(self, opens_in_s: float) -> None:
        if not self.is_away:
            self.memory += 1
            self._directory = EmbeddedDirectory(
                self, self._terms, lease_s=LEASE_S, opens_in_s=opens_in_s
            )


class SimDirectoryLine:
    """What `DirectoryClient` is to a node."""

    def __init__(self, node: MovingNode) -> None:
        self._node = node

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        node, answered = self._node, Future[list[Outcome]]()
        network = node.world.network

        def answer(outcomes: list[Outcome]) -> None:
            late_s = SLOW_S if node.is_slow else 0.0
            node.world.loop.call_later(late_s, network.send, lambda: hear(outcomes))

        def hear(outcomes: list[Outcome]) -> None:
            if not answered.done():
                answered.set_result(outcomes)

        def ask() -> None:
            if not node.is_apart:
                node.world.directory.arrives(requests, answer)

        network.send(ask)
        try:
            return waited(answered, ASKED_S)
        except NotInTime:
            return [Refused(DirectoryRefusal.UNREACHABLE) for _ in requests]
        finally:
            node.world.touch(node)

    def status(self) -> DirectoryStatus:
        raise NotImplementedError

    def close(self) -> None: ...


class SimOwnership(Ownership):
    """An `Ownership` that is watched as it gives sessions up."""

    def __init__(self, node: MovingNode) -> None:
        self._node = node
        node.world.acting = node  # whose thread this makes
        super().__init__(
            node.unit,
            lambda: SimDirectoryLine(node),
            block_tokens=B,
            scope=b"toy",
            inventory=node.state.inventory,
        )

    def hand_over(self, asked: HandOver, told: MoveTold) -> Reject | None:
        node, session = self._node, asked.session_id
        world, grant = node.world, self.standing(session)

        def hears(said: Any) -> None:
            world.counts["moved" if isinstance(said, Moved) else "not moved"] += 1
            if isinstance(said, Moved) and not node.turns_since(session):
                node.gave_up.add(session)
            told(said)

        stays = super().hand_over(asked, hears)
        if stays is None:
            world.require(grant is not None, "who owns nothing gives a session up")
            assert grant is not None
            what = (grant.epoch, grant.version)
            world.require(what == (asked.epoch, asked.version), f"{asked} of what is {what}")
            world.require(not node.turns_of(session), "a session goes whose turn is here")
            world.says(node, session, grant.epoch, grant.version)
            node.asked_to_go(session)
        return stays

    def release(self, asked: ReleaseSession) -> Released | Reject:
        node, session = self._node, asked.session_id
        grant = self.standing(session)
        said = super().release(asked)
        if isinstance(said, Released) and asked.epoch is not None:
            world = node.world
            world.require(grant is not None, "who owns nothing lets a session go")
            assert grant is not None
            world.require(grant.epoch == asked.epoch, f"{asked} of what is {grant}")
            world.says(node, session, grant.epoch, grant.version)
            world.counts["let go for a guest"] += 1
        return said

    def stop(self) -> None:
        """Its process is killed."""
        cast(FiberThread, self._thread).stop()


def of_owning(loop: VirtualLoop, world: Callable[[], MovingWorld]) -> Iterable[Instead]:
    """What stands for threads, queues and the clock of `Ownership`."""

    def acting() -> MovingNode:
        return cast("MovingNode", running_for() or world().acting)

    def thread(*, target: Callable[[], None], **_: object) -> FiberThread:
        node = acting()
        return FiberThread(loop, target, soon=node.soon, of=node)

    threads = SimpleNamespace(RLock=threading.RLock, Event=FiberEvent, Thread=thread)
    return (
        Instead(ownership, "threading", threads),
        Instead(ownership, "Queue", FiberQueue),
        Instead(ownership, "LOOK_S", LOOK_S),
        Instead(doors, "ASKED_FOR_S", ASKED_FOR_S),
        Instead(ownership, "boot_time_s", lambda: acting().boot_time_s()),
    )
