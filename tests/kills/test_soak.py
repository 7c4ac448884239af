"""A short soak over real processes, and that a soak notices what leaks or is wrong.

Ten minutes in .ci/run, beside the other tests; hours: `make soak MINUTES=180`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.children import ROOT, importing
from tests.support.soak import soak as soaking
from tests.support.soak.sizes import FEWEST, SLACK, Place, Sizes, disk_bytes, grown, of_process
from tests.support.waits import WAIT_S, until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

SOAKED_S = 20.0
AT = Place("w0", "descriptors")


def series(*sizes: float) -> list[Sizes]:
    return [{AT: size} for size in sizes]


def test_under_faults_no_answer_is_wrong_and_nothing_grows(tmp_path: Path) -> None:
    told: list[str] = []
    soaked = soaking.soak(tmp_path, SOAKED_S, seed=1, tell=told.append)
    assert soaked.failures == []
    assert soaked.turns["answered"] >= soaked.faults.total() >= FEWEST
    assert len(told) == soaked.faults.total()
    sizes = soaked.as_json(1)["sizes"]
    for seen in ("w0.rss_bytes", "gateway.threads", "w1.disk_bytes", "directory.descriptors"):
        assert sizes[seen]["last"] > 0, seen


def test_a_wrong_answer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with an oracle that is itself wrong."""

    class Wrong(soaking.Cold):
        def answer(self, prompt: list[int]) -> list[int]:
            return [1 + token for token in super().answer(prompt)]

    monkeypatch.setattr(soaking, "Cold", Wrong)
    soaked = soaking.soak(tmp_path, 1.0, seed=1, tell=lambda _line: None)
    assert any("and right is" in failure for failure in soaked.failures)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    mark = uuid4().hex
    told = importing(OWNERSERVE_SOAK_MARK=mark, TMPDIR=str(tmp_path))
    command = [sys.executable, str(ROOT / "tools" / "soak.py"), "--minutes", "10"]
    with (tmp_path / "said").open("w") as said:
        soak = subprocess.Popen(command, stderr=said, env=told)
    try:
        until(lambda: "turns" in (tmp_path / "said").read_text(), within_s=300, what="a fault")
        assert len(marked(mark)) >= 6, "the tool, a directory, two workers, a gateway, the oracle"
    finally:
        soak.send_signal(number)
        soak.wait(4 * WAIT_S)
    until(lambda: not marked(mark), what="all processes to end")


def marked(mark: str) -> list[int]:
    """The processes that have `mark` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # ended meanwhile, or another's
            continue
    return found


def test_what_grows_is_named_and_what_swings_is_flat() -> None:
    slack = SLACK["descriptors"]
    (leak,) = grown(series(*(20 + slack / 6 * n for n in range(12))))
    assert str(leak).startswith("w0's descriptors grew from ")
    assert not grown(series(*(20 + slack * (n % 2) for n in range(12))))
    assert not grown(series(20, 20, 20, 400, 20, 20)), "once, in the middle"


def test_a_run_too_short_to_say_anything_fails() -> None:
    assert soaking.trend(series(1, 1)) == ["2 samples say nothing of a trend: at least 6"]


def test_sizes_are_those_of_the_process_and_of_the_disk(tmp_path: Path) -> None:
    before = of_process(os.getpid())
    held = [(tmp_path / f"f{n}").open("wb") for n in range(10)]
    assert of_process(os.getpid())["descriptors"] == before["descriptors"] + 10
    held[0].write(b"x" * 100_000)
    held[1].truncate(10_000_000)  # a hole
    for file in held:
        file.close()
    assert 100_000 <= disk_bytes(tmp_path) < 200_000


def test_a_store_that_does_not_verify_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "w0").mkdir()
    (tmp_path / "w0" / "STORE").write_bytes(b"no store")
    assert soaking.unsound(tmp_path / "w0")
