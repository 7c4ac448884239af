"""The ids of a long prompt are made where it is read: the engine's thread hashes none of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.kv.ids import PrefixHash, SessionId  # noqa: E402
from ownerserve.kv.prefix import Packed, PrefixChain, hash_prefix, pack  # noqa: E402
from ownerserve.node.vocabulary.chains import Chains, PromptPrefixes  # noqa: E402
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from tests.support.hf.engine_rig import text  # noqa: E402
from tests.support.hf.fleet_rig import ServedWorker  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = pytest.mark.engine

BLOCK = 16


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Tokens hashed so far: by the engine's thread, and by all others."""
    seen: Counter[str] = Counter()
    extend = PrefixChain.extend

    def counted(chain: PrefixChain, packed: Packed) -> Sequence[PrefixHash]:
        name = threading.current_thread().name
        seen["engine" if name == "engine" else "others"] += len(packed) // 4
        return extend(chain, packed)

    monkeypatch.setattr(PrefixChain, "extend", counted)
    return seen


@pytest.fixture
def spill_after_s() -> float:
    return 1e6


@pytest.fixture
def served(tmp_path: Path, spill_after_s: float) -> Iterator[ServedWorker]:
    node = NodeSettings(spill_after_s=spill_after_s)
    options = WorkerOptions(model="tiny-qwen3", store=tmp_path, node=node, kv_bytes=32 << 20)
    worker = ServedWorker(options)
    try:
        yield worker
    finally:
        worker.close()


def asked(served: ServedWorker, prompt: list[int], session: str | None) -> list[int]:
    """One turn of one new token; the prompt with what was answered."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    headers = {} if session is None else {"x-session-id": session}
    answer = served.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return [*prompt, *answer.json()["choices"][0]["token_ids"]]


@pytest.mark.parametrize("session", ["s", None])
def test_a_cold_prompt_is_hashed_off_the_engines_thread(
    served: ServedWorker, hashed: Counter[str], session: str | None
) -> None:
    said = asked(served, text(3000), session)
    assert (hashed["others"], hashed["engine"]) == (2992, 0)
    asked(served, [*said, *text(200, seed=1)], session)
    more = 3201 // BLOCK * BLOCK if session is None else 3201 // BLOCK * BLOCK - 2992
    assert hashed["others"] <= 2992 + more, "a session's next turn hashes what it adds"
    assert not hashed["engine"]


@pytest.mark.parametrize("spill_after_s", [0.05])
def test_what_is_put_away_costs_the_engines_thread_the_answers_digests_alone(
    served: ServedWorker, hashed: Counter[str]
) -> None:
    said = asked(served, text(3000), "s")
    until(lambda: served.metric("ownerserve_spill_records_total") > 0)
    asked(served, [*said, *text(200, seed=1)], "s")
    before = served.metric("ownerserve_spill_records_total")
    until(lambda: served.metric("ownerserve_spill_records_total") > before)
    assert hashed["others"] and not hashed["engine"], "no answer has filled a block"


def test_what_was_made_elsewhere_is_what_the_engine_would_have_made() -> None:
    """Also for a branch, a shorter prompt, and from many threads at once for one session."""
    prefixes = PromptPrefixes(BLOCK)
    long = text(5000)
    prompts = [long[:n] for n in range(100, 5000, 700)] + [[*long[:777], *text(300, seed=2)]]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda prompt: prefixes.of(prompt, "s"), prompts * 3))
    for prompt, one in zip(prompts * 3, made, strict=True):
        assert one.tokens == pack(prompt)
        assert one.hashed.digests == hash_prefix(one.tokens, BLOCK)
        whole = len(prompt) // BLOCK * BLOCK
        assert one.hashed.tokens == one.tokens[: whole * 4]


def test_an_engine_that_is_told_another_prefix_makes_its_own() -> None:
    chains, wrong = Chains(BLOCK, block_bytes=BLOCK * 4), PromptPrefixes(BLOCK)
    tokens = pack(text(100))
    made = wrong.of(text(100, seed=9), "s").hashed
    found = chains.hashed(tokens, SessionId("s"), made)
    assert found.digests == hash_prefix(tokens, BLOCK)
