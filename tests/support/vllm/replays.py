"""What scenarios of replays are written in: engines with our scheduler, branches of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.vllm import connectors, tiny
from tests.support.vllm.fleet import VllmWorker

SCHEDULERS = "ownerserve.engines.vllm.replay.scheduler"
FAMILIES = ("gptoss", "gemma3")
PROMPT_TOKENS = 1537
EXACT = 2e-5
"""Far below the oracle's tolerance: 1e-6 is measured, and half of a replay gives 5e-4 and more."""


def replaying(store: Path, **extra: Any) -> dict[str, Any]:
    """Our connector under our scheduler."""
    scheduler = {"scheduler_cls": f"{SCHEDULERS}.ReplayScheduler"}
    return {**connectors.ours(store, **extra), **scheduler}


def replaying_async(store: Path, **extra: Any) -> dict[str, Any]:
    """The same with steps that overlap, vLLM's default on GPUs."""
    scheduler = {
        "scheduler_cls": f"{SCHEDULERS}.AsyncReplayScheduler",
        "async_scheduling": True,
    }
    return {**connectors.ours(store, **extra), **scheduler}


def branch(prompt: Sequence[int], at: int, *, seed: int, added: int = 60) -> list[int]:
    """A prompt that shares `at` tokens with another and goes on otherwise."""
    return [*prompt[:at], *tiny.prompt(added, seed=20_000 + seed)]


def hook(worker: VllmWorker, name: str, **arguments: Any) -> Any:
    """Call a function of replay_hooks.py in the worker."""
    return worker.hook(f"replay_hooks:{name}", **arguments)
