"""A worker's Prometheus metrics count what they are told or read dated snapshots; they decide
nothing.

    WorkerMetrics                  requests, steps, pools: every worker
    RestoreMetrics, StoreMetrics   restores, spills, what storing wears: a worker with a node
    OwnershipCollector             sessions owned: a worker that asks a directory
    RemoteCollector                verdicts on a shared medium's records
    RpcCollector                   the RPC port's counts
    render                         the cache's own numbers, from one dated snapshot a scrape

Written by the engine thread, read by the server (prometheus_client locks each value).
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ownerserve.cache.counters import Counters
from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.metrics import Snapshot
from ownerserve.directory.owner.state import OwnerPhase
from ownerserve.engines.hf.metrics.status import pool_uses
from ownerserve.engines.hf.scheduling.requests import Admitted
from ownerserve.engines.hf.scheduling.step import Intake, SchedulerLoad
from ownerserve.kv.messages import ExecutionMode, RestoreAction
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject, RpcAnswer
from ownerserve.node.ownership.ownership import Ownership
from ownerserve.node.vocabulary.events import RestoreOutcome, RestoreReport
from ownerserve.plan.swa.accounting import WriteAccount
from ownerserve.store.tiers.remote import VERDICTS

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTAKE_SECONDS = tuple(1e-5 * 1.25**step for step in range(52))
"""From 10 us to 1 s, a quarter apart: a median is read off them within 12 %."""
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class WorkerMetrics:
    """`WorkerMetrics` are a worker's own metrics, in a registry of its own: several can live in one
    process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._evictions_seen = self._evicted_tokens_seen = 0
        self._requests()
        self._steps()
        self._pools()

    def render(self) -> bytes:
        """Return all metrics of the registry in Prometheus' text exposition format."""
        return generate_latest(self.registry)

    # ---- told by the engine

    def admitted(self, admitted: Admitted, *, prompt_tokens: int, cached: dict[str, int]) -> None:
        """Count a request that left the queue for the first time; `cached` tokens by component."""
        self._modes.labels(admitted.mode.value).inc()
        self._reseeds.inc(admitted.mode is ExecutionMode.RESEED)
        self._lost_tokens.inc(admitted.lost_tokens)
        self._prompt_tokens.inc(prompt_tokens)
        for component, tokens in cached.items():
            self._cached_tokens.labels(component).inc(tokens)

    def taken_in(self, intake: Intake, cpu_s: float) -> None:
        """Count a turn that was opened, which took the engine's thread `cpu_s` seconds of CPU."""
        self._intake.labels(intake.value).observe(cpu_s)

    def took_over(self) -> None:
        """Count a session that goes on here at a version that was counted elsewhere."""
        self._versions.inc()

    def reserved(self, answer: RpcAnswer) -> None:
        """Count the answer to a request for a place: reserved, or the reason of the refusal."""
        outcome = answer.reason.value if isinstance(answer, Reject) else "reserved"
        self._reservations.labels(outcome).inc()

    def refused(self, reason: WorkerRefusal) -> None:
        """Count a request that was refused, by reason."""
        self._outcomes.labels(reason.value).inc()

    def finished(self, outcome: str) -> None:
        """Count a request that ended: stop, length, aborted, or prefilled (for another worker)."""
        self._outcomes.labels(outcome).inc()

    def first_token(self, after_s: float) -> None:
        """Observe the seconds from a request's arrival to its first token."""
        self._ttft.observe(after_s)

    def generated(self, tokens: int) -> None:
        """Count tokens that were sampled."""
        self._completion_tokens.inc(tokens)

    def preempted(self, sequences: int) -> None:
        """Count sequences that were preempted."""
        self._preemptions.inc(sequences)

    def step(self, kind: str, *, took_s: float, load: SchedulerLoad, cache: HeteroCache) -> None:
        """Count an iteration that ended, with the levels it left; `kind` is prefill, decode or
        mixed."""
        self._step_seconds.labels(kind).observe(took_s)
        self.levels(load, cache)
        self._read_evictions(cache)

    def levels(self, load: SchedulerLoad, cache: HeteroCache) -> None:
        """Note the levels as they are now, where no step follows what changed them."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._pending.set(load.pending_prefill_tokens)
        for component, use in pool_uses(cache).items():
            self._slots_used.labels(component).set(use.capacity - use.free)
            self._slots.labels(component).set(use.capacity)

    def _read_evictions(self, cache: HeteroCache) -> None:
        """Observe the step's evictions. The cache counts in sums: several evictions of one step are
        seen as their mean."""
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


RESTORE_SECONDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


class RestoreMetrics:
    """`RestoreMetrics` count restores and spills; registered only by a worker that has a node."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen: Counts[str] = Counts()
        self._seen_bytes = 0
        self.store = StoreMetrics(registry)
        self._outcomes = Counter(
            "ownerserve_restores",
            "Turns by what came of their wish for stored state.",
            ["outcome"],
            registry=registry,
        )
        self._misses = Counter(
            "ownerserve_restore_misses",
            "Reads of a restore that gave nothing: each was planned around.",
            registry=registry,
        )
        self._trials = Counter(
            "ownerserve_restore_trials",
            "Turns that loaded though computing was priced lower: so a wrong price is found out.",
            registry=registry,
        )
        self._actions = Counter(
            "ownerserve_restore_actions",
            "Turns by the actions that brought their state.",
            ["action"],
            registry=registry,
        )
        self._bytes = Counter(
            "ownerserve_restored_bytes", "Bytes loaded from the store or a peer.", registry=registry
        )
        self._saved_s = Counter(
            "ownerserve_restore_benefit_seconds",
            "Time that loads saved against a full prefill, by the plan's prices.",
            registry=registry,
        )
        self._parts = Histogram(
            "ownerserve_restore_seconds",
            "Arrival to first token by part: load, queue, recompute.",
            ["part"],
            buckets=RESTORE_SECONDS,
            registry=registry,
        )
        self._spills = Counter(
            "ownerserve_spill_records",
            "Records of idle sessions by outcome: kept, not_kept, evicted_first, point_gone,"
            " low_utility (sessions).",
            ["outcome"],
            registry=registry,
        )
        self._spilled_bytes = Counter(
            "ownerserve_spilled_bytes",
            "Bytes written to the store, headers and padding included.",
            registry=registry,
        )

    def decided(self, report: RestoreReport) -> None:
        """Count a turn's restore that is over, with what it loaded and saved."""
        self._outcomes.labels(report.outcome.value).inc()
        self._misses.inc(report.misses)
        self._trials.inc(report.is_trial)
        self._bytes.inc(report.loaded_bytes)
        if report.outcome is RestoreOutcome.LOADED and report.plan is not None:
            self._saved_s.inc(max(0.0, report.plan.reuse_benefit_ms / 1000.0))

    def acted(self, actions: Iterable[RestoreAction]) -> None:
        """Count each of the actions that a turn began with, once."""
        for action in dict.fromkeys(actions):
            self._actions.labels(action.value).inc()

    def recomputed(self, *, load_s: float, queue_s: float, recompute_s: float) -> None:
        """Observe the seconds that a turn with its first token spent on load, queue and
        recompute."""
        self._parts.labels("load").observe(load_s)
        self._parts.labels("queue").observe(queue_s)
        self._parts.labels("recompute").observe(recompute_s)

    def stored(self, counts: Counts[str], stored_bytes: int) -> None:
        """Count what is new in the node's own running counts."""
        if counts == self._seen and stored_bytes == self._seen_bytes:
            return
        for outcome, total in counts.items():
            self._spills.labels(outcome).inc(total - self._seen[outcome])
        self._spilled_bytes.inc(stored_bytes - self._seen_bytes)
        self._seen, self._seen_bytes = counts.copy(), stored_bytes


class StoreMetrics:
    """`StoreMetrics` count what storing wears: checkpoints, the drive, upkeep.

    Registered only by a worker that has a node. It is told running totals and counts what is new.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._account = WriteAccount()
        self._upkeep_seen: Counts[str] = Counts()
        self._bytes = Counter(
            "ownerserve_checkpoint_bytes",
            "Written by kind: range, point (payload), drive (both, with headers and padding); read"
            " back: point_read.",
            ["kind"],
            registry=registry,
        )
        self._amplification = Gauge(
            "ownerserve_write_amplification",
            "Bytes that reached the drive for each byte of range state written.",
            registry=registry,
        )
        self._slots_seen: Counts[str] = Counts()
        self._slots = Counter(
            "ownerserve_spilled_slots",
            "Blocks of range components, and boundaries of point components, that were stored.",
            ["component"],
            registry=registry,
        )
        self._upkeep = Counter(
            "ownerserve_store_upkeep",
            "What the store's upkeep did: passes, expired, segments_compacted, segments_dropped,"
            " compacted_bytes, quarantine_released, failed.",
            ["step"],
            registry=registry,
        )

    def wrote(self, account: WriteAccount) -> None:
        """Count what is new in the account of bytes written and read back."""
        if account == self._account:
            return
        for kind, total, before in (
            ("range", account.range_payload_bytes, self._account.range_payload_bytes),
            ("point", account.point_payload_bytes, self._account.point_payload_bytes),
            ("drive", account.drive_bytes, self._account.drive_bytes),
            ("point_read", account.point_read_bytes, self._account.point_read_bytes),
        ):
            self._bytes.labels(kind).inc(total - before)
        self._amplification.set(account.write_amplification)
        self._account = msgspec.structs.replace(account)

    def spilled(self, slots: Mapping[str, int]) -> None:
        """Count what is new in the slots that left the device for the store, by component."""
        if slots != self._slots_seen:
            for component, total in slots.items():
                self._slots.labels(component).inc(total - self._slots_seen[component])
            self._slots_seen = Counts(slots)

    def tidied(self, counts: Mapping[str, int]) -> None:
        """Count what is new in what the store's upkeep has done."""
        if counts == self._upkeep_seen:
            return
        for step, total in counts.items():
            self._upkeep.labels(step).inc(total - self._upkeep_seen[step])
        self._upkeep_seen = Counts(counts)


def render(snapshot: Snapshot) -> bytes:
    """Return the cache's numbers in Prometheus' text exposition format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_CacheCollector(snapshot))
    return generate_latest(registry)


class _CacheCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now, counters = self._snapshot, self._snapshot.counters
        yield from _sums(
            {
                "evicted_tokens": (
                    "Tokens whose range state was evicted.",
                    counters.evicted_tokens,
                ),
                "evicted_bytes": ("Bytes of range state evicted.", counters.evicted_bytes),
                "eviction_wanted_tokens": (
                    "Tokens that evictions were asked for; evicted less wanted is waste.",
                    counters.wanted_tokens,
                ),
                "reprefilled_tokens": (
                    "Tokens computed again for a known session.",
                    counters.reprefilled_tokens,
                ),
            }
        )
        yield from _relief(counters)
        yield _labelled(
            CounterMetricFamily(
                "ownerserve_restorable_points_lost", "By reason.", labels=["reason"]
            ),
            counters.points_lost,
        )
        yield GaugeMetricFamily(
            "ownerserve_restorable_points", "Boundaries that lack nothing.", now.restorable_points
        )
        yield from _holds(now)
        yield from _by_component(now)


def _by_component(now: Snapshot) -> Iterator[Metric]:
    """Yield the levels of components and tails."""
    for name, about, values in (
        ("resident_tokens", "Tokens whose state is resident.", now.cached_tokens),
        ("tail_tokens", "Running tokens that wait for their window.", now.tail_tokens),
        (
            "fragmentation_internal_bytes",
            "Padding, unfilled blocks and empty tail rows in used slots.",
            now.fragmentation.internal_bytes,
        ),
        (
            "fragmentation_external_bytes",
            "Free point slots that no snapshot can use.",
            now.fragmentation.external_bytes,
        ),
    ):
        family = GaugeMetricFamily(f"ownerserve_cache_{name}", about, labels=["component"])
        yield _labelled(family, values)


def _holds(now: Snapshot) -> Iterator[Metric]:
    """Yield what was given up and waits for its writer, by the kind of the writer."""
    arrivals = GaugeMetricFamily(
        "ownerserve_cache_held_arrivals",
        "Arrivals that were given up, whose writer may still write.",
        labels=["writer"],
    )
    yield _labelled(arrivals, {kind: level.arrivals for kind, level in now.holds.items()})
    blocks = GaugeMetricFamily(
        "ownerserve_cache_held_blocks",
        "Range blocks that such arrivals keep from use.",
        labels=["writer"],
    )
    yield _labelled(blocks, {kind: level.blocks for kind, level in now.holds.items()})
    oldest = GaugeMetricFamily(
        "ownerserve_cache_held_oldest_seconds",
        "How long the oldest of them has waited: one that stays is a writer that was lost.",
        labels=["writer"],
    )
    yield _labelled(oldest, {kind: level.oldest_s for kind, level in now.holds.items()})


def _relief(counters: Counters) -> Iterator[Metric]:
    """Yield the counters of what watermarks brought about."""
    yield from _sums(
        {
            "relief_runs": ("Times a low watermark was acted on.", counters.relief_runs),
            "spilled_points": (
                "Boundaries whose point state was copied below because room was short.",
                counters.spilled_points,
            ),
            "failed_spills": ("Spills that came to nothing.", counters.failed_spills),
        }
    )
    yield _labelled(
        CounterMetricFamily(
            "ownerserve_cache_evicted_points", "Slots evicted.", labels=["component"]
        ),
        counters.evicted_points,
    )


def _sums(values: dict[str, tuple[str, int]]) -> Iterator[Metric]:
    for name, (about, value) in values.items():
        yield CounterMetricFamily(f"ownerserve_cache_{name}", about, value)


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]
) -> CounterMetricFamily | GaugeMetricFamily:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


class OwnershipCollector(Collector):
    """An `OwnershipCollector` reads the metrics of a worker that owns sessions from its
    `Ownership`."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership

    def collect(self) -> Iterator[Metric]:
        ownership = self._ownership
        yield GaugeMetricFamily(
            "ownerserve_sessions_owned",
            "Sessions that are this worker's.",
            value=len(ownership.owner.grants),
        )
        yield GaugeMetricFamily(
            "ownerserve_directory_leased",
            "1 while the directory counts this worker among the living.",
            value=ownership.phase is OwnerPhase.LIVE,
        )
        yield CounterMetricFamily(
            "ownerserve_directory_frames", "Frames sent to the directory.", value=ownership.frames
        )
        yield GaugeMetricFamily(
            "ownerserve_extents_published",
            "Copies of prefixes that the directory was told of, or is about to be.",
            value=len(ownership.publishing),
        )
        yield CounterMetricFamily(
            "ownerserve_last_copies_lost",
            "Last living copies of what a session stands on that went here.",
            value=ownership.publishing.lost_copies,
        )
        answers = CounterMetricFamily(
            "ownerserve_directory_answers",
            "What the directory answered: outcomes, and refusals by reason.",
            labels=["answer"],
        )
        for answer, count in list(ownership.answers.items()):
            answers.add_metric([answer], count)
        yield answers
        refused = CounterMetricFamily(
            "ownerserve_owner_refusals",
            "What only an owner may do and was refused, here (release) or by the directory; "
            "lease_over: what was not answered before the lease had ended; grant: one that a later "
            "owner made void.",
            labels=["verb", "reason"],
        )
        for (verb, reason), count in list(ownership.owner.refused.items()):
            refused.add_metric([verb, reason], count)
        yield refused


class RemoteCollector(Collector):
    """A `RemoteCollector` reads what a worker came to think of records on a shared medium; `counts`
    are those of `store.tiers.remote.RemoteTier`. Registered only where there is such a medium."""

    def __init__(self, counts: Counts[str]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        verdicts = CounterMetricFamily(
            "ownerserve_remote_verdicts",
            "What came of records of the shared medium that were not as they should be: forged (not"
            " sealed by its key), reread (bad, then good), accused (bad twice), quarantined (two"
            " machines say so), self_suspected (this one reads badly), key_refused (another key).",
            labels=["verdict"],
        )
        for verdict in VERDICTS:
            verdicts.add_metric([verdict], self._counts[verdict])
        yield verdicts


class RpcCollector(Collector):
    """An `RpcCollector` reads the metrics of a worker's RPC port; `counts` are those of
    `node.rpc.server.RpcServer`."""

    def __init__(self, counts: Counts[str]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "ownerserve_rpc_requests",
            "Requests on the RPC port that were said again, called off, or given up, and answers"
            " that came when nobody waited any more.",
            labels=["what"],
        )
        for what in ("repeated", "cancelled", "given_up", "late"):
            requests.add_metric([what], self._counts[what])
        yield requests
