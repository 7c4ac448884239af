"""The demo's tables: counts of all policies first, then times with their spread, and a warning."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from ownerserve.report.demo_machine import BUSY_LOAD, BUSY_SHARE, MachineLoad
from ownerserve.report.demo_table import (
    COUNTS_NOTE,
    counts_table,
    detail_table,
    engines_table,
    spanned,
    times_note,
    times_of,
    times_table,
)
from tests.support.report.demo_results import RESULT, changed, took

QUIET = MachineLoad(cores=2, load_average=0.4, others_cpu_shares=(0.01, 0.02, 0.0))
LOADED = MachineLoad(cores=2, load_average=10.5, others_cpu_shares=(0.02, 0.63, 0.2))


def printed(table: Table | str, *, width: int = 80) -> list[str]:
    console = Console(file=(file := io.StringIO()), width=width)
    console.print(table, highlight=False)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def row(lines: list[str], name: str) -> list[str]:
    (found,) = [line.split() for line in lines if line.startswith(name + " ")]
    return found[1:]


def test_counts_of_all_policies_stand_in_eighty_columns_without_a_clock() -> None:
    alike = changed(
        requests=1_234, prompt_tokens=1_234_567, computed_tokens=999_999,
        cached_token_share=1.0, peer_bytes=999 << 20, moves=999,
        sources={"device": 1_234_567} | dict.fromkeys(("host", "peer", "remote_prefill"), 999_999),
        modes={"remote_prefill": 999},
    )  # fmt: skip
    runs = {"round_robin": [alike, alike], "ownerserve": [alike, alike]}
    lines = printed(counts_table(runs, equal={"round_robin": "-", "ownerserve": "yes"}))
    assert lines[0] == "What each policy did with 1,234 requests, 1,234,567 prompt tokens"
    assert row(lines, "ownerserve") == [
        *("999,999", "100.0%", "100.0%", "81.0%", "81.0%", "81.0%"),
        *("999", "MiB", "999", "999", "yes"),
    ]  # fmt: skip
    assert max(map(len, lines)) <= 80
    assert len(lines) == 6, "no cell is broken"
    narrow = counts_table(runs, equal={"round_robin": "-", "ownerserve": "yes"})
    assert "…" not in "".join(printed(narrow, width=60)), "no digit is ever left out"
    assert not any(unit in " ".join(lines) for unit in (" ms", " s "))


def test_each_count_has_its_column_and_the_note_says_what_it_is() -> None:
    one = changed(
        computed_tokens=300, cached_token_share=0.7, peer_bytes=2048, moves=5,
        sources={"device": 400, "host": 100, "peer": 50, "remote_prefill": 20},
        modes={"remote_prefill": 3, "seed": 6},
    )  # fmt: skip
    lines = printed(counts_table({"ear": [one]}, equal={"ear": "NO"}))
    figures = ["300", "70.0%", "40.0%", "10.0%", "5.0%", "2.0%", "2", "KiB", "3", "5", "NO"]
    assert row(lines, "ear") == figures
    headings = " ".join(lines[1:3]).split()
    for word in headings:
        named = word in COUNTS_NOTE or word in ("policy", "tokens", "share", "own")
        assert named, word


def test_repeats_that_differ_show_the_least_and_the_most() -> None:
    runs = [changed(moves=moves) for moves in (4, 2, 9)]
    lines = printed(counts_table({"ear": runs}, equal={"ear": "yes"}))
    assert row(lines, "ear")[-2] == "2"
    assert lines[-1].split() == ["9"]


def test_runs_that_lost_turns_show_in_the_title() -> None:
    runs = {"ear": [RESULT, changed(prompt_tokens=900)]}
    title = printed(counts_table(runs, equal={"ear": "NO"}))[0]
    assert title == "What each policy did with 9 requests, 900 to 1,000 prompt tokens"


def test_times_are_medians_with_their_spread_and_ratios_come_last() -> None:
    runs = {
        "round_robin": [took(400), took(600)],
        "ownerserve": [took(100), took(150)],
    }
    lines = printed(times_table(runs, reference="round_robin", machine=QUIET))
    assert max(map(len, lines)) <= 80
    assert row(lines, "ownerserve") == ["125", "250", "250.0", "0.12", "1.00", "0.25"]
    spread = lines[-1].split()
    assert spread == ["100-150", "200-300", "200.0-300.0", "0.10-0.15", "0.17-0.38"]
    assert row(lines, "round_robin")[-1] == "-", "it is what the others are compared with"
    assert "Medians of 2 repeats" in times_note(runs)


def test_the_median_of_repeats_is_not_moved_by_one_that_was_disturbed() -> None:
    times = times_of([took(100), took(110), took(5000)])
    assert times.ttft_p50_ms == spanned([110, 100, 5000])
    assert (times.ttft_p50_ms.median, times.ttft_p50_ms.most) == (110, 5000)


def test_one_run_each_has_no_spread_and_says_so() -> None:
    runs = {"sticky": [took(10)], "ear": [took(20)]}
    lines = printed(times_table(runs, reference="sticky", machine=QUIET))
    assert row(lines, "ear")[-1] == "2.00"
    assert "how far chance alone goes is not known" in times_note(runs)


def test_nothing_is_compared_with_a_policy_of_which_no_turn_was_answered() -> None:
    runs = {"sticky": [took(0)], "ear": [took(20)]}
    lines = printed(times_table(runs, reference="sticky", machine=QUIET))
    assert row(lines, "ear")[-1] == "-"


def test_a_quiet_machine_gets_no_warning_and_its_ratios_no_mark() -> None:
    assert QUIET.warning is None
    at_the_limit = MachineLoad(4, 4 * BUSY_LOAD, (BUSY_SHARE, None))
    assert at_the_limit.warning is None
    runs = {"sticky": [took(10)], "ear": [took(20)]}
    assert "?" not in "\n".join(printed(times_table(runs, reference="sticky", machine=QUIET)))


def test_a_loaded_machine_is_told_of_in_plain_words_and_its_ratios_are_marked() -> None:
    warning = LOADED.warning
    assert warning is not None
    assert "10.5 processes wanted its 2 cores when the demo began" in warning
    assert "in 2 of 3 runs others took more than 10% of its CPU, up to 63%" in warning
    assert "not to be trusted" in warning
    runs = {"sticky": [took(10)], "ear": [took(20)]}
    lines = printed(times_table(runs, reference="sticky", machine=LOADED))
    assert row(lines, "ear")[-2:] == ["2.00", "?"]


def test_each_of_the_two_readings_warns_alone() -> None:
    at_first = MachineLoad(2, 3.0, (0.0, 0.0)).warning
    assert at_first is not None and "in 2 of" not in at_first
    later = MachineLoad(2, 0.1, (0.0, 0.5)).warning
    assert later is not None and "in 1 of 2 runs" in later and "load average" not in later


def test_a_system_that_says_nothing_gets_no_warning() -> None:
    assert MachineLoad(2, None, (None, None)).warning is None
    assert MachineLoad(2, None).warning is None


def test_the_long_tables_have_times_for_engines_alone() -> None:
    details = "\n".join(printed(detail_table("First", {"ear": took(20)})))
    assert "TTFT" not in details and "tokens computed" in details
    engines = "\n".join(printed(engines_table({"vllm": took(20), "ownerserve": took(10)})))
    assert "TTFT p50 / p90" in engines and "requests" in engines
