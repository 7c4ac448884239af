"""Replays sessions against a cache: closed loop, one clock, no engine. Standard library only.

The unit is a block: a prompt is the ids of its full blocks. `lanes` sessions run at once; a
request is released a think time after what it waits for, takes its recorded service time, and
waits in a queue when there is no room. Its answer needs one more block at a time.

    released -> queue -> begin (evicts what the prompt lacks) -> decode block by block -> finish
                  ^         | no room                                | no room: aborted
                  `---------+----------------------------------------'
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

SAMPLE_EVERY_TURNS = 20
RESIDENT_SHARE = 0.95
"""A session counts as resident when so much of its context is."""


class Request(NamedTuple):
    """One turn. `full` prompt blocks have ids; `answer` are those that become full behind them.
    `cap`: blocks that may be restored, since the last token must be computed."""

    session: int
    chain: int
    ids: list[int]
    answer: list[int]
    cap: int
    blocks: int
    waits: list[int]
    delay_s: float
    service_s: float
    returns: bool


class Holder(Protocol):
    """A cache under replay. Counts are blocks; a turn is named by its number."""

    def begin(self, turn: int, request: Request, now: float) -> int | None:
        """Blocks restored; None: no room, nothing changed."""

    def decode(self, turn: int, now: float) -> bool:
        """One more block for the answer; False: no room."""

    def finish(self, turn: int, now: float) -> None: ...

    def abort(self, turn: int, now: float) -> None: ...

    def close(self, chain: int) -> None:
        """The agent will not come back."""

    def relieve(self, now: float) -> bool:
        """Last resort when there is no room: drop an idle session. False: not its way."""

    def resident(self, ids: list[int]) -> int:
        """How many of the first blocks are there. Must not refresh anything."""

    def counts(self) -> dict[str, float]:
        """`evictions`, `freed` and `wanted` blocks; `drops` of whole sessions and blocks
        `dropped` by them, where that is done."""


def load(path: Path) -> list[list[Request]]:
    """Sessions as `workload` wrote them."""
    return [[Request(*row) for row in session] for session in json.loads(path.read_text())]


class Replay:
    """One run. Owns the clock, the queue and what is measured from outside."""

    def __init__(
        self, sessions: list[list[Request]], holder: Holder, *, lanes: int, goodbye: str
    ) -> None:
        """`goodbye` "told": the cache hears when an agent will not come back; "never": it does not,
        as with real agents."""
        self._sessions, self._holder, self._is_told = sessions, holder, goodbye == "told"
        self._events: list[tuple[float, int, str, tuple[int, int]]] = []
        self._order = 0
        self._queue: deque[tuple[int, int]] = deque()
        self._running: dict[int, tuple[int, int]] = {}
        self._left = [len(session) for session in sessions]
        self._blocking: list[list[set[int]]] = [
            [set(request.waits) for request in session] for session in sessions
        ]
        self._waiting = iter(range(len(sessions)))
        self._tips: dict[int, list[int]] = {}
        self._begun: dict[int, int] = {}
        self.sums = dict.fromkeys(
            ("turns", "next_turns", "prompt", "cached", "next_cached", "next_known", "aborts"), 0
        )
        self.samples: list[int] = []
        for _ in range(lanes):
            self._open_next(0.0)

    def run(self) -> dict[str, float]:
        """To the end; raises RuntimeError when turns wait and nothing will ever free a block."""
        now = 0.0
        while self._events or self._queue:
            if not self._events:
                raise RuntimeError(f"deadlock: {len(self._queue)} turns wait, none runs")
            now, _, kind, at = heapq.heappop(self._events)
            if kind == "release":
                self._queue.append(at)
            else:
                self._end(at, now)
            self._admit(now)
        counts = self._holder.counts()
        return {**self.sums, **counts, "resident": mean(self.samples), "seconds": now}

    def _push(self, when: float, kind: str, at: tuple[int, int]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, kind, at))

    def _open_next(self, now: float) -> None:
        number = next(self._waiting, None)
        if number is not None:
            for position, request in enumerate(self._sessions[number]):
                if not request.waits:
                    self._push(now + request.delay_s, "release", (number, position))

    def _admit(self, now: float) -> None:
        while self._queue:
            number, position = self._queue[0]
            request = self._sessions[number][position]
            turn = self._turn(number, position)
            cached = self._holder.begin(turn, request, now)
            while cached is None and self._holder.relieve(now):
                cached = self._holder.begin(turn, request, now)
            if cached is None:
                return
            self._queue.popleft()
            self._running[turn] = (number, position)
            self._begun[turn] = cached
            self._push(now + request.service_s, "end", (number, position))

    @staticmethod
    def _turn(number: int, position: int) -> int:
        return number * 100_000 + position

    def _end(self, at: tuple[int, int], now: float) -> None:
        number, position = at
        request, turn = self._sessions[number][position], self._turn(*at)
        for _ in range(request.blocks - len(request.ids)):
            while not self._holder.decode(turn, now):
                if not self._holder.relieve(now):
                    self._holder.abort(turn, now)
                    self.sums["aborts"] += 1
                    del self._running[turn]
                    self._queue.append(at)
                    return
        self._count(request, self._begun.pop(turn))
        self._holder.finish(turn, now)
        del self._running[turn]
        self._tips[request.chain] = request.ids + request.answer
        if not request.returns:
            self._tips.pop(request.chain)
            if self._is_told:
                self._holder.close(request.chain)
        self._release_after(number, position, now)

    def _release_after(self, number: int, position: int, now: float) -> None:
        for other, blocking in enumerate(self._blocking[number]):
            if position in blocking:
                blocking.discard(position)
                if not blocking:
                    delay_s = self._sessions[number][other].delay_s
                    self._push(now + delay_s, "release", (number, other))
        self._left[number] -= 1
        if not self._left[number]:
            self._open_next(now)

    def _count(self, request: Request, cached: int) -> None:
        sums = self.sums
        if not sums["turns"] % SAMPLE_EVERY_TURNS:
            self._sample()
        sums["turns"] += 1
        sums["prompt"] += len(request.ids)
        sums["cached"] += cached
        tip = self._tips.get(request.chain)
        if tip is not None:
            known = common(tip, request.ids[: request.cap])
            sums["next_turns"] += 1
            sums["next_known"] += known
            sums["next_cached"] += min(cached, known)

    def _sample(self) -> None:
        whole = 0
        for tip in self._tips.values():
            whole += self._holder.resident(tip) >= RESIDENT_SHARE * len(tip)
        self.samples.append(whole)


def common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # ids are chained: equal at i means equal before
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[middle - 1] == right[middle - 1] else (low, middle - 1)
    return low


def mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def expand(runs: list[tuple[int, int]]) -> Iterator[int]:
    for first, count in runs:
        yield from range(first, first + count)
