"""A seeded schedule of three workers that compute for one another and fetch from one another.

Frames are lost, doubled, late; workers freeze, die and begin anew; clients hang up, prompts are
called off, engines give them up, turns are preempted and revoke lends; reads break. After `HEAL_S`
all is well: then every turn has its answer in time, a cold engine's, nothing is left anywhere, and
nobody writes into memory that was let go of.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import msgspec

from ownerserve.kv.ids import SessionId, TurnId
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
from tests.support.node.schedules.node import SimNode, prompt_of
from tests.support.node.schedules.service import FiberFuture, SimExecutor
from tests.support.node.toy import VOCABULARY, cold

HEAL_S, QUIET_S = 8.0, 60.0
ACTIONS = 40
ANSWER = 3
SESSIONS = 6


class Violation(AssertionError):
    """Something that must hold does not."""


class Asked(msgspec.Struct):
    """A turn that a client waits for."""

    prompt: list[int]
    session: int
    at: str
    decode_from: str = ""


class World:
    """One schedule."""

    def __init__(self, seed: int, loop: VirtualLoop, retired: RetiredMemory) -> None:
        self.draw = random.Random(seed)
        self.loop, self.retired = loop, retired
        self.counts: Counter[str] = Counter()
        self.is_well = False
        self.network = Network(self)
        self.breaking = self.draw.choice((0.0, 0.0, 0.02))
        self._pause_s = self.draw.choice((0.002, 0.02, 0.3))
        self._step_s = self.draw.choice((0.01, 0.1, 0.4))
        self._slots = self.draw.choice((20, 28, 48))
        self._life = 1
        self.nodes: dict[str, SimNode] = {}
        for name in ("a", "b", "c")[: self.draw.choice((2, 3, 3))]:
            self.nodes[name] = SimNode(self, name, 1, slots=self._slots)
        self._heads = [self._text(self.draw.randint(1, 4) * B) for _ in range(2)]
        self._sessions = [[*self.draw.choice([*self._heads, []])] for _ in range(SESSIONS)]
        self._last_at: dict[int, str] = {}
        self.open: dict[TurnId, Asked] = {}
        self._turns = 0

    def require(self, holds: object, problem: str) -> None:
        if not holds:
            raise Violation(problem)

    def pause_s(self) -> float:
        """How long what is asked of a thread waits for it."""
        return 0.001 if self.is_well else self.draw.random() * self._pause_s

    def step_s(self) -> float:
        """How long a step of an engine takes."""
        return 0.01 if self.is_well else self.draw.random() * self._step_s

    # -- a schedule ----------------------------------------------------------------------------

    def play(self) -> None:
        for _ in range(ACTIONS):
            self.loop.call_at(self.draw.uniform(0.0, HEAL_S), self._act)
        self.loop.run_for(HEAL_S)
        self.is_well = True
        self.loop.run_for(QUIET_S)
        self.require(not self.open, f"turns without an answer: {self.open}")
        self._last_turn()
        for node in self.nodes.values():
            self._check_end(node)
        if self.retired.standing:
            gc.collect()
        is_somebody_dead = self.counts["killed"] > 0  # whose memory nobody has let go of
        self.require(is_somebody_dead or not self.retired.standing, "landings are left")
        self.require(not self.retired.late_bytes(), "a write into memory that was let go of")

    def _act(self) -> None:
        draw = self.draw
        node = self.nodes[draw.choice(sorted(self.nodes))]
        if node.is_frozen:
            return
        action = draw.random()
        if action < 0.55:
            self._begin(node)
        elif action < 0.70:
            self._hang_up()
        elif action < 0.78:
            self._end_prompt(node)
        elif action < 0.84:
            node.cache.pressure.evict_blocks(min(8, node.cache.occupancy.evictable_blocks()))
        elif action < 0.90:
            node.frozen_until_s = min(HEAL_S, self.loop.time() + draw.uniform(0.2, 7.0))
            self.counts["frozen"] += 1
        elif action < 0.92:
            self._kill(node)
        else:
            self._press(node)

    def _text(self, tokens: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(tokens)]

    def _begin(self, node: SimNode) -> None:
        draw = self.draw
        session = draw.randrange(SESSIONS)
        if any(one.session == session for one in self.open.values()):
            return
        new = draw.randint(B // 2, self._slots // 3 * B)
        prompt = [*self._sessions[session], *self._text(new)]
        if len(prompt) + ANSWER > (self._slots - 2) * B:
            self._sessions[session] = []
            return
        others = [name for name in sorted(self.nodes) if name != node.name]
        other = draw.choice(others)
        held = self._last_at.get(session, "")
        if held in others and draw.random() < 0.4:
            self._run(node, Asked(prompt, session, node.name), lender=held)
        else:
            self._run(node, Asked(prompt, session, node.name, other))

    def _run(self, node: SimNode, asked: Asked, *, lender: str = "") -> None:
        self._turns += 1
        turn_id = TurnId(f"turn {self._turns}")
        self.open[turn_id] = asked
        refusal = node.run(
            turn_id,
            prompt_of(asked.prompt),
            answer=ANSWER,
            session_id=SessionId(f"{asked.session:032x}"),
            lender=self.nodes[lender].address if lender else None,
            decode_from=self.nodes[asked.decode_from].address if asked.decode_from else None,
        )
        if refusal is not None:
            del self.open[turn_id]

    def _hang_up(self) -> None:
        if self.open:
            turn_id = self.draw.choice(sorted(self.open))
            asked = self.open.pop(turn_id)
            node = self.nodes[asked.at]
            node.soon(lambda: node.abort(turn_id))
            self.counts["hung up"] += 1

    def _end_prompt(self, node: SimNode) -> None:
        """A prompt that a peer ordered is called off, or its engine gives it up."""
        ordered = [turn_id for turn_id in node.turns if turn_id.startswith("prefill-")]
        if ordered:
            turn_id = self.draw.choice(ordered)
            if self.draw.random() < 0.5:
                node.prefills.answer(prefills.EndPrefill(turn_id))
            else:
                node.abort(turn_id)
            self.counts["prompts ended"] += 1

    def _press(self, node: SimNode) -> None:
        """A turn like no other, which needs nearly all there is."""
        self._run(node, Asked(self._text((self._slots - 3) * B), SESSIONS + self._turns, node.name))

    def _kill(self, node: SimNode) -> None:
        node.is_dead = True
        self.counts["killed"] += 1
        node.service.source.close()
        node.service.target.close()
        for turn_id in [one for one, asked in self.open.items() if asked.at == node.name]:
            del self.open[turn_id]
        self._life += 1
        self.nodes[node.name] = SimNode(self, node.name, self._life, slots=self._slots)

    # -- what nodes say ------------------------------------------------------------------------

    def arrives(self, address: str, data: bytes, answer: Callable[[bytes], None]) -> None:
        """A frame is at the port of whoever is at that address now."""
        node = self.nodes[address.removeprefix("tcp://").partition(":")[0]]
        node.soon(lambda: node.port.arrives(data, answer))

    def answered(self, turn_id: TurnId, said: list[int], *, is_brought: bool) -> None:
        asked = self.open.pop(turn_id, None)
        if asked is None:
            return  # its client is gone
        self.require(said == cold(asked.prompt, ANSWER), f"{turn_id} has a wrong answer")
        self.counts["answered, computed by a peer" if is_brought else "answered"] += 1
        if asked.session < SESSIONS:
            self._sessions[asked.session] = [*asked.prompt, *said]
            self._last_at[asked.session] = asked.at

    def failed(self, turn_id: TurnId) -> None:
        self.require(turn_id not in self.open, f"{turn_id} found no room, alone")

    # -- the end -------------------------------------------------------------------------------

    def _last_turn(self) -> None:
        """All is well, and for long: what a peer computes comes to who asked for it."""
        for node in self.nodes.values():
            for session in list(node.cache.sessions):
                node.cache.sessions.let_go(session.session_id)
            node.cache.pressure.evict_blocks(node.cache.occupancy.evictable_blocks())
        target, source = sorted(self.nodes)[:2]
        before = self.counts["answered, computed by a peer"]
        self._run(self.nodes[target], Asked(self._text(6 * B), SESSIONS, target, source))
        self.loop.run_for(20.0)
        self.require(self.counts["answered, computed by a peer"] > before, "nothing was brought")

    def _check_end(self, node: SimNode) -> None:
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


def play(seed: int) -> Counter[str]:
    """One schedule; an error names its seed. Returns what was in it."""
    loop, retired = VirtualLoop(), RetiredMemory()
    raised: list[BaseException] = []

    def note(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        raised.append(error if isinstance(error, BaseException) else Violation(str(context)))
        loop.stop()

    loop.set_exception_handler(note)
    try:
        with ExitStack() as patched:
            for module in (lending, peers, prefills):
                patched.enter_context(patch.object(module, "time", loop))
            patched.enter_context(patch.object(target_side, "AsyncFramedClient", SimLine))
            patched.enter_context(patch.object(part_bring, "Future", FiberFuture))
            patched.enter_context(patch.object(source_side, "time", loop))
            patched.enter_context(patch.object(landing, "np", retired.numpy))
            world = World.__new__(World)
            executor = lambda *_: SimExecutor(loop, lambda: world.pause_s())  # noqa: E731
            patched.enter_context(patch.object(source_side, "ThreadPoolExecutor", executor))
            World.__init__(world, seed, loop, retired)
            try:
                world.play()
            finally:
                if raised:
                    raise raised[0]
            return world.counts
    except BaseException as error:
        error.add_note(f"node schedule {seed}, at {loop.time():.3f} s")
        raise
    finally:
        _end(loop)


def _end(loop: VirtualLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.set_exception_handler(lambda *_: None)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
