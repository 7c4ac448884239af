"""What the hooks look at does not grow with sessions, with their number, or with the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, SupportsIndex, overload

import pytest

from ownerserve.engines.vllm.scheduler_side.soft_references import WORKED_OFF
from tests.support.vllm_parts.soft_play import ModelBlock, ModelPool, Play

NEW = 5
"""Blocks that a turn adds."""
VISITS_A_BLOCK = 20
"""Looks at one block that begins or ceases to be wished for, at most: id, hash, count, links."""


class Visits:
    """How often a block was looked at, or taken from the pool's list of all blocks."""

    def __init__(self) -> None:
        self.count = 0


class CountedBlock(ModelBlock):
    """Counts every look at one of its fields."""

    def __init__(self, block_id: int, visits: Visits) -> None:
        object.__setattr__(self, "visits", visits)
        super().__init__(block_id)

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "visits").count += 1
        return object.__getattribute__(self, name)


class CountedBlocks(list[CountedBlock]):
    """Counts every block that is taken out by its number, or walked over."""

    def __init__(self, count: int, visits: Visits) -> None:
        super().__init__(CountedBlock(at, visits) for at in range(count))
        self._visits = visits

    @overload
    def __getitem__(self, at: SupportsIndex) -> CountedBlock: ...
    @overload
    def __getitem__(self, at: slice) -> list[CountedBlock]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> CountedBlock | list[CountedBlock]:
        found = super().__getitem__(at)
        self._visits.count += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Any:
        self._visits.count += len(self)
        return super().__iter__()


class CountedPool(ModelPool):
    def __init__(self, count: int, visits: Visits) -> None:
        super().__init__(count)
        free = CountedBlocks(count, visits)
        self.blocks: Sequence[Any] = free
        self.free_block_queue = type(self.free_block_queue)(list.__iter__(free[1:]))


def visits_of_a_turn(sessions: int, blocks: int, pool_blocks: int) -> Counter[str]:
    """Looks in each call of soft references during one session's next turn, beside idle others."""
    visits = Visits()
    play = Play(CountedPool(pool_blocks, visits), pool_fraction=1.0)
    texts = {f"s{n}": [("head", i) for i in range(3)] for n in range(sessions)}
    for name, text in texts.items():
        text += [(name, i) for i in range(blocks)]
        play.start(name, text)
        play.finish(0)
    found: Counter[str] = Counter()

    def counted(what: str, call: Any) -> None:
        before = visits.count
        call()
        found[what] += visits.count - before

    name = f"s{sessions // 2}"
    texts[name] += [("more", i) for i in range(NEW)]
    counted("resumed", lambda: play.soft.resumed(name, play.now))
    counted("tidy, while it waits", lambda: play.soft.tidy(play.now))
    assert play.start(name, texts[name]) == blocks + 3
    session, held = play.running.pop()
    tables = [[block.block_id for block in held]]
    counted("finished", lambda: play.soft.finished(session, tables, play.now))
    play.pool.free_blocks(reversed(held))
    counted("tidy", lambda: play.soft.tidy(play.now))
    play.check()
    assert play.soft.status().blocks == 3 + sessions * blocks + NEW
    return found


def test_a_turn_is_charged_for_what_it_adds_and_for_nothing_else() -> None:
    small = visits_of_a_turn(sessions=4, blocks=40, pool_blocks=400)
    assert small == visits_of_a_turn(sessions=4, blocks=400, pool_blocks=4000), "longer sessions"
    assert small == visits_of_a_turn(sessions=40, blocks=40, pool_blocks=4000), "more sessions"
    assert 0 < small["finished"] <= NEW * VISITS_A_BLOCK
    assert small["resumed"] == small["tidy"] == small["tidy, while it waits"] == 0


@pytest.mark.parametrize("why", ["over_limit", "expired", "released"])
def test_wishes_end_a_few_blocks_at_a_time(why: str) -> None:
    visits, blocks = Visits(), 4 * WORKED_OFF
    play = Play(CountedPool(3 * blocks, visits), pool_fraction=0.5 if why == "over_limit" else 1.0)
    for name in ("a", "b"):
        play.start(name, [(name, i) for i in range(blocks)])
        session, held = play.running.pop()
        play.soft.finished(session, [[block.block_id for block in held]], play.now)
        play.pool.free_blocks(reversed(held))
    if why == "expired":
        play.now += 51.0
    elif why == "released":
        play.soft.released("a")
    kept = {"over_limit": (3 * blocks - 1) // 2, "expired": 0, "released": blocks}[why]
    calls = 0
    while play.soft.status().blocks > kept:
        before, wished = visits.count, play.soft.status().blocks
        play.soft.tidy(play.now)
        assert wished - play.soft.status().blocks <= WORKED_OFF
        assert visits.count - before <= WORKED_OFF * VISITS_A_BLOCK
        calls += 1
        assert calls <= 2 * blocks // WORKED_OFF + 1
    play.check()
    assert play.soft.status().blocks == kept


def test_of_a_window_only_what_moved_is_looked_at() -> None:
    """Two groups: all blocks of one are kept, of the other the last four; 0 is the null block."""
    found = []
    for length in (40, 400):
        visits = Visits()
        play = Play(CountedPool(4 * length, visits), pool_fraction=1.0, groups=2)
        held = play.take(2 * length + 2 * NEW)
        for at, block in enumerate(held):
            play.pool.fill(block, at)
        ids = [block.block_id for block in held]
        full, windows = ids[: length + NEW], ids[length + NEW :]

        def tables(end: int, full: list[int] = full, windows: list[int] = windows) -> Any:
            return [full[:end], [*[0] * (end - 4), *windows[end - 4 : end]]]

        play.soft.finished("s", tables(length), play.now)
        assert play.soft.status().blocks == length + 4
        before = visits.count
        play.soft.finished("s", tables(length + NEW), play.now)
        found.append(visits.count - before)
        assert play.soft.status().blocks == length + NEW + 4
        play.pool.free_blocks(reversed(held))
        play.soft.check()
    assert found[0] == found[1] <= (2 * NEW + 8) * VISITS_A_BLOCK
