"""This module runs the demo over real vLLM workers: vLLM alone beside vLLM with OwnerServe, then a
crash.

vllm          the workload over the gateway; what leaves vLLM's pool is lost
ownerserve    the same with the connector; what leaves the pool comes back from the store
kill -9       a worker dies; a new one over its store goes on with the session
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import msgspec

from ownerserve.cli.demo.drive import SessionResult, TurnAnswer, run_conversations
from ownerserve.cli.demo.run import hotspot_index, wall_clock_factor
from ownerserve.cli.demo.vllm_processes import VllmFleet, VllmSetup, VllmWorker
from ownerserve.cli.demo.workload import Conversation, Transcript
from ownerserve.report.demo_results import PolicyResult, PressureTotals, spread

ALONE, WITH_US = "vllm", "ownerserve"
PROMPT_TOKENS = 1500
ANSWER_TOKENS = 16
SAVED_S = 2.0
"""Time for what a turn left behind to become durable before the crash."""


class Crash(msgspec.Struct, frozen=True):
    """A crash has one prompt on a worker that then died, and on the worker after it."""

    prompt_tokens: int
    cached_before: int
    cached_after: int
    ms_before: float
    ms_after: float
    max_logprob_difference: float

    def line(self) -> str:
        """Return the line that tells people of it."""
        return (
            f"after kill -9 a new worker over the same store had {self.cached_after:,} of "
            f"{self.prompt_tokens:,} prompt tokens, first token and {ANSWER_TOKENS - 1} more in "
            f"{self.ms_after:.0f} ms (computed: {self.ms_before:.0f} ms); "
            f"largest logprob difference {self.max_logprob_difference:.1e}"
        )


def write_model(folder: Path) -> Path:
    """Write a tiny random Qwen3 with a byte tokenizer, as a checkpoint, and return its folder."""
    from transformers import Qwen3Config
    from transformers.utils import logging

    from ownerserve.engines.hf.model.tiny import random_model
    from ownerserve.engines.hf.model.tokenizer import (
        BOS_ID,
        EOS_ID,
        PAD_ID,
        VOCAB_SIZE,
        byte_tokenizer,
    )

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32_768,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=False,
    )
    random_model(config, seed=0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run_engine(
    name: str,
    setup: VllmSetup,
    conversations: Sequence[Conversation],
    *,
    workers: int,
    transcript: Transcript,
    on_turn: Callable[[TurnAnswer], None],
) -> tuple[PolicyResult, list[TurnAnswer], Crash | None]:
    """Run one column of the table. Raises PeerLost when a process dies that should not."""
    with tempfile.TemporaryDirectory(prefix="ownerserve-demo-") as place:
        folder = Path(place)
        stores = [folder / f"kv-{i}" if name == WITH_US else None for i in range(workers)]
        with VllmFleet(setup, folder) as fleet:
            fleet.start(stores)
            started_s = time.perf_counter()
            sessions = asyncio.run(
                run_conversations(
                    fleet.gateway_url,
                    conversations,
                    model="demo",
                    transcript=transcript,
                    on_turn=on_turn,
                )
            )
            factor = wall_clock_factor(time.perf_counter() - started_s, conversations)
            crash = _crash(fleet) if name == WITH_US else None
        answers = [answer for session in sessions for answer in session.answers]
        return _result(sessions, answers, workers, factor=factor), answers, crash


def _crash(fleet: VllmFleet) -> Crash:
    """Run a session's turn; kill -9; run the same turn on a new worker over the dead one's
    store."""
    worker = fleet.workers[0]
    prompt = [32 + (7 * i * i + i // 11) % 95 for i in range(PROMPT_TOKENS)]
    before = _complete(worker, prompt)
    time.sleep(SAVED_S)
    worker.kill()
    following = fleet.spawn(worker.store)
    following.wait_ready()
    _complete(following, prompt[::-1])  # the first turn of a process warms it up
    after = _complete(following, prompt)
    pairs = zip(before[2], after[2], strict=True)
    return Crash(
        prompt_tokens=len(prompt),
        cached_before=before[0],
        cached_after=after[0],
        ms_before=before[1],
        ms_after=after[1],
        max_logprob_difference=max(abs(one - other) for one, other in pairs),
    )


def _complete(worker: VllmWorker, prompt: list[int]) -> tuple[int, float, list[float]]:
    """Ask for a completion; return cached tokens, milliseconds, logprobs."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 0,
    }
    began_s = time.perf_counter()
    answer = httpx.post(
        f"{worker.url}/v1/completions",
        json=body,
        headers={"x-session-id": "survivor"},
        timeout=120,
        trust_env=False,
    ).raise_for_status()
    took_ms = (time.perf_counter() - began_s) * 1e3
    said = answer.json()
    details = said["usage"].get("prompt_tokens_details") or {}
    logprobs = said["choices"][0]["logprobs"]["token_logprobs"]
    return details.get("cached_tokens") or 0, took_ms, logprobs


def _result(
    sessions: Sequence[SessionResult], answers: Sequence[TurnAnswer], workers: int, *, factor: float
) -> PolicyResult:
    good = [answer for answer in answers if not answer.error]
    prompt = sum(answer.prompt_tokens for answer in good)
    cached = sum(answer.cached_tokens for answer in good)
    computed: Counter[str] = Counter()
    for answer in good:
        computed[answer.worker] += answer.prompt_tokens - answer.cached_tokens
    return PolicyResult(
        requests=len(answers),
        errors=len(answers) - len(good),
        prompt_tokens=prompt,
        computed_tokens=sum(computed.values()),
        cached_token_share=cached / prompt if prompt else 0.0,
        prefill_tokens_saved=cached,
        ttft_ms=spread([answer.ttft_ms for answer in good]),
        tpot_ms=spread([answer.tpot_ms for answer in good if answer.tpot_ms]),
        hotspot_index=hotspot_index(computed.values(), workers),
        wall_clock_factor=factor,
        e2e_s=spread([session.e2e_s for session in sessions]),
        modes={},
        requests_by_worker=dict(sorted(Counter(answer.worker for answer in good).items())),
        kv_bytes={},
        pressure=PressureTotals(),
        first_errors=[answer.error for answer in answers if answer.error][:3],
    )
