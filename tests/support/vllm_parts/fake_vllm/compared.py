"""A program for vLLM's own environment: which names of the fake are not vLLM's.

PYTHONPATH=src:. .venv-vllm/bin/python -m tests.support.vllm_parts.fake_vllm.compared
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields

from tests.support.vllm_parts.fake_vllm.cache import FakeCacheManager, FakePool
from tests.support.vllm_parts.fake_vllm.request import FakeRequest, RequestStatus
from tests.support.vllm_parts.fake_vllm.scheduler import SchedulerOutput

OURS = {"tokens_to", "rows", "commands", "order", "take", "fill", "find", "reset", "windows"}
"""Names of the fakes that vLLM's classes have not, and no connector reads."""


def public(kind: type, *more: str) -> Iterator[str]:
    names = {name for name in dir(kind) if not name.startswith("_")}
    yield from sorted({*names, *more} - OURS)


def missing() -> Iterator[str]:
    from vllm import SamplingParams
    from vllm.v1 import request as real
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import output, scheduler

    one = real.Request("r", [1, 2, 3], SamplingParams(max_tokens=2), None)
    own = [field.name for field in fields(FakeRequest)]
    requests = public(FakeRequest, *own, "num_prompt_tokens", "all_token_ids")
    yield from lacks("Request", one, requests)
    yield from lacks("RequestStatus", real.RequestStatus, [each.name for each in RequestStatus])
    pool = BlockPool(8, True, 4)
    yield from lacks("BlockPool", pool, public(FakePool, "blocks", "free_block_queue"))
    yield from lacks("KVCacheManager", KVCacheManager, public(FakeCacheManager))
    told = {field.name for field in fields(output.SchedulerOutput)}
    given = [field.name for field in fields(SchedulerOutput) if field.name not in OURS]
    yield from [f"SchedulerOutput.{name}" for name in given if name not in told]
    yield from out_of_order(inspect.getsource(scheduler.Scheduler))


def lacks(name: str, real: object, names: Iterable[str]) -> Iterator[str]:
    yield from [f"{name}.{each}" for each in names if not hasattr(real, each)]


IN_ORDER = {
    "schedule": (
        "allocate_slots(",
        ".has_pending_block_frees(",
        "_preempt_request(",
        ".get_num_new_matched_tokens(",
        "allocate_slots(",
        ".update_state_after_alloc(",
        "_build_kv_connector_meta(",
        "_update_after_schedule(",
    ),
    "update_from_output": (
        "_drain_deferred_frees(",
        "_handle_failed_recving(",
        "num_in_flight_tokens -=",
        "num_computed_tokens -= num_rejected",
        "_update_request_with_output(",
        "_update_from_kv_xfer_finished(",
    ),
    "_update_from_kv_xfer_finished": (".update_connector_output(", "finished_recving"),
    "_preempt_request": ("_free_request_blocks(", "num_computed_tokens = 0", "num_preemptions +="),
    "_connector_finished": ("remove_skipped_blocks(", "request_finished_all_groups("),
}
"""What a method of vLLM's scheduler does, in this order: the fake's does too."""


def out_of_order(source: str) -> Iterator[str]:
    for method, steps in IN_ORDER.items():
        at = source.find(f"def {method}(")
        end = source.find("\n    def ", at + 1)
        body, done = source[at:end], 0
        for step in steps:
            found = body.find(step, done)
            if at < 0 or found < 0:
                yield f"Scheduler.{method}: {step} not where it was"
                break
            done = found + len(step)


if __name__ == "__main__":
    print(json.dumps(list(missing())))
