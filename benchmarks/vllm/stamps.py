"""Imported in an engine's process: from here on calls that a resume passes through are noted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.cpu_worker import CPUWorker

from ownerserve.engines.vllm.connector import OwnerServeConnector
from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.store.tiers.tiered import TieredStore
from tests.support.vllm import hooks

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "start_load_kv",
    "get_transfer_results",
    "get_finished",
    "wait_for_save",
    "update_connector_output",
    "request_finished_all_groups",
)
CALLS = {
    EngineCore: ("add_request",),
    Scheduler: ("schedule", "update_from_output"),
    CPUWorker: ("execute_model",),
    OwnerServeConnector: HOOKS,
    OffloadingConnector: HOOKS,
    PageCodec: ("read", "write"),
    TieredStore: ("read",),
}
STAMPS: list[tuple[str, str, float, float, float]] = []
"""Thread, call, when it began, and the seconds and CPU seconds that it took."""


def _noted(label: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*given: Any, **options: Any) -> Any:
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            return call(*given, **options)
        finally:
            took_s, used_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
            STAMPS.append((threading.current_thread().name, label, began_s, took_s, used_s))

    return noted


def taken(worker: Any) -> list[tuple[str, str, float, float, float]]:
    """What was noted since the last call."""
    found = list(STAMPS)
    STAMPS.clear()
    return found


for _owner, _names in CALLS.items():
    for _name in _names:
        if _name in vars(_owner):
            setattr(_owner, _name, _noted(f"{_owner.__name__}.{_name}", getattr(_owner, _name)))
setattr(hooks, "stamps", taken)  # noqa: B010 - the worker calls its hooks by name
