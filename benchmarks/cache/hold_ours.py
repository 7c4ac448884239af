"""HeteroCache under replay. A block id stands for a block's tokens: the layout's block is one
"token" long, so the very same cache runs on ids, 64 tokens each."""

from __future__ import annotations

from pathlib import Path

from cache.replay import Replay, Request, load
from cache.serve import serve
from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.cache.policies import EVICTION_POLICIES
from ownerserve.cache.policies.base import EvictionPolicy
from ownerserve.cache.policies.cost_aware import CostAware
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import pack
from ownerserve.kv.specs import Coverage

KV_BYTES, POINT_BYTES = 64 * 5511, 4_524_248 + 614_400
"""DeepSeek-V4-Pro: compressed KV of 64 tokens; window and overlap rows of one boundary."""

KV = Component("kv", Coverage.RANGE, KV_BYTES, KV_BYTES)
POINT = Component("point", Coverage.POINT, POINT_BYTES, POINT_BYTES)
RUNNING = 512
PLACEHOLDER = (1 << 32) - 1
"""A prompt's unfinished last block; it is never advanced."""


def policy_of(name: str) -> EvictionPolicy:
    if name == CostAware.name:  # its positions are blocks here
        return CostAware(context_tokens=65_536 / 64)
    return EVICTION_POLICIES[name]()


class Ours:
    """Drives the facade as a worker does."""

    def __init__(self, policy: str, *, capacity: int, points: int) -> None:
        """Room for `capacity` blocks and, in a hybrid model, `points` boundaries' state."""
        slots = {"kv": capacity, "point": points} if points else {"kv": capacity}
        layout = Layout(1, (KV, POINT) if points else (KV,))
        self.cache = HeteroCache(layout, slots, RUNNING, policy_of(policy))
        self._pins = self.cache.policy.pins_idle_sessions
        self._requests: dict[int, Request] = {}
        self._reserved: dict[int, int] = {}
        self._missing = 0
        self._drops = self._dropped = 0

    def begin(self, turn: int, request: Request, now: float) -> int | None:
        ids = request.ids + (request.answer[:1] or [PLACEHOLDER])
        name = TurnId(str(turn))
        tokens = pack(ids[: request.cap + 1])
        opened = self.cache.begin(Turn(name, SessionId(str(request.chain)), tokens), now)
        assert isinstance(opened, Begun), opened
        prompt = len(request.ids)
        got = self.cache.reserve(name, prompt, now)
        if isinstance(got, NoRoom):
            self.cache.abort(name, now)
            self._missing = got.missing
            return None
        for ids in (request.ids[opened.restored : request.cap], request.ids[request.cap :]):
            if ids:
                self.cache.advance(name, pack(ids), now)
                self.cache.snapshot(name, now)
        self._requests[turn], self._reserved[turn] = request, prompt
        return opened.restored

    def decode(self, turn: int, now: float) -> bool:
        upto = self._reserved[turn] + 1
        got = self.cache.reserve(TurnId(str(turn)), upto, now)
        if isinstance(got, NoRoom):
            self._missing = got.missing
            return False
        self._reserved[turn] = upto
        return True

    def finish(self, turn: int, now: float) -> None:
        name, request = TurnId(str(turn)), self._requests.pop(turn)
        self.cache.advance(name, pack(request.answer), now)
        if request.answer:
            self.cache.snapshot(name, now)
        self.cache.finish(name, now)
        del self._reserved[turn]

    def abort(self, turn: int, now: float) -> None:
        self.cache.abort(TurnId(str(turn)), now)
        del self._requests[turn], self._reserved[turn]

    def close(self, chain: int) -> None:
        self.cache.sessions.release(SessionId(str(chain)))

    def relieve(self, now: float) -> bool:
        """Pinned slots alone: the idle session longest unused goes, whole and at once."""
        if not self._pins:
            return False
        cache = self.cache
        idle = [s for s in cache.sessions if s.pin is not None and not s.running]
        if not idle:
            return False
        before = cache.occupancy.evictable_blocks()
        cache.sessions.release(min(idle, key=lambda s: s.last_s).session_id)
        freed = cache.occupancy.evictable_blocks() - before
        if freed:
            cache.pressure.evict_blocks(freed)
            self._drops += 1
            self._dropped += freed
            cache.counters.wanted_tokens += min(freed, self._missing) - freed
        return True

    def resident(self, ids: list[int]) -> int:
        return self.cache.match(pack(ids)).range_tokens

    def counts(self) -> dict[str, float]:
        counters = self.cache.counters
        return {
            "evictions": counters.evictions,
            "freed": counters.evicted_tokens,
            "wanted": counters.wanted_tokens,
            "drops": self._drops,
            "dropped": self._dropped,
        }


def replay(
    path: str, *, policy: str, capacity: int, lanes: int, goodbye: str, points: int
) -> dict[str, float]:
    """One policy's numbers."""
    ours = Ours(policy, capacity=capacity, points=points)
    found = Replay(load(Path(path)), ours, lanes=lanes, goodbye=goodbye).run()
    ours.cache.check()
    return found


if __name__ == "__main__":
    serve({"replay": replay})
