"""A forked worker: one in-process vLLM engine and the loop that steps it and answers questions.

The loop is vLLM's own busy loop in small: step while the scheduler has anything to do, sleep 1 ms
when a step ran no model, else wait for the next question.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import select
import socket
import sys
import time
import traceback
from typing import Any

import msgspec
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from tests.support.vllm.seeing import picture
from tests.support.vllm.wire import Answer, Ask, Boot, Reply, receive, send

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "disable_log_stats": False,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 256,
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": 32,
    "generation_config": "vllm",
    "max_logprobs": 20,
}


def serve(connection: socket.socket) -> None:
    """Build the engine the first frame asks for, then answer until `shutdown` or hang-up."""
    boot = msgspec.msgpack.decode(receive(connection), type=Boot)
    _log_to(boot.log)
    os.environ.update(boot.env)
    _ready_the_cpu()
    try:
        for module in boot.imports:
            importlib.import_module(module)
        worker = Worker(boot)
    except Exception:  # noqa: BLE001  the root of this process: whatever it is goes to the test
        send(connection, Reply(error=traceback.format_exc()))
        return
    send(connection, Reply(os.getpid()))
    worker.loop(connection)


def _log_to(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()


def _ready_the_cpu() -> None:
    # A first forward of one token (a wholly restored prompt) dies of SIGILL without this.
    getattr(torch.cpu, "_init_amx", lambda: None)()


class Worker:
    """Owns the engine. Questions are its methods whose name starts with `do_`."""

    def __init__(self, boot: Boot) -> None:
        given = {**DEFAULTS, **boot.engine_args}
        if "kv_transfer_config" in given:
            given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
        arguments = EngineArgs(model=boot.model, **given)
        self.engine: Any = LLMEngine.from_engine_args(arguments)
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self._asked: dict[str, tuple[float, float | None]] = {}
        self._answers: dict[str, Answer] = {}
        self._waiting: tuple[set[str], float] | None = None
        self._steps = {"steps": 0, "empty": 0}
        self._stopping = False
        for hook in boot.hooks:
            _hook(hook)(self)

    def loop(self, connection: socket.socket) -> None:
        while not self._stopping:
            busy = self.scheduler.has_requests()
            timeout = 0 if busy else 0.05 if self._waiting else None
            if self._waiting is None or not busy:
                readable, _, _ = select.select([connection], [], [], timeout)
                if readable:
                    self._answer(connection)
            if busy:
                self._step()
            if self._waiting is not None:
                self._report(connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            frame = receive(connection)
        except EOFError:
            self._stopping = True
            return
        name, *arguments = msgspec.msgpack.decode(frame)
        try:
            value = getattr(self, f"do_{name}")(*arguments)
        except Exception:  # noqa: BLE001  an RPC root
            send(connection, Reply(error=traceback.format_exc()))
            return
        if name != "wait":
            send(connection, Reply(value))

    def _step(self) -> None:
        before = time.perf_counter()
        outputs = self.engine.step()
        now = time.perf_counter()
        self._steps["steps"] += 1
        for output in outputs:
            asked, first = self._asked[output.request_id]
            if first is None and output.outputs and output.outputs[0].token_ids:
                self._asked[output.request_id] = (asked, now)
            if output.finished:
                self._answers[output.request_id] = self._finish(output, now)
        if not outputs and now - before < 0.002:
            self._steps["empty"] += 1
            time.sleep(0.001)

    def _finish(self, output: Any, now: float) -> Answer:
        asked, first = self._asked.pop(output.request_id)
        completion = output.outputs[0]
        return Answer(
            id=output.request_id,
            tokens=list(completion.token_ids),
            top=[
                {token: entry.logprob for token, entry in position.items()}
                for position in completion.logprobs or ()
            ],
            finish=str(completion.finish_reason),
            cached=output.num_cached_tokens or 0,
            ttft_s=(first or now) - asked,
            e2e_s=now - asked,
            kv=getattr(output, "kv_transfer_params", None) or {},
        )

    def _report(self, connection: socket.socket) -> None:
        """Answer a `wait` when all its requests are done, or its time is up."""
        assert self._waiting is not None
        ids, deadline = self._waiting
        missing = ids - self._answers.keys()
        if missing and time.monotonic() < deadline:
            return
        self._waiting = None
        if missing:
            send(connection, Reply(error=f"TimeoutError: unfinished: {sorted(missing)}"))
        else:
            send(connection, Reply([self._answers.pop(id) for id in sorted(ids)]))

    def do_submit(self, ask: dict[str, Any]) -> None:
        request = msgspec.convert(ask, Ask)
        extra = {"kv_transfer_params": request.kv} if request.kv else None
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            logprobs=request.top,
            ignore_eos=True,
            extra_args=extra,
            structured_outputs=_obeying(request.schema),
        )
        prompt: dict[str, Any] = {"prompt_token_ids": request.tokens}
        if request.pictures:
            shown = [picture(seed) for seed in request.pictures]
            prompt["multi_modal_data"] = {"image": shown}
        if request.salt:
            prompt["cache_salt"] = request.salt
        options: dict[str, Any] = {"priority": request.priority}
        if request.session:
            options["session_id"] = request.session
        if request.lora:
            options["lora_request"] = LoRARequest(request.lora, 1, request.lora)
        self._asked[request.id] = (time.perf_counter(), None)
        self.engine.add_request(request.id, prompt, parameters, **options)

    def do_submit_all(self, asks: list[dict[str, Any]]) -> None:
        """Submit several requests with no step between them."""
        for ask in asks:
            self.do_submit(ask)

    def do_wait(self, ids: list[str], timeout_s: float) -> None:
        self._waiting = (set(ids), time.monotonic() + timeout_s)

    def do_abort(self, ids: list[str]) -> None:
        self.engine.abort_request(ids)
        for id in ids:
            self._asked.pop(id, None)

    def do_run_steps(self, count: int) -> int:
        """Step at most `count` times while there is work; for aborts at a chosen moment."""
        done = 0
        while done < count and self.scheduler.has_requests():
            self._step()
            done += 1
        return done

    def do_drain(self, timeout_s: float) -> bool:
        """Step until the scheduler has nothing left; False when the time was up first."""
        deadline = time.monotonic() + timeout_s
        while self.scheduler.has_requests() and time.monotonic() < deadline:
            self._step()
        return not self.scheduler.has_requests()

    def do_pool(self) -> dict[str, int]:
        """Blocks of the engine's pool: all but the null block, free, and referenced."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "block_tokens": self.scheduler.block_size,
            "blocks": pool.num_gpu_blocks - 1,
            "free": pool.get_num_free_blocks(),
            "referenced": sum(1 for b in pool.blocks if b.ref_cnt > 0 and not b.is_null),
            "requests": len(self.scheduler.requests),
        }

    def do_groups(self) -> list[str]:
        """Kind of spec of each KV cache group."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return [type(group.kv_cache_spec).__name__ for group in groups]

    def do_usage(self) -> dict[str, float]:
        pages = int(open("/proc/self/statm").read().split()[1])  # noqa: SIM115, PTH123
        return {
            **self._steps,
            "cpu_s": time.process_time(),
            "rss_bytes": pages * os.sysconf("SC_PAGESIZE"),
        }

    def do_reset(self) -> bool:
        """Forget what the engine's own prefix cache holds; a connector's cache stays."""
        return bool(self.engine.reset_prefix_cache())

    def do_hook(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a function of hooks.py, or of `module:function`, with this worker."""
        return _hook(name)(self, **arguments)

    def do_shutdown(self) -> None:
        """As an engine's own end: the connector's shutdown runs, then the process exits."""
        self._stopping = True
        self.engine.engine_core.shutdown()


def _obeying(schema: dict[str, Any] | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return None if schema is None else StructuredOutputsParams(json=schema)


def _hook(name: str) -> Any:
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(f"tests.support.vllm.{module or 'hooks'}"), function)
