"""The same KV through vLLM's pages, through the hf engine's pools, and by hand: the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ownerserve.engines.hf.state.pools import DevicePool
from ownerserve.engines.hf.state.states import describe as hf_describe
from ownerserve.engines.vllm.layout import shape as vllm_shape
from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.layout.places import BlockPlaces
from ownerserve.engines.vllm.layout.shape import StateShape
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.kv.errors import InvalidInput, SpecMismatch
from ownerserve.kv.frame import DENSE, LEAD, WINDOW
from ownerserve.node.vocabulary.events import Filling, StoreCopy
from ownerserve.node.vocabulary.records import LeadUse
from ownerserve.store.format.model import ArtifactKind, Meta
from tests.support.vllm_parts import specs

pytestmark = pytest.mark.engine

BLOCKS, BS, HEADS, DIM, W = 40, 32, 2, 8, 64
TABLES = [[7, 3, 4, 5, 9, 10, 1, 2], [21, 22, 23, 30, 31, 36, 37, 38]]


def rows(layer: int, part: int, start: int, end: int) -> np.ndarray:
    """Keys or values of tokens [start, end), [tokens, heads, dim]: no two numbers alike."""
    base = (layer * 2 + part) * 1024
    numbers = np.arange((base + start) * HEADS * DIM, (base + end) * HEADS * DIM)
    return numbers.astype(np.float32).reshape(end - start, HEADS, DIM)


def paged(order: Sequence[int] | None, layer: int, table: Sequence[int], tokens: int) -> Any:
    """A layer's cache with `tokens` tokens in the blocks of `table`, as its platform lays them."""
    cache = np.full((BLOCKS, HEADS, BS, 2 * DIM), -1.0, dtype=np.float32)
    for index in range(tokens // BS):
        keys, values = (
            rows(layer, part, index * BS, (index + 1) * BS).transpose(1, 0, 2) for part in range(2)
        )
        if order is None:
            cache[table[index]] = np.concatenate((keys, values), axis=-1)
        else:
            laid = keys.reshape(HEADS, -1)[:, order], values.reshape(HEADS, -1)
            cache[table[index]] = np.concatenate(laid, axis=-1).reshape(HEADS, BS, 2 * DIM)
    return torch.from_numpy(cache)


def key_order(tile: int) -> list[int]:
    """Keys as the CPU kernels lay them: tiles of `tile` tokens, transposed."""
    plain = torch.arange(BS * DIM).view(BS // tile, tile, DIM)
    return [int(at) for at in plain.transpose(1, 2).reshape(-1)]


def model() -> StateShape:
    config = specs.Config([specs.sliding(0, 2), specs.dense(1, 3)])
    return vllm_shape.describe(config, block_tokens=64)


def test_a_window_takes_no_more_blocks_than_it_and_a_step_need() -> None:
    shape = model()
    assert shape.group_windows == (W, 0)
    short, whole = 4 * BS, 1000 * BS
    assert shape.blocks_for(short, step_tokens=2 * W) == 2 * (4 + 1)
    assert shape.blocks_for(whole, step_tokens=2 * W) == (-(-3 * W // BS) + 1) + (1000 + 1)


def codec_and_caches(order: list[int] | None) -> tuple[PageCodec, dict[str, Any]]:
    caches = {
        name: paged(order, number, TABLES[number % 2], 256)
        for number in range(4)
        for name in specs.layers(number)
    }
    orders = {DENSE: order, WINDOW: order}
    return PageCodec(model(), caches, num_blocks=BLOCKS, key_orders=orders), caches


def read(codec: PageCodec, place: BlockPlace) -> bytes:
    data = bytearray(codec.size(place))
    codec.read(place, memoryview(data))
    return bytes(data)


def dense_by_hand(first: int, end: int) -> bytes:
    return b"".join(
        np.stack([rows(n, part, start, start + 64) for n in (1, 3)]).tobytes()
        for start in range(first, end, 64)
        for part in range(2)
    )


def window_by_hand(position: int) -> bytes:
    parts = []
    start = max(0, position - W + 1)
    for part in range(2):
        ring = np.zeros((2, W - 1, HEADS, DIM), dtype=np.float32)
        for layer, number in enumerate((0, 2)):
            for at, row in enumerate(rows(number, part, start, position), start):
                ring[layer, at % (W - 1)] = row
        parts.append(ring.tobytes())
    return b"".join(parts)


ORDERS = [None, key_order(32), key_order(16), key_order(1)]


@pytest.mark.parametrize("order", ORDERS, ids=["side by side", "32 rows", "16 rows", "plain"])
def test_pages_read_as_the_canonical_payload(order: list[int] | None) -> None:
    codec, _ = codec_and_caches(order)
    place = model().place(DENSE, TABLES, 64, 192)
    assert read(codec, place) == dense_by_hand(64, 192)
    for position in (64, 128, 192):
        place = model().place(WINDOW, TABLES, *model().span(WINDOW, position))
        assert read(codec, place) == window_by_hand(position)


@pytest.mark.parametrize("order", ORDERS, ids=["side by side", "32 rows", "16 rows", "plain"])
def test_what_was_read_is_written_into_other_blocks(order: list[int] | None) -> None:
    codec, caches = codec_and_caches(order)
    there = [[11, 12, 13, 14, 15, 16, 17, 18], [24, 25, 26, 27, 28, 29, 32, 33]]
    for name, start, end in ((DENSE, 0, 256), (WINDOW, 193, 256)):
        data = read(codec, model().place(name, TABLES, start, end))
        goal = model().place(name, there, start, end)
        codec.write(goal, memoryview(data))
        assert read(codec, goal) == data
    dense = caches[specs.layers(1)[0]]
    assert torch.equal(dense[there[1]], dense[TABLES[1]])
    sliding = caches[specs.layers(0)[0]]
    assert torch.equal(sliding[there[0][7]], sliding[TABLES[0][7]])


@pytest.mark.parametrize("order", ORDERS, ids=["side by side", "32 rows", "16 rows", "plain"])
def test_what_is_cut_is_the_whole(order: list[int] | None) -> None:
    codec, caches = codec_and_caches(order)
    place = model().place(DENSE, TABLES, 0, 192)
    data = read(codec, place)
    for cache in caches.values():
        cache.zero_()
    parts = list(codec.cut(place, memoryview(data), most_bytes=len(data) // 3))
    assert [part.start for part, _ in parts] == [0, 64, 128]
    for part, own in parts:
        codec.write(part, own)
    assert read(codec, place) == data
    assert len(list(codec.cut(place, memoryview(data), most_bytes=1 << 30))) == 1
    with pytest.raises(SpecMismatch):
        list(codec.cut(place, memoryview(data)[:-1], most_bytes=len(data) // 3))


LED = 224
"""A point, and boundaries before it that its lead makes points of."""
NO_META = Meta(b"", ArtifactKind.RANGE, LEAD, b"", 0, 0)


@pytest.mark.parametrize("order", ORDERS, ids=["side by side", "32 rows", "16 rows", "plain"])
@pytest.mark.parametrize("position", [192, 160, 128])
def test_a_point_and_its_lead_make_the_points_before_it(
    order: list[int] | None, position: int
) -> None:
    """At 192 rows come from both; at 160 and before all of them from the lead."""
    config = specs.Config([specs.sliding(0, 2), specs.dense(1, 3)])
    shape = vllm_shape.describe(config, block_tokens=32)
    caches = {
        name: paged(order, number, TABLES[number % 2], 256)
        for number in range(4)
        for name in specs.layers(number)
    }
    orders = {DENSE: order, WINDOW: order}
    codec = PageCodec(shape, caches, num_blocks=BLOCKS, key_orders=orders)
    places, lead = BlockPlaces(shape), shape.lead()
    assert lead is not None and lead.window_rows == W - 1
    units = tuple(range(LED // 32 - 4, LED // 32))
    saved = places.source(TABLES, StoreCopy(1, NO_META, LEAD, units))
    assert (saved.start, saved.end) == (LED - W + 1 - 128, LED - W + 1)
    rows_before = read(codec, saved)
    point = read(codec, shape.place(WINDOW, TABLES, *shape.span(WINDOW, LED)))
    there = [[11, 12, 13, 14, 15, 16, 17, 18], [24, 25, 26, 27, 28, 29, 32, 33]]
    use = lead_use(position)
    if use.base_id:
        goal = places.goal(there, Filling(0, WINDOW, (position, LED)), hit=0, window_hit=0)
        codec.write(goal, memoryview(point))
    goal = places.goal(there, Filling(0, LEAD, (position, LED)), hit=0, window_hit=0)
    unit = shape.components[LEAD].section.unit_bytes
    data = memoryview(rows_before)[use.first * unit : (use.first + use.units) * unit]
    for part, piece in codec.cut(goal, data, most_bytes=unit):
        codec.write(part, piece)
    own = shape.span(WINDOW, position)
    assert read(codec, shape.place(WINDOW, there, *own)) == read(
        codec, shape.place(WINDOW, TABLES, *own)
    )
    untouched = caches[specs.layers(0)[0]][there[0][position // 32]]
    assert (untouched == -1.0).all(), "nothing is written behind the boundary"


def lead_use(position: int) -> LeadUse:
    """How a lead of four units is used for a boundary before LED."""
    away = (LED - position) // 32
    rows_led = min(W - 1, LED - position)
    base = b"" if rows_led == W - 1 else b"point"
    return LeadUse(position // 32, LED // 32, 4 - away, -(-rows_led // 32), base)


def test_blocks_that_are_not_ours_stay_as_they_are() -> None:
    codec, caches = codec_and_caches(None)
    data = read(codec, model().place(DENSE, TABLES, 0, 64))
    before = caches[specs.layers(1)[0]].clone()
    codec.write(BlockPlace(DENSE, ((-1, 39),), 0, 64), memoryview(data))
    after = caches[specs.layers(1)[0]]
    changed = [b for b in range(BLOCKS) if not torch.equal(before[b], after[b])]
    assert changed == [39]
    assert torch.equal(after[39], before[TABLES[1][1]])


def test_a_window_that_begins_inside_the_engines_own_part_writes_the_rest() -> None:
    codec, caches = codec_and_caches(None)
    data = read(codec, model().place(WINDOW, TABLES, *model().span(WINDOW, 128)))
    goal = BlockPlace(WINDOW, ((39,),), 96, 128)
    codec.write(goal, memoryview(data))
    cache = caches[specs.layers(0)[0]]
    assert torch.equal(cache[39], cache[TABLES[0][3]])


def test_a_payload_of_another_length_is_refused() -> None:
    codec, _ = codec_and_caches(None)
    with pytest.raises(SpecMismatch):
        codec.write(model().place(DENSE, TABLES, 0, 64), memoryview(bytes(16)))


def hf_config() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        num_hidden_layers=4,
        intermediate_size=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=W,
    )


def test_the_hf_engine_means_the_same_by_the_same_digest() -> None:
    states = hf_describe(hf_config(), torch.float32, block_tokens=64)
    assert model().payload.digest() == states.digest()
    own = {c.name: (c.coverage, c.slot_bytes, c.payload_bytes) for c in model().layout().components}
    its = {c.name: (c.coverage, c.slot_bytes, c.payload_bytes) for c in states.layout().components}
    assert own == its


def test_the_hf_engines_slot_holds_the_same_bytes() -> None:
    states = hf_describe(hf_config(), torch.float32, block_tokens=64)
    sections = {section.name: section for section in states.sections}
    device = torch.device("cpu")
    dense = DevicePool((sections[DENSE],), slots=4, device=device)
    window = DevicePool((sections[WINDOW],), slots=4, device=device)
    for part, name in enumerate(("keys", "values")):
        for layer, number in enumerate((1, 3)):
            dense.part(DENSE, name)[2, layer] = torch.from_numpy(rows(number, part, 64, 128))
        for layer, number in enumerate((0, 2)):
            for at, row in enumerate(rows(number, part, 65, 128), 65):
                window.part(WINDOW, name)[1, layer, at % (W - 1)] = torch.from_numpy(row)
    codec, _ = codec_and_caches(key_order(32))
    assert read(codec, model().place(DENSE, TABLES, 64, 128)) == dense.read(2)
    place = model().place(WINDOW, TABLES, *model().span(WINDOW, 128))
    assert read(codec, place) == window.read(1)


def test_an_unknown_attention_is_refused_by_name() -> None:
    spec = specs.CrossAttentionSpec(32, 2, 8)
    config = specs.Config([specs.Group(specs.layers(0), spec)])
    with pytest.raises(vllm_shape.NotServed, match="CrossAttentionSpec"):
        vllm_shape.describe(config)


def test_the_block_is_a_multiple_of_every_groups() -> None:
    config = specs.Config([specs.dense(0, block=48), specs.sliding(1, block=32)])
    assert vllm_shape.describe(config).payload.block_tokens == 96
    with pytest.raises(InvalidInput, match="multiple of 96"):
        vllm_shape.describe(config, block_tokens=128)
