"""A session's next prompt costs what is new in it, and is never taken for another one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.engines.vllm.turns.prompts import AT_ONCE_TOKENS, HashedPrompt, Prompts
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.node.vocabulary.chains import PromptPrefix

BLOCK, ALIAS = 32, 16
S = SessionId("s")


class Tokens(Sequence[int]):
    """A request's tokens, as vLLM shows them; counts how many are read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.plain = list(tokens)
        self.read = 0

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, at: Any) -> Any:
        found = self.plain[at]
        self.read += len(found) if isinstance(at, slice) else 1
        return found


class Request:
    """vLLM's request, as far as prompts are read: its block hashes are made before."""

    def __init__(self, tokens: Sequence[int], *, prompt: int | None = None, salt: str = "") -> None:
        self.request_id = "r"
        self.all_token_ids = Tokens(tokens)
        self.num_prompt_tokens = len(tokens) if prompt is None else prompt
        state, self.block_hashes = salt.encode(), list[bytes]()
        for end in range(ALIAS, len(tokens) + 1, ALIAS):
            state = hashlib.sha256(state + pack(tokens[end - ALIAS : end])).digest()
            self.block_hashes.append(state)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Bench:
    def __init__(self, algorithm: str = "sha256", kept_tokens: int = 1 << 20) -> None:
        self.chores: list[Callable[[], None]] = []
        self.prompts = Prompts(
            BLOCK, self.chores.append, algorithm=algorithm, kept_tokens=kept_tokens
        )
        self.prompts.bind(ALIAS)

    def ask(self, request: Request, session: SessionId | None = S) -> HashedPrompt:
        """The prompt, hashed by the hook or by the other thread."""
        found = self.prompts.hashed(request, session)
        if found is None:
            self.chores.pop()()
            (found,) = self.prompts.poll()
        assert found.tokens == pack(request.all_token_ids.plain)
        assert found.hashed.digests == hash_prefix(found.tokens, BLOCK)
        return found

    def turn(self, tokens: Sequence[int], *, said: int = 0, session: SessionId = S) -> PromptPrefix:
        """A turn whose last `said` tokens are its answer."""
        asked = self.ask(Request(tokens[: len(tokens) - said]), session)
        request = Request(tokens, prompt=len(tokens) - said)
        left = self.prompts.extended(asked, request, len(tokens))
        assert left is not None
        self.prompts.left(session, left, request)
        return left


def text(count: int, *, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_of_a_next_prompt_only_what_is_new_is_read() -> None:
    bench, tokens = Bench(), text(100_000)
    bench.turn(tokens, said=40)
    request = Request([*tokens, *text(760, first=7)])
    bench.ask(request)
    assert request.all_token_ids.read <= 760 + ALIAS
    assert not bench.chores


def test_an_answer_told_back_in_other_words_costs_it_and_what_follows() -> None:
    bench, tokens = Bench(), text(50_000)
    bench.turn(tokens, said=500)
    request = Request([*tokens[:-500], *text(300, first=9), *text(760, first=7)])
    bench.ask(request)
    assert request.all_token_ids.read <= 300 + 760 + ALIAS


def test_long_new_prompts_are_hashed_elsewhere() -> None:
    bench = Bench()
    tokens = text(AT_ONCE_TOKENS + 1)
    request = Request(tokens)
    assert bench.prompts.hashed(request, S) is None
    assert request.all_token_ids.read == 0, "the hook reads nothing of it"
    assert len(bench.chores) == 1
    bench.chores.pop()()
    (found,) = bench.prompts.poll()
    assert found.hashed.digests == hash_prefix(pack(tokens), BLOCK)
    assert not bench.prompts.has_answers


@pytest.mark.parametrize("why", ["edited at the front", "another tenant", "shorter than before"])
def test_what_does_not_go_on_is_not_taken_for_what_was(why: str) -> None:
    bench, tokens = Bench(), text(20_000)
    bench.turn(tokens)
    request = {
        "edited at the front": Request([5, *tokens[1:]]),
        "another tenant": Request(tokens, salt="other"),
        "shorter than before": Request(tokens[:3000]),
    }[why]
    bench.ask(request)
    assert request.all_token_ids.read >= request.num_tokens, "all of it was packed"


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_hash_that_two_prompts_may_share_is_not_believed(algorithm: str) -> None:
    bench, tokens = Bench(algorithm), text(3000)
    bench.turn(tokens)
    forged = Request([9, *tokens[1:]])
    forged.block_hashes = Request(tokens).block_hashes
    bench.ask(forged)


def test_a_mark_beyond_what_was_computed_is_not_kept() -> None:
    """A turn that was given up in its prompt leaves less than its prompt, and vLLM has hashed it
    all."""
    bench, tokens = Bench(), text(2000)
    bench.turn(tokens)
    asked = bench.ask(Request(tokens[:960]))
    left = bench.prompts.extended(asked, Request(tokens), 970)
    assert left is not None
    bench.prompts.left(S, left, Request(tokens))
    bench.ask(Request([*tokens, *text(100, first=3)]))


def test_a_turn_given_up_in_its_prompt_leaves_nothing() -> None:
    bench, tokens = Bench(), text(2000)
    asked = bench.ask(Request(tokens))
    assert bench.prompts.extended(asked, Request(tokens), 1000) is None


def test_what_is_kept_has_a_bound() -> None:
    bench = Bench(kept_tokens=10_000)
    for number in range(9):
        bench.turn(text(3000, first=number), session=SessionId(f"s{number}"))
        assert len(bench.prompts) <= 10_000
    assert len(bench.prompts) == 9000
    for number in range(6, 9):
        bench.prompts.forget(SessionId(f"s{number}"))
    assert len(bench.prompts) == 0


@given(st.data())
def test_any_turns_at_all(data: st.DataObject) -> None:
    """Turns that go on, take back, edit and branch, of two sessions with a common head."""
    bench = Bench(data.draw(st.sampled_from(["sha256", "sha256_cbor", "xxhash"])), 6000)
    texts: dict[SessionId, list[int]] = {S: text(70), SessionId("t"): text(70)}
    for _ in range(data.draw(st.integers(1, 8))):
        session = data.draw(st.sampled_from(sorted(texts)))
        tokens = texts[session]
        cut = data.draw(st.integers(0, len(tokens)))
        kept = tokens if data.draw(st.booleans()) else tokens[:cut]
        more = data.draw(st.sampled_from([1, 15, 16, 31, 32, 33, 200, AT_ONCE_TOKENS]))
        tokens = texts[session] = [*kept, *text(more, first=data.draw(st.integers(0, 3)))]
        bench.turn(
            tokens, said=data.draw(st.integers(0, min(40, len(tokens) - 1))), session=session
        )
