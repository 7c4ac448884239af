"""The live page is one HTML file that the admin port serves, and that reads the admin port's JSON;
this module has the page, and the JSON that is made for it.

Owns no fact: what nobody told is None, and the page says "not known".
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from ownerserve.gateway.admin_api.answers import (
    DeviceMemory,
    EpochRow,
    HeldCopy,
    Latency,
    LatencyRow,
    OwnerChangeRow,
    OwnerCount,
    OwnerRow,
    Owners,
    PatternRow,
    Patterns,
    Pressed,
    SessionRow,
    SessionsAnswer,
)
from ownerserve.gateway.entry.figures import entry_figures
from ownerserve.gateway.histograms import Histogram
from ownerserve.gateway.patterns import SessionPattern
from ownerserve.gateway.workers.health import HealthMonitor
from ownerserve.kv.ids import SessionId
from ownerserve.router.sessions import RoutedSession
from ownerserve.router.worker import Worker

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway


SESSIONS_TOLD_MAX = 1000
"""Sessions in one answer, however many are asked for: turns wait while it is made."""
WORST_TOLD = 8


class LivePage(msgspec.Struct, frozen=True):
    """A live page is its document, and the headers without which it must not be served."""

    document: bytes
    headers: dict[str, str]


def _read_page() -> LivePage:
    """Read the page. Its policy lets run and shine what is in the document itself, by its hash, and
    lets nothing be asked but this port."""
    text = resources.files(__package__).joinpath("live.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'",
        f"script-src {_hash_of('script', text)}",
        f"style-src {_hash_of('style', text)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
    return LivePage(text.encode(), headers)


def _hash_of(tag: str, text: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest())
    return f"'sha256-{digest.decode()}'"


PAGE = _read_page()


def counts(gateway: Gateway) -> dict[str, Any]:
    """Return what became of turns so far, by reason and by mode: fields of /status."""
    account, turns = gateway.state.account, gateway.turns
    observer = turns.observer
    return {
        "reasons": dict(account.reasons),
        "refusals": dict(account.refusals),
        "failures": dict(account.failures),
        "downs": dict(account.downs),
        "errors": dict(observer.rejections),
        "pressure": [
            Pressed(kind=kind, reason=reason, count=count)
            for (kind, reason), count in sorted(observer.pressure.items())
        ],
        "queue": entry_figures(turns),
        "releases": dict(turns.releasing.counts),
        "owner_changes": dict(observer.owner_changes.counts),
        "latency": [
            LatencyRow(
                mode=mode,
                first_byte=latency_of(latency.first_byte_s),
                whole=latency_of(latency.duration_s),
            )
            for mode, latency in observer.by_mode.items()
        ],
        "patterns": Patterns(
            kept_share=observer.patterns.bands(),
            worst=[_pattern_row(*one) for one in observer.patterns.worst(WORST_TOLD)],
            finishes={reason.value: count for reason, count in observer.finishes.items()},
        ),
    }


def _pattern_row(session: SessionId, pattern: SessionPattern) -> PatternRow:
    return PatternRow(
        session=session,
        later_turns=pattern.later,
        kept=pattern.kept,
        lost_run=pattern.lost_run,
        longest_lost_run=pattern.longest_lost_run,
        first_byte_mean_s=round(pattern.first_byte_s / pattern.later, 6),
        modes={mode.value: count for mode, count in pattern.modes.items()},
    )


def latency_of(histogram: Histogram) -> Latency:
    """Return what a histogram of times comes to."""
    count = sum(histogram.counts)
    return Latency(
        count=count,
        mean_s=round(histogram.sum / count, 6) if count else None,
        p50_at_most_s=at_most(histogram, 0.5),
        p95_at_most_s=at_most(histogram, 0.95),
    )


def at_most(histogram: Histogram, share: float) -> float | None:
    """Return the edge that so large a share of the values does not exceed; None: beyond the last
    edge, or no value."""
    wanted, seen = share * sum(histogram.counts), 0
    for edge, count in zip(histogram.edges, histogram.counts, strict=False):
        seen += count
        if seen >= wanted and seen:
            return edge
    return None


def device_memory(monitor: HealthMonitor) -> DeviceMemory | None:
    """Return the device memory for state by the worker's last statement; None: it tells none."""
    if monitor.stated is None or not monitor.stated.load.kv_bytes_total:
        return None
    load = monitor.stated.load
    return DeviceMemory(
        bytes_total=load.kv_bytes_total,
        bytes_free=load.kv_bytes_free,
        bytes_evictable=load.kv_bytes_evictable,
        components=monitor.components or None,
    )


def newest_sessions(gateway: Gateway, last: int) -> SessionsAnswer:
    """Return the sessions that were used last, where their state lies, and the newest changes of
    owners."""
    now, table = gateway.now(), gateway.state.sessions
    last = min(last, SESSIONS_TOLD_MAX)
    return SessionsAnswer(
        known=len(table),
        sessions=[_session(name, one, now) for name, one in islice(table.newest(), last)],
        owner_changes=_changes(gateway, last),
    )


def newest_owners(gateway: Gateway, last: int) -> Owners:
    """Return who owns the sessions that were used last, how many sessions go to each worker, and
    the newest changes of owners."""
    now, table = gateway.now(), gateway.state.sessions
    last = min(last, SESSIONS_TOLD_MAX)
    return Owners(
        known=len(table),
        workers=[
            OwnerCount(worker=one.id, dp_rank=one.dp_rank, sessions=one.bound_sessions)
            for one in gateway.state.fleet
        ],
        sessions=[_owner(name, one, now) for name, one in islice(table.newest(), last)],
        owner_changes=_changes(gateway, last),
        changes=dict(gateway.turns.observer.owner_changes.counts.items()),
    )


def _changes(gateway: Gateway, last: int) -> list[OwnerChangeRow]:
    now = gateway.now()
    newest = islice(reversed(gateway.turns.observer.owner_changes.newest), last)
    return [
        OwnerChangeRow(
            age_s=round(now - one.at_s, 3),
            session=one.session,
            former=one.former,
            owner=one.owner,
            how=one.how,
        )
        for one in newest
    ]


def _owner(name: SessionId, session: RoutedSession, now: float) -> OwnerRow:
    epoch = session.epoch
    return OwnerRow(
        session=name,
        owner=_id(session.owner),
        up=session.live_owner is not None,
        granted_to=_granted_to(session),
        seen_s_ago=round(now - session.seen_at_s, 3),
        epoch=None if epoch is None else EpochRow(term=epoch.term.ordinal, counter=epoch.counter),
    )


def _granted_to(session: RoutedSession) -> str | None:
    return None if session.grant is None else _id(session.grant.live_owner)


def _session(name: SessionId, session: RoutedSession, now: float) -> SessionRow:
    moved = session.last_move_s
    return SessionRow(
        session=name,
        owner=_id(session.live_owner),
        former_owner=None if session.live_owner is not None else _id(session.owner),
        home=_id(session.live_home),
        granted_to=_granted_to(session),
        seen_s_ago=round(now - session.seen_at_s, 3),
        moved_s_ago=round(now - moved, 3) if isfinite(moved) else None,
        turns=session.turns,
        live=len(session.pending),
        context_tokens=session.known_tokens,
        copies=[
            HeldCopy(worker=_id(copy.worker), tier=copy.tier, tokens=copy.tokens)
            for copy in session.copies()
        ],
    )


def _id(worker: Worker | None) -> str | None:
    return None if worker is None else worker.id
