"""The live page is one HTML file that the admin port serves, and that reads the admin port's JSON;
this module has the page, and the JSON that is made for it.

Owns no fact: what nobody told is None, and the page says "not known".
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from ownerserve.gateway.turns import Histogram
from ownerserve.gateway.workers.health import HealthMonitor
from ownerserve.kv.ids import SessionId
from ownerserve.router.sessions import RoutedSession
from ownerserve.router.worker import Worker

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway


SESSIONS_TOLD_MAX = 1000
"""Sessions in one answer, however many are asked for: turns wait while it is made."""


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
    """Return what became of turns so far, by reason and by mode, as JSON values."""
    account, turns = gateway.state.account, gateway.turns
    observer = turns.observer
    return {
        "reasons": dict(account.reasons),
        "refusals": dict(account.refusals),
        "failures": dict(account.failures),
        "downs": dict(account.downs),
        "errors": dict(observer.rejections),
        "pressure": [
            {"kind": kind, "reason": reason, "count": count}
            for (kind, reason), count in sorted(observer.pressure.items())
        ],
        "releases": dict(turns.releasing.counts),
        "owner_changes": dict(observer.owner_changes.counts),
        "latency": [
            {
                "mode": mode,
                "first_byte": _latency(latency.first_byte_s),
                "whole": _latency(latency.duration_s),
            }
            for mode, latency in observer.by_mode.items()
        ],
    }


def _latency(histogram: Histogram) -> dict[str, float | int | None]:
    count = sum(histogram.counts)
    return {
        "count": count,
        "mean_s": round(histogram.sum / count, 6) if count else None,
        "p50_at_most_s": at_most(histogram, 0.5),
        "p95_at_most_s": at_most(histogram, 0.95),
    }


def at_most(histogram: Histogram, share: float) -> float | None:
    """Return the edge that so large a share of the values does not exceed; None: beyond the last
    edge, or no value."""
    wanted, seen = share * sum(histogram.counts), 0
    for edge, count in zip(histogram.edges, histogram.counts, strict=False):
        seen += count
        if seen >= wanted and seen:
            return edge
    return None


def device_memory(monitor: HealthMonitor) -> dict[str, Any] | None:
    """Return the device memory for state by the worker's last statement; None: it tells none."""
    if monitor.stated is None or not monitor.stated.load.kv_bytes_total:
        return None
    load = monitor.stated.load
    return {
        "bytes_total": load.kv_bytes_total,
        "bytes_free": load.kv_bytes_free,
        "bytes_evictable": load.kv_bytes_evictable,
        "components": msgspec.to_builtins(monitor.components) or None,
    }


def newest_sessions(gateway: Gateway, last: int) -> dict[str, Any]:
    """Return the sessions that were used last, where their state lies, and the newest changes of
    owners, as JSON values."""
    now, table = gateway.now(), gateway.state.sessions
    last = min(last, SESSIONS_TOLD_MAX)
    changes = gateway.turns.observer.owner_changes.newest
    return {
        "known": len(table),
        "sessions": [_session(name, one, now) for name, one in islice(table.newest(), last)],
        "owner_changes": [
            {
                "age_s": round(now - one.at_s, 3),
                "session": one.session,
                "from": one.former,
                "to": one.owner,
                "how": one.how,
            }
            for one in islice(reversed(changes), last)
        ],
    }


def _session(name: SessionId, session: RoutedSession, now: float) -> Mapping[str, Any]:
    grant = session.grant
    moved = session.last_move_s
    return {
        "session": name,
        "owner": _id(session.live_owner),
        "former_owner": None if session.live_owner is not None else _id(session.owner),
        "home": _id(session.live_home),
        "granted_to": None if grant is None else _id(grant.live_owner),
        "seen_s_ago": round(now - session.seen_at_s, 3),
        "moved_s_ago": round(now - moved, 3) if isfinite(moved) else None,
        "turns": session.turns,
        "live": len(session.pending),
        "context_tokens": session.known_tokens,
        "copies": [
            {
                "worker": _id(copy.worker),
                "tier": copy.tier.value,
                "tokens": copy.tokens,
            }
            for copy in session.copies()
        ],
    }


def _id(worker: Worker | None) -> str | None:
    return None if worker is None else worker.id
