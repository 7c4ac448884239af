"""This module says which turns were not served: how many, why, and what would help; beside a table
of percentiles.

Owns the words. A percentile is over the turns that were served, so a fleet that turns most of them
away can look fast: whoever shows percentiles shows these lines too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerserve.kv.messages import UnservedReason

MENDS: dict[str, str] = {
    UnservedReason.TOO_LONG: "give each worker more memory (--kv), or take shorter sessions",
    UnservedReason.NO_ROOM: "add workers or memory (--workers, --kv), or a faster link (--nic)",
    UnservedReason.OVERLOADED: "add workers, or fewer sessions at once (--mode capped:N)",
    UnservedReason.ENGINE_ERROR: "workers died (--faults)",
    UnservedReason.CLIENT_TIMEOUT: "add workers, or clients that wait longer",
}
UNNAMED = "see `modes` and `reasons` in --json"


def unserved(policies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each policy that did not serve every turn, then what that means; no line
    when all did."""
    lines, seen = [], dict[str, None]()
    for name, metrics in policies.items():
        share, reasons = metrics.get("error_rate") or 0.0, metrics.get("reasons") or {}
        if not share:
            continue
        told = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        lines.append(f"{name}: {share:.1%} of turns refused or failed: {told or 'no reason told'}")
        seen.update(dict.fromkeys(reasons))
    if not lines:
        return []
    mends = "; ".join(f"{reason}: {MENDS.get(reason, UNNAMED)}" for reason in seen) or UNNAMED
    return [
        *lines,
        "Percentiles and shares are over served turns only; they say nothing of the others.",
        f"To mend it: {mends}.",
    ]


def served_nothing(policies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the policies under which no turn at all was served: nothing was measured of them."""
    return [name for name, metrics in policies.items() if metrics.get("error_rate") == 1.0]
