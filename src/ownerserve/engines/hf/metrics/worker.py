"""A worker's Prometheus metrics. Counts what it is told; decides nothing.

Written by the engine thread, read by the server (prometheus_client locks each value).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ownerserve.cache.hetero import HeteroCache
from ownerserve.engines.hf.metrics.status import pool_uses
from ownerserve.engines.hf.scheduling.requests import Admitted
from ownerserve.engines.hf.scheduling.step import Intake, Load
from ownerserve.kv.messages import ExecutionMode
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Answer as RpcAnswer
from ownerserve.kv.wire.rpc import Reject

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTAKE_SECONDS = tuple(1e-5 * 1.25**step for step in range(52))
"""From 10 us to 1 s, a quarter apart: a median is read off them within 12 %."""
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class WorkerMetrics:
    """One registry a worker, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._evictions_seen = self._evicted_tokens_seen = 0
        self._requests()
        self._steps()
        self._pools()

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)

    # ---- told by the engine

    def admitted(self, admitted: Admitted, *, prompt_tokens: int, cached: dict[str, int]) -> None:
        """A request left the queue for the first time; `cached` tokens by component."""
        self._modes.labels(admitted.mode.value).inc()
        self._reseeds.inc(admitted.mode is ExecutionMode.RESEED)
        self._lost_tokens.inc(admitted.lost_tokens)
        self._prompt_tokens.inc(prompt_tokens)
        for component, tokens in cached.items():
            self._cached_tokens.labels(component).inc(tokens)

    def taken_in(self, intake: Intake, cpu_s: float) -> None:
        """A turn was opened; the engine's thread spent `cpu_s` on that."""
        self._intake.labels(intake.value).observe(cpu_s)

    def took_over(self) -> None:
        """A session goes on here at a version that was counted elsewhere."""
        self._versions.inc()

    def reserved(self, answer: RpcAnswer) -> None:
        """What was said to somebody who asked for a place."""
        outcome = answer.reason.value if isinstance(answer, Reject) else "reserved"
        self._reservations.labels(outcome).inc()

    def refused(self, reason: WorkerRefusal) -> None:
        self._outcomes.labels(reason.value).inc()

    def finished(self, outcome: str) -> None:
        self._outcomes.labels(outcome).inc()

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)

    def generated(self, tokens: int) -> None:
        self._completion_tokens.inc(tokens)

    def preempted(self, sequences: int) -> None:
        self._preemptions.inc(sequences)

    def step(self, kind: str, *, took_s: float, load: Load, cache: HeteroCache) -> None:
        """An iteration ended; `kind` is prefill, decode or mixed."""
        self._step_seconds.labels(kind).observe(took_s)
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._pending.set(load.pending_prefill_tokens)
        for component, use in pool_uses(cache).items():
            self._slots_used.labels(component).set(use.capacity - use.free)
            self._slots.labels(component).set(use.capacity)
        self._read_evictions(cache)

    def _read_evictions(self, cache: HeteroCache) -> None:
        """The cache counts in sums: several evictions of one step are seen as their mean."""
        runs = cache.counters.evictions - self._evictions_seen
        tokens = cache.counters.evicted_tokens - self._evicted_tokens_seen
        for _ in range(runs):
            self._eviction_tokens.observe(tokens / runs)
        self._evictions_seen += runs
        self._evicted_tokens_seen += tokens

    # ---- definitions

    def _requests(self) -> None:
        self._outcomes = Counter(
            "ownerserve_requests",
            "Requests by outcome: stop, length, aborted or the reason of a refusal.",
            ["outcome"],
            registry=self.registry,
        )
        self._modes = Counter(
            "ownerserve_execution_mode",
            "Admitted requests by what happened to their prompt.",
            ["mode"],
            registry=self.registry,
        )
        self._reseeds = Counter(
            "ownerserve_reseeds",
            "Turns of known sessions of whose state something was lost.",
            registry=self.registry,
        )
        self._lost_tokens = Counter(
            "ownerserve_lost_tokens",
            "Tokens that a session's last turn had left and that were not at hand for its next.",
            registry=self.registry,
        )
        self._reservations = Counter(
            "ownerserve_reservations",
            "Answers to those who asked for a place: reserved, or the reason of a refusal.",
            ["outcome"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "ownerserve_prompt_tokens", "Prompt tokens admitted.", registry=self.registry
        )
        self._cached_tokens = Counter(
            "ownerserve_cached_tokens",
            "Prompt tokens whose state of this component was at hand.",
            ["component"],
            registry=self.registry,
        )
        self._completion_tokens = Counter(
            "ownerserve_completion_tokens", "Tokens generated.", registry=self.registry
        )
        self._versions = Counter(
            "ownerserve_versions_installed",
            "Sessions that go on here at a version that was counted elsewhere.",
            registry=self.registry,
        )
        self._intake = Histogram(
            "ownerserve_turn_intake_seconds",
            "CPU time of the engine's thread to take in a turn, from its arrival to its opening.",
            ["kind"],
            buckets=INTAKE_SECONDS,
            registry=self.registry,
        )
        self._ttft = Histogram(
            "ownerserve_ttft_seconds",
            "Arrival to first token.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def _steps(self) -> None:
        self._step_seconds = Histogram(
            "ownerserve_step_seconds",
            "One iteration of the engine.",
            ["kind"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._running = Gauge(
            "ownerserve_running_sequences", "Sequences in the batch.", registry=self.registry
        )
        self._waiting = Gauge(
            "ownerserve_waiting_sequences", "Sequences in the queue.", registry=self.registry
        )
        self._pending = Gauge(
            "ownerserve_pending_prefill_tokens",
            "Prompt tokens queued or not yet computed.",
            registry=self.registry,
        )
        self._preemptions = Counter(
            "ownerserve_preemptions",
            "Sequences sent back to the queue for want of room.",
            registry=self.registry,
        )

    def _pools(self) -> None:
        self._slots_used = Gauge(
            "ownerserve_pool_slots_used",
            "Slots in use, cached state included.",
            ["component"],
            registry=self.registry,
        )
        self._slots = Gauge(
            "ownerserve_pool_slots",
            "Slots of the pool.",
            ["component"],
            registry=self.registry,
        )
        self._eviction_tokens = Histogram(
            "ownerserve_eviction_tokens",
            "Tokens freed by one eviction (its count is the number of evictions).",
            buckets=TOKENS,
            registry=self.registry,
        )
