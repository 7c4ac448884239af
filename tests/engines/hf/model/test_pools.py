"""Slots are copied, spilled and restored as bytes, and nothing else changes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the hf engine needs the [engine] extra")

from ownerserve.cache.effects import (  # noqa: E402
    CopyBlock,
    CopyState,
    LoadPoint,
    MoveBorder,
    ResetState,
    SavePoint,
)
from ownerserve.engines.hf.state.pools import DevicePool, Pools  # noqa: E402
from ownerserve.engines.hf.state.states import ComponentTensors, ModelStates, StateTensor  # noqa: E402
from ownerserve.kv.errors import InvalidInput, SpecMismatch  # noqa: E402
from ownerserve.kv.specs import Coverage  # noqa: E402

pytestmark = pytest.mark.engine

BLOCKS = ComponentTensors("dense", Coverage.RANGE, (StateTensor("keys", (2, 4, 3), torch.float32),))
WINDOW = ComponentTensors(
    "swa",
    Coverage.POINT,
    (StateTensor("keys", (3, 5), torch.bfloat16), StateTensor("values", (3, 5), torch.float32)),
)
TAIL = ComponentTensors("tail", None, (StateTensor("kv", (1, 7), torch.float32),))
STATES = ModelStates(block_tokens=16, layers=(), sections=(BLOCKS, WINDOW, TAIL))


@pytest.fixture
def pools():
    return Pools(STATES, {"dense": 4, "swa": 3}, state_slots=2, device=torch.device("cpu"))


def fill(pool, slot, value):
    pool.write(slot, bytes([value]) * pool.slot_bytes)


def test_parts_are_views_into_the_slot_bytes():
    pool = DevicePool((WINDOW,), slots=2, device=torch.device("cpu"))
    pool.part("swa", "values")[1, 2, 4] = 1.0
    raw = pool.read(1)
    assert pool.part("swa", "keys").shape == (3, 3, 5)
    assert raw[32 + 14 * 4 : 32 + 15 * 4] == bytes.fromhex("0000803f")
    assert pool.read(0) == bytes(pool.slot_bytes)


def test_bytes_round_trip_and_length_is_checked(pools):
    pool = pools.component("dense")
    fill(pool, 2, 9)
    pool.write(0, pool.read(2))
    assert pool.read(0) == bytes([9]) * pool.slot_bytes
    assert pool.read(1) == bytes(pool.slot_bytes)
    with pytest.raises(SpecMismatch, match="5 bytes for a slot of 96"):
        pool.write(0, b"short")


def test_the_zero_slot_is_out_of_reach(pools):
    pool = pools.component("dense")
    with pytest.raises(InvalidInput, match="use 0 to 3"):
        pool.write(pool.zero_slot, bytes(pool.slot_bytes))


def test_a_snapshot_is_the_point_part_of_the_state_block(pools):
    fill(pools.state, 0, 5)
    pools.perform(SavePoint(0, {"swa": 1}))
    assert pools.component("swa").read(1) == bytes([5]) * WINDOW.slot_bytes
    pools.perform(LoadPoint({"swa": 1}, 1))
    tail = bytes(TAIL.slot_bytes)
    assert pools.state.read(1) == bytes([5]) * WINDOW.slot_bytes + tail


def test_copies_and_reset(pools):
    fill(pools.component("dense"), 0, 1)
    fill(pools.state, 0, 2)
    pools.perform(CopyBlock({"dense": (0, 3)}))
    pools.perform(CopyState(0, 1))
    pools.perform(ResetState(0))
    assert pools.component("dense").read(3) == pools.component("dense").read(0)
    assert pools.state.read(1) == bytes([2]) * pools.state.slot_bytes
    assert pools.state.read(0) == bytes(pools.state.slot_bytes)


def test_every_component_needs_a_count():
    with pytest.raises(InvalidInput, match=r"give a count for each of \['dense', 'swa'\]"):
        Pools(STATES, {"dense": 4}, state_slots=2, device=torch.device("cpu"))


def test_bytes_move_with_their_slots_and_what_changes_sides_is_zero():
    """Blocks are from the left, points from the right: each side's last slots give way."""
    pools = Pools(STATES, {"dense": 8, "swa": 4}, state_slots=1, device=torch.device("cpu"))
    blocks, points = pools.component("dense"), pools.component("swa")
    for slot in range(8):
        fill(blocks, slot, 10 + slot)
    for slot in range(4):
        fill(points, slot, 20 + slot)
    size = 8 * blocks.slot_bytes + 4 * points.slot_bytes
    more = (size - 2 * points.slot_bytes) // blocks.slot_bytes
    pools.perform(MoveBorder(more, 2, point_moves={"swa": ((3, 0),)}))
    assert points.read(0) == bytes([23]) * points.slot_bytes
    assert points.read(1) == bytes([21]) * points.slot_bytes
    assert more > 8 and blocks.read(7) == bytes([17]) * blocks.slot_bytes
    for slot in range(8, more):
        assert blocks.read(slot) == bytes(blocks.slot_bytes)
        fill(blocks, slot, 99)
    assert points.read(1) == bytes([21]) * points.slot_bytes, "and the two never meet"
    with pytest.raises(InvalidInput):
        points.read(2)
    pools.perform(MoveBorder(8, 4, block_moves=((more - 1, 0),)))
    assert blocks.read(0) == bytes([99]) * blocks.slot_bytes
    assert points.read(3) == points.read(2) == bytes(points.slot_bytes)
    assert points.read(0) == bytes([23]) * points.slot_bytes
    assert not blocks.part("dense", "keys")[blocks.zero_slot].any()
