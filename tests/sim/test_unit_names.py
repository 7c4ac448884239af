"""Prefixes and records of the simulator, named by unit ids: the same equalities as by hashes."""

from __future__ import annotations

from itertools import product

import pytest

from ownerserve.kv.prefix import ArtifactIds, PrefixChain, pack
from ownerserve.sim.storage.unit_names import UnitChain, UnitRecordIds

IDENTITY = bytes(32)
SHARED = (1, 2, 3, 4)
"""Chained over a run: an id names all before it."""
PROMPTS = ((*SHARED, 5, 6, 7), (*SHARED, 8, 9), SHARED, ())


@pytest.mark.parametrize("block", [1, 2, 3])
def test_digests_are_equal_where_hashes_are(block: int) -> None:
    hashed = [PrefixChain(block).extend(pack(prompt)) for prompt in PROMPTS]
    named = [UnitChain(block).extend(pack(prompt)) for prompt in PROMPTS]
    assert [len(one) for one in named] == [len(one) for one in hashed]
    for (these, names), (others, other_names) in product(zip(hashed, named, strict=True), repeat=2):
        for (one, name), (other, other_name) in product(
            zip(these, names, strict=True), zip(others, other_names, strict=True)
        ):
            assert (one == other) == (name == other_name)
            assert len(name) == len(one)


@pytest.mark.parametrize("block", [1, 2])
def test_a_chain_grows_as_it_would_at_once(block: int) -> None:
    whole = UnitChain(block)
    whole.extend(pack(PROMPTS[0]))
    grown = UnitChain(block)
    for cut in (slice(0, 3), slice(3, 4), slice(4, None)):
        grown.extend(pack(PROMPTS[0][cut]))
    assert (grown.digests, grown.tip(), grown.tokens) == (whole.digests, whole.tip(), whole.tokens)
    twin = whole.upto(2)
    twin.extend(pack(PROMPTS[0][2 * block :]))
    assert twin.digests == whole.digests


def test_ids_are_equal_where_hashes_are() -> None:
    digests = UnitChain(1).extend(pack(PROMPTS[0]))

    def ids(make: type[ArtifactIds]) -> list[bytes]:
        found: list[bytes] = []
        for component in ("attention", "indexer"):
            maker = make(IDENTITY, component)
            for end in (4, 6):
                found += [maker.range(digests[end - 1], start, end) for start in (0, 2)]
                found += [maker.at(digests[end - 1], maker.place(0, end))]
                found.append(maker.point(digests[end - 1], end))
        return found

    hashed, named = ids(ArtifactIds), ids(UnitRecordIds)
    assert {len(one) for one in named} == {len(one) for one in hashed} == {32}
    assert [hashed.index(one) for one in hashed] == [named.index(one) for one in named]
