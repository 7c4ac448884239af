"""Every figure is drawn from plain data, is a valid file, and is the same file when drawn again."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import numpy as np
import pytest
from PIL import Image

from ownerserve.report.figures.amplification import Amplification, amplification
from ownerserve.report.figures.grids import HeatMap, Split, SplitMatrix, heat_map, split_matrix
from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.figures.state import StateBreakdown, state_breakdown
from ownerserve.report.figures.style import CYCLE, VERMILLION, Written, looks, write
from ownerserve.report.figures.sweeps import Sweep, Sweeps, sweeps
from tests.support.children import importing
from tests.support.report.figure_examples import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_files_are_valid_and_tell_their_data(name: str, written: Callable[[str], Written]) -> None:
    files = written(name)
    with Image.open(files.png) as image:
        assert image.width >= 1_000
        ink = np.asarray(image.convert("L")) < 250
        assert ink.any(axis=1).sum() > 100  # not an empty page
        assert not ink[[0, -1]].any()
        assert not ink[:, [0, -1]].any()  # nothing is cut off at an edge
    assert ET.parse(files.svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    told = json.loads(files.data.read_text())
    assert told == {"figure": name, "data": json.loads(msgspec.json.encode(EXAMPLES[name][1]))}


def test_a_second_run_writes_the_same_bytes(
    tmp_path: Path, written: Callable[[str], Written]
) -> None:
    """In a process of its own: with another hash seed and another matplotlibrc."""
    names = ("f02_reuse", "f10_heat")
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: pink\nfont.size: 30\n")
    path = importing()["PYTHONPATH"]
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.support.report.figure_examples import EXAMPLES\n"
        "from ownerserve.report.figures.style import write\n"
        "for name in sys.argv[1:]: write(name, *EXAMPLES[name], Path('again'))\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, *names],
        check=True,
        cwd=tmp_path,
        env={"PYTHONHASHSEED": "7", "HOME": str(Path.home()), "PATH": "", "PYTHONPATH": path},
    )
    for name in names:
        first = written(name)
        for path in (first.png, first.svg, first.data):
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_drawing_leaves_no_settings_behind(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    write("x", *EXAMPLES["f01_amplification"], tmp_path)
    assert dict(mpl.rcParams) == before


def test_bars_are_as_long_as_their_numbers_and_say_what_is_missing() -> None:
    figure = amplification(
        Amplification("t", {"sticky": 8.0, "static_pd": None, "ownerserve": 2.0})
    )
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [8, 0, 2]
    assert [text.get_text() for text in axes.texts] == ["8", "n/a", "2"]
    assert axes.patches[2].get_facecolor() == mpl.colors.to_rgba(VERMILLION)


def test_a_panel_reaches_its_reference() -> None:
    panel = Panel("share", "%", {"sticky": 3.0}, "higher", 9.0, "ideal")
    (axes,) = panels(Panels("t", [panel])).axes
    assert axes.get_xlim()[1] > 9
    assert axes.get_xlabel() == "%   (→ better)   dashed: ideal"


def test_a_stack_ends_at_the_sum_of_its_parts() -> None:
    data = StateBreakdown(1_000, {"small": {"a": 1 << 30}, "large": {"a": 1 << 30, "b": 2 << 30}})
    (axes,) = state_breakdown(data).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["large", "small"]
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == 3


def test_a_sweep_breaks_where_a_run_told_nothing() -> None:
    sweep = Sweep("t", "x", "y", [1, 2, 3], {"sticky": [1.0, None, 3.0]})
    (axes,) = sweeps(Sweeps("t", [sweep])).axes
    assert np.isnan(axes.lines[0].get_ydata()).tolist() == [False, True, False]


def test_split_matrix_sets_each_split_beside_the_hybrid_fleet_of_its_size() -> None:
    splits = [Split(1, 1, 5.0), Split(1, 2, None, "no room"), Split(2, 1, 12.0)]
    data = SplitMatrix("t", "tasks", "higher", splits, {2: 10.0, 3: 6.0})
    texts = [text.get_text() for text in split_matrix(data).axes[0].texts]
    assert texts == ["5\nx0.50", "fails\nno room", "12\nx2.00"]


@pytest.mark.parametrize("rows", [[], [[0.0, 0.0]]])
def test_an_idle_fleet_has_a_heat_map(rows: list[list[float]], tmp_path: Path) -> None:
    data = HeatMap("idle", [0.0, 1.0] if rows else [], rows, [])
    assert write("idle", heat_map, data, tmp_path).png.stat().st_size > 1_000


def test_lines_differ_by_more_than_colour() -> None:
    names = ["ownerserve", *(f"p{i}" for i in range(7))]
    found: list[dict[str, Any]] = list(looks(names).values())
    assert len({look["color"] for look in found}) == len(CYCLE) == 8
    assert len({look["marker"] for look in found}) == 8
    assert looks(["sticky", "ownerserve"])["ownerserve"] == found[0]
