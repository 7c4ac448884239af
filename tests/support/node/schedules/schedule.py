"""What seeded schedules of nodes have in common: a clock, a network, how slow all is, and what must
hold of a node when all is over.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest.mock import patch

from ownerserve.kv.ids import TurnId
from ownerserve.node.transfers import (
    landing,
    lending,
    part_bring,
    peers,
    prefills,
    source_side,
    target_side,
)
from tests.support.node.lending_nodes import B
from tests.support.node.retired import RetiredMemory
from tests.support.node.schedules.clock import VirtualLoop
from tests.support.node.schedules.network import Network, SimLine
from tests.support.node.schedules.node import SimNode
from tests.support.node.schedules.service import FiberFuture, SimExecutor
from tests.support.node.toy import VOCABULARY
from tests.support.removals import Instead

ANSWER = 3


class Violation(AssertionError):
    """Something that must hold does not."""


class Schedule:
    """One schedule."""

    def __init__(self, seed: int, loop: VirtualLoop, retired: RetiredMemory) -> None:
        self.draw = random.Random(seed)
        self.loop, self.retired = loop, retired
        self.acting: SimNode | None = None
        """Whose thread runs."""
        self.counts: Counter[str] = Counter()
        self.is_well = False
        self.network = Network(self)
        self.breaking = self.draw.choice((0.0, 0.0, 0.02))
        self._pause_s = self.draw.choice((0.002, 0.02, 0.3))
        self._step_s = self.draw.choice((0.01, 0.1, 0.4))
        self.slots = self.draw.choice((20, 28, 48))

    @property
    def lives(self) -> Iterable[SimNode]:
        """The nodes that live now."""
        raise NotImplementedError

    def at(self, name: str) -> SimNode | None:
        """Who lives there now."""
        return next((node for node in self.lives if node.name == name), None)

    def play(self) -> None:
        """Play it, or raise Violation."""
        raise NotImplementedError

    def answered(self, turn_id: TurnId, said: list[int], *, is_brought: bool) -> None:
        """A turn has its answer."""
        raise NotImplementedError

    def failed(self, turn_id: TurnId) -> None:
        """A turn found no room, alone."""
        raise NotImplementedError

    @classmethod
    def instead(cls, loop: VirtualLoop, world: Callable[[], Any]) -> Iterable[Instead]:
        """What stands for what modules have, beside what does in each schedule."""
        return ()

    def require(self, holds: object, problem: str) -> None:
        if not holds:
            raise Violation(problem)

    def pause_s(self) -> float:
        """How long what is asked of a thread waits for it."""
        return 0.001 if self.is_well else self.draw.random() * self._pause_s

    def step_s(self) -> float:
        """How long a step of an engine takes."""
        return 0.01 if self.is_well else self.draw.random() * self._step_s

    def text(self, tokens: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(tokens)]

    @property
    def longest(self) -> int:
        """Tokens of a turn, at most."""
        return (self.slots - 2) * B

    def arrives(self, address: str, data: bytes, answer: Callable[[bytes], None]) -> None:
        """A frame is at the port of whoever is at that address now."""
        node = self.at(address.removeprefix("tcp://").partition(":")[0])
        if node is not None:
            node.soon(lambda: node.port.arrives(data, answer))

    # -- the end -------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Nothing is left anywhere."""
        for node in self.lives:
            self._check_node(node)
        if self.retired.standing:
            gc.collect()
        is_somebody_dead = self.counts["killed"] > 0  # whose memory nobody has let go of
        self.require(is_somebody_dead or not self.retired.standing, "landings are left")
        self.require(not self.retired.late_bytes(), "a write into memory that was let go of")

    def _check_node(self, node: SimNode) -> None:
        books = node.books()
        self.require(not any(books.values()), f"{node.name} still has {books}")
        node.service.source.state.check()
        node.service.target.state.check()
        node.scheduler.check()
        node.state.check()
        self.require(not node.memory.wrong_slots(node.cache), "the tree has wrong bytes")
        for session in list(node.cache.sessions):
            node.cache.sessions.let_go(session.session_id)
        levels = node.cache.occupancy
        node.cache.pressure.evict_blocks(levels.evictable_blocks())
        self.require(not levels.blocks.used, "blocks are left")
        for kind, count in node.prefills.counts.items():
            self.counts[f"prompt {kind}"] += count
        for kind, count in node.peers.brings.items():
            self.counts[f"bring {kind}"] += count


S = TypeVar("S", bound=Schedule)


def play_one(kind: type[S], seed: int) -> S:
    """One schedule of that kind; an error names its seed."""
    loop, retired = VirtualLoop(), RetiredMemory()

    def note(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        loop.faults.append(error if isinstance(error, BaseException) else Violation(str(context)))
        loop.stop()

    loop.set_exception_handler(note)
    world = kind.__new__(kind)
    executor = lambda *_: SimExecutor(loop, lambda: world.pause_s())  # noqa: E731
    always = (
        *(Instead(module, "time", loop) for module in (lending, peers, prefills, source_side)),
        Instead(target_side, "AsyncFramedClient", SimLine),
        Instead(part_bring, "Future", FiberFuture),
        Instead(landing, "np", retired.numpy),
        Instead(source_side, "ThreadPoolExecutor", executor),
    )
    try:
        with ExitStack() as patched:
            for module, name, by in (*always, *kind.instead(loop, lambda: world)):
                patched.enter_context(patch.object(module, name, by))
            world.__init__(seed, loop, retired)  # type: ignore[misc]
            world.play()
            return world
    except BaseException as error:
        error.add_note(f"node schedule {seed}, at {loop.time():.3f} s")
        raise
    finally:
        _end(loop)


def _end(loop: VirtualLoop) -> None:
    for fiber in list(loop.fibers):
        fiber.stop()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.set_exception_handler(lambda *_: None)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
