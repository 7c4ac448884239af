"""Records in another layout: converted right, byte for byte, or refused with the reason."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.store.format.convert import (
    ByteOrder,
    PayloadLayout,
    Unconvertible,
    UnitRange,
    convert,
    decode,
    obstacle,
    source_span,
)
from ownerserve.store.format.model import (
    ArtifactKind,
    Meta,
    MissReason,
    ReadHit,
    ReadMiss,
    Want,
    WriteDone,
)
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.policy import split
from ownerserve.store.tiers.tiered import TieredStore

LAYOUT = PayloadLayout(
    engine="vllm",
    engine_version="0.32.0",
    layout_version=3,
    first_layer=0,
    end_layer=3,
    shard=0,
    shards=1,
    block_tokens=64,
    entries=64,
    entry_bytes=8,
    page_bytes=576,
    scalar="bf16",
    scalar_bytes=2,
    byte_order=ByteOrder.LITTLE,
)
TOKENS = 512


def but(**changes: Any) -> PayloadLayout:
    return msgspec.structs.replace(LAYOUT, **changes)


def lay_out(state: np.ndarray, layout: PayloadLayout) -> bytes:
    """The reference: every scalar of every entry is put where the layout's words say, one by one.

    `state[token entry, layer, scalar]`. Written from docs/format.md, sharing nothing with convert.
    """
    width = layout.scalar_bytes
    units = state.shape[0] // layout.entries
    out = bytearray(units * layout.layers * layout.page_bytes)
    order = "<" if layout.byte_order is ByteOrder.LITTLE else ">"
    for row in range(state.shape[0]):
        unit, slot = divmod(row, layout.entries)
        for layer in range(layout.layers):
            at = (unit * layout.layers + layer) * layout.page_bytes + slot * layout.entry_bytes
            raw = state[row, layer].astype(f"{order}u{width}").tobytes()
            out[at : at + layout.entry_bytes] = raw
    return bytes(out)


def random_state(layout: PayloadLayout, tokens: int, seed: int = 1) -> np.ndarray:
    rows = tokens * layout.entries // layout.block_tokens
    top = 1 << (8 * layout.scalar_bytes)
    shape = (rows, layout.layers, layout.entry_bytes // layout.scalar_bytes)
    return np.random.default_rng(seed).integers(0, top, shape, dtype=np.uint64)


def meta(layout: PayloadLayout, tokens: int = TOKENS, **changes: Any) -> Meta:
    fields: dict[str, Any] = {
        "id": b"i" * 32,
        "kind": ArtifactKind.RANGE,
        "component": "csa_main",
        "prefix_hash": b"p" * 32,
        "first_token": 1024,
        "end_token": 1024 + tokens,
        "descriptor": layout.encode(),
        "units": tokens // layout.block_tokens,
    }
    return Meta(**fields | changes)


CONVERTIBLE = {
    "engine version": but(engine_version="0.33.1"),
    "smaller blocks": but(block_tokens=16, entries=16, page_bytes=144),
    "larger blocks": but(block_tokens=256, entries=256, page_bytes=256 * 8),
    "page padding": but(page_bytes=1024),
    "no padding": but(page_bytes=512),
    "endianness": but(byte_order=ByteOrder.BIG),
    "all of these": but(
        block_tokens=32,
        entries=32,
        page_bytes=300,
        byte_order=ByteOrder.BIG,
        engine_version="1.0",
    ),
}

REFUSED = {
    Unconvertible.OTHER_ENGINE: but(engine="sglang"),
    Unconvertible.OTHER_LAYOUT_VERSION: but(layout_version=4),
    Unconvertible.OTHER_LAYERS: but(end_layer=4),
    Unconvertible.OTHER_SHARD: but(shards=2),
    Unconvertible.OTHER_COMPRESSION: but(entries=16),
    Unconvertible.OTHER_ENTRY: but(entry_bytes=4),
    Unconvertible.OTHER_SCALAR: but(scalar="fp16"),
    Unconvertible.INCONSISTENT: but(page_bytes=100),
}


def tier_of(clock: Any, layout: PayloadLayout, payload: bytes, **changes: Any) -> TieredStore:
    store = TieredStore([MemoryTier(clock, split(1 << 24))])
    assert isinstance(put(store, meta(layout, **changes), payload), WriteDone)
    return store


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_what_is_convertible_comes_back_right(clock, name):
    wanted, state = CONVERTIBLE[name], random_state(LAYOUT, TOKENS)
    store = tier_of(clock, LAYOUT, lay_out(state, LAYOUT))
    outcome = store.read([Want(b"i" * 32, descriptor=wanted.encode())])
    assert isinstance(outcome, ReadHit)
    part = outcome.parts[0]
    assert bytes(part.data) == lay_out(state, wanted)
    assert part.meta.units == TOKENS // wanted.block_tokens
    assert part.meta.descriptor == wanted.encode()
    assert store.counters["converted"] == 1


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_part_of_a_record_is_converted(clock, name):
    wanted, state = CONVERTIBLE[name], random_state(LAYOUT, TOKENS)
    store = tier_of(clock, LAYOUT, lay_out(state, LAYOUT))
    whole, units = lay_out(state, wanted), TOKENS // wanted.block_tokens
    size = len(whole) // units
    for first, end in ((0, 1), (units - 1, units), (units // 3, units // 3 + 1), (0, units)):
        outcome = store.read([Want(b"i" * 32, first, end, wanted.encode())])
        assert isinstance(outcome, ReadHit)
        assert bytes(outcome.parts[0].data) == whole[first * size : end * size]


@pytest.mark.parametrize("reason", REFUSED)
def test_all_else_is_refused(clock, reason):
    wanted = REFUSED[reason]
    assert obstacle(LAYOUT, wanted) is reason
    store = tier_of(clock, LAYOUT, lay_out(random_state(LAYOUT, TOKENS), LAYOUT))
    outcome = store.read([Want(b"i" * 32, descriptor=wanted.encode())])
    assert outcome == ReadMiss(MissReason.FOREIGN_LAYOUT, b"i" * 32)
    assert store.counters["foreign"] == 1


def test_byte_order_of_mixed_scalars_can_not_be_turned():
    mixed = but(scalar="fp8_ds_mla", scalar_bytes=0)
    turned = msgspec.structs.replace(mixed, byte_order=ByteOrder.BIG)
    assert obstacle(mixed, turned) is Unconvertible.MIXED_SCALARS
    assert obstacle(mixed, msgspec.structs.replace(mixed, page_bytes=1024)) is None


@pytest.mark.parametrize(
    "span, units, reason",
    [
        (UnitRange(0, 1, 1024, True), 1, Unconvertible.POINT_BLOCK),
        (UnitRange(0, 1, 1024, False), 3, Unconvertible.UNALIGNED),  # 192 tokens are no 256s
        (UnitRange(0, 1, 64, False), 8, Unconvertible.UNALIGNED),  # begins within a block of 256
        (UnitRange(0, 3, 1024, False), 8, Unconvertible.UNALIGNED),  # there are but two of 256
        (UnitRange(1, 1, 1024, False), 8, Unconvertible.UNALIGNED),
    ],
)
def test_blocks_that_do_not_fit_are_refused(span, units, reason):
    assert source_span(LAYOUT, CONVERTIBLE["larger blocks"], span, units) is reason


def test_a_point_is_padded_and_turned_but_not_cut(clock):
    wanted = but(page_bytes=600, byte_order=ByteOrder.BIG)
    state = random_state(LAYOUT, 64)
    point = {"kind": ArtifactKind.POINT, "first_token": 1024, "end_token": 1024, "units": 1}
    store = tier_of(clock, LAYOUT, lay_out(state, LAYOUT), **point)
    outcome = store.read([Want(b"i" * 32, descriptor=wanted.encode())])
    assert isinstance(outcome, ReadHit)
    assert bytes(outcome.parts[0].data) == lay_out(state, wanted)
    smaller = CONVERTIBLE["smaller blocks"].encode()
    assert isinstance(store.read([Want(b"i" * 32, descriptor=smaller)]), ReadMiss)


def test_a_descriptor_that_does_not_fit_the_record_is_refused(clock):
    """Blocks of 64 that are said to be of 32: a conversion would spread entries over the gap."""
    lie = but(block_tokens=32, entries=32, page_bytes=576)
    payload = lay_out(random_state(LAYOUT, TOKENS), LAYOUT)
    store = TieredStore([MemoryTier(clock, split(1 << 24))])
    assert isinstance(put(store, meta(lie, units=8), payload), WriteDone)
    wanted = but(block_tokens=16, entries=16, page_bytes=144)
    outcome = store.read([Want(b"i" * 32, descriptor=wanted.encode())])
    assert outcome == ReadMiss(MissReason.FOREIGN_LAYOUT, b"i" * 32)


def test_a_payload_of_another_length_is_refused():
    span = UnitRange(0, 8, 1024, False)
    short = memoryview(bytes(8 * LAYOUT.unit_bytes - 1))
    assert convert(short, LAYOUT, LAYOUT, source=span, target=span) is Unconvertible.WRONG_LENGTH


@pytest.mark.parametrize("text", [b"", b'{"block":128}', b"\xc1", b"\x80", b"\x91" * 5000])
def test_an_unknown_form_is_no_layout(clock, text, samples):
    assert decode(text) is None
    store = tier_of(clock, LAYOUT, lay_out(random_state(LAYOUT, TOKENS), LAYOUT))
    assert isinstance(store.read([Want(b"i" * 32, descriptor=text)]), ReadMiss)


def test_every_field_changed_alone_is_the_same_state_or_refused():
    """No field of a layout may differ unseen: each changed alone converts to the reference or is
    refused."""
    changes: dict[str, object] = {"scalar_bytes": 4, "first_layer": 1, "shard": 1, "shards": 2}
    state = random_state(LAYOUT, TOKENS)
    for field in LAYOUT.__struct_fields__:
        old = getattr(LAYOUT, field)
        match old:
            case ByteOrder():
                new: object = ByteOrder.BIG
            case str():
                new = old + "x"
            case _:
                new = changes.get(field, old * 2 or 1)
        wanted = but(**{field: new})
        span = UnitRange(0, 8, 1024, False)
        if decode(wanted.encode()) is None or obstacle(LAYOUT, wanted) is not None:
            continue
        assert field in ("engine_version", "page_bytes", "byte_order"), field
        payload = memoryview(lay_out(state, LAYOUT))
        got = convert(payload, LAYOUT, wanted, source=span, target=span)
        assert isinstance(got, memoryview)
        assert bytes(got) == lay_out(state, wanted)


@st.composite
def layouts(draw: st.DrawFn, ratio: int, width: int, entry_bytes: int) -> PayloadLayout:
    entries = draw(st.sampled_from([1, 2, 3, 4, 8]))
    padding = draw(st.sampled_from([0, 1, 7, 64]))
    return but(
        end_layer=2,
        block_tokens=entries * ratio,
        entries=entries,
        entry_bytes=entry_bytes,
        page_bytes=entries * entry_bytes + padding,
        scalar_bytes=width,
        byte_order=draw(st.sampled_from(list(ByteOrder))),
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_two_layouts_agree_with_the_reference(data):
    ratio = data.draw(st.sampled_from([1, 4]))
    width = data.draw(st.sampled_from([1, 2, 4]))
    entry_bytes = width * data.draw(st.integers(1, 3))
    stored = data.draw(layouts(ratio, width, entry_bytes))
    wanted = data.draw(layouts(ratio, width, entry_bytes))
    rows = 24 * data.draw(st.integers(1, 2))
    state = random_state(stored, rows * ratio)
    units, available = rows // stored.entries, rows // wanted.entries
    first = data.draw(st.integers(0, available - 1))
    end = data.draw(st.integers(first + 1, available))
    target = UnitRange(first, end, 0, False)
    source = source_span(stored, wanted, target, units)
    assert isinstance(source, UnitRange)
    payload = lay_out(state, stored)[
        source.first * stored.unit_bytes : source.end * stored.unit_bytes
    ]
    got = convert(memoryview(payload), stored, wanted, source=source, target=target)
    assert isinstance(got, memoryview)
    expected = lay_out(state, wanted)[first * wanted.unit_bytes : end * wanted.unit_bytes]
    assert bytes(got) == expected
