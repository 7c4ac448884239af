"""What relays say of themselves, put together as one gateway would say it: pure functions over
their JSON values, by the admin port's paths.

| what | together |
|---|---|
| counts, and what each relay has of its own (turns, clients, sessions, load it sent) | summed |
| what workers say of themselves (queue, batch, memory, profile) | the largest, or the first's |
| whether a worker is up | where one relay may choose it |
| lists | joined, newest first |

A worker's queue is its last word and what one relay has sent since: the largest of several such
estimates is still below the truth by what the others have sent in the meantime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from ownerserve.gateway.entry.figures import TOLD_MAX
from ownerserve.gateway.histograms import Histogram
from ownerserve.gateway.live import SESSIONS_TOLD_MAX, WORST_TOLD, latency_of

Said: TypeAlias = dict[str, Any]
"""A JSON object that one relay said."""

_SUMMED = ("sessions", "content_sessions", "clients", "live")
_COUNTS = ("reasons", "refusals", "failures", "downs", "errors", "releases", "owner_changes")
_WORKER_SUMMED = (
    "requests", "pending_prefill_tokens", "held_tokens", "sessions",
    "connections_opened", "connections_reused", "connections_idle",
)  # fmt: skip
_WORKER_LARGEST = ("queue_ms", "batch", "occupancy")
_WORKER_ALIKE = (
    "worker", "dp_rank", "incarnation", "model", "profile", "busy_share", "refill_shares",
)  # fmt: skip
WORKER_KEYS = {*_WORKER_SUMMED, *_WORKER_LARGEST, *_WORKER_ALIKE, "up", "device_memory"}
"""All that a status says of a worker: what is new there belongs to one of these."""
_ALIKE = ("policy", "mode", "discovery", "constants")
"""What every relay says alike, or for itself with the same meaning."""
STATUS_KEYS = {
    *_SUMMED, *_COUNTS, *_ALIKE, "age_s", "draining", "directory", "requests", "workers", "probes",
    "never_up", "pressure", "queue", "latency", "patterns",
}  # fmt: skip
"""All that a relay's status says."""


def status(said: Sequence[Said], abouts: Sequence[Said]) -> Said:
    """Return the status of the whole: `abouts` is what relays say of themselves besides."""
    first = said[0]
    known = {worker["worker"] for one in said for worker in one["workers"]}
    return {
        **{name: first[name] for name in _ALIKE},
        "age_s": max(one["age_s"] for one in said),
        "draining": any(one["draining"] for one in said),
        **{name: sum(one[name] for one in said) for name in _SUMMED},
        "directory": _directory([one["directory"] for one in said]),
        "requests": _summed([one["requests"] for one in said]),
        "workers": [_worker(rows) for rows in _by_worker([one["workers"] for one in said])],
        "probes": {name: probe for one in reversed(said) for name, probe in one["probes"].items()},
        "never_up": [name for name in first["never_up"] if name not in known],
        **{name: _summed([one[name] for one in said]) for name in _COUNTS},
        "pressure": _rows([one["pressure"] for one in said], "count"),
        "queue": {
            "waiting": _rows([one["queue"]["waiting"] for one in said], "turns"),
            "first": _newest([one["queue"] for one in said], "first", "waited_s")[
                : -TOLD_MAX - 1 : -1
            ],
            "without_room": sum(one["queue"]["without_room"] for one in said),
            "not_let_in": _rows([one["queue"]["not_let_in"] for one in said], "count"),
        },
        "latency": latency(abouts),
        "patterns": _patterns([one["patterns"] for one in said]),
        "processes": [
            {name: value for name, value in one.items() if name != "latency"} for one in abouts
        ],
    }


def _patterns(said: Sequence[Said]) -> Said:
    """Return how sessions were served, each by the relay that it is at home."""
    worst = [row for one in said for row in one["worst"]]
    worst.sort(key=lambda row: (-row["longest_lost_run"], row["kept"] / row["later_turns"]))
    counts = {name: _summed([one[name] for one in said]) for name in ("kept_share", "finishes")}
    return {**counts, "worst": worst[:WORST_TOLD]}


def _came_first(queues: Sequence[Said]) -> list[Said]:
    """Return those of all relays' turns that have waited for longest."""
    return list(reversed(_newest(queues, "first", "waited_s")))[:TOLD_MAX]


def workers(said: Sequence[Said]) -> Said:
    """Return the workers as an operator sees them."""
    rows = _by_worker([one["workers"] for one in said])
    return {"workers": [worker_row(same) for same in rows]}


def worker_row(same: Sequence[Said]) -> Said:
    """Return one worker as an operator sees it, by what each relay says of it."""
    causes = [one["cause"] for one in same if one["cause"]]
    return {
        **same[0],
        "up": any(one["up"] for one in same),
        "requests": sum(one["requests"] for one in same),
        "cause": causes[0] if causes else None,
    }


def sessions(said: Sequence[Said], last: int) -> Said:
    """Return the sessions that were used last, wherever."""
    last = min(last, SESSIONS_TOLD_MAX)
    return {
        "known": sum(one["known"] for one in said),
        "sessions": _newest(said, "sessions", "seen_s_ago")[:last],
        "owner_changes": _newest(said, "owner_changes", "age_s")[:last],
    }


def owners(said: Sequence[Said], last: int) -> Said:
    """Return who owns the sessions that were used last."""
    rows = _by_worker([one["workers"] for one in said])
    counts = [{**same[0], "sessions": sum(one["sessions"] for one in same)} for same in rows]
    changes = _summed([one["changes"] for one in said])
    return {**sessions(said, last), "workers": counts, "changes": changes}


def decisions(said: Sequence[Said], last: int) -> Said:
    """Return the last decisions, whosever."""
    return {"decisions": _newest(said, "decisions", "age_s")[:last]}


def rollout(said: Sequence[Said]) -> Said:
    """Return who decides, and what was counted of shadows and arms."""
    counted = {name: _deep([one[name] for one in said]) for name in ("shadows", "arms")}
    return {**said[0], **counted}


def health(said: Sequence[Said]) -> Said:
    """Return how many workers the relay that has most may choose."""
    return {"workers_up": max(one["workers_up"] for one in said)}


def latency(abouts: Sequence[Said]) -> list[Said]:
    """Return how long turns took, by execution mode, over all relays."""
    modes: dict[str | None, tuple[Histogram, Histogram]] = {}
    for about in abouts:
        for row in about["latency"]:
            first_byte, whole = modes.setdefault(row["mode"], (Histogram(), Histogram()))
            _add(first_byte, row["first_byte"])
            _add(whole, row["whole"])
    return [
        {"mode": mode, **{name: msgspec.to_builtins(latency_of(one)) for name, one in both.items()}}
        for mode, (first_byte, whole) in modes.items()
        for both in ({"first_byte": first_byte, "whole": whole},)
    ]


def _add(histogram: Histogram, more: Said) -> None:
    counts = zip(histogram.counts, more["counts"], strict=True)
    histogram.counts = [mine + other for mine, other in counts]
    histogram.sum += more["sum"]


def _by_worker(lists: Sequence[Sequence[Said]]) -> list[list[Said]]:
    """Return all rows of each worker, sorted by its name: each relay has an order of its own."""
    rows: dict[tuple[str, int], list[Said]] = {}
    for workers in lists:
        for row in workers:
            rows.setdefault((row["worker"], row.get("dp_rank") or 0), []).append(row)
    return [rows[worker] for worker in sorted(rows)]


def _worker(same: Sequence[Said]) -> Said:
    first = next((one for one in same if one["up"]), same[0])
    told = (one["device_memory"] for one in same if one["device_memory"] is not None)
    return {
        **first,
        "up": any(one["up"] for one in same),
        **{name: sum(one[name] for one in same) for name in _WORKER_SUMMED},
        **{name: max(one[name] for one in same) for name in _WORKER_LARGEST},
        "device_memory": next(told, None),
    }


def _directory(said: Sequence[Said | None]) -> Said | None:
    asked = [one for one in said if one is not None]
    if not asked:
        return None
    owning = {worker for one in asked for worker in one["workers_owning"]}
    answers = _summed([one["answers"] for one in asked])
    return {**asked[0], "answers": answers, "workers_owning": sorted(owning)}


def _rows(several: Sequence[Sequence[Said]], count: str) -> list[Said]:
    """Return rows of counts, those with the same labels as one."""
    counts = Counter[tuple[tuple[str, Any], ...]]()
    for rows in several:
        for row in rows:
            labels = tuple((name, value) for name, value in row.items() if name != count)
            counts[labels] += row[count]
    return [{**dict(labels), count: number} for labels, number in sorted(counts.items())]


def _summed(said: Sequence[Mapping[str, int]]) -> dict[str, int]:
    counts = Counter[str]()
    for one in said:
        counts.update(one)
    return dict(counts)


def _deep(several: Sequence[Any]) -> Any:
    """Return nested counts, summed."""
    first = several[0]
    if not isinstance(first, dict):
        return sum(several)
    names = dict.fromkeys(name for one in several for name in one)
    return {name: _deep([one[name] for one in several if name in one]) for name in names}


def _newest(said: Sequence[Said], what: str, age: str) -> list[Said]:
    return sorted((row for one in said for row in one[what]), key=lambda row: float(row[age]))


TOGETHER: dict[str, Callable[[Sequence[Said]], Said]] = {
    "/workers": workers,
    "/health": health,
    "/rollout": rollout,
    "/mode": rollout,
    "/shadow": rollout,
    "/canary": rollout,
}
"""Paths whose answers need nothing beside."""
NEWEST: dict[str, Callable[[Sequence[Said], int], Said]] = {
    "/sessions": sessions,
    "/owners": owners,
    "/decisions": decisions,
}
"""Paths of rows, of which so many are asked for."""
