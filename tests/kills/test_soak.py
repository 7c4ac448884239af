"""A minute of soak over real processes, and that a soak notices what leaks or is wrong.

Hours: `make soak MINUTES=180`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.soak import soak as soaking
from tests.support.soak.sizes import SLACK, Place, Sizes, disk_bytes, grown, of_process

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

SOAKED_S = 60.0
AT = Place("w0", "descriptors")


def series(*sizes: float) -> list[Sizes]:
    return [{AT: size} for size in sizes]


def test_under_faults_no_answer_is_wrong_and_nothing_grows(tmp_path: Path) -> None:
    told: list[str] = []
    soaked = soaking.soak(tmp_path, SOAKED_S, seed=1, tell=told.append)
    assert soaked.failures == []
    assert soaked.turns["answered"] >= soaked.faults.total() >= 6
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
