"""A pace for RTX PRO 6000 under vLLM 0.19, for validation; the target run's times are never fitted.

    python tools/fit_vllm_truth.py FOLDER [--fit] [--out pace.json]

FOLDER holds the shared llmservingsim-vllm-groundtruth files. A step is built from parts:

    GEMMs, experts, prefill attention   aiconfigurator-core's operator tables, as they are
    per step                            what one sequence alone takes beyond the tables (Llama run)
    collectives                         latency: the same of Qwen3-32B TP2; bandwidth: fitted to it
    decode attention, pure and mixed    fitted to Qwen3-32B TP2: the target's own head shape a GPU

and the target (Qwen3-30B-A3B, DP2 + EP2) is predicted from its arrivals and lengths alone: two
ranks in lockstep. `--fit` repeats the fit (3 minutes) instead of taking FITTED. `--out` writes a
pace that sees both ranks as one engine (256 sequences, 4,096 tokens a step).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ownerserve.sim.engine.pace import TIMES, load_pace
from ownerserve.sim.engine.pace_fit import MeasuredStep, fit_steps

Floats = NDArray[np.float64]

SYSTEM = "rtx_pro_6000_server"
PREFILL_SHARE = 0.924
"""Of prompt tokens, computed: ShareGPT turns share beginnings, and the runs cached prefixes. From
the published time series of a later run of the Qwen3-32B workload: 19,600 of 258,691 were hits."""
STEP_MS = 0.75
"""One Llama sequence alone: 11.65 ms a step over 148 steps, of which 10.90 are in the tables."""
COLLECTIVE_MS = 0.0145
"""One Qwen3-32B sequence alone: 25.51 ms over 168 steps; 128 all-reduces make the rest of it.
NCCL's published 12.7 us for 4 KiB on such a pair agrees."""
GATHER_LATENCY, GATHER_BYTES = 0.82, 1.18
"""All-gather and reduce-scatter against all-reduce, same tables: latency, time for a local byte."""
MAX_SEQS, BUDGET_TOKENS = 128, 2048
EXPERT_SHARE = 8 / 128


class Decode(NamedTuple):
    """What is fitted: collectives' GB/s, ns for a token of context a layer in a step without and
    with prefill (a mixed batch runs attention for prefill, 2 to 3 times slower for decodes)."""

    gb_per_s: float
    pure_ns: float
    mixed_ns: float


FITTED = Decode(15.98, 2.261, 4.268)


class Load(NamedTuple):
    """One rank's part of a step, as sim.pace.Pace.step_ms wants it."""

    new: int
    weighted: float
    context: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.new + self.batch


StepTime = Callable[[Sequence[Load]], float]


class Run(NamedTuple):
    """Requests in ms from the first arrival; outcomes are times of tokens, as measured."""

    arrival: Floats
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    queued: Floats
    first: Floats
    last: Floats

    def means(self) -> Floats:
        """TTFT, TPOT and end to end, ms, as the published comparison defines them: from when the
        engine took the request off its queue."""
        ttft, whole = self.first - self.queued, self.last - self.queued
        tpot = (self.last - self.first) / (self.output - 1)
        return np.array([ttft.mean(), tpot.mean(), whole.mean()])


def read_run(folder: Path, name: str) -> Run:
    lines = (folder / f"RTXPRO6000-{name}.requests.jsonl").read_bytes().splitlines()
    rows: list[dict[str, Any]] = [msgspec.json.decode(line) for line in lines]
    took = {key: np.array([row[key] for row in rows]) for key in rows[0] if key != "request_id"}
    # Two clocks: the first request found an idle engine, so it was queued when it arrived.
    arrival = took["arrival_time"] - took["arrival_time"][0]
    start = took["queued_ts"][0]
    queued, first, last = (
        (took[key] - start) * 1e3 for key in ("queued_ts", "first_token_ts", "last_token_ts")
    )
    return Run(arrival * 1e3, took["input_toks"], took["output_toks"], queued, first, last)


class Scheduler:
    """vLLM's: decodes first, then prompts in order of arrival, in chunks. Owns one rank's queue."""

    def __init__(self, run: Run, *, max_seqs: int, budget: int) -> None:
        self._run, self._max_seqs, self._budget = run, max_seqs, budget
        self.done = (run.prompt * (1.0 - PREFILL_SHARE)).astype(int)
        self.made = np.zeros(len(run.prompt), dtype=int)
        self.waiting: deque[int] = deque()
        self.running: list[int] = []

    def compose(self) -> tuple[Load, list[int], list[int]]:
        """The next step: its load, who gets a token from it, and whose last that is."""
        left, new, weighted, context, batch = self._budget, 0, 0.0, 0, 0
        tokens: list[int] = []
        for i in self.running:
            if self.done[i] >= self._run.prompt[i]:
                context += int(self._run.prompt[i] + self.made[i])
                batch += 1
                left -= 1
                self.made[i] += 1
                tokens.append(i)
        prefills = [i for i in self.running if self.done[i] < self._run.prompt[i]]
        while left > 0:
            if prefills:
                i = prefills.pop(0)
            elif self.waiting and len(self.running) < self._max_seqs:
                i = self.waiting.popleft()
                self.running.append(i)
            else:
                break
            chunk = int(min(left, self._run.prompt[i] - self.done[i]))
            new += chunk
            weighted += chunk * (self.done[i] + chunk / 2)
            left -= chunk
            self.done[i] += chunk
            if self.done[i] >= self._run.prompt[i]:
                self.made[i] = 1
                tokens.append(i)
        ended = [i for i in tokens if self.made[i] >= self._run.output[i]]
        gone = set(ended)
        self.running = [i for i in self.running if i not in gone]
        return Load(new, weighted, context, batch), tokens, ended


def simulate(
    run: Run, step_ms: StepTime, *, ranks: int = 1, budget: int = BUDGET_TOKENS
) -> tuple[Run, list[list[Load]]]:
    """The run as the steps would have it, and its steps. Scheduling is asynchronous: a step is
    composed when the one before it starts, so an arrival waits for the end of the next."""
    seqs = MAX_SEQS * budget // BUDGET_TOKENS
    engines = [Scheduler(run, max_seqs=seqs, budget=budget) for _ in range(ranks)]
    queued, first, last = (np.zeros(len(run.arrival)) for _ in range(3))
    arrived, now, steps = 0, 0.0, []

    def take() -> None:
        nonlocal arrived
        while arrived < len(run.arrival) and run.arrival[arrived] <= now:
            # vLLM's balancer between ranks; ties in turn.
            scores = [(4 * len(e.waiting) + len(e.running), (k - arrived) % ranks, k)
                      for k, e in enumerate(engines)]  # fmt: skip
            engines[min(scores)[2]].waiting.append(arrived)
            queued[arrived] = now
            arrived += 1

    take()
    current = [engine.compose() for engine in engines]
    while True:
        if not any(load.tokens for load, *_ in current):
            if arrived == len(run.arrival) and not any(e.running or e.waiting for e in engines):
                break
            if not any(e.running or e.waiting for e in engines):
                now = max(now, float(run.arrival[arrived]))
                take()
            current = [engine.compose() for engine in engines]
            continue
        following = [engine.compose() for engine in engines]
        loads = [load for load, *_ in current]
        steps.append(loads)
        now += step_ms(loads)
        for _, tokens, ended in current:
            for i in tokens:
                if not first[i]:
                    first[i] = now
            last[ended] = now
        take()
        current = following
    return run._replace(queued=queued, first=first, last=last), steps


class Operators:
    """Operator times by tokens in a step, from the tables; decode attention and collectives not."""

    TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2304,
              4352)  # fmt: skip
    APART = ("attention", "_ar", "dispatch", "moe")

    def __init__(self, model: str, **options: int) -> None:
        from aiconfigurator_core.sdk.engine import EngineHandle

        engine = EngineHandle.compile(model, SYSTEM, "vllm", **options)
        self._gemm, self._experts, self._prefill = [], [], []
        for tokens in self.TOKENS:
            decode = engine.decode_step_per_op(min(tokens, 512), 16, 2)
            asked = {"ctx_tokens": tokens, "gen_tokens": 0, "isl": tokens, "osl": 2}
            ops = decode if tokens <= 512 else engine.mixed_step_breakdown_per_op(**asked)[0]
            gemm = sum(ms for name, ms, *_ in ops if not any(word in name for word in self.APART))
            if tokens > 512:
                gemm += sum(ms for name, ms, *_ in decode if "logits" in name)
            self._gemm.append(gemm)
            self._experts.append(sum(ms for name, ms, *_ in ops if name.endswith("_moe")))
            prompt = {"batch_size": 1, "isl": max(tokens, 16), "osl": 1, "mode": "static_ctx"}
            context, _ = engine.run_static_per_op(**prompt)
            self._prefill.append(sum(ms for name, ms, *_ in context if name.endswith("attention")))

    def gemm_ms(self, tokens: float) -> float:
        return float(np.interp(tokens, self.TOKENS, self._gemm))

    def experts_ms(self, tokens: float) -> float:
        return float(np.interp(tokens, self.TOKENS, self._experts))

    def attention_ms(self, load: Load, layers: int, decode: Decode) -> float:
        nanoseconds = decode.mixed_ns if load.new else decode.pure_ns
        prefill = np.interp(load.new, self.TOKENS, self._prefill) if load.new else 0.0
        return layers * load.context * nanoseconds * 1e-6 + float(prefill)


def dense_tp2(operators: Operators, decode: Decode) -> StepTime:
    """Qwen3-32B on two GPUs: 64 layers, two all-reduces of 5,120 BF16 a token in each."""

    def step_ms(loads: Sequence[Load]) -> float:
        (load,) = loads
        collective = COLLECTIVE_MS + load.tokens * 10_240 / (decode.gb_per_s * 1e6)
        compute = operators.gemm_ms(load.tokens) + operators.attention_ms(load, 64, decode)
        return STEP_MS + compute + 128 * collective

    return step_ms


def experts_dp2(operators: Operators, decode: Decode) -> StepTime:
    """Qwen3-30B-A3B on two ranks: 48 layers, in each a gather and a scatter of 2,048 BF16 a token;
    the slower rank's attention decides, experts see both ranks' tokens."""

    def step_ms(loads: Sequence[Load]) -> float:
        tokens = sum(load.tokens for load in loads) / len(loads)
        local = tokens * 4096 * GATHER_BYTES / (decode.gb_per_s * 1e6)
        own = max(
            operators.gemm_ms(load.tokens) + operators.attention_ms(load, 48, decode)
            for load in loads
        )
        experts = operators.experts_ms(tokens)
        return STEP_MS + own + experts + 96 * (GATHER_LATENCY * COLLECTIVE_MS + local)

    return step_ms


def fit_decode(run: Run, operators: Operators) -> Decode:
    """Decode's three numbers from the Qwen3-32B run: least squares on its token times."""
    from scipy.optimize import least_squares

    def wrong(guess: Floats) -> Floats:
        made, _ = simulate(run, dense_tp2(operators, Decode(*guess)))
        spans = (made.last - made.first) / (run.last - run.first) - 1.0
        times = [(made.first - run.first) / 2e4, (made.last - run.last) / 2e4]
        return np.concatenate([spans, *times])

    start = np.array([18.0, 2.2, 4.65])
    bounds = ([3.0, 1.0, 1.0], [60.0, 5.0, 20.0])
    found = least_squares(wrong, start, bounds=bounds, diff_step=0.02, max_nfev=8, x_scale=start)
    return Decode(*found.x.tolist())


def as_one_engine(steps: list[list[Load]], step_ms: StepTime) -> dict[str, Any]:
    """A pace for both ranks together, fitted to the steps as predicted (not as measured)."""
    rows = []
    for loads in steps:
        new, weighted, context, batch = (sum(part) for part in zip(*loads, strict=True))
        rows.append(MeasuredStep(new, weighted, context, batch, step_ms(loads)))
    fitted = fit_steps(rows, expert_share=EXPERT_SHARE)
    pace = msgspec.to_builtins(load_pace("qwen3-30b-a3b", "RTX PRO 6000"))
    pace |= {name: getattr(fitted, name) for name in TIMES}
    return pace | {
        "schema": "ownerserve.pace/1",
        "name": "qwen3-30b-a3b-dp2@rtx-pro-6000",
        "gpus": 2,
        "engine": "vllm 0.19.0",
        "fit_error": fitted.median_error,
        "source": "tools/fit_vllm_truth.py",
        "error_note": "both ranks as one engine: 256 sequences, 4,096 tokens a step",
        "kv_bytes_total": 2 * pace["kv_bytes_total"],
        "evidence": {},
    }


def main() -> None:
    logging.disable(logging.WARNING)
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("folder", type=Path)
    top.add_argument("--fit", action="store_true", help="fit again instead of taking FITTED")
    top.add_argument("--out", type=Path)
    args, console = top.parse_args(), Console(width=100)
    dense = Operators("Qwen/Qwen3-32B", tp_size=2)
    known = read_run(args.folder, "Qwen3-32B")
    decode = fit_decode(known, dense) if args.fit else FITTED
    moe = Operators("Qwen/Qwen3-30B-A3B", tp_size=1, attention_dp_size=2, moe_ep_size=2)
    target = read_run(args.folder, "Qwen3-30B-A3B-Instruct-2507")
    target_ms = experts_dp2(moe, decode)
    made, steps = simulate(target, target_ms, ranks=2)
    console.print(decode)
    shown = {"Qwen3-32B, fitted": (simulate(known, dense_tp2(dense, decode))[0], known)}
    shown["Qwen3-30B-A3B, predicted"] = (made, target)
    for name, (ours, real) in shown.items():
        for metric, got, true in zip(
            ("TTFT", "TPOT", "E2E"), ours.means(), real.means(), strict=True
        ):
            console.print(
                f"{name}: {metric} mean {got:.1f} ms, {true:.1f} real, {got / true - 1:+.1%}"
            )
    if args.out:
        args.out.write_bytes(msgspec.json.encode(as_one_engine(steps, target_ms)))


if __name__ == "__main__":
    sys.exit(main())
