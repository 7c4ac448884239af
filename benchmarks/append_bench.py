"""What taking in a turn costs the engine's thread, by the length of its session: its own metric.

    python benchmarks/append_bench.py [--turns N]

The real loop, scheduler, desk and cache on a thread of their own, as in a worker; blocks of 16. In
the place of a model is one that computes nothing. Prompts come with their digests, as the server
makes them where they are read. Each session is begun, then goes on by turns that append, and once
its history is edited; first on a worker without a store, then with a node over an empty one. Read
is what a worker serves at /metrics, ownerserve_turn_intake_seconds: CPU of the engine's thread.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from ownerserve.cache.effects import Effect
from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Table
from ownerserve.engines.hf.build import WorkerOptions, build_node
from ownerserve.engines.hf.engine.commands import StopLoop, Submit
from ownerserve.engines.hf.engine.loop import StepLoop
from ownerserve.engines.hf.metrics.prometheus import RestoreMetrics, WorkerMetrics
from ownerserve.engines.hf.metrics.status import WorkerIdentity
from ownerserve.engines.hf.model.checkpoint import load_checkpoint
from ownerserve.engines.hf.model.runner import NOBODY, DecodeRow, ModelRunner
from ownerserve.engines.hf.node.restoring import WithNode
from ownerserve.engines.hf.scheduling.requests import (
    EngineRequest,
    RequestFinished,
    Sampling,
    Stopping,
    StreamEvent,
)
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import SchedulerLimits
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import unpack
from ownerserve.node.vocabulary.chains import PromptPrefixes
from ownerserve.node.vocabulary.settings import NodeSettings
from result import Row, report, smaller_is_better

BLOCK, STATE_BLOCKS = 16, 8
CONTEXTS = (8_000, 64_000, 262_144, 1_000_000)
ADDED, ANSWER = 700, 40
"""Tokens that a turn adds and gets: about what agents' turns do."""
VOCABULARY = 1000
MODEL = "tiny-qwen3"
"""Gives layout and names; it computes nothing here."""
METRIC = "ownerserve_turn_intake_seconds"


class NoModel:
    """A runner that computes nothing: every token is as likely."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._row = torch.zeros(1, VOCABULARY)

    def apply(self, effects: Sequence[Effect]) -> None: ...

    def prefill(
        self,
        table: Table,
        tokens: Sequence[int],
        start: int,
        *,
        write_floor: int = 0,
        turn_id: TurnId = NOBODY,
    ) -> Tensor:
        return self._row

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        return self._row.expand(len(rows), VOCABULARY)


class Letters:
    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


class Bench:
    """A worker's engine thread, and one session that talks to it. `store`: where its node keeps
    what is idle, which nothing is long enough here; None: it has no node."""

    def __init__(self, context: int, *, turns: int, store: Path | None = None) -> None:
        most = context + 4 * (turns + 2) * (ADDED + ANSWER)
        blocks = 2 * (most // BLOCK + STATE_BLOCKS)
        checkpoint = load_checkpoint(MODEL)
        runner = ModelRunner(checkpoint.model, block_tokens=BLOCK)
        slots = dict.fromkeys((one.name for one in runner.layout.components), blocks)
        cache = HeteroCache(runner.layout, slots, STATE_BLOCKS)
        limits = SchedulerLimits(
            chunk_tokens=1024 * BLOCK,
            prefill_tokens_a_step=1024 * BLOCK,
            max_running=STATE_BLOCKS,
            max_waiting=STATE_BLOCKS,
            sequence_tokens=blocks * BLOCK,
        )
        node = None
        if store is not None:
            options = WorkerOptions(model=MODEL, store=store, node=NodeSettings(spill_after_s=1e9))
            node = build_node(options, checkpoint, runner=runner, cache=cache)
        scheduler = Scheduler(
            cache,
            limits,
            resume_of=node.resume if node else None,
            checkpoints_of=node.state.checkpoints.during if node else None,
        )
        self.metrics = WorkerMetrics()
        self.loop = StepLoop(
            NoModel(),
            scheduler,
            cache=cache,
            decoder=Letters(),
            identity=WorkerIdentity("none", 1, limits.sequence_tokens),
            metrics=self.metrics,
        )
        if node is not None:
            self.loop.attach(WithNode(node, scheduler, RestoreMetrics(self.metrics.registry)))
        self.cache = cache
        self._prefixes = PromptPrefixes(BLOCK)
        self._events: SimpleQueue[tuple[str, StreamEvent]] = SimpleQueue()
        self._draw = random.Random(context)
        self._thread = threading.Thread(target=self.loop.run, args=(self._put,))
        self._thread.start()
        self._turns = 0

    def _put(self, events: Sequence[tuple[str, StreamEvent]]) -> None:
        for event in events:
            self._events.put(event)

    def text(self, count: int) -> list[int]:
        return [self._draw.randrange(VOCABULARY) for _ in range(count)]

    def turn(self, prompt: list[int]) -> list[int]:
        """One turn of the session; its answer."""
        self._turns += 1
        prefix = self._prefixes.of(prompt, "s")
        request = EngineRequest(
            request_id=str(self._turns),
            prompt=unpack(prefix.tokens),
            stopping=Stopping(max_tokens=ANSWER),
            sampling=Sampling(temperature=0.0),
            session_id="s",
            prefix=prefix,
        )
        self.loop.inbox.put(Submit(request, 0.0))
        said: list[int] = []
        while True:
            _, event = self._events.get()
            if isinstance(event, RequestFinished):
                return said
            said += [one.token for one in getattr(event, "sampled", ())]

    def close(self) -> None:
        self.loop.inbox.put(StopLoop())
        self._thread.join()

    def intake(self, kind: str) -> Histogram:
        return Histogram(self.metrics.render().decode(), kind)


class Histogram:
    """One kind's intakes, as a scrape gives them."""

    def __init__(self, scrape: str, kind: str) -> None:
        self.buckets: list[tuple[float, float]] = []
        self.count = self.sum_s = 0.0
        for family in text_string_to_metric_families(scrape):
            for sample in family.samples:
                if sample.labels.get("kind") != kind or not sample.name.startswith(METRIC):
                    continue
                if sample.name.endswith("_bucket"):
                    self.buckets.append((float(sample.labels["le"]), sample.value))
                elif sample.name.endswith("_count"):
                    self.count = sample.value
                elif sample.name.endswith("_sum"):
                    self.sum_s = sample.value

    def without(self, before: Histogram) -> Histogram:
        """What came since."""
        former = dict(before.buckets)
        self.buckets = [(le, count - former.get(le, 0.0)) for le, count in self.buckets]
        self.count -= before.count
        self.sum_s -= before.sum_s
        return self

    def quantile_us(self, share: float) -> float:
        """Interpolated in its bucket, as Prometheus does."""
        wanted, below, low = share * self.count, 0.0, 0.0
        for le, count in self.buckets:
            if count >= wanted:
                inside = (wanted - below) / (count - below) if count > below else 1.0
                return (low + (le - low) * inside) * 1e6
            below, low = count, le
        return float("inf")


def measure(context: int, turns: int, store: Path | None) -> dict[str, float]:
    """p50 us of appends and of begins behind `context` tokens."""
    bench = Bench(context, turns=turns, store=store)
    try:
        prompt = bench.text(context)
        prompt += bench.turn(prompt) + bench.text(ADDED)
        before = bench.intake("append")
        for _ in range(turns):
            prompt += bench.turn(prompt) + bench.text(ADDED)
        appends = bench.intake("append").without(before)
        assert appends.count == turns, f"{appends.count} of {turns} turns were appends"
        before = bench.intake("begin")
        for _ in range(turns):  # the last answer is told back in other words
            edited = prompt[: -2 * ADDED] + bench.text(ADDED)
            bench.turn(edited)
        begins = bench.intake("begin").without(before)
        assert begins.count == turns, f"{begins.count} of {turns} turns were begins"
        bench.cache.check()
    finally:
        bench.close()
    return {"append": appends.quantile_us(0.5), "begin": begins.quantile_us(0.5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60, help="of each kind (default 60)")
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for where, stores in (("", False), ("_with_a_store", True)):
            found = {}
            for context in CONTEXTS:
                store = Path(folder) / str(context) if stores else None
                found[context] = measure(context, turns, store)
            for kind, goal in (("append", "1M within 2x of 8k"), ("begin", "")):
                rows += [
                    smaller_is_better(
                        f"intake_{kind}_{context}{where}",
                        "us CPU p50",
                        found[context][kind],
                        other=found[CONTEXTS[0]][kind],
                        other_name=f"at {CONTEXTS[0]}",
                        goal=goal,
                    )
                    for context in CONTEXTS
                ]
    report("append_bench", rows)


if __name__ == "__main__":
    main()
