"""What points weigh, by model: the table in docs/vllm.md is what the registry's specs give.

python -m tests.docs.test_point_sizes        prints the table
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import read_config
from ownerserve.kv.specs import Coverage, Role
from ownerserve.kv.units import format_bytes
from ownerserve.plan.swa.branches import LEAD_TOKENS, PointCost

ROOT = Path(__file__).parents[2]
HEAD = (
    "| model | range state a token | a point | turn end, with its lead | chunk ends every | "
    "of range state |\n|---|---|---|---|---|---|"
)
BOUNDARY_TOKENS = 32
WHOLE_PAGES = ("deepseek-v4.1-flash", "llama-4-scout", "mimo-v2-flash")
"""Windows that vLLM's connector keeps as pages, if at all: rows before one have no place there."""


def rows() -> Iterator[str]:
    """A line for each published model of ours that has point state."""
    for path in sorted((ROOT / "examples" / "configs").glob("*.json")):
        spec = build_spec(read_config(path))
        geometry = Geometry.of(spec)
        points = [s for s in spec.states if s.coverage is Coverage.POINT and s.boundary_bytes]
        if not points:
            continue
        point, each = geometry.point_bytes, geometry.bytes_per_token
        is_plain = path.stem not in WHOLE_PAGES and {s.role for s in points} == {Role.SWA}
        row_bytes = sum(state.entry.payload_bytes for state in points) if is_plain else 0
        turn_end = point + LEAD_TOKENS * row_bytes if is_plain else point
        cost = PointCost(point, each, has_lead=is_plain)
        first, even = (
            cost.first_chunk_end(BOUNDARY_TOKENS),
            cost.spacing_tokens(BOUNDARY_TOKENS),
        )
        share = f"{100 * point / (first * each):.0f} %" if first else "-"
        instead = f"a point {LEAD_TOKENS} before" if cost.stands_in_for_lead else "no lead"
        cells = (
            path.stem,
            format_bytes(round(each)) if each else "-",
            format_bytes(point),
            format_bytes(turn_end) if is_plain else instead,
            (f"{first:,}" if even else f"{first:,}, growing") if first else "none",
            share,
        )
        yield f"| {' | '.join(cells)} |"


def table() -> str:
    return "\n".join((HEAD, *rows()))


def test_the_table_of_points_is_what_the_registry_gives() -> None:
    docs = (ROOT / "docs" / "vllm.md").read_text()
    assert table() in docs, "print it with python -m tests.docs.test_point_sizes"


if __name__ == "__main__":
    print(table())
