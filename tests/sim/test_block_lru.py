"""vLLM's order on our tree: all of a path is as young as the last turn that ended on it."""

from __future__ import annotations

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, Turn
from ownerserve.cache.policies.block_lru import BlockLru
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import Packed, pack
from ownerserve.kv.specs import Coverage

B = 4
LAYOUT = Layout(B, (Component("kv", Coverage.RANGE, 8, 8),), state_bytes=8)
HEAD = list(range(4 * B))
LONG = [*HEAD, *range(100, 100 + 4 * B)]
OTHER = list(range(500, 500 + 4 * B))


class Driver:
    """A cache of 16 blocks; turns without output, all at one instant unless `now` says other."""

    def __init__(self) -> None:
        self.cache = HeteroCache(LAYOUT, {"kv": 16}, 4, BlockLru())
        self.turns = 0

    def turn(self, tokens: list[int], now: float = 0.0) -> int:
        """Runs it; how much of it was cached."""
        self.turns += 1
        turn_id = TurnId(f"t{self.turns}")
        begun = self.cache.begin(Turn(turn_id, None, pack(tokens)), now)
        assert isinstance(begun, Begun)
        assert self.cache.reserve(turn_id, len(tokens), now) == ()
        rest: Packed = pack(tokens[begun.restored :])
        self.cache.advance(turn_id, rest, now)
        self.cache.finish(turn_id, now)
        self.cache.check()
        return begun.restored

    def resident(self, tokens: list[int]) -> int:
        return self.cache.match(pack([*tokens, 0])).range_tokens


def test_the_path_of_the_last_turn_is_the_youngest() -> None:
    driver = Driver()
    driver.turn(LONG)
    driver.turn(OTHER)
    driver.turn([*HEAD, 7])  # reads the head of LONG: its own tail stays old
    driver.cache.pressure.evict_blocks(4)
    assert driver.resident(LONG) == len(HEAD), "the tail that nobody has read since goes first"
    assert driver.resident(OTHER) == len(OTHER)
    driver.cache.pressure.evict_blocks(4)
    assert driver.resident(OTHER) == 0
    assert driver.resident(HEAD) == len(HEAD)


def test_turns_that_end_at_one_instant_are_in_order() -> None:
    driver = Driver()
    driver.turn(OTHER, now=5.0)
    driver.turn(HEAD, now=5.0)
    driver.cache.pressure.evict_blocks(4)
    assert (driver.resident(OTHER), driver.resident(HEAD)) == (0, len(HEAD))


def test_blocks_go_from_a_tail_just_as_many_as_are_wanted() -> None:
    driver = Driver()
    driver.turn(LONG)
    driver.cache.pressure.evict_blocks(3)
    assert driver.resident(LONG) == len(LONG) - 3 * B
    assert driver.turn([*LONG, 1]) == len(LONG) - 3 * B
