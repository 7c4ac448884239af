"""A seeded schedule of three workers that compute for one another and fetch from one another.

Frames are lost, doubled, late; workers freeze, die and begin anew; clients hang up, prompts are
called off, engines give them up, turns are preempted and revoke lends; reads break. After `HEAL_S`
all is well: then every turn has its answer in time, a cold engine's, nothing is left anywhere, and
nobody writes into memory that was let go of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.node.transfers import prefills
from tests.support.node.lending_nodes import B
from tests.support.node.retired import RetiredMemory
from tests.support.node.schedules.clock import VirtualLoop
from tests.support.node.schedules.node import SimNode, prompt_of
from tests.support.node.schedules.schedule import ANSWER, Schedule, play_one
from tests.support.node.toy import cold

HEAL_S, QUIET_S = 8.0, 60.0
ACTIONS = 40
SESSIONS = 6


class Asked(msgspec.Struct):
    """A turn that a client waits for."""

    prompt: list[int]
    session: int
    at: str
    decode_from: str = ""


class World(Schedule):
    """One schedule."""

    def __init__(self, seed: int, loop: VirtualLoop, retired: RetiredMemory) -> None:
        super().__init__(seed, loop, retired)
        self._life = 1
        self.nodes: dict[str, SimNode] = {}
        for name in ("a", "b", "c")[: self.draw.choice((2, 3, 3))]:
            self.nodes[name] = SimNode(self, name, 1, slots=self.slots)
        self._heads = [self.text(self.draw.randint(1, 4) * B) for _ in range(2)]
        self._sessions = [[*self.draw.choice([*self._heads, []])] for _ in range(SESSIONS)]
        self._last_at: dict[int, str] = {}
        self.open: dict[TurnId, Asked] = {}
        self._turns = 0

    @property
    def lives(self) -> Iterable[SimNode]:
        return self.nodes.values()

    # -- a schedule ----------------------------------------------------------------------------

    def play(self) -> None:
        for _ in range(ACTIONS):
            self.loop.call_at(self.draw.uniform(0.0, HEAL_S), self._act)
        self.loop.run_for(HEAL_S)
        self.is_well = True
        self.loop.run_for(QUIET_S)
        self.require(not self.open, f"turns without an answer: {self.open}")
        self._last_turn()
        self.check_end()

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

    def _begin(self, node: SimNode) -> None:
        draw = self.draw
        session = draw.randrange(SESSIONS)
        if any(one.session == session for one in self.open.values()):
            return
        new = draw.randint(B // 2, self.slots // 3 * B)
        prompt = [*self._sessions[session], *self.text(new)]
        if len(prompt) + ANSWER > self.longest:
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
        self._run(node, Asked(self.text((self.slots - 3) * B), SESSIONS + self._turns, node.name))

    def _kill(self, node: SimNode) -> None:
        node.kill()
        self.counts["killed"] += 1
        for turn_id in [one for one, asked in self.open.items() if asked.at == node.name]:
            del self.open[turn_id]
        self._life += 1
        self.nodes[node.name] = SimNode(self, node.name, self._life, slots=self.slots)

    # -- what nodes say ------------------------------------------------------------------------

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
        self._run(self.nodes[target], Asked(self.text(6 * B), SESSIONS, target, source))
        self.loop.run_for(20.0)
        self.require(self.counts["answered, computed by a peer"] > before, "nothing was brought")


def play(seed: int) -> Counter[str]:
    """One schedule; an error names its seed. Returns what was in it."""
    return play_one(World, seed).counts
