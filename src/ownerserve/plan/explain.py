"""This module puts a plan in words: one line for logs and metrics, rows for a table, plain data for
JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ownerserve.plan.outcome import Basis, Explanation, NotOffered, Priced, RestorePlan

COLUMNS = ("queue", "load", "recompute", "stall", "memory", "total", "hidden")


class Row(msgspec.Struct, frozen=True):
    """A row is one way back as a table shows it; times in ms."""

    name: str
    position: int
    computed_tokens: int
    moved_bytes: int
    ms: tuple[float, ...]
    exactness: str


def row_of(option: Priced) -> Row:
    """Return `option` as a row; `ms` in the order of COLUMNS."""
    t = option.terms
    ms = (t.queue_ms, t.load_ms, t.recompute_ms, t.stall_ms, t.hbm_ms, t.total_ms, t.hidden_ms)
    return Row(
        describe(option),
        option.position,
        option.computed_tokens,
        option.moved_bytes,
        ms,
        option.exactness.value,
    )


def describe(option: Priced) -> str:
    """Name a way like "load_global + replay 7,747 + prefill from 92,160": ways of one kind told
    apart.
    """
    text = option.name
    if option.position > 0:
        text += f" from {option.position:,}"
    if option.computed_from < option.position:
        again = f"replay {option.position - option.computed_from:,}"
        again += f" after point {option.checkpoint:,}" if option.checkpoint is not None else ""
        text = text.replace("replay", again)
    return text


def summary(plan: RestorePlan) -> str:
    """Return a plan in one line: what is done, what it takes, what it saves, and what decided."""
    option, t = plan.chosen, plan.chosen.terms
    parts = (
        describe(option),
        f"ttft {t.ttft_ms:.1f} ms (queue {t.queue_ms:.1f}, load {t.load_ms:.1f},"
        f" recompute {t.recompute_ms:.1f}, stall {t.stall_ms:.1f}, hidden {t.hidden_ms:.1f})",
        f"memory {t.hbm_ms:.2f} ms",
        f"saves {plan.reuse_benefit_ms:.1f} ms against a full prefill",
        f"by {plan.basis}",
    )
    return "; ".join(parts)


def notable(explanation: Explanation, *, most: int = 8) -> Sequence[Priced]:
    """Return the ways worth showing, `most` of them: the cheapest of each kind first, then the
    cheapest others; all by price.
    """
    kinds: dict[tuple[str, str], Priced] = {}
    for option in explanation.alternatives:
        kinds.setdefault((option.name, option.exactness.value), option)
    firsts = list(kinds.values())
    others = [option for option in explanation.alternatives if option not in firsts]
    return sorted((firsts + others)[:most], key=lambda option: option.terms.total_ms)


def grouped(omitted: Sequence[NotOffered]) -> dict[str, list[int]]:
    """Group positions by reason: "replay: engine_cannot_replay" -> [1024, 768, ...]."""
    groups: dict[str, list[int]] = {}
    for item in omitted:
        groups.setdefault(f"{item.action}: {item.why}", []).append(item.position)
    return groups


def to_data(explanation: Explanation) -> dict[str, object]:
    """Return the whole explanation as plain data."""
    plan = explanation.plan
    return {
        "chosen": _priced(plan.chosen),
        "basis": plan.basis.value,
        "decided_by_cost": plan.basis is Basis.COST,
        "reuse_benefit_ms": plan.reuse_benefit_ms,
        "full_prefill_ms": plan.prefill_ttft_ms,
        "alternatives": [_priced(option) for option in explanation.alternatives],
        "not_offered": [msgspec.to_builtins(item) for item in explanation.not_offered],
    }


def _priced(option: Priced) -> dict[str, object]:
    data: dict[str, object] = msgspec.to_builtins(option)
    terms = option.terms
    data["name"] = describe(option)
    data["ttft_ms"], data["total_ms"] = terms.ttft_ms, terms.total_ms
    return data
