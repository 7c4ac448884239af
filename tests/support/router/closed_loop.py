"""A closed loop in a few lines: agents that send the next turn when the last is answered.

Workers compute one prefill at a time, keep sessions in device memory and evict the least recently
used; they stamp their load on each answer, on clocks of their own. No simulator: just enough for a
router's decisions to come back to it.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import PlacementAction
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.router.messages import Arrive, Dispatch, Done, FirstByte, WorkerUp
from ownerserve.router.requests.body import Usage
from ownerserve.router.state import RouterState
from ownerserve.router.worker import EVERY_ACTION, LOADED_TIERS, Profile, Speed
from tests.support.router.fleets import status

TOKENS_PER_S = 10_000.0
FETCHED_PER_S = 200_000.0
BYTES_PER_TOKEN = 4


PROFILE = Profile(
    actions=EVERY_ACTION - {PlacementAction.REMOTE_PREFILL},
    speed=Speed(
        prefill=Coefficients(0.0, 1000.0 / TOKENS_PER_S, 0.0),
        step_ms=0.0,
        step_ms_per_sequence=0.0,
        media=dict.fromkeys(LOADED_TIERS, Medium(0.0, FETCHED_PER_S)),
        kv_bytes_per_token=1000.0,
    ),
)


class Engine:
    """One worker: a queue, and a cache of whole sessions with room for `room_tokens`."""

    def __init__(self, name: str, *, room_tokens: int, clock_s: float) -> None:
        self.name = name
        self.free_at_s = 0.0
        self.pending: list[tuple[float, int]] = []
        self._room = room_tokens
        self._clock_s = clock_s
        self._cache: OrderedDict[str, int] = OrderedDict()

    def take(self, session: str, tokens: int, now: float, *, moved: int = 0) -> tuple[float, int]:
        """When the prefill ends, and how many tokens were cached; `moved` ones are brought."""
        cached = min(self._cache.pop(session, 0) + moved, tokens - 1)
        new = tokens - cached
        self.free_at_s = max(self.free_at_s, now) + new / TOKENS_PER_S + moved / FETCHED_PER_S
        self.pending.append((self.free_at_s, new))
        self.keep(session, tokens)
        return self.free_at_s, cached

    def keep(self, session: str, tokens: int) -> None:
        """The least recently used make room."""
        self._cache[session] = tokens
        while sum(self._cache.values()) > self._room and len(self._cache) > 1:
            self._cache.popitem(last=False)

    def stamp(self, now: float):  # type: ignore[no-untyped-def]
        self.pending = [(end, new) for end, new in self.pending if end > now]
        return status(self.name, now + self._clock_s, pending=sum(n for _, n in self.pending))


class Outcome:
    """What became of each session's turns: (cached tokens, prompt tokens, seconds), in order."""

    def __init__(self) -> None:
        self.turns: dict[str, list[tuple[int, int, float]]] = {}
        self.workers: dict[str, list[str]] = {}
        self.end_s = 0.0

    def cached_share(self, session: str) -> float:
        """Share of later turns that found most of their prompt cached."""
        later = self.turns[session][1:]
        return sum(cached > tokens / 2 for cached, tokens, _ in later) / len(later)


def play(
    routers: Sequence[RouterState],
    engines: Sequence[Engine],
    *,
    sessions: int,
    turns: int,
    tokens: Callable[[int], int],
    gap_s: float,
    seed: int = 0,
) -> Outcome:
    """Each session sends `turns` turns, all through one of the routers."""
    draw = random.Random(seed)
    by_name = {engine.name: engine for engine in engines}
    for router in routers:
        for engine in engines:
            router.handle(WorkerUp(WorkerId(engine.name), 0, Incarnation(1), PROFILE), 0.0)
    outcome, tick = Outcome(), 0
    due: list[tuple[float, int, str, int, Dispatch | None, RouterState, float, int]] = []
    for number in range(sessions):
        start = draw.uniform(0.0, gap_s)
        heapq.heappush(
            due, (start, number, f"s{number}", 0, None, routers[number % len(routers)], 0.0, 0)
        )
    tick = sessions
    while due:
        now, _, session, turn, dispatch, router, began, cached = heapq.heappop(due)
        prompt = tokens(int(session[1:])) + 500 * turn
        if dispatch is None:
            event = Arrive(SessionId(session), prompt * BYTES_PER_TOKEN)
            sent = router.handle(event, now)
            assert isinstance(sent, Dispatch)
            end, cached = by_name[sent.worker].take(
                session, prompt, now, moved=sent.decision.moved_tokens
            )
            outcome.workers.setdefault(session, []).append(sent.worker)
            heapq.heappush(due, (end, tick, session, turn, sent, router, now, cached))
        else:
            stamp = by_name[dispatch.worker].stamp(now)
            router.handle(FirstByte(dispatch.receipt, stamp), now)
            router.handle(Done(dispatch.receipt, Usage(prompt, 10, cached)), now)
            outcome.turns.setdefault(session, []).append((cached, prompt, now - began))
            outcome.end_s = now
            if turn + 1 < turns:
                later = now + draw.expovariate(1.0 / gap_s)
                heapq.heappush(due, (later, tick, session, turn + 1, None, router, 0.0, 0))
        tick += 1
    for router in routers:
        router.check()
    return outcome
