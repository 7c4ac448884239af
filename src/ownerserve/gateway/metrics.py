"""This module makes the Prometheus metrics of a gateway from its counters when scraped: no cost on
a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from ownerserve.gateway.entry.figures import entry_families
from ownerserve.gateway.histograms import Histogram
from ownerserve.gateway.processes.part import GatewayPart
from ownerserve.gateway.rollout.metrics import constant_metrics, rollout_metrics
from ownerserve.router.entry.terms import WaitReason

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway

_P = "ownerserve_gateway_"
"""This stands before each name: what a worker counts under a like one is another thing, and a sum
over processes would have both."""

_BY_LABEL = (
    ("reasons", _P + "dispatches", "Dispatches by the decision's reason.", "reason"),
    ("refusals", _P + "refusals", "Requests that got no worker.", "refusal"),
    (
        "failures",
        _P + "attempt_failures",
        "Attempts lost before the first byte.",
        "failure",
    ),
    ("downs", _P + "worker_downs", "Workers taken out.", "why"),
)
_PER_WORKER = (
    (_P + "worker_up", "1 when the worker may be chosen.", "up"),
    (_P + "worker_requests", "Requests dispatched and not ended.", "requests"),
    (
        _P + "worker_pending_prefill_tokens",
        "Estimated tokens of dispatched requests without a first byte.",
        "pending_prefill_tokens",
    ),
    (
        _P + "worker_held_tokens",
        "Estimated prompt tokens of live requests.",
        "held_tokens",
    ),
    (_P + "worker_sessions", "Sessions bound to the worker.", "bound_sessions"),
)


class GatewayCollector(Collector):
    """The collector turns a gateway's counters into metric families."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._workers()
        yield from self._discovery()
        yield from self._tls()
        observer = self._gateway.turns.observer
        yield _histogram(
            "first_byte_seconds", "Arrival to the answer's first byte.", observer.first_byte_s
        )
        yield _histogram("duration_seconds", "Arrival to the answer's end.", observer.duration_s)
        yield from entry_families(self._gateway.turns)
        yield from self._receipts()
        yield from self._patterns()
        yield from self._nodes()
        yield from self._moves()
        yield from rollout_metrics(self._gateway.turns.rollout)
        yield from constant_metrics(self._gateway.state.settings)
        if self._gateway.part is not None:
            yield from _part(self._gateway.part)
        for kind in ("prompt", "cached", "output"):
            yield CounterMetricFamily(
                f"{_P}{kind}_tokens",
                f"{kind.capitalize()} tokens that workers reported in `usage`.",
                value=getattr(observer, f"{kind}_tokens"),
            )

    def _requests(self) -> Iterator[Metric]:
        account, observer = self._gateway.state.account, self._gateway.turns.observer
        yield CounterMetricFamily(
            _P + "requests",
            "Requests that asked for a worker.",
            value=account.received,
        )
        ends = CounterMetricFamily(_P + "ends", "How dispatches ended.", labels=["end"])
        for end in ("finished", "broken", "aborted"):
            ends.add_metric([end], getattr(account, end))
        yield ends
        yield CounterMetricFamily(
            _P + "usages_refused",
            "Answers whose `usage` no sequence of the model can have.",
            value=account.usages_refused,
        )
        yield GaugeMetricFamily(
            _P + "live", "Dispatches not ended.", value=self._gateway.state.live
        )
        yield GaugeMetricFamily(
            _P + "sessions_waiting",
            "New sessions that wait for a seat.",
            value=sum(
                one.reason is WaitReason.SEAT for one in self._gateway.turns.admission.waiting()
            ),
        )
        seats = self._gateway.turns.admission.seats
        yield GaugeMetricFamily(
            _P + "seat_stay_seconds",
            "How long an idle session keeps its seat now (0: no seats).",
            value=0.0 if seats is None else seats.stay.seconds,
        )
        door = self._gateway.door
        yield GaugeMetricFamily(
            _P + "clients", "Clients that are connected.", value=len(self._gateway.clients)
        )
        yield GaugeMetricFamily(
            _P + "clients_max",
            "Clients for whom there are descriptors: further ones wait.",
            value=self._gateway.turns.share.clients_max,
        )
        yield CounterMetricFamily(
            _P + "clients_full",
            "Times that as many clients were connected as there are descriptors for.",
            value=0 if door is None else door.shut_times,
        )
        yield GaugeMetricFamily(
            _P + "request_body_bytes",
            "Memory that the bodies of requests hold, from their first byte to the answer's.",
            value=self._gateway.bodies.held_bytes,
        )
        for attribute, name, text, label in _BY_LABEL:
            family = CounterMetricFamily(name, text, labels=[label])
            for key, value in getattr(account, attribute).items():
                family.add_metric([key], value)
            yield family
        errors = CounterMetricFamily(_P + "errors", "Error answers by code.", labels=["code"])
        for code, value in observer.rejections.items():
            errors.add_metric([code], value)
        yield errors

    def _tls(self) -> Iterator[Metric]:
        """Yield the families of the ports' certificates."""
        door = self._gateway.door
        yield CounterMetricFamily(
            _P + "handshakes_failed",
            "Clients that could not agree on keys, or brought no certificate that is asked for.",
            value=0 if door is None else door.handshakes_failed,
        )
        certificates = GaugeMetricFamily(
            _P + "certificate_end_timestamp_seconds",
            "When the certificate of a port runs out, since 1970.",
            labels=["port"],
        )
        for port, tls in (("data", self._gateway.tls), ("admin", self._gateway.admin_tls)):
            if tls is not None:
                certificates.add_metric([port], tls.ends_at)
        yield certificates

    def _discovery(self) -> Iterator[Metric]:
        """Yield the families of the sources that name workers."""
        discovery = self._gateway.discovery
        named = GaugeMetricFamily(
            _P + "discovered_workers",
            "Workers that a source names: a name of DNS, a service of Kubernetes.",
            labels=["source"],
        )
        failures = CounterMetricFamily(
            _P + "discovery_failures",
            "Times that a source could not say which workers there are: it removes nobody.",
            labels=["source"],
        )
        for source, count in discovery.named().items():
            named.add_metric([source], count)
            failures.add_metric([source], discovery.failures[source])
        yield named
        yield failures

    def _receipts(self) -> Iterator[Metric]:
        """Yield the families that set decisions against what came of them."""
        observer = self._gateway.turns.observer
        pressure = CounterMetricFamily(
            _P + "pressure",
            "What did not go as decided: workers' refusals, lost attempts, state that was not "
            "where it was expected, errors told to clients.",
            labels=["kind", "reason"],
        )
        for labels, value in observer.pressure.items():
            pressure.add_metric(labels, value)
        yield pressure
        legs = CounterMetricFamily(
            _P + "legs",
            "Legs of turns that run at more than one worker, by what became of them.",
            labels=["leg", "outcome"],
        )
        for labels, value in self._gateway.legs.counts.items():
            legs.add_metric(labels, value)
        yield legs
        yield _histogram(
            "receipt_error_tokens",
            "Distance of the tokens expected to be cached from those the engine reports.",
            observer.receipt_error_tokens,
        )
        yield CounterMetricFamily(
            _P + "expected_cached_tokens",
            "Prompt tokens of finished turns that decisions expected to be cached.",
            value=observer.expected_cached_tokens,
        )
        yield CounterMetricFamily(
            _P + "zero_hits",
            "Turns sent to where their state was expected, of which the engine had nothing.",
            value=observer.zero_hits,
        )
        yield CounterMetricFamily(
            _P + "reseeds",
            "Turns of known sessions of whose state something was lost.",
            value=observer.reseeds,
        )
        yield CounterMetricFamily(
            _P + "lost_tokens",
            "Tokens that sessions' last turns had left and that were not at hand for their next.",
            value=observer.lost_tokens,
        )

    def _patterns(self) -> Iterator[Metric]:
        """Yield how turns were served, by mode and by session, and how answers ended."""
        observer = self._gateway.turns.observer
        first_byte = HistogramMetricFamily(
            _P + "mode_first_byte_seconds",
            "Arrival to the answer's first byte, by how the turn was served; empty: nobody says.",
            labels=["mode"],
        )
        for mode, latency in observer.by_mode.items():
            histogram = latency.first_byte_s
            buckets = _buckets(histogram)
            first_byte.add_metric([mode or ""], buckets, sum_value=histogram.sum)
        yield first_byte
        shares = GaugeMetricFamily(
            _P + "sessions_by_kept_share",
            "Sessions seen last that had four later turns, by the share of these (percent) that"
            " went on from what the session had left: many at both ends are two classes.",
            labels=["share"],
        )
        for band, count in observer.patterns.bands().items():
            shares.add_metric([band], count)
        yield shares
        yield GaugeMetricFamily(
            _P + "longest_lost_run_turns",
            "Turns in a row that the session which has fared worst was served without what it had"
            " left.",
            value=observer.patterns.longest_lost_run(),
        )
        finishes = {reason.value: count for reason, count in observer.finishes.items()}
        yield _counts("answers", "Whole answers by why they ended.", finish=finishes)

    def _nodes(self) -> Iterator[Metric]:
        """Yield what was asked of workers' nodes and of the directory, and what answers said
        badly."""
        gateway = self._gateway
        yield _counts(
            "places",
            "What workers said when asked for a place before a turn was sent.",
            outcome=gateway.turns.places.counts,
        )
        yield _counts(
            "releases",
            "Owners asked to hand a session over to where its turn went; let_go: who let one go.",
            outcome=gateway.turns.releasing.counts,
        )
        yield _counts(
            "node_requests",
            "Requests on workers' RPC ports, by type.",
            request=gateway.turns.lines.asked,
        )
        yield _counts(
            "answer_line_problems",
            "Fields of workers' x-ownerserve-answer that could not be used.",
            field=gateway.turns.observer.bad_lines,
        )
        if gateway.turns.finder is not None:
            yield _counts(
                "directory_answers",
                "What the directory answered when asked who owns a session: outcomes, and refusals "
                "by reason.",
                answer=gateway.turns.finder.answers,
            )

    def _moves(self) -> Iterator[Metric]:
        """Yield what came of sessions and turns that were to move."""
        gateway = self._gateway
        yield _counts(
            "moves",
            "Idle sessions that were to leave a drained worker, by how that ended: taken, suspended"
            " (to its store), no_target (nobody else can take its state), unreachable, or why the"
            " session stayed.",
            end=gateway.moves.counts,
        )
        yield _counts(
            "wanted_moves",
            "Moves of idle sessions for load's sake, by step: wanted, granted, and how each ended:"
            " taken, why it stayed, or why it was dropped (ended, moved, went_on, owner_gone,"
            " too_old, crowded_out).",
            step=gateway.turns.gap_moves.counts,
        )
        yield _counts(
            "replicas",
            "Read-only replicas of hot prefixes, by step: wanted (by a fork), granted, and how each"
            " ended: made, why there is none, or why it was dropped (cooled, ended, crowded_out).",
            step=gateway.turns.hot_prefixes.counts,
        )
        moved = CounterMetricFamily(
            _P + "replica_bytes", "Bytes that workers moved for the replicas that were made."
        )
        moved.add_metric([], gateway.turns.hot_prefixes.moved_bytes)
        yield moved
        rests = gateway.moves.rests
        yield _counts(
            "rests",
            "What drained workers had added to others' sessions as guests, by how bringing it to"
            " who goes on ended: brought, its_own (the session is that worker's by now), went_on,"
            " unreachable, no_answer, or why it was not.",
            end=rests.counts,
        )
        came = CounterMetricFamily(_P + "rest_bytes", "Bytes that workers moved for it.")
        came.add_metric([], rests.moved_bytes)
        yield came
        yield _counts(
            "turn_moves",
            "Turns that were to leave a drained worker amid their answers, by how the order ended:"
            " sent, no_target, unreachable, torn (their client had a part of a line), no_answer, or"
            " why they stayed.",
            end=gateway.turn_moves.counts,
        )
        yield _histogram(
            "turn_move_pause_seconds",
            "How long clients had nothing of streams that moved to another worker.",
            gateway.legs.pauses_s,
        )
        yield GaugeMetricFamily(
            _P + "turn_move_longest_pause_seconds",
            "The longest of these pauses since the start.",
            value=gateway.legs.longest_pause_s,
        )

    def _workers(self) -> Iterator[Metric]:
        for name, text, attribute in _PER_WORKER:
            family = GaugeMetricFamily(name, text, labels=["worker"])
            for worker in self._gateway.state.fleet:
                family.add_metric([worker.id], float(getattr(worker, attribute)))
            yield family
        queues = GaugeMetricFamily(
            _P + "worker_queue_seconds",
            "Estimated prefill time of everybody's requests there, by the worker's last word.",
            labels=["worker"],
        )
        for worker in self._gateway.state.fleet:
            queues.add_metric([worker.id], worker.queue_ms / 1000.0)
        yield queues
        yield from self._shares()
        problems = CounterMetricFamily(
            _P + "worker_statement_problems",
            "Statements of a worker (/ownerserve/status) in which a field could not be used.",
            labels=["worker", "field"],
        )
        for name, monitor in self._gateway.monitors.items():
            for field, value in monitor.problem_counts.items():
                problems.add_metric([name, field], value)
        yield problems
        read = CounterMetricFamily(
            _P + "worker_inventory",
            "Pages of a worker's inventory that were read, words in them, readings that failed.",
            labels=["worker", "kind"],
        )
        held = GaugeMetricFamily(
            _P + "worker_extents",
            "Sessions' extents that a worker says it holds, one for each tier.",
            labels=["worker"],
        )
        for name, reader in self._gateway.inventories.items():
            for kind in ("pages", "words", "failed"):
                read.add_metric([name, kind], reader.counts[kind])
            read.add_metric([name, "ignored"], reader.residents.ignored)
            held.add_metric([name], len(reader.residents))
        yield read
        yield held
        connections = CounterMetricFamily(
            _P + "worker_connections",
            "Connections opened to a worker, and exchanges on a kept one.",
            labels=["worker", "kind"],
        )
        for name, pool in self._gateway.turns.pools.items():
            connections.add_metric([name, "opened"], pool.opened)
            connections.add_metric([name, "reused"], pool.reused)
        yield connections
        yield GaugeMetricFamily(
            _P + "sessions",
            "Sessions known.",
            value=len(self._gateway.state.sessions),
        )

    def _shares(self) -> Iterator[Metric]:
        """Yield what workers say of their time; those that do not say it have no line."""
        busy = GaugeMetricFamily(
            _P + "worker_busy_share",
            "Part of the last minute in which the worker's engine computed, by its last word.",
            labels=["worker"],
        )
        refill = GaugeMetricFamily(
            _P + "worker_refill_share",
            "Part of its time that the worker would spend on bringing back what it displaces, if "
            "it took so many tokens of state more, by its last word.",
            labels=["worker", "tokens"],
        )
        for worker in self._gateway.state.fleet:
            load = worker.load
            if load.busy_share is not None:
                busy.add_metric([worker.id], load.busy_share)
            for one in load.refill_shares:
                refill.add_metric([worker.id, str(one.tokens)], one.share)
        yield busy
        yield refill


def _part(part: GatewayPart) -> Iterator[Metric]:
    """Yield what one process of several counts of the others."""
    process, counts = str(part.homes.process), part.homes.counts
    lives = GaugeMetricFamily(
        _P + "process_life",
        "How many processes have had this number so far: over 1, one was lost.",
        labels=["process"],
    )
    lives.add_metric([process], part.life)
    yield lives
    yield _counts(
        "requests_placed",
        "Requests of sessions by whether the process that read them is the sessions' home.",
        at={"home": counts.here, "elsewhere": counts.elsewhere},
    )


def _counts(name: str, text: str, **counts: Mapping[str, int]) -> Metric:
    """Return a counter with one label, named like the only one of `counts`."""
    ((label, values),) = counts.items()
    family = CounterMetricFamily(f"{_P}{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(
        f"{_P}{name}", text, buckets=_buckets(histogram), sum_value=histogram.sum
    )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return a histogram's counts up to each edge."""
    edges = [*(str(float(edge)) for edge in histogram.edges), "+Inf"]
    return list(zip(edges, accumulate(histogram.counts), strict=True))
