"""HeteroCache on the recipe: five components, packed input, LRU order.

Of each turn all that the engine asks of the cache: begin, reserve, advance to the last boundary,
snapshot, advance the rest, reserve and advance the answer, finish.
"""

from __future__ import annotations

import random
from time import thread_time

from cache.recipe import BLOCK, KEPT, NEW, VOCABULARY, clock, grown, idle_sessions
from cache.serve import serve
from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Append, Begun, Turn
from ownerserve.cache.policies.lru import Lru
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed, pack
from ownerserve.kv.specs import Coverage

SESSION = SessionId("agent")
LAYOUT = Layout(
    BLOCK,
    tuple(
        Component(name, Coverage.RANGE, size * BLOCK, size * BLOCK)
        for name, size in (("csa_main", 4380), ("csa_index", 990), ("hca", 141))
    )
    + tuple(
        Component(name, Coverage.POINT, size, size)
        for name, size in (("swa", 4_524_248), ("csa_overlap", 614_400))
    ),
)


def empty(blocks: int) -> HeteroCache:
    """A cache with room for `blocks` blocks."""
    slots = dict.fromkeys(LAYOUT.range_names, blocks) | dict.fromkeys(LAYOUT.point_names, 1000)
    return HeteroCache(LAYOUT, slots, 8, Lru())


def compute(cache: HeteroCache, turn_id: TurnId, begun: Begun, end: int) -> None:
    """Prefill to the last boundary, snapshot there, then the rest."""
    cache.reserve(turn_id, end, 0.0)
    cut = (end // BLOCK * BLOCK - begun.restored) * TOKEN_BYTES
    cache.advance(turn_id, begun.pending[:cut], 0.0)
    cache.snapshot(turn_id, 0.0)
    cache.advance(turn_id, begun.pending[cut:], 0.0)


def whole_turn(cache: HeteroCache, turn: Turn, answer: Packed, now: float) -> None:
    """A turn given as its whole prompt."""
    begun = cache.begin(turn, now)
    assert isinstance(begun, Begun)
    end = len(turn.tokens) // TOKEN_BYTES
    compute(cache, turn.turn_id, begun, end)
    cache.reserve(turn.turn_id, end + len(answer) // TOKEN_BYTES, now)
    cache.advance(turn.turn_id, answer, now)
    cache.finish(turn.turn_id, now)


def turns(context: int, measured: int) -> list[float]:
    """us a turn, its prompt given as packed tokens."""
    cache = empty(2 * context // BLOCK + 1000)
    times = []
    for turn in grown(context, measured):
        name, prompt, answer = TurnId(str(turn.number)), pack(turn.prompt), pack(turn.answer)
        started = clock()
        whole_turn(cache, Turn(name, SESSION, prompt), answer, float(turn.number))
        if turn.is_measured:
            times.append((thread_time() - started) * 1e6)
    return times


def turns_from_lists(context: int, measured: int) -> list[float]:
    """us a turn, its prompt given as `list[int]`: packing is inside the clock."""
    cache = empty(2 * context // BLOCK + 1000)
    times = []
    for turn in grown(context, measured):
        name = TurnId(str(turn.number))
        started = clock()
        prompt, answer = pack(turn.prompt), pack(turn.answer)
        whole_turn(cache, Turn(name, SESSION, prompt), answer, float(turn.number))
        if turn.is_measured:
            times.append((thread_time() - started) * 1e6)
    return times


def appends(context: int, measured: int) -> list[float]:
    """us a turn, given as (session, version, suffix) behind `context` tokens."""
    source = random.Random(context)
    cache = empty((context + (measured + 2) * 1000) // BLOCK)
    prompt = pack(source.choices(range(VOCABULARY), k=context))
    first = TurnId("first")
    begun = cache.begin(Turn(first, SESSION, prompt), 0.0)
    assert isinstance(begun, Begun)
    compute(cache, first, begun, context)
    done = cache.finish(first, 0.0)
    times = []
    for number in range(measured):
        turn_id, now = TurnId(str(number)), float(number)
        suffix = pack(source.choices(range(VOCABULARY), k=NEW))
        answer = pack(source.choices(range(VOCABULARY), k=KEPT))
        started = clock()
        assert done.version is not None
        begun = cache.append(Append(turn_id, SESSION, done.version, suffix), now)
        assert isinstance(begun, Begun)
        compute(cache, turn_id, begun, done.tokens + NEW)
        cache.reserve(turn_id, done.tokens + NEW + KEPT, now)
        cache.advance(turn_id, answer, now)
        done = cache.finish(turn_id, now)
        times.append((thread_time() - started) * 1e6)
    return times


def evictions(at_once: int) -> list[float]:
    """us a block."""
    cache = empty(20_200)
    for number, prompt in enumerate(idle_sessions()):
        turn = Turn(TurnId(str(number)), SessionId(str(number)), pack(prompt))
        whole_turn(cache, turn, b"", float(number))
    times = []
    for _ in range(6000 // at_once):
        started = clock()
        cache.pressure.evict_blocks(at_once)
        times.append((thread_time() - started) * 1e6 / at_once)
    return times


if __name__ == "__main__":
    serve(
        {
            "turns": turns,
            "turns_from_lists": turns_from_lists,
            "appends": appends,
            "evictions": evictions,
        }
    )
