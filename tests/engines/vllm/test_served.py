"""Whose state is not kept: by config.json, by parallelism, and by pages that only a worker sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ownerserve.engines.vllm.served import NotServed, check_config, check_parallel
from ownerserve.engines.vllm.worker_commands import (
    BlockPlace,
    LoadInto,
    SaveCommand,
    WorkerCommands,
)
from ownerserve.engines.vllm.worker_side.unable import UnableWorker
from ownerserve.store.format.model import ArtifactKind, Meta

PLACE = BlockPlace("dense", ((1,),), 0, 32)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v41"},
        {"model_type": "a_wrapper", "text_config": {"model_type": "deepseek_v41"}},
        {"model_type": "whisper", "is_encoder_decoder": True},
    ],
)
def test_a_config_says_that_its_state_is_not_kept(config: dict[str, Any]) -> None:
    with pytest.raises(NotServed):
        check_config(config)


def test_other_configs_say_nothing_against_it() -> None:
    check_config({"model_type": "qwen3", "is_encoder_decoder": False, "text_config": None})
    check_config({"model_type": "deepseek_v4"})


@pytest.mark.parametrize("field", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_ranks_that_share_a_blocks_tokens_keep_nothing(field: str) -> None:
    check_parallel(SimpleNamespace(tensor_parallel_size=2))
    check_parallel(SimpleNamespace(**{field: 1}))
    with pytest.raises(NotServed, match=field):
        check_parallel(SimpleNamespace(**{field: 2}))


def meta() -> Meta:
    return Meta(
        id=bytes(32),
        kind=ArtifactKind.RANGE,
        component="dense",
        prefix_hash=bytes(32),
        first_token=0,
        end_token=32,
        units=1,
    )


def test_an_unable_worker_lets_nobody_wait() -> None:
    """It says why once; loads fail, saves are not kept, and their blocks are free."""
    worker = UnableWorker("keys lie in an unknown order")
    load = LoadInto("r1", 1, wants=(), places=(), deadline_s=5.0)
    commands = WorkerCommands(
        loads=(load,), saves=(SaveCommand(2, meta(), PLACE),), failures=("r2",)
    )
    worker.load(commands)
    worker.save(commands)
    assert worker.results(commands) == ({"r1", "r2"}, {"r1", "r2"})
    assert worker.results(commands) == (set(), set())
    report = worker.report()
    assert report.unable == ("keys lie in an unknown order",)
    assert [(each.operation_id, bool(each.reason)) for each in report.loads] == [(1, True)]
    assert (report.copied, report.not_kept, report.kept) == ((2,), (2,), ())
    assert worker.report().is_empty
    worker.close()
