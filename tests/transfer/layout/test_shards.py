"""Which rank is asked for which heads; and what is refused before anything is asked."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.frame import CONV, DENSE, MLA, RECURRENT, PayloadPart, PayloadSection
from ownerserve.kv.wire.holders import Holder
from ownerserve.transfer.layout.arrays import Pool
from ownerserve.transfer.layout.known import LAYOUTS
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.layout.shards import HeadAsk, Misfit, asks
from ownerserve.transfer.vocabulary import FramePiece, Runs

SPEC, TOKENS, LAYERS, DIM = b"s" * 32, 4, 2, 3
EVEN = [(heads, ranks) for heads in (1, 2, 4, 8) for ranks in (1, 2, 4, 8)]


def section(heads: int, name: str = DENSE) -> PayloadSection:
    shape = {
        DENSE: (LAYERS, TOKENS, heads, DIM),
        RECURRENT: (LAYERS, heads, DIM, DIM),
        MLA: (LAYERS, TOKENS, DIM),
        CONV: (LAYERS, heads * DIM, 3),
    }[name]
    return PayloadSection(name, (PayloadPart("keys", shape, "float32"),))


def holders(heads: int, ranks: int, name: str = DENSE) -> list[Holder]:
    own = section(max(1, heads // ranks), name)
    total = 0 if name == MLA else heads
    return [Holder(SPEC, TOKENS, own, rank, ranks, total) for rank in range(ranks)]


def asked(mine: Holder, theirs: list[Holder]) -> tuple[HeadAsk, ...]:
    found = asks(mine, theirs)
    assert not isinstance(found, Misfit)
    return found


@pytest.mark.parametrize("name", [DENSE, RECURRENT])
@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from((1, 2, 4, 6, 8)),
    own_ranks=st.sampled_from((1, 2, 3, 4, 8, 16)),
    ranks=st.sampled_from((1, 2, 3, 4, 8, 16)),
)
def test_each_head_is_asked_for_once_of_one_that_has_it(
    name: str, heads: int, own_ranks: int, ranks: int
) -> None:
    for mine in holders(heads, own_ranks, name):
        theirs = holders(heads, ranks, name)
        found = asks(mine, theirs)
        if any(heads % n and n % heads for n in (own_ranks, ranks)):
            assert found is Misfit.OTHER_HEADS
            continue
        assert not isinstance(found, Misfit)
        got = list[int]()
        for ask in found:
            there = theirs[ask.rank].own_heads
            part = there[ask.first_head : ask.end_head] if ask.end_head else there
            at = mine.own_heads[ask.own_first : ask.own_end] if ask.own_end else mine.own_heads
            assert part == at
            got += part
        assert got == list(mine.own_heads)


def test_ranks_with_the_same_heads_share_the_asking() -> None:
    theirs = holders(heads=2, ranks=8)
    first = [asked(mine, theirs)[0].rank for mine in holders(heads=2, ranks=4)]
    assert first == [0, 1, 6, 7]
    latent = [asked(mine, holders(0, 4, MLA)) for mine in holders(0, 2, MLA)]
    assert latent == [(HeadAsk(0),), (HeadAsk(1),)]


def test_equal_ranks_ask_for_the_whole() -> None:
    for name in (DENSE, CONV):
        found = [asked(mine, holders(4, 4, name)) for mine in holders(4, 4, name)]
        assert found == [(HeadAsk(0),), (HeadAsk(1),), (HeadAsk(2),), (HeadAsk(3),)]


def but(holder: Holder, **changes: Any) -> Holder:
    return msgspec.structs.replace(holder, **changes)


def with_part(**changes: Any) -> dict[str, Any]:
    part = msgspec.structs.replace(section(4).parts[0], **changes)
    return {"section": PayloadSection(DENSE, (part,))}


@pytest.mark.parametrize(
    ("changes", "misfit"),
    [
        ({"spec": b"o" * 32}, Misfit.OTHER_SPEC),
        ({"block_tokens": 8}, Misfit.OTHER_BLOCK),
        ({"section": section(4, RECURRENT)}, Misfit.OTHER_SECTION),
        (with_part(name="values"), Misfit.OTHER_SECTION),
        (with_part(dtype="bfloat16"), Misfit.OTHER_SCALAR),
        (with_part(shape=(LAYERS + 1, TOKENS, 4, DIM)), Misfit.OTHER_LAYERS),
        (with_part(shape=()), Misfit.OTHER_SHAPE),
        (with_part(shape=(LAYERS, TOKENS, 4, DIM + 1)), Misfit.OTHER_SHAPE),
        (with_part(shape=(LAYERS, TOKENS + 1, 4, DIM)), Misfit.OTHER_SHAPE),
        (with_part(shape=(LAYERS, TOKENS, 3, DIM)), Misfit.OTHER_HEADS),
        ({"heads": 8}, Misfit.OTHER_HEADS),
    ],
)
def test_sides_that_do_not_fit_are_told_so(changes: dict[str, Any], misfit: Misfit) -> None:
    (mine,) = holders(4, 1)
    assert asks(mine, [but(mine, **changes)]) is misfit


def test_all_ranks_count_or_none() -> None:
    (mine,) = holders(4, 1)
    theirs = holders(4, 4)
    for some in (theirs[:3], theirs[1:], [*theirs, theirs[0]], []):
        assert asks(mine, some) is Misfit.MISSING_RANKS


def test_a_convolution_is_not_cut_by_heads() -> None:
    assert asks(holders(4, 1, CONV)[0], holders(4, 2, CONV)) is Misfit.NOT_BY_HEAD


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.sampled_from([(h, a, b) for h, a in EVEN for h2, b in EVEN if h == h2]),
    layouts=st.tuples(*[st.sampled_from(("combined", "headwise", "split", "slots"))] * 2),
    seed=st.integers(0, 99),
)
def test_what_the_ranks_of_a_source_have_comes_to_ours(
    sizes: tuple[int, int, int], layouts: tuple[str, str], seed: int
) -> None:
    heads, ranks, own_ranks = sizes
    random = np.random.default_rng(seed)
    model = random.integers(0, 2**31, (2, 2, LAYERS, TOKENS, heads, DIM), dtype=np.int32)
    parts = ("keys", "values")

    def memory(holder: Holder, layout: str) -> tuple[RegionPlaces, np.ndarray, list[np.ndarray]]:
        shape = (LAYERS, TOKENS, len(holder.own_heads), DIM)
        both = PayloadSection(DENSE, tuple(PayloadPart(p, shape, "float32") for p in parts))
        places = RegionPlaces(LAYOUTS[layout](Pool(both, 5, TOKENS, 0)))
        return places, np.zeros(places.region.bytes, np.uint8), [random.permutation(5)[:2]]

    def moved(runs: Runs) -> np.ndarray:
        where = zip(runs.addresses.tolist(), runs.lengths.tolist(), strict=True)
        return np.concatenate([np.arange(a, a + n) for a, n in where])

    source = [memory(one, layouts[0]) for one in holders(heads, ranks)]
    for one, (places, data, tables) in zip(holders(heads, ranks), source, strict=True):
        own = np.ascontiguousarray(model[:, :, :, :, one.own_heads.start : one.own_heads.stop])
        runs = places.runs(FramePiece(b"", 0, 2, 0, LAYERS), tables)
        data[moved(runs)] = own.view(np.uint8).reshape(-1)
    for mine in holders(heads, own_ranks):
        places, data, tables = memory(mine, layouts[1])
        for ask in asked(mine, holders(heads, ranks)):
            there, theirs, their_tables = source[ask.rank]
            piece = FramePiece(b"", 0, 2, 0, LAYERS, ask.first_head, ask.end_head)
            here = msgspec.structs.replace(piece, first_head=ask.own_first, end_head=ask.own_end)
            taken = theirs[moved(there.runs(piece, their_tables))]
            data[moved(places.runs(here, tables))] = taken
        whole = data[moved(places.runs(FramePiece(b"", 0, 2, 0, LAYERS), tables))]
        expected = model[:, :, :, :, mine.own_heads.start : mine.own_heads.stop]
        assert whole.tobytes() == np.ascontiguousarray(expected).tobytes()
