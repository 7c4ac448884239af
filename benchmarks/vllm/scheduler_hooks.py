"""CPU of the connector's hooks on vLLM's scheduler thread, at sessions of 100k tokens.

    PYTHONPATH=src .venv-vllm/bin/python benchmarks/vllm/scheduler_hooks.py [--json]

vLLM's own Scheduler, KVCacheManager and BlockPool with our connector on both sides of it and a real
store; only the model is missing: tokens are made up, and the cache's tensors are small. Hooks are
timed by the CPU clock of the thread that calls them, and beside them what vLLM's own `touch`,
`get_new_blocks`, `free` and `schedule` take, into which some of our work may have moved.

    fill      sessions of 100,000 tokens, one after another, until idle ones fill their share
    turns     each comes back with 760 tokens more, and gets 40
    waiting   so many run at once that one more has to wait: every attempt asks `matched` again
    restored  one whose blocks are gone comes back, from the store
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

POOL_BLOCKS, BLOCK_TOKENS = 100_000, 16
SESSION_TOKENS, ADDED_TOKENS, ANSWER_TOKENS = 100_000, 760, 40
IDLE_SESSIONS, TURNS = 10, 12
STEP_TOKENS = 8192
VOCABULARY = 32_000
LAYER = "model.layers.0.self_attn.attn"
OURS = {
    "arrived": "on_new_request",
    "matched": "get_num_new_matched_tokens",
    "placed": "update_state_after_alloc",
    "build": "build_connector_meta",
    "reported": "update_connector_output",
    "finished": "request_finished_all_groups",
}
VLLMS = {"touch": "touch", "get_new_blocks": "get_new_blocks", "free_blocks": "free_blocks"}


class Clock:
    """CPU milliseconds of this thread in each hook, call by call, by the part of the play."""

    def __init__(self) -> None:
        self.part = ""
        self.calls: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.own: dict[tuple[str, str], list[float]] = defaultdict(list)
        """The same without Python's garbage collections, which come to whoever allocates next."""
        self.collected_ms = 0.0
        self._collects_from = 0.0
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collects_from = time.thread_time()
        else:
            self.collected_ms += (time.thread_time() - self._collects_from) * 1e3

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time every call of the method from now on."""
        plain = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            began, collected_ms = time.thread_time(), self.collected_ms
            try:
                return plain(*arguments, **options)
            finally:
                took_ms = (time.thread_time() - began) * 1e3
                self.calls[self.part, name].append(took_ms)
                self.own[self.part, name].append(took_ms - (self.collected_ms - collected_ms))

        setattr(owner, method, timed)

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        self.part, before = part, self.part
        yield
        self.part = before


class Engine:
    """An engine core without a model: vLLM's scheduler, our connector, and a step that makes up
    tokens."""

    def __init__(self, folder: Path) -> None:
        import torch
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from ownerserve.engines.vllm.connector import KVConnectorRole, OwnerServeConnector

        torch.set_num_threads(1)
        self.config = _configured(folder)
        cache = _cache(self.config)
        _alone(self.config, folder)
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        self.scheduler = Scheduler(
            self.config,
            cache,
            StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=False,
        )
        self.connector: Any = self.scheduler.connector
        self.worker: Any = OwnerServeConnector(self.config, KVConnectorRole.WORKER, cache)
        pages = torch.zeros((POOL_BLOCKS, 1, BLOCK_TOKENS, 64), dtype=torch.bfloat16)
        self.worker.register_kv_caches({LAYER: pages})
        self._draw = random.Random(0)
        self.clock = Clock()
        for name, method in OURS.items():
            self.clock.watch(self.connector, method, name)
        pool = self.scheduler.kv_cache_manager.block_pool
        for name, method in VLLMS.items():
            self.clock.watch(pool, method, f"vllm {name}")
        self.clock.watch(self.scheduler, "schedule", "vllm schedule, our hooks in it")
        self._count = 0

    def text(self, tokens: int) -> list[int]:
        return [self._draw.randrange(VOCABULARY) for _ in range(tokens)]

    def submit(self, session: str, prompt: list[int], answer: int) -> Any:
        """A request of the session; its ids are objects of their own, as from the API server."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        request = Request(
            request_id=f"request-{self._count}",
            prompt_token_ids=json.loads(json.dumps(prompt)),
            sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
            pooling_params=None,
            session_id=session,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> int:
        """One step of everything that is scheduled; how many tokens it computed."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        worker = self.worker
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        sampled = [self._sampled(name, output) for name in ids]
        told = KVConnectorOutput(
            finished_sending=None,
            finished_recving=results.finished_recving or None,
            kv_connector_worker_meta=meta,
        )
        if hasattr(told, "failed_recving"):
            told.failed_recving = results.failed_recving or None
        done = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: at for at, name in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )
        self.scheduler.update_from_output(output, done)
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)
        return int(output.total_num_scheduled_tokens)

    def _sampled(self, name: str, output: Any) -> list[int]:
        request = self.scheduler.requests[name]
        # `schedule` has counted this step's tokens as computed.
        return self.text(1) if request.num_computed_tokens >= request.num_tokens else []

    def run(self, *requests: Any) -> None:
        """Step until all of them have ended."""
        while not all(request.is_finished() for request in requests):
            self.step()

    def rest(self) -> None:
        """Step until every copy is answered for."""
        while self.scheduler.has_requests() or self.connector.has_pending_push_work():
            self.step()

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()


def _configured(folder: Path) -> Any:
    """vLLM's configuration, with our connector over a store in the folder."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    settings = {"store": str(folder / "store"), "weights": "benchmark", "restores": "always"}
    transfer = KVTransferConfig(
        kv_connector="OwnerServeConnector",
        kv_connector_module_path="ownerserve.engines.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )
    config = EngineArgs(
        model=str(_model(folder / "model")),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2 * SESSION_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=64,
        block_size=BLOCK_TOKENS,
        kv_transfer_config=transfer,
        enable_prefix_caching=True,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = POOL_BLOCKS
    config.cache_config.num_gpu_blocks_override = POOL_BLOCKS
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def _cache(config: Any) -> Any:
    """A cache of one layer with one head."""
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
    )
    (cache,) = get_kv_cache_configs(config, [{LAYER: spec}], [spec.page_size_bytes * POOL_BLOCKS])
    return cache


def _alone(config: Any, folder: Path) -> None:
    """One rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def _model(folder: Path) -> Path:
    from transformers import Qwen3Config

    Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_hidden_layers=1,
        intermediate_size=64,
        max_position_embeddings=4 * SESSION_TOKENS,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def play(engine: Engine) -> dict[str, int]:
    """All parts of the play; what the connector counted in it."""
    clock = engine.clock
    texts = {f"s{number}": engine.text(SESSION_TOKENS) for number in range(IDLE_SESSIONS)}

    def turn(name: str) -> Any:
        request = engine.submit(name, texts[name], ANSWER_TOKENS)
        engine.run(request)
        texts[name] = [*request.all_token_ids]
        return request

    with clock.during("fill"):
        for name in texts:
            turn(name)
    engine.rest()
    with clock.during("turns"):
        for number in range(TURNS):
            name = f"s{IDLE_SESSIONS - 1 - number % 6}"
            texts[name] += engine.text(ADDED_TOKENS)
            turn(name)
            engine.rest()
    with clock.during("waiting"):
        _waiting(engine)
    engine.rest()
    with clock.during("restored"):
        for name in list(texts)[:4]:
            texts[name] += engine.text(ADDED_TOKENS)
            turn(name)
            engine.rest()
    counts: dict[str, int] = engine.connector.status()
    return counts


def _waiting(engine: Engine) -> None:
    """Fifteen requests of 6,250 blocks run; one more waits for room while they decode."""
    running = [
        engine.submit(f"w{number}", engine.text(SESSION_TOKENS), 260) for number in range(15)
    ]
    while not all(request.num_computed_tokens >= SESSION_TOKENS for request in running):
        engine.step()
    with engine.clock.during("waits"):
        waiting = engine.submit("late", engine.text(SESSION_TOKENS), 4)
        for _ in range(30):
            engine.step()
    ids = [request.request_id for request in (*running, waiting)]
    from vllm.v1.request import RequestStatus

    engine.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)


def summary(clock: Clock) -> dict[str, dict[str, list[float]]]:
    """By part and hook: calls, median, largest and sum of CPU milliseconds; and the largest but
    for garbage collections."""
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (part, name), calls in clock.calls.items():
        own = max(clock.own[part, name])
        found[part or "rest"][name] = [len(calls), median(calls), max(calls), sum(calls), own]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        gc.freeze()  # as vLLM's engine core does once it is set up
        try:
            facts = play(engine)
        finally:
            engine.close()
    found = summary(engine.clock)
    if options.json:
        import vllm

        print(json.dumps({"hooks": found, "facts": facts, "vllm": vllm.__version__}))
        return
    for part, hooks in found.items():
        print(f"-- {part}")
        for name, (count, middle, most, total, own) in sorted(hooks.items()):
            print(
                f"{name:32} {count:6} calls {middle:8.3f} median {most:8.3f} max {total:9.1f} sum"
                f"  {own:8.3f} max without collections"
            )
    print(facts)


if __name__ == "__main__":
    main()
