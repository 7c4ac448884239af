"""The Prometheus families of all processes: those of a gateway as it tells them, those of workers
read from the source that defines them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.registry import Collector

from ownerserve.node.transfers.counting import COUNTED
from tests.support.children import ROOT

SOURCES = {
    "worker": (
        ROOT / "src/ownerserve/engines/hf/metrics/prometheus.py",
        ROOT / "src/ownerserve/engines/hf/metrics/transfers.py",
    ),
    "vllm": (ROOT / "src/ownerserve/engines/vllm/stats.py",),
}
TABLE = ROOT / "docs" / "metrics.md"
CACHE = "ownerserve_cache_"


class Family(NamedTuple):
    """One name that Prometheus knows, as it is exposed."""

    process: str
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def row(self) -> str:
        """Its line in the table of docs/metrics.md."""
        return f"| `{self.name}` | {self.kind} | {', '.join(self.labels)} | {self.text} |"


def exposed(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def told(collector: Collector, process: str) -> Iterator[Family]:
    """What a collector tells now; a label is known by a family's samples."""
    for metric in collector.collect():
        labels = getattr(metric, "_labelnames", ())
        yield Family(
            process,
            exposed(metric.name, metric.type),
            metric.type,
            tuple(labels),
            metric.documentation,
        )


def defined(process: str) -> Iterator[Family]:
    """What the source of a worker's metrics defines, and what all kinds of workers count alike."""
    for metric in COUNTED:
        labels = (metric.label,) if metric.label else ()
        yield Family(process, exposed(metric.name, "counter"), "counter", labels, metric.about)
    trees = [ast.parse(source.read_text()) for source in SOURCES[process]]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call):
            yield from _called(node, process)
        elif isinstance(node, ast.For) and CACHE in ast.unparse(node):
            yield from _levels(node, process)


def _called(call: ast.Call, process: str) -> Iterator[Family]:
    given = {word.arg: word.value for word in call.keywords}
    named = call.args[0] if call.args else given.get("name")
    function = ast.unparse(call.func)
    if function == "_sums" and isinstance(named, ast.Dict):
        for key, value in zip(named.keys, named.values, strict=True):
            about = value.elts[0] if isinstance(value, ast.Tuple) else value
            yield Family(process, f"{CACHE}{_text(key)}_total", "counter", (), _text(about))
    name = _text(named)
    if not name.startswith("ownerserve_"):
        return
    about = call.args[1] if len(call.args) > 1 else given.get("documentation")
    listed = call.args[2] if len(call.args) > 2 else given.get("labels", given.get("labelnames"))
    labels = listed.elts if isinstance(listed, ast.List) else []
    kind = next(kind for kind in ("counter", "gauge", "histogram") if kind in function.lower())
    known = tuple(filter(None, map(_text, labels)))
    yield Family(process, exposed(name, kind), kind, known, _text(about))


def _levels(loop: ast.For, process: str) -> Iterator[Family]:
    rows = loop.iter.elts if isinstance(loop.iter, ast.Tuple) else []
    for row in rows:
        if isinstance(row, ast.Tuple):
            name, about = map(_text, row.elts[:2])
            yield Family(process, CACHE + name, "gauge", ("component",), about)


def _text(node: ast.expr | None) -> str:
    """A constant's text; of anything else none."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else ""


def rows(families: Iterable[Family]) -> str:
    """A table of families, in the order of their names."""
    lines = ["| name | type | labels | is |", "|---|---|---|---|"]
    return "\n".join(lines + [family.row for family in sorted(families)])
