"""Turns between three worker processes that compute for one another and fetch from one another, cut
off at random points: their client hangs up (which is a `Cancel` at the peer), a peer says
`EndPrefill`, the engine that computes gives up, a deadline passes.

    python -m tests.support.hf.aborts.storm [ABORTS] [SEED]         10,000 aborts, seed 1

Points are drawn over the time that such a turn takes here. Whatever has an answer has a cold
engine's. In the end nobody has or waits for anything, and nobody writes.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter, deque
from heapq import heappop, heappush

import msgspec

from tests.support.hf.aborts.process import ToyProcess, hear_any
from tests.support.hf.aborts.worker import (
    CallOff,
    DropPrompt,
    HangUp,
    RunTurn,
    Told,
    TurnOver,
    WorkerSetting,
)
from tests.support.node.lending_nodes import B
from tests.support.node.toy import VOCABULARY, cold

AT_ONCE = 8
SESSIONS = 24
MOST_BLOCKS = 28
ANSWER_TOKENS = 4
TELL_EVERY_S = 10.0
LEFT_WITHIN_S = 120.0
"""A prompt that nobody asks to read is kept for 30 s; machines may be slow beside it."""
KINDS = {"none": 15, "hang up": 50, "call off": 20, "drop": 15}
WORKERS = (("a", ("readv", "tcp"), None), ("b", ("tcp",), None), ("c", ("readv", "tcp"), 0.05))


class Session(msgspec.Struct):
    """What was said in a session so far, and where its last turn ran."""

    name: str
    tokens: list[int]
    at: str = ""
    is_busy: bool = False


class OpenTurn(msgspec.Struct):
    turn: RunTurn
    session: Session
    at: str
    begun_s: float
    kind: str
    is_cut: bool = False


class Came(msgspec.Struct):
    """What came of a storm. `late`: kinds of aborts whose turn was over before."""

    aborts: int = 0
    by: Counter[str] = msgspec.field(default_factory=Counter)
    late: Counter[str] = msgspec.field(default_factory=Counter)
    answered: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    counts: dict[str, Counter[str]] = msgspec.field(default_factory=dict)
    took_s: float = 0.0


class Storm:
    """A storm under way."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.came = Came()
        self.workers = {
            name: ToyProcess(WorkerSetting(name, seed, roads, patience_s, piece_bytes=1))
            for name, roads, patience_s in WORKERS
        }
        heads = [self._text(self.draw.randint(0, 5) * B) for _ in range(3)]
        self.heads = [*heads, []]
        self.sessions = [self._session() for _ in range(SESSIONS)]
        self.open: dict[int, OpenTurn] = {}
        self.due: list[tuple[float, int]] = []
        self.took_s: deque[float] = deque([0.05], maxlen=64)
        self.numbers = 0

    def _text(self, tokens: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(tokens)]

    def _session(self) -> Session:
        return Session(f"{self.draw.getrandbits(128):032x}", list(self.draw.choice(self.heads)))

    # -- turns ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """One more turn, of a session that none runs in."""
        draw = self.draw
        place = draw.choice([n for n, one in enumerate(self.sessions) if not one.is_busy])
        if len(self.sessions[place].tokens) > MOST_BLOCKS // 2 * B:
            self.sessions[place] = self._session()
        session = self.sessions[place]
        prompt = [*session.tokens, *self._text(draw.randint(B, MOST_BLOCKS // 2 * B))]
        at = draw.choice(sorted(self.workers))
        other = draw.choice([name for name in sorted(self.workers) if name != at])
        held = session.at if session.at not in ("", at) and draw.random() < 0.5 else ""
        self.numbers += 1
        turn = RunTurn(
            number=self.numbers,
            prompt=prompt,
            session_id=session.name,
            tokens=ANSWER_TOKENS,
            decode_from=None if held else self.workers[other].address,
            bring_from=self.workers[held].address if held else None,
        )
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        now_s = time.monotonic()
        self.open[turn.number] = OpenTurn(turn, session, at, now_s, kind)
        session.is_busy = True
        self.workers[at].run(turn)
        if kind != "none":
            span_s = 1.2 * statistics.median(self.took_s)
            heappush(self.due, (now_s + draw.random() * span_s, turn.number))

    def cut(self, number: int) -> None:
        """Abort the turn, or what is done for it."""
        one = self.open.get(number)
        if one is None:
            return
        self.came.aborts += 1
        self.came.by[one.kind] += 1
        one.is_cut = True
        if one.kind == "hang up":
            self.workers[one.at].tell(HangUp(number))
            self._leave(one)
            return
        back = self.draw.choice((0, 0, 0, 1, 2))
        told: Told = CallOff(back) if one.kind == "call off" else DropPrompt(back)
        self.workers[self._computes(one)].tell(told)

    def _computes(self, one: OpenTurn) -> str:
        asked = one.turn.decode_from or one.turn.bring_from
        assert asked is not None
        return str(asked.unit.worker)

    def ended(self, over: TurnOver) -> None:
        """A turn has its answer, which is a cold engine's."""
        one = self.open.get(over.number)
        if one is None:
            return  # its client is gone
        if over.failed:
            self.came.refused[over.failed.partition(":")[0]] += 1
        else:
            expected = cold(one.turn.prompt, ANSWER_TOKENS)
            assert over.tokens == expected, f"{one.at} answers {over} for {one.turn}"
            one.session.tokens, one.session.at = [*one.turn.prompt, *over.tokens], one.at
            self.came.answered[over.mode] += 1
            if one.kind == "none":
                self.took_s.append(time.monotonic() - one.begun_s)
        if one.kind != "none" and not one.is_cut:
            self.came.late[one.kind] += 1
        if self.workers[one.at].setting.patience_s is not None and one.kind == "none":
            self.came.by["deadline"] += over.mode not in ("remote_prefill", "artifact_fetch")
        self._leave(one)

    def _leave(self, one: OpenTurn) -> None:
        del self.open[one.turn.number]
        one.session.is_busy = False

    # -- all of it -----------------------------------------------------------------------------

    def play(self, aborts: int) -> Came:
        began_s = told_s = time.monotonic()
        while self.came.aborts < aborts:
            while len(self.open) < AT_ONCE:
                self.begin()
            self._turn_over(time.monotonic())
            if time.monotonic() - told_s > TELL_EVERY_S:
                told_s = time.monotonic()
                print(f"{self.came.aborts:,} of {aborts:,} aborts", file=sys.stderr, flush=True)
        self.due.clear()
        while self.open:
            self._turn_over(time.monotonic())
            oldest_s = min((one.begun_s for one in self.open.values()), default=began_s)
            assert time.monotonic() - oldest_s < 300.0 or not self.open, f"starved: {self.open}"
        self._look_at_the_end()
        self.came.took_s = time.monotonic() - began_s
        return self.came

    def _turn_over(self, now_s: float) -> None:
        """Cut what is due, then wait for the next word or the next cut."""
        while self.due and self.due[0][0] <= now_s:
            self.cut(heappop(self.due)[1])
        next_s = self.due[0][0] - now_s if self.due else 0.1
        hear_any(list(self.workers.values()), min(next_s, 0.1))
        for worker in self.workers.values():
            while worker.over:
                self.ended(worker.over.popitem()[1])

    def _look_at_the_end(self) -> None:
        for name, worker in self.workers.items():
            books = worker.comes_to_rest(LEFT_WITHIN_S)
            for of, counts in books.counts.items():
                self.came.counts.setdefault(of, Counter()).update(counts)
            left = worker.rest()
            assert not any(left.values()), f"{name}: {left}"

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def storm(aborts: int, seed: int) -> Came:
    """Make so many aborts. Raises AssertionError for a wrong answer, for what is left, and for what
    was written where nobody may."""
    under_way = Storm(seed)
    try:
        return under_way.play(aborts)
    finally:
        under_way.close()


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    came = storm(wanted, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    for name in ("by", "late", "answered", "refused"):
        print(name, dict(getattr(came, name)))
    for name, found in came.counts.items():
        print(name, dict(found))
    print(f"{came.aborts:,} aborts in {came.took_s:.0f} s: nothing is left, no wrong answer")
