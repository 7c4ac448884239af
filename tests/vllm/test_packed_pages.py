"""A cache that vLLM quantises has no canonical payload: its pages are kept as they lie.

fp8 keys and values are what the CPU build runs of that kind. DeepSeek-V4's packed blocks go the
same way, over vLLM's own allocation, in tests/engines/vllm/test_packed.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ownerserve.store.disk.snapshot import StoreSnapshot
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import VllmWorker, quantises_on_this_cpu
from tests.support.vllm.pages import assert_same_pages, byte_runs
from tests.support.vllm.rig import Rig, next_turn, settle

pytestmark = pytest.mark.vllm

B = 32
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
TOLERANCE = 0.1
"""bfloat16; the control below is beyond it."""
quantised = pytest.mark.skipif(
    not quantises_on_this_cpu(), reason="vLLM keeps fp8 on CPUs with AVX-512 or AMX alone"
)


def cold(rig: Rig, family: str) -> VllmWorker:
    """An engine with the same cache and no reuse of any kind."""
    return rig.worker(family, {"enable_prefix_caching": False}, **FP8)


def components(store: Path) -> set[str]:
    snapshot = StoreSnapshot(store)
    found = {entry.meta.component for entry in snapshot.entries()}
    snapshot.close()
    return found


@quantised
@pytest.mark.parametrize(
    ("family", "kept"), [("qwen3", {"pages"}), ("gemma3", {"pages", "window_pages"})]
)
def test_quantised_pages_come_back_after_a_restart(
    rig: Rig, family: str, kept: set[str], store: Path
) -> None:
    prompt = tiny.prompt(500, seed=201)
    before = rig.worker(family, connectors.ours(store), **FP8)
    answer = before.generate(prompt, session="s", max_tokens=40)
    settle(before)
    before.shutdown()
    after = rig.worker(family, connectors.ours(store), **FP8)
    restored = after.generate(prompt)
    assert restored.cached == 499 // B * B
    following = next_turn(prompt, answer, seed=1)
    again = after.generate(following, session="s")
    assert again.cached >= 540 // B * B
    settle(after)
    after.shutdown()
    assert components(store) == kept
    truth = cold(rig, family)
    assert oracle.judge(truth.generate(prompt), restored).worst <= TOLERANCE
    assert oracle.judge(truth.generate(following), again).worst <= TOLERANCE


@quantised
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_spoilt_page_shows(rig: Rig, family: str, store: Path) -> None:
    """The control of the test above."""
    prompt = tiny.prompt(500, seed=202)
    worker = rig.worker(family, connectors.ours(store), **FP8)
    worker.generate(prompt)
    settle(worker)
    worker.ask("reset")
    worker.hook("corrupt_restored", value=90)
    spoilt = worker.generate(prompt)
    assert spoilt.cached > 0
    assert oracle.judge(cold(rig, family).generate(prompt), spoilt).worst > TOLERANCE


@pytest.mark.parametrize("family", ["llama4", "lfm2"])
def test_chunks_and_short_convolutions_come_back(rig: Rig, family: str, store: Path) -> None:
    """Judged by what the engine answered itself. vLLM's CPU kernels of short convolutions answer
    otherwise for every way in which a prompt is cut (0.24 to 1.4), so no other engine is a judge.
    The last turn is the control: what it restores is spoilt."""
    prompt = tiny.prompt(500, seed=204)
    before = rig.worker(family, connectors.ours(store))
    truth = before.generate(prompt)
    settle(before)
    before.shutdown()
    assert components(store) >= {"window_pages"}
    after = rig.worker(family, connectors.ours(store))
    restored = after.generate(prompt)
    assert restored.cached == 499 // B * B
    assert oracle.judge(truth, restored).worst <= oracle.TOLERANCE
    settle(after)
    after.ask("reset")
    after.hook("corrupt_restored", value=90)
    spoilt = after.generate(prompt)
    assert spoilt.cached > 0
    assert oracle.judge(truth, spoilt).worst > oracle.TOLERANCE


@quantised
def test_every_page_is_what_the_engine_computed(rig: Rig, store: Path) -> None:
    """Byte for byte, in vLLM's own memory; and a prompt that differs differs in every layer."""
    first, second, other = byte_runs(rig, store, "gemma3", B, **FP8)
    assert_same_pages(first, second)
    assert all(first[name][0] != other[name][0] for name in first if first[name][0])


@quantised
def test_plain_and_quantised_pages_are_strangers(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(300, seed=203)
    plain = rig.worker("qwen3", connectors.ours(store), dtype="bfloat16")
    plain.generate(prompt)
    settle(plain)
    plain.shutdown()
    packed = rig.worker("qwen3", connectors.ours(store), **FP8)
    assert packed.generate(prompt).cached == 0
