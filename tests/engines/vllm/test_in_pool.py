"""What sessions have in vLLM's pool, as a walk over the pool would find it; a model pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ownerserve.engines.vllm.layout.shape import StateShape, describe
from ownerserve.engines.vllm.scheduler_side.in_pool import (
    BLOCKS_KEPT_RATIO,
    InPool,
    PoolEvents,
    PoolWatch,
)
from ownerserve.engines.vllm.scheduler_side.soft_references import SoftReferences
from ownerserve.engines.vllm.settings import SoftReference
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.inventory import Lost
from ownerserve.node.ownership.inventory import Inventory
from tests.support.vllm_parts.soft_play import ModelBlock, ModelPool
from tests.support.vllm_parts.specs import Config, dense, sliding

pytestmark = pytest.mark.engine

B = 32
DIGESTS = [PrefixHash(bytes([at]) * 32) for at in range(64)]

DENSE = describe(Config([dense(0, 1)]))
HYBRID = describe(Config([dense(0), sliding(1, window=64)]))


class Pool(ModelPool):
    """Finds cached blocks by group, as vLLM's does."""

    hash_block_size = B
    was_reset = False

    def reset(self) -> bool:
        self.was_reset = super().reset()
        return self.was_reset

    def get_cached_block(self, content: object, groups: Sequence[int]) -> list[ModelBlock] | None:
        found = self.find((content, groups[0]))
        return None if found is None else [found]


class Rig:
    """Turns over one pool: each holds its blocks until it ends, and leaves them cached."""

    def __init__(self, shape: StateShape, blocks: int) -> None:
        self.pool, self.shape = Pool(blocks), shape
        self.inventory = Inventory()
        events: PoolEvents = PoolEvents()
        self.stirred = 0
        self.watch = PoolWatch(shape, events, self.stir)
        soft = SoftReferences(SoftReference(ttl_s=0.0))
        assert soft.bind(self.pool, shape.group_tokens, on_taken=self.watch.taken)
        self.watch.bind(self.pool)
        self.events = events
        self.in_pool = InPool(shape, self.pool, inventory=self.inventory)

    def stir(self) -> None:
        self.stirred += 1

    def turn(self, name: str, contents: Sequence[object], *, passed: int = 0) -> None:
        """A turn of so many whole pieces, each as long as vLLM hashes them; groups but the first
        have let go of their blocks before token `passed`."""
        piece = self.pool.hash_block_size
        prefixes = [tuple(contents[: at + 1]) for at in range(len(contents))]
        tables, owned = [], []
        for group, size in enumerate(self.shape.group_tokens):
            hits: list[ModelBlock] = []
            ends = [
                prefixes[end // piece - 1] for end in range(size, len(contents) * piece + 1, size)
            ]
            for prefix in ends:
                block = self.pool.find((prefix, group))
                if block is None:
                    break
                hits.append(block)
            self.pool.touch(hits)
            new = self.pool.take(len(ends) - len(hits))
            for block, prefix in zip(new, ends[len(hits) :], strict=True):
                self.pool.fill(block, (prefix, group))
            blocks, gone = [*hits, *new], passed // size if group else 0
            self.pool.free_blocks(reversed(blocks[:gone]))
            owned += blocks[gone:]
            tables.append([*[0] * gone, *(block.block_id for block in blocks[gone:])])
        request: Any = SimpleNamespace(block_hashes=prefixes)
        self.watch.finished(
            SessionId(name),
            request,
            tables=tables,
            tokens=len(contents) * piece + piece - 1,
            digests=DIGESTS,
            tenant=b"",
        )
        self.pool.free_blocks(reversed(owned))

    def told(self, name: str) -> int:
        self.watch.stepped()
        if self.events or self.pool.was_reset:
            self.in_pool.take(self.events)
            self.in_pool.check()
            self.inventory.check()
        return self.inventory.tokens(SessionId(name), Tier.DEVICE)

    def found(self, contents: Sequence[object]) -> int:
        """Tokens of range state that a walk from the start finds."""
        for at in range(len(contents)):
            if self.pool.find((tuple(contents[: at + 1]), 0)) is None:
                return at * B
        return len(contents) * B


def own(name: str, count: int) -> list[object]:
    return [(name, at) for at in range(count)]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_told_is_what_a_walk_over_the_pool_finds(seed: int) -> None:
    """Sessions come back at random, some longer, some edited, over a pool for half of them."""
    draw, rig = random.Random(seed), Rig(DENSE, 40)
    texts: dict[str, list[object]] = {f"s{at}": own(f"s{at}", 2 + at) for at in range(12)}
    left: dict[str, list[object]] = {}
    for turn in range(80):
        name = draw.choice(list(texts))
        text = texts[name]
        if draw.random() < 0.2:
            text = text[: draw.randrange(len(text)) + 1]
        if len(text) < 12:
            text = [*text, *((name, turn, at) for at in range(draw.randrange(3)))]
        texts[name] = left[name] = text
        rig.turn(name, text)
        for each, contents in left.items():
            assert rig.told(each) == rig.found(contents)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_several_share_count_for_each_and_never_for_more(seed: int) -> None:
    draw, rig = random.Random(seed), Rig(DENSE, 40)
    head = own("head", 6)
    left: dict[str, list[object]] = {}
    for turn in range(80):
        name = f"s{draw.randrange(6)}"
        left[name] = [*head[: draw.randrange(1, 7)], *own(name, draw.randrange(8))]
        rig.turn(name, left[name])
        assert rig.told(name) == len(left[name]) * B
        for each, contents in left.items():
            assert rig.told(each) <= rig.found(contents)
        if turn == 0:
            rig.turn("also", left[name])
            assert rig.told(name) == rig.told("also") == len(left[name]) * B
            rig.in_pool.forget(SessionId("also"))


def test_a_word_names_what_is_left_and_goes_with_the_last_block() -> None:
    rig = Rig(DENSE, 11)
    rig.turn("a", own("a", 5))
    assert rig.told("a") == 5 * B
    rig.turn("b", own("b", 7))
    assert rig.told("a") == 3 * B
    [word] = [word for word in rig.inventory if word.session == "a"]
    assert (word.tokens, word.prefix_hash) == (3 * B, DIGESTS[2].hex())
    rig.turn("b", own("b", 10))
    assert rig.told("a") == 0
    words = rig.inventory.page(0, incarnation=1).words
    assert [word.session for word in words if isinstance(word, Lost)] == ["a"]


@pytest.mark.parametrize("uncached", [0, 1])
def test_a_block_that_no_lookup_finds_is_nothing_to_go_on_from(uncached: int) -> None:
    """A turn of three blocks, the last of which one group has not cached."""
    rig = Rig(HYBRID, 40)
    tables = []
    for group in range(2):
        blocks = rig.pool.take(3)
        for at, block in enumerate(blocks[: 2 if group == uncached else 3]):
            rig.pool.fill(block, (tuple(range(at + 1)), group))
        tables.append([block.block_id for block in blocks])
    request: Any = SimpleNamespace(block_hashes=[tuple(range(at + 1)) for at in range(3)])
    rig.watch.finished(
        SessionId("a"), request, tables=tables, tokens=3 * B, digests=DIGESTS, tenant=b""
    )
    assert rig.told("a") == 2 * B


def test_a_point_that_is_gone_leaves_nothing_to_go_on_from() -> None:
    """Windows take whole what range state alone would give."""
    rig = Rig(HYBRID, 30)
    rig.turn("a", own("a", 6), passed=4 * B)
    assert rig.told("a") == 6 * B
    windows = [rig.pool.find((tuple(own("a", at)), 1)) for at in (5, 6)]
    assert windows[0] is not None
    rig.watch.lost([windows[0].block_id])
    assert rig.told("a") == 0


def test_windows_that_a_request_has_passed_count_while_vllm_finds_them() -> None:
    """Its own table has none of the blocks that a hit at the last boundary takes; the pool does."""
    rig = Rig(HYBRID, 40)
    rig.turn("a", own("a", 6), passed=6 * B)
    assert rig.told("a") == 6 * B
    rig.turn("b", own("b", 10))  # all unused ones, of 39; then "a"'s, those passed first
    assert rig.told("a") == 6 * B
    rig.turn("c", own("c", 6))
    assert rig.told("a") == 0


@pytest.mark.parametrize("pieces", [15, 16, 17, 31])
def test_groups_of_unlike_blocks_meet_at_whole_boundaries(pieces: int) -> None:
    """Blocks of 64 and of 16 tokens, hashed in pieces of 16: a window of 32 takes two of them."""
    shape = describe(Config([dense(0, block=64), sliding(1, block=16, window=32)]))
    rig = Rig(shape, 60)
    rig.pool.hash_block_size = 16
    text = own("a", pieces)
    rig.turn("a", text, passed=pieces * 16 - 31)
    depth = pieces * 16 // 64 * 64
    assert rig.told("a") == depth
    needed = rig.pool.find((tuple(text[: depth // 16 - 1]), 1))
    assert needed is not None
    rig.watch.lost([needed.block_id])
    assert rig.told("a") == 0


def test_a_reset_is_noticed_without_a_step() -> None:
    rig = Rig(DENSE, 30)
    rig.turn("a", own("a", 5))
    assert rig.told("a") == 5 * B
    rig.turn("b", own("b", 5))  # told after the reset, and was before it
    rig.pool.reset()
    assert rig.told("a") == rig.told("b") == 0
    rig.turn("a", own("a", 2))
    assert rig.told("a") == 2 * B


def test_a_reset_forgets_what_was_taken_before() -> None:
    rig = Rig(DENSE, 8)
    rig.turn("a", own("a", 5))
    assert rig.told("a") == 5 * B
    rig.pool.reset()
    rig.turn("a", own("a", 5))
    assert rig.told("a") == 5 * B


def test_memory_is_bounded_by_the_pool() -> None:
    """Sessions that share all they have: the ones left longest ago are forgotten."""
    rig = Rig(DENSE, 12)
    text, most = own("head", 10), BLOCKS_KEPT_RATIO * 12 // 10
    for at in range(most + 3):
        rig.turn(f"s{at}", text)
    told = [rig.told(f"s{at}") for at in range(most + 3)]
    assert told == [0] * 3 + [10 * B] * most


def test_steps_tell_what_was_taken_now_and_then() -> None:
    rig = Rig(DENSE, 12)
    rig.watch.stepped()
    assert rig.stirred == 0, "nothing was taken"
    rig.pool.free_blocks(rig.pool.take(3))
    rig.watch.stepped()
    rig.pool.free_blocks(rig.pool.take(3))
    rig.watch.stepped()
    assert (rig.stirred, len(rig.events)) == (1, 2), "soon after another: with the next one"
