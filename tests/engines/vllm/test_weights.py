"""Which calls to vLLM's workers leave the weights as they are."""

from __future__ import annotations

import re

import pytest

from ownerserve.engines.vllm.weights import KEEPS_WEIGHTS, WorkerCall, may_change
from tests.support.vllm.fleet import vllm_python

CHANGES = {
    "adjust_rank": "experts go to other ranks",
    "apply_model": "any function over the model",
    "checkpoint_prepare": "not looked into",
    "checkpoint_restore": "another process's image",
    "discard": "by what is discarded",
    "elastic_ep_execute": "experts go to other ranks",
    "finish_weight_update": "a trainer's",
    "handle_ft_command": "ranks come and go",
    "init_weight_transfer_engine": "a trainer's",
    "reinitialize_distributed": "experts go to other ranks",
    "reload_weights": "from a checkpoint",
    "reset_weights": "to those of a checkpoint",
    "shutdown_weight_transfer_engine": "a trainer's",
    "sleep": "by its level",
    "start_draft_weight_update": "a trainer's",
    "start_weight_update": "a trainer's",
    "update_weights": "a trainer's",
}
"""What vLLM calls its workers by that counts as an update, and why."""
BEFORE_US = {"init_device", "init_worker", "load_model", "update_environment_variables"}
"""Called before there is a connector."""


@pytest.mark.parametrize(
    "call",
    [
        WorkerCall("execute_model", ("a step",)),
        WorkerCall("sleep", named={"level": 1}),
        WorkerCall("sleep", (0,)),
        WorkerCall("wake_up", named={"tags": ["weights"]}),
        WorkerCall("discard", (("kv_cache",),)),
        WorkerCall("reset_mm_cache"),
        WorkerCall("supports_draft_weight_updates"),
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


@pytest.mark.vllm
def test_each_of_vllms_own_calls_was_judged() -> None:
    """One that nobody thought of counts as an update, and what is stored is not used from then on:
    so it was on each server of 0.30, from its start."""
    (package,) = vllm_python().parents[1].glob("lib/python3*/site-packages/vllm")
    called = re.compile(r'collective_rpc(?:_async)?\(\s*"(\w+)"')
    names = {
        name
        for part in ("v1", "entrypoints")
        for path in (package / part).rglob("*.py")
        for name in called.findall(path.read_text(errors="ignore"))
    }
    assert "execute_model" in names
    assert names - KEEPS_WEIGHTS - set(CHANGES) - BEFORE_US == set()
