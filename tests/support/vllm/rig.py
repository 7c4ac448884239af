"""What scenarios are written in: checkpoints, workers by connector, answers of a cold engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import tiny
from tests.support.vllm.fleet import VllmWorker, Zygote, vllm_version
from tests.support.vllm.wire import Answer, Boot

SETTLE_S = 20.0


class Rig:
    """Owns a test run's checkpoints and cold answers, and the workers of the running test."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote = zygote
        self.folder = folder
        self._answers: dict[tuple[Any, ...], Answer] = {}
        self._cold: dict[str, VllmWorker] = {}
        self._workers: list[VllmWorker] = []
        self._forked = 0

    def checkpoint(self, family: str) -> Path:
        folder = self.folder / family
        if not (folder / "config.json").exists():
            tiny.write_checkpoint(family, folder)
        return folder

    def worker(self, family: str, connector: dict[str, Any], **engine_args: Any) -> VllmWorker:
        """A fresh engine of a family; `engine_args` beside what the family and connector need:
        among them `env`, variables, `imports`, modules, and `model`, another checkpoint."""
        if vllm_version() < tiny.RUNS_FROM.get(family, ()):
            pytest.skip(f"this vLLM has no CPU kernels for {family}")
        worker = self._fork(family, {**connector, **engine_args})
        self._workers.append(worker)
        return worker

    def cold(
        self, family: str, tokens: Sequence[int], *, max_tokens: int = 16, **options: Any
    ) -> Answer:
        """What an engine that has no cache of any kind answers; asked once for each prompt."""
        key = (family, tuple(tokens), max_tokens, repr(options))
        if key not in self._answers:
            if family not in self._cold:
                self._end_cold()
                self._cold[family] = self._fork(family, {"enable_prefix_caching": False})
            self._answers[key] = self._cold[family].generate(
                tokens, max_tokens=max_tokens, **options
            )
        return self._answers[key]

    def end_test(self) -> None:
        """Kill what the test has started and not ended itself."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _end_cold(self) -> None:
        for worker in self._cold.values():
            worker.kill()
        self._cold.clear()

    def _fork(self, family: str, arguments: dict[str, Any]) -> VllmWorker:
        self._forked += 1
        needs = dict(tiny.ENGINE_ARGS.get(family, {}))
        if arguments.get("enable_prefix_caching") is False:
            needs.pop("mamba_cache_mode", None)
        arguments = dict(arguments)
        boot = Boot(
            env=arguments.pop("env", {}),
            imports=[*tiny.IMPORTS.get(family, ()), *arguments.pop("imports", [])],
            model=str(arguments.pop("model", None) or self.checkpoint(family)),
            log=str(self.folder / f"worker-{self._forked:03d}-{family}.log"),
            engine_args={**needs, **arguments},
        )
        return self.zygote.fork(boot)


def settle(worker: VllmWorker, *, blocks_free: bool = True) -> None:
    """Let a worker finish what it does after an answer; fails when blocks stay referenced."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        drained = worker.ask("drain", SETTLE_S)
        pool = worker.ask("pool")
        clean = pool["requests"] == 0 and (pool["referenced"] == 0 or not blocks_free)
        if drained and clean:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"after {SETTLE_S} s: drained {drained}, {pool}")
        time.sleep(0.02)


def next_turn(tokens: Sequence[int], answer: Answer, *, seed: int, added: int = 40) -> list[int]:
    """The session's following prompt: what was said so far and `added` new tokens."""
    return [*tokens, *answer.tokens, *tiny.prompt(added, seed=10_000 + seed)]
