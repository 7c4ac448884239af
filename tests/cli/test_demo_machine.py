"""How busy the demo's machine is with other work, as its system says it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ownerserve.cli.demo.machine import CpuTicks, cpu_ticks, load_average, others_share

STAT = "cpu  100 20 30 400 50 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n"


def process(proc: Path, pid: int, *, user: int, system: int, name: str = "python") -> None:
    (proc / str(pid)).mkdir()
    before, after = "S 1 1 1 0 -1 4194304 10 0 0 0", "0 0 20 0 3 0 12345"
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {before} {user} {system} {after}\n")


def test_busy_are_all_but_idle_and_waiting_and_ours_all_threads_of_ours(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(STAT)
    process(tmp_path, 7, user=40, system=2)
    process(tmp_path, 8, user=5, system=1, name="a) b (c")
    read = cpu_ticks([7, 8], proc=tmp_path)
    assert read == CpuTicks(total=621, busy=171, ours=48)


@pytest.mark.parametrize("text", [None, "", "cpu\n", "cpu a b c d e f g h\n"])
def test_a_system_that_says_nothing_of_it_is_asked_in_vain(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert cpu_ticks([], proc=tmp_path) is None


def test_a_process_that_has_ended_leaves_nothing_known(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(STAT)
    assert cpu_ticks([7], proc=tmp_path) is None
    assert others_share(None, CpuTicks(1, 1, 1)) is None
    assert others_share(CpuTicks(1, 1, 1), None) is None


def test_what_others_took_is_what_was_busy_and_not_ours() -> None:
    before = CpuTicks(total=1000, busy=500, ours=100)
    assert others_share(before, CpuTicks(total=1400, busy=800, ours=300)) == 0.25
    assert others_share(before, CpuTicks(total=1400, busy=700, ours=301)) == 0.0, "ticks are coarse"
    assert others_share(before, before) is None, "no time has passed"


def test_this_machine_says_what_it_is_asked() -> None:
    before = cpu_ticks([os.getpid()])
    ends = time.process_time() + 0.2
    while time.process_time() < ends:
        pass
    after = cpu_ticks([os.getpid()])
    share = others_share(before, after)
    assert before is not None and after is not None and share is not None
    assert after.ours - before.ours >= 10, "ticks are hundredths of a second"
    assert 0.0 <= share <= 1.0
    load = load_average()
    assert load is not None and load >= 0.0
