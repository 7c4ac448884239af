"""Which calls to vLLM's workers leave the weights as they are."""

from __future__ import annotations

import pytest

from ownerserve.engines.vllm.weights import WorkerCall, may_change


@pytest.mark.parametrize(
    "call",
    [
        WorkerCall("execute_model", ("a step",)),
        WorkerCall("sleep", named={"level": 1}),
        WorkerCall("sleep", (0,)),
        WorkerCall("wake_up", named={"tags": ["weights"]}),
        WorkerCall("discard", (("kv_cache",),)),
        WorkerCall("reset_mm_cache"),
    ],
)
def test_these_keep_them(call: WorkerCall) -> None:
    assert not may_change(call)


@pytest.mark.parametrize(
    "call",
    [
        WorkerCall("sleep", named={"level": 2}),
        WorkerCall("sleep"),
        WorkerCall("sleep", (1,), {"further": "argument"}),
        WorkerCall("discard", (("kv_cache", "weights"),)),
        WorkerCall("reload_weights"),
        WorkerCall("start_weight_update"),
        WorkerCall("update_weights", ({},)),
        WorkerCall("finish_weight_update"),
        WorkerCall("load_model"),
        WorkerCall(""),
        WorkerCall("a method of tomorrow"),
    ],
)
def test_after_these_they_may_be_others(call: WorkerCall) -> None:
    assert may_change(call)
