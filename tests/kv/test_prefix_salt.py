"""Salted prefixes: parted from all others, and plain again for whoever computes."""

from __future__ import annotations

import random

import pytest

from ownerserve.kv.prefix import (
    NO_SALT,
    SALTED_TOKENS,
    SALTED_VOCABULARY,
    PrefixSalt,
    hash_prefix,
    pack,
    unpack,
)
from ownerserve.node.vocabulary.chains import PromptPrefixes, prefix_of


@pytest.mark.parametrize("count", [1, 5, SALTED_TOKENS - 1, SALTED_TOKENS, 200])
@pytest.mark.parametrize("at", [0, 3, SALTED_TOKENS - 1, SALTED_TOKENS, 40])
def test_what_is_turned_twice_is_as_it_was(count: int, at: int) -> None:
    draw = random.Random(count + at)
    tokens = pack(draw.randrange(SALTED_VOCABULARY) for _ in range(count))
    salt = PrefixSalt("a tenant")
    salted = salt.turned(tokens, at)
    assert salt.turned(salted, at) == tokens
    parted = min(count, max(0, SALTED_TOKENS - at))
    assert sum(a != b for a, b in zip(unpack(salted), unpack(tokens), strict=True)) == parted
    assert all(token >= SALTED_VOCABULARY for token in unpack(salted)[:parted])
    assert NO_SALT.turned(tokens, at) == tokens


def test_in_pieces_it_is_the_same() -> None:
    tokens, salt = pack(range(300)), PrefixSalt("s")
    whole = salt.turned(tokens, 0)
    for cut in range(40):
        assert salt.turned(tokens[: cut * 4], 0) + salt.turned(tokens[cut * 4 :], cut) == whole


def test_no_two_salts_meet() -> None:
    """A thousand salts and none: the first block of one token already parts most, all of 16 part
    all."""
    tokens = list(range(64))
    prefixes = [prefix_of(tokens, 16, PrefixSalt(f"tenant {n}")) for n in range(1000)]
    plain = prefix_of(tokens, 16)
    assert len({one.tip for one in (*prefixes, plain)}) == 1001
    assert plain.tip == hash_prefix(pack(tokens), 16)[-1]
    assert all(list(one.plain(0, 64)) == tokens for one in prefixes)
    assert list(prefixes[0].plain(7, 40)) == tokens[7:40]


@pytest.mark.parametrize("prompt", [1, 5, 15, 16, 17, 40])
def test_an_answer_goes_on_under_the_salt(prompt: int) -> None:
    """The next prompt begins with prompt and answer, whatever the prompt's length."""
    tokens, salt = list(range(100)), PrefixSalt("s")
    said = prefix_of(tokens[:prompt], 16, salt).answered(tokens[prompt:96])
    later = prefix_of(tokens, 16, salt)
    for at in (16, 48, 96):
        assert said.digest_at(at) == later.digest_at(at)


def test_a_sessions_next_prompt_under_another_salt_is_hashed_anew() -> None:
    prefixes, tokens = PromptPrefixes(16), list(range(160))
    first = prefixes.of(tokens[:80], "s", PrefixSalt("a"))
    other = prefixes.of(tokens, "s", PrefixSalt("b"))
    again = prefixes.of(tokens, "s", PrefixSalt("a"))
    assert first.digest_at(80) == again.digest_at(80) != other.digest_at(80)
