"""Chains: equal prefixes have equal digests, however the sequence was fed in."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.prefix import (
    DOMAIN,
    HashedPrefix,
    PrefixChain,
    digests_behind,
    hash_prefix,
    pack,
    unpack,
)

FEW = settings(max_examples=30)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def test_the_digest_is_the_documented_one():
    packed = pack(range(32))
    root = hashlib.sha256(DOMAIN + (16).to_bytes(4, "little")).digest()
    first = hashlib.sha256(root + packed[:64]).digest()
    second = hashlib.sha256(first + packed[64:]).digest()
    assert list(hash_prefix(packed, 16)) == [first, second]


@FEW
@given(tokens=TOKENS)
def test_pack_round_trip(tokens):
    assert list(unpack(pack(tokens))) == tokens


@FEW
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 200), max_size=5))
def test_feeding_in_pieces_changes_nothing(tokens, cuts):
    chain, at = PrefixChain(16), 0
    returned = []
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        returned += chain.extend(pack(tokens[at:cut]))
        at = cut
    assert returned == chain.digests == list(hash_prefix(pack(tokens), 16))
    assert chain.tokens == len(tokens)


@FEW
@given(tokens=st.lists(st.integers(0, 9), min_size=32, max_size=100), at=st.integers(0, 99))
def test_one_other_token_changes_its_block_and_all_after(tokens, at):
    at %= len(tokens)
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    mine, theirs = hash_prefix(pack(tokens), 16), hash_prefix(pack(other), 16)
    block = at // 16
    assert list(mine[:block]) == list(theirs[:block])
    assert not set(mine[block:]) & set(theirs[block:])


@FEW
@given(tokens=TOKENS, mine=TOKENS, theirs=TOKENS)
def test_a_fork_shares_the_past_and_nothing_else(tokens, mine, theirs):
    chain = PrefixChain(16)
    chain.extend(pack(tokens))
    twin = chain.fork()
    chain.extend(pack(mine))
    twin.extend(pack(theirs))
    assert chain.digests == list(hash_prefix(pack(tokens + mine), 16))
    assert twin.digests == list(hash_prefix(pack(tokens + theirs), 16))


def test_block_sizes_have_apart_domains():
    packed = pack(range(4096))
    tips = {size: hash_prefix(packed, size)[-1] for size in (16, 64, 256, 4096)}
    assert len(set(tips.values())) == 4
    assert PrefixChain(16).tip() != PrefixChain(32).tip()


@pytest.mark.parametrize("block_tokens", [-1, 0, 4097])
def test_block_size_is_checked(block_tokens):
    with pytest.raises(InvalidInput, match="block_tokens"):
        PrefixChain(block_tokens)


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"]])
def test_tokens_are_checked(tokens):
    with pytest.raises(InvalidInput, match="tokens"):
        pack(tokens)


@FEW
@given(tokens=TOKENS, more=TOKENS, block=st.sampled_from([1, 2, 16]))
def test_digests_go_on_from_a_digest_alone(tokens, more, block):
    whole = hash_prefix(pack(tokens + more), block)
    first = len(tokens) // block
    before = whole[first - 1] if first else None
    rest = pack((tokens + more)[first * block :])
    assert list(digests_behind(before, rest, block)) == list(whole[first:])


@FEW
@given(tokens=TOKENS, more=TOKENS, other=TOKENS, block=st.sampled_from([1, 2, 16]))
def test_a_hashed_prefix_answers_for_what_it_has_hashed_and_nothing_else(
    tokens, more, other, block
):
    hashed = HashedPrefix(block)
    assert hashed.grow(pack(tokens)) and hashed.grow(pack(tokens + more))
    whole = pack(tokens + more)
    assert hashed.digests == list(hash_prefix(whole, block))
    for blocks in range(len(hashed.digests) + 1):
        part = whole[: blocks * block * 4]
        assert hashed.digest_of(part) == (hashed.digests[blocks - 1] if blocks else None)
    assert hashed.digest_of(whole + b"1") is None
    begins = pack(other)[: len(other) // block * block * 4].startswith(hashed.tokens)
    before = list(hashed.digests)
    assert hashed.grow(pack(other)) is begins
    if not begins:
        assert hashed.digests == before, "unchanged"


def test_a_fork_of_a_hashed_prefix_goes_its_own_way():
    hashed = HashedPrefix(16)
    hashed.grow(pack(range(40)))
    twin = hashed.fork()
    twin.extend(pack(range(7, 30)))
    assert len(hashed.digests) == 2 and len(twin.digests) == 3


@FEW
@given(tokens=TOKENS, more=TOKENS, other=TOKENS, block=st.sampled_from([1, 2, 16]))
def test_a_hashed_prefix_follows_another_that_begins_with_it(tokens, more, other, block):
    mine, longer, apart = (HashedPrefix(block) for _ in range(3))
    mine.grow(pack(tokens))
    longer.grow(pack(tokens + more))
    apart.grow(pack(other))
    copy, before = mine.copy(), list(mine.digests)
    assert mine.follow(longer)
    assert (mine.digests, mine.tokens) == (longer.digests, longer.tokens)
    assert mine.grow(pack(tokens + more + other))
    assert mine.digests == list(hash_prefix(pack(tokens + more + other), block))
    assert longer.digests == list(hash_prefix(pack(tokens + more), block)), "its own"
    assert copy.digests == before
    begins = apart.tokens.startswith(copy.tokens)
    assert copy.follow(apart) is begins
    assert copy.digests == (apart.digests if begins else before)
