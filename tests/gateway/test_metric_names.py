"""docs/metrics.md has the one table of Prometheus names; no name is two things in two processes,
and units are seconds and bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.node.transfers.counting import COUNTED
from tests.support.gateway.metric_names import TABLE, Family, defined, exposed, told
from tests.support.gateway.world import World

HEADINGS = {"gateway": "The gateway", "worker": "A worker of ours", "vllm": "A vLLM worker"}
TOLD_AT_TIMES = {
    ("ownerserve_gateway_directory_answers_total", "counter", "answer"),  # with --directory
    ("ownerserve_gateway_process_life", "gauge", "process"),  # with --processes
    ("ownerserve_gateway_requests_placed_total", "counter", "at"),
}
NO_UNIT = re.compile(r"_(ms|us|ns|minutes|hours|kb|kib|mb|mib|gb|gib|percent)(_|$)")


@pytest.fixture
def families(play: Callable[..., None]) -> list[Family]:
    found: list[Family] = []

    async def scenario(world: World) -> None:
        found.extend(told(GatewayCollector(world.gateway), "gateway"))

    play(scenario, engines=1)
    return [*found, *defined("worker"), *defined("vllm")]


def test_the_table_has_each_name_with_its_type_and_labels(families: list[Family]) -> None:
    text = TABLE.read_text()
    for process, heading in HEADINGS.items():
        part = text.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
        said = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", part, re.MULTILINE)
        listed = {(name, kind, labels.strip()) for name, kind, labels in said}
        listed -= TOLD_AT_TIMES
        mine = [family for family in families if family.process == process]
        assert {(one.name, one.kind, ", ".join(one.labels)) for one in mine} == listed


def test_no_name_is_two_things(families: list[Family]) -> None:
    """What both kinds of workers count alike is one thing, and each of them has it once."""
    names = Counter((family.process, family.name) for family in families)
    assert not [name for name, times in names.items() if times > 1]
    things = {(one.name, one.kind, one.labels, one.text) for one in families}
    assert len(things) == len({name for _, name in names}) > 80
    shared = Counter(name for _, name in names)
    alike = {exposed(one.name, "counter") for one in COUNTED}
    assert {name for name, times in shared.items() if times > 1} == alike


def test_times_are_in_seconds_and_sizes_in_bytes(families: list[Family]) -> None:
    for family in families:
        assert not NO_UNIT.search(family.name), family
        assert re.fullmatch(r"ownerserve(_[a-z]+)+", family.name), family
        assert family.text, family
        if family.kind == "histogram":
            assert family.name.endswith(("_seconds", "_tokens", "_turns")), family
