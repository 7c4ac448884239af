"""This module shows what a model's state costs, as a table for people and an object for programs.

Owns the wording and the columns of `ownerserve inspect`. Must never compute a size: kv.geometry
does.
"""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.geometry import (
    ComponentGeometry,
    Geometry,
    exact_replay_tokens,
    layer_counts,
)
from ownerserve.kv.units import format_bytes

WIDE_COLUMNS = 120


class Question(msgspec.Struct, frozen=True):
    """A question is what is asked: which model, at which context, in how much memory (None: not
    asked)."""

    model: str
    context_tokens: int
    hbm_bytes: int | None = None


def to_json(question: Question, geometry: Geometry, kv: KvDescriptor) -> dict[str, Any]:
    """Return the result object of `ownerserve inspect` (schema ownerserve.inspect/1)."""
    spec = geometry.spec
    context, hbm = question.context_tokens, question.hbm_bytes
    dense = geometry.dense_bytes_per_token
    return {
        "model": question.model,
        "family": spec.family,
        "kv_descriptor": kv.name,
        "kv": msgspec.to_builtins(kv),
        "spec_digest": spec.digest().hex(),
        "layers": len(spec.layers),
        "layers_by_type": layer_counts(spec),
        "draft_layers_not_counted": spec.draft_layers,
        "context_tokens": context,
        "block_tokens": geometry.block_tokens,
        "bytes_per_token": geometry.bytes_per_token,
        "fixed_bytes_per_sequence": geometry.fixed_bytes_per_sequence,
        "bytes_at_context": geometry.range_bytes(context),
        "total_bytes_at_context": geometry.total_bytes(context),
        "allocated_bytes_at_context": geometry.allocated_bytes(context),
        "point_bytes": geometry.point_bytes,
        "exact_replay_tokens": exact_replay_tokens(spec),
        "hbm_bytes": hbm,
        "sessions_fit": None if hbm is None else geometry.sessions_that_fit(hbm, context),
        "dense_equivalent_bytes_per_token": dense,
        "dense_equivalent_bytes_at_context": dense * context,
        "dense_equivalent_sessions_fit": None if hbm is None else hbm // max(dense * context, 1),
        "components": [_component(component) for component in geometry.components],
    }


def _component(component: ComponentGeometry) -> dict[str, Any]:
    return {
        "role": component.role.value,
        "layers": component.layers,
        "kinds": component.kinds,
        "entry": component.entry,
        "entry_bytes": component.entry_bytes,
        "tokens_per_entry": component.tokens_per_entry,
        "bytes_per_token": component.bytes_per_token,
        "fixed_bytes": component.live_bytes,
        "boundary_bytes": component.boundary_bytes,
        "block_entries": component.block_entries,
        "block_payload_bytes": component.block_payload_bytes,
        "block_bytes": component.block_bytes,
    }


def show(question: Question, geometry: Geometry, kv: KvDescriptor, console: Console) -> None:
    """Print heading, per-component table, totals and the dense layout beside them."""
    spec = geometry.spec
    counts = ", ".join(f"{count} {name}" for name, count in layer_counts(spec).items())
    console.print(Text(f"{question.model}: {len(spec.layers)} layers ({counts})", style="bold"))
    block = f"block {geometry.block_tokens:,} tokens"
    console.print(Text(f"family {spec.family}, KV descriptor {kv.name}, {block}"))
    console.print()
    console.print(_components_table(geometry, console.width))
    console.print()
    console.print(_totals_table(question, geometry))
    console.print()
    for line in _notes(question, geometry):
        console.print(Text(line))


def _components_table(geometry: Geometry, width: int) -> Table:
    """Make the table of one row a component; a terminal narrower than WIDE_COLUMNS does without the
    last columns."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("component", no_wrap=True)
    for name in ("layers", "keeps", "B/entry", "B/token", "fixed", "boundary"):
        table.add_column(name, justify="left" if name == "keeps" else "right", no_wrap=True)
    if width >= WIDE_COLUMNS:
        table.add_column("padding", justify="right")
        table.add_column("entry", no_wrap=True)
    for component in geometry.components:
        cells = (
            component.role.value,
            f"{component.layers}",
            ", ".join(component.kinds),
            f"{component.entry_bytes:,}",
            _number(component.bytes_per_token),
            _size(component.live_bytes),
            _size(component.boundary_bytes),
            _padding(component),
            component.entry,
        )
        table.add_row(*cells[: len(table.columns)])
    return table


def _totals_table(question: Question, geometry: Geometry) -> Table:
    context, hbm = question.context_tokens, question.hbm_bytes
    dense = geometry.dense_bytes_per_token
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("B/token", f"{context:,} tokens", "fixed", "together"):
        table.add_column(name, justify="right")
    ours = [
        "this model",
        _number(geometry.bytes_per_token),
        _size(geometry.range_bytes(context)),
        _size(geometry.fixed_bytes_per_sequence),
        _size(geometry.total_bytes(context)),
    ]
    paged_size = _size(dense * context)
    paged = ["dense layout", _number(dense), paged_size, "", paged_size]
    if hbm is not None:
        table.add_column(f"sessions in {format_bytes(hbm)}", justify="right")
        ours.append(f"{geometry.sessions_that_fit(hbm, context):,}")
        paged.append(f"{hbm // max(dense * context, 1):,}")
    table.add_row(*ours)
    table.add_row(*paged)
    return table


def _notes(question: Question, geometry: Geometry) -> list[str]:
    """Say what the totals do not: how a session comes back."""
    notes = [_beside_dense(question, geometry)]
    if geometry.point_bytes:
        notes.append(
            f"To go on at a boundary, {format_bytes(geometry.point_bytes)} of point state suffice."
        )
    match exact_replay_tokens(geometry.spec):
        case None:
            notes.append("Recurrent state can't be replayed: without it, the prompt is prefilled.")
        case 0:
            notes.append("No window state: the kept entries alone restore a session.")
        case tokens:
            notes.append(f"Without it, an exact replay recomputes {tokens:,} tokens.")
    if geometry.spec.draft_layers:
        notes.append(f"Draft (MTP) layers, not counted: {geometry.spec.draft_layers}.")
    return notes


def _beside_dense(question: Question, geometry: Geometry) -> str:
    total = geometry.total_bytes(question.context_tokens)
    dense = geometry.dense_bytes_per_token * question.context_tokens
    ratio = f"{dense / max(total, 1):.3g}"
    verdict = "as much" if ratio == "1" else f"{ratio} times as much"
    at = f"at {question.context_tokens:,} tokens"
    return f"A dense layout (PagedAttention: every layer an entry a token) takes {verdict} {at}."


def _number(count: float) -> str:
    return f"{count:,.0f}" if count else ""


def _size(count: int) -> str:
    return format_bytes(count) if count else ""


def _padding(component: ComponentGeometry) -> str:
    waste = component.block_bytes - component.block_payload_bytes
    return f"{waste / component.block_bytes:.1%}" if waste else ""
