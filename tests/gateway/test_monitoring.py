"""The alert rules and the dashboard in examples/monitoring: they parse, and ask for nothing that no
process tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.children import ROOT
from tests.support.gateway.metric_names import TABLE

FOLDER = ROOT / "examples" / "monitoring"
ALERTS = (FOLDER / "alerts.yaml").read_text()
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
ROW = re.compile(r"^\| `(ownerserve\w+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)
OTHERS = {"instance", "le"}
"""Labels that Prometheus gives."""
UNITS = {"s", "bytes", "Bps", "reqps", "short", "percentunit"}


def known() -> dict[str, set[str]]:
    """All names in docs/metrics.md as they may be asked for, with their labels."""
    names: dict[str, set[str]] = {}
    for name, kind, labels in ROW.findall(TABLE.read_text()):
        own = {label.strip() for label in labels.split(",")} - {""} | OTHERS
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + end: own for end in ends}
    return names


def alerts() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(ALERTS)["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def check(expression: str) -> None:
    """A query's brackets close, and its names and labels are known."""
    names = known()
    asked = re.findall(r"\bownerserve\w+", expression)
    assert asked and set(asked) <= set(names), set(asked) - set(names)
    labels = set().union(*(names[name] for name in asked))
    matched = re.findall(r"(\w+)\s*=~?\s*\"", expression)
    grouped = [
        one.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for one in by.split(",")
    ]
    assert {*matched, *grouped} <= labels, expression
    for name in asked:
        is_rate = re.search(rf"rate\(\s*{name}\b", expression) is not None
        assert is_rate == name.endswith(("_total", "_bucket")), f"{name}: a counter is for rates"
    plain = re.sub(r'"[^"]*"', "", expression)
    for begin, end in ("()", "[]", "{}"):
        assert plain.count(begin) == plain.count(end), expression


def test_alerts_ask_for_what_is_told_and_say_what_to_do() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        check(rule["expr"])
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        text = rule["annotations"]["summary"]
        for label in re.findall(r"\$labels\.(\w+)", text):
            assert label == "instance" or label in rule["expr"] or "worker_up" in rule["expr"]


def test_each_service_level_names_alerts_that_there_are_and_each_alert_watches_one() -> None:
    page = (ROOT / "docs" / "service-levels.md").read_text()
    assert set(re.findall(r"`(OwnerServe\w+)`", page)) == {rule["alert"] for rule in alerts()}
    names = known()
    for asked in re.findall(r"\bownerserve_gateway\w+", page):
        assert any(name.startswith(asked) for name in names), asked


def test_the_dashboard_asks_for_what_is_told_in_units_that_fit() -> None:
    for query in queries():
        check(query)
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] == "row":
            continue
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS
        asked = {
            name
            for target in panel["targets"]
            for name in re.findall(r"ownerserve\w+", target["expr"])
        }
        is_time = any("_seconds" in name for name in asked)
        assert is_time == (unit == "s"), panel["title"]
        assert any("_bytes" in name for name in asked) == (unit in ("bytes", "Bps"))


def test_rows_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
