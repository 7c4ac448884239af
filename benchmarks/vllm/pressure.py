"""Cached-token share when the engine's pool can't hold all sessions: recorded agents, scaled.

Sessions of the Claude-Code trace (or generated ones, when it is not at hand) with their lengths
scaled to the tiny model. All agents start together and a request's turn is its recorded time in its
session: so they interleave, and idle ones lose their place. Requests run one at a time. A prompt's
tokens follow from its block ids: equal prefixes stay equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from contenders import ROOT, Contender

from ownerserve.trace.model import Trace, TraceRequest
from ownerserve.trace.read import read_trace
from ownerserve.trace.runs import expand
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from ownerserve.trace.transform import keep, scale_lengths

TRACE = ROOT.parent / "shared" / "traces" / "claude-code-weka" / "sessions.jsonl.zst"
MAX_TOKENS = 1_900
POOL_BLOCKS, BLOCK_TOKENS = 160, 32


class Shared(msgspec.Struct):
    """What a contender made of the workload."""

    cached_token_share: float
    ttft_ms: float
    cpu_s: float
    seconds: float
    requests: int


def workload(*, sessions: int, turns: int) -> tuple[str, Trace]:
    """(where it comes from, the trace scaled to the engine)."""
    if TRACE.exists():
        origin, trace = "claude-code-weka", read_trace(TRACE)
    else:
        origin, trace = "generated", generate("swe", Options(sessions=sessions, seed=1))
    kept = keep(trace, sessions=sessions, turns=turns)
    return origin, scale_lengths(kept, max_tokens=MAX_TOKENS)


def measure(contender: Contender, model: Path, trace: Trace) -> Shared:
    """Replay the workload through one engine."""
    worker = contender.worker(
        model,
        contender.data / "pressure.log",
        max_model_len=MAX_TOKENS + 148,
        num_gpu_blocks_override=POOL_BLOCKS,
    )
    asked = cached = 0
    ttft_s = []
    usage, start = worker.ask("usage")["cpu_s"], time.monotonic()
    for session, prompt, request in prompts(trace):
        answer = worker.generate(
            prompt, max_tokens=min(8, max(1, request.output_tokens)), top=0, session=session
        )
        asked, cached = asked + len(prompt), cached + answer.cached
        ttft_s.append(answer.ttft_s)
    shared = Shared(
        cached_token_share=cached / asked,
        ttft_ms=median(ttft_s) * 1e3,
        cpu_s=worker.ask("usage")["cpu_s"] - usage,
        seconds=time.monotonic() - start,
        requests=len(ttft_s),
    )
    worker.kill()
    return shared


def prompts(trace: Trace) -> Iterator[tuple[str, list[int], TraceRequest]]:
    """(session, prompt tokens, request) in order of their time in their sessions."""
    turns = [
        (request.start_s, index, position)
        for index, session in enumerate(trace.sessions)
        for position, request in enumerate(session.requests)
    ]
    for _, index, position in sorted(turns):
        request = trace.sessions[index].requests[position]
        tokens: list[int] = []
        scope = index if trace.ids == "session" else 0
        for id in expand(request.runs):
            dice = np.random.default_rng((scope, id))
            tokens += dice.integers(0x20, 0x7F, trace.block_tokens).tolist()
        missing = request.input_tokens - len(tokens)
        if missing > 0:  # the last, partial block of a prompt has no id
            dice = np.random.default_rng((scope, int(request.start_s * 1e3), 7))
            tokens += dice.integers(0x20, 0x7F, missing).tolist()
        yield str(index), tokens[: request.input_tokens], request
