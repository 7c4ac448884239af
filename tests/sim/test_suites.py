"""The evaluation's frame on tiny traces, and its verdicts on made-up results."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ownerserve.cli.simulation.evaluate import command
from ownerserve.kv.errors import InvalidInput
from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.page import Verdict
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.pool import run_tasks
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.suites import goal
from ownerserve.sim.suites.base import (
    Drawing,
    Experiment,
    Finding,
    Job,
    Measurement,
    Origin,
    Results,
    ResultTable,
    Scale,
    Simulation,
    at,
    known,
)
from ownerserve.sim.suites.draws import compared, more
from ownerserve.sim.suites.fleet import SESSIONS, agents
from ownerserve.sim.suites.publish import publish
from ownerserve.sim.suites.registry import SUITES, chosen, experiments
from ownerserve.sim.suites.run import run_work, traces_of, work_of
from ownerserve.sim.suites.seed_002 import baselines, coupling, pillars, trace
from ownerserve.sim.suites.traces import ROLES, find, held_out
from ownerserve.sim.workload import Sample, WorkloadShape
from ownerserve.sim.workload.cast import cast
from ownerserve.trace.model import Trace
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options

ORIGINS = {"claude_code": Origin("coding-agent", 8, 100, is_generated=True)}


# -- a suite of one's own ------------------------------------------------------------------------


def turns(result: Result) -> int:
    return len(result.rows)


def sessions(trace: Trace | None) -> int:
    assert trace is not None
    return len(trace.sessions)


def broken(trace: Trace | None) -> int:
    raise ValueError("no such luck")


def _jobs(scale: Scale) -> dict[str, Job]:
    setup = agents("sticky", scale)
    return {
        "metrics": Simulation("claude_code", setup),
        "turns": Simulation("claude_code", setup, turns),
        "sessions": Measurement(sessions, "claude_code"),
    }


def _verdicts(results: Results) -> list[Finding]:
    share = known(results["metrics"], "cached_token_share")
    holds = Verdict.HOLDS if share > 0.5 else Verdict.FAILS
    return [Finding("Agents re-use", "seed 000 §1", holds, f"{share:.1%}")]


def _tables(results: Results) -> list[ResultTable]:
    return [
        ResultTable("t", "Turns", ["", "turns"], [["sticky", results["turns"]], ["none", None]])
    ]


def _figures(results: Results) -> list[Drawing]:
    values = {"sticky": float(results["turns"])}
    return [Drawing("f", panels, Panels("t", [Panel("turns", "", values)]), "Turns.")]


GOOD = Experiment(
    name="good",
    title="Good",
    source="seed 000 §1",
    about="A test.",
    jobs=_jobs,
    verdicts=_verdicts,
    tables=_tables,
    figures=_figures,
)


def _raises(results: Results) -> list[Finding]:
    raise LookupError("the run tells no luck")


def _bad_jobs(scale: Scale) -> dict[str, Job]:
    return {"b": Measurement(broken, "claude_code"), **_jobs(scale)}


BAD_JOB = Experiment(name="bad-job", title="Bad job", source="", about="", jobs=_bad_jobs)
BAD_END = Experiment(
    name="bad-end", title="Bad end", source="", about="", jobs=_jobs, verdicts=_raises
)


def _evaluate(which: list[Experiment], out: Path, processes: int = 1) -> Any:
    work = work_of(which, Scale.QUICK)
    traces = traces_of(work, None)
    told: list[float] = []
    concluded = run_work(
        work, traces, runner=partial(run_tasks, processes=processes), progress=told.append
    )
    origins = {role: origin for role, (_, origin) in traces.items()}
    report = publish(concluded, out, origins=origins, command="ownerserve evaluate --quick")
    return work, report, sum(told)


def test_equal_runs_are_simulated_once_and_everything_is_written(tmp_path: Path) -> None:
    work, report, told = _evaluate([GOOD, BAD_JOB, BAD_END], tmp_path)
    assert len(work.runs) == 1 and len(work.measurements) == 2
    assert told == pytest.approx(2, abs=0.01)  # the one that raised told nothing
    claim = report.claims[0]
    assert claim.verdict is Verdict.HOLDS
    assert claim.trace == "claude_code, generated; one draw"
    assert claim.command.endswith("--only good")
    for name in (
        "report.html",
        "verdicts.json",
        "verdicts.md",
        "tables/t.csv",
        "tables/t.json",
        "figures/f.png",
        "figures/f.svg",
        "figures/f.json",
        "results/good.json",
    ):
        assert (tmp_path / name).stat().st_size > 0
    assert (tmp_path / "tables/t.csv").read_text().splitlines()[0] == ",turns"


@pytest.mark.slow
def test_one_that_fails_is_a_line_and_the_others_stand(tmp_path: Path) -> None:
    _, report, _ = _evaluate([BAD_JOB, GOOD, BAD_END], tmp_path)
    assert {one.name: one.error for one in report.failures} == {
        "bad-job": "b: ValueError: no such luck",
        "bad-end": "LookupError: the run tells no luck",
    }
    assert len(report.claims) == 1
    page = (tmp_path / "report.html").read_text()
    assert "no such luck" in page and "Agents re-use" in page


@pytest.mark.slow
def test_the_same_again_is_the_same_bytes(tmp_path: Path) -> None:
    _, one, _ = _evaluate([GOOD], tmp_path / "one", processes=1)
    _, two, _ = _evaluate([GOOD], tmp_path / "two", processes=2)
    assert one.digest == two.digest
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert len(files) >= 9
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()


def test_tasks_that_are_closed_end_their_processes() -> None:
    def endless(told: Any) -> None:
        while True:
            told(0, 1)

    ends = run_tasks({"quick": lambda told: 7, "endless": endless}, processes=2)
    assert next(ends).answer == 7
    ends.close()  # would not return while `endless` runs


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="--only"):
        chosen("seeds", ("nothing",))
    with pytest.raises(InvalidInput, match="--suite"):
        chosen("all")
    with pytest.raises(InvalidInput, match="trace"):
        find("nothing", None, Scale.QUICK)


def test_experiments_have_names_of_their_own_and_known_traces() -> None:
    every = experiments()
    assert len({one.name for one in every}) == len({one.title for one in every}) == len(every)
    for scale in Scale:
        for one in every:
            assert {job.trace for job in one.jobs(scale).values() if job.trace} <= set(ROLES)


def test_a_shared_trace_is_named_and_a_stand_in_says_so(tmp_path: Path) -> None:
    _, made = find("miniswe", tmp_path, Scale.FULL)
    assert made.is_generated and str(made) == "miniswe, generated"


@pytest.mark.slow
def test_every_experiment_of_a_suite_runs_to_its_end(tmp_path: Path) -> None:
    verdicts = {"seeds": 20, "together": 3}
    for suite in SUITES:
        target = tmp_path / f"{suite}.json"
        given = ["--suite", suite, "--quick", "--out", str(tmp_path / suite), "--json", str(target)]
        outcome = CliRunner().invoke(command, given)
        assert outcome.exit_code == 0, outcome.output
        body = json.loads(target.read_bytes())
        assert set(body["experiments"]) == {one.name for one in chosen(suite)}
        assert all(told["error"] is None for told in body["experiments"].values())
        assert len(body["verdicts"]) >= verdicts[suite]
    assert {one.name for suite in SUITES for one in chosen(suite)} == {
        one.name for one in experiments()
    }


@pytest.mark.slow
def test_the_command_lists_and_runs_one(tmp_path: Path) -> None:
    listed = CliRunner().invoke(command, ["--list"])
    assert "002-f6" in listed.output and "goal" in listed.output
    given = ["--quick", "--only", "002-f5", "--out", str(tmp_path)]
    outcome = CliRunner().invoke(command, given)
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "figures" / "002-f5-architecture.svg").exists()


# -- verdicts on made-up results -----------------------------------------------------------------


def _goal(work: dict[str, list[float]], p95: dict[str, list[float]]) -> Results:
    """Everybody like "other" but who is named; a number for each draw, at every load."""
    kept = {}
    for label in goal.EXPERIMENTS[0].jobs(Scale.FULL):
        policy = label.split(" on ")[0]
        draw = int(label.rsplit(" ", 1)[1]) - 1
        kept[label] = {
            "tasks_per_gpu_hour": work.get(policy, work["other"])[draw],
            "turn_p95_s": p95.get(policy, p95["other"])[draw],
            "first_turn_mean_s": 20.0,
            "avoidable_duplicate_share": 0.01,
            "network_kv_bytes": 250.0 if policy == "static_pd_delta" else 100.0,
        }
    return Results(kept, ORIGINS)


OTHERS = [4.0, 3.0, 8.0, 5.0]
P95_S = {"other": [40.0, 90.0, 20.0, 60.0]}


def _goal_verdicts(results: Results) -> dict[str, Finding]:
    return {finding.claim: finding for finding in goal.EXPERIMENTS[0].verdicts(results)}


AS_MUCH = "OwnerServe does as much work as the best rival, both without seats"
MORE = "OwnerServe does more work than EAR"


def test_a_lead_holds_where_every_draw_shows_it_and_not_where_one_does() -> None:
    ahead = _goal({"other": OTHERS, "ownerserve": [4.4, 3.3, 8.9, 5.5]}, P95_S)
    assert _goal_verdicts(ahead)[MORE].verdict is Verdict.HOLDS
    by_luck = _goal({"other": OTHERS, "ownerserve": [8.0, 2.9, 7.9, 5.1]}, P95_S)
    assert _goal_verdicts(by_luck)[MORE].verdict is Verdict.NOT_SHOWN
    behind = _goal({"other": OTHERS, "ownerserve": [3.6, 2.7, 7.1, 4.5]}, P95_S)
    told = _goal_verdicts(behind)
    assert told[MORE].verdict is told[AS_MUCH].verdict is Verdict.FAILS
    assert told[MORE].draws == 3  # of the generated sessions


def test_a_latency_is_compared_so_that_less_is_better() -> None:
    slow = _goal({"other": OTHERS}, {**P95_S, "ownerserve": [80.0, 170.0, 41.0, 122.0]})
    claim = "OwnerServe's turn p95 is lower than EAR's"
    assert _goal_verdicts(slow)[claim].verdict is Verdict.FAILS
    fast = _goal({"other": OTHERS}, {**P95_S, "ownerserve": [20.0, 44.0, 11.0, 31.0]})
    assert _goal_verdicts(fast)[claim].verdict is Verdict.HOLDS


def test_an_interval_is_students_and_one_draw_has_none() -> None:
    told = compared([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert (told.ratio, told.low, told.high) == (pytest.approx(2.0),) * 3
    one = compared([2.0], [1.0])
    assert one.low == 0.0 and more(one) is Verdict.NOT_SHOWN
    spread = compared([1.1, 1.3], [1.0, 1.0])
    off = 12.706 * (math.log(1.3) - math.log(1.1)) / 2
    assert math.log(spread.high) - math.log(spread.ratio) == pytest.approx(off)


def test_the_sessions_on_which_constants_were_set_are_not_those_that_are_tested() -> None:
    whole = generate("coding-agent", Options(sessions=220, max_input_tokens=4096))
    kept = held_out(whole, 96)
    fitted = {part.source for part in cast(whole, WorkloadShape(sessions=Sample(96), seed=0))}
    assert len(fitted) == 96
    assert [one.id for one in kept.sessions] == [
        one.id for at_, one in enumerate(whole.sessions) if at_ not in fitted
    ]
    assert ROLES["held_out"].without == SESSIONS


def test_the_window_ends_with_half_of_the_turns() -> None:
    trace, _ = find("claude_code", None, Scale.QUICK)
    result = simulate(trace, agents("sticky", Scale.QUICK))
    kept = goal.while_full(result)
    assert 0 < kept["window_h"] * 3600 < result.metrics["makespan_s"]
    turns_done = kept["tasks_per_gpu_hour"] * kept["window_h"] * 2
    assert turns_done == pytest.approx(8 / 2, rel=0.05)  # half of the work of 8 sessions


def _run(**told: Any) -> dict[str, Any]:
    base = {
        "cached_token_share": 0.9,
        "interference_index": 2.0,
        "hotspot_index": 1.5,
        "migrations": {"count": 3},
        "success_rate": 0.995,
        "ttft_ms": {"p50": 100.0},
        "step_latency_ms": {"p95": 1000.0},
    }
    return {**base, **told}


def test_each_baseline_fails_in_its_own_way() -> None:
    kept = {policy: _run() for policy in baselines.POLICIES}
    kept["round_robin"] = _run(cached_token_share=0.6)
    kept["lmetric"] = _run(cached_token_share=0.85)
    kept["static_pd"] = _run(success_rate=0.6, ttft_ms={"p50": 7000.0})
    kept["sticky"] = _run(interference_index=5.0)
    kept |= {f"{policy}, calm": _run() for policy in ("static_pd", "sticky", "ear")}
    verdicts = [one.verdict for one in baselines.EXPERIMENTS[0].verdicts(Results(kept, ORIGINS))]
    assert verdicts == [
        Verdict.HOLDS,
        Verdict.IN_RANGE,
        Verdict.HOLDS,
        Verdict.HOLDS,
        Verdict.HOLDS,
    ]
    level = {label: _run() for label in kept}
    verdicts = [one.verdict for one in baselines.EXPERIMENTS[0].verdicts(Results(level, ORIGINS))]
    assert set(verdicts) == {Verdict.FAILS}


def test_a_pillar_that_changes_nothing_is_told() -> None:
    kept = {name: _run() for name in pillars.VARIANTS}
    verdicts = [one.verdict for one in pillars.EXPERIMENTS[0].verdicts(Results(kept, ORIGINS))]
    assert set(verdicts) == {Verdict.FAILS}
    kept["both (EAR)"] = _run(interference_index=1.0, step_latency_ms={"p95": 500.0})
    kept["migration only"] = _run(cached_token_share=0.5)
    verdicts = [one.verdict for one in pillars.EXPERIMENTS[0].verdicts(Results(kept, ORIGINS))]
    assert set(verdicts) == {Verdict.HOLDS}


def test_points_on_the_law_hold_and_points_off_it_do_not() -> None:
    def results(factor: float) -> Results:
        kept = {}
        for tools in (0.0, 1.0):
            for rate in coupling.RATES_PER_H:
                kept[coupling.run_label("alone", rate, tools)] = {"turn_s": 1.0, "gain": 0.0}
                for policy in coupling.POLICIES:
                    own = {"turn_s": factor * 2.0, "gain": 0.5}
                    kept[coupling.run_label(policy, rate, tools)] = own
        return Results(kept, ORIGINS)

    [law] = [one for one in coupling.EXPERIMENTS if one.name == "002-f8"]
    assert law.verdicts(results(1.1))[0].verdict is Verdict.HOLDS
    assert law.verdicts(results(4.0))[0].verdict is Verdict.FAILS


def test_spans_of_a_session_never_overlap() -> None:
    spans = trace.spans_of([[0.0, 2.0], [1.0, 3.0], [5.0, 6.0]], "tool")
    assert [(span.kind, span.from_s, span.until_s) for span in spans] == [
        ("turn", 0.0, 2.0),
        ("turn", 2.0, 3.0),
        ("tool", 3.0, 5.0),
        ("turn", 5.0, 6.0),
    ]


def test_a_number_that_is_not_told_is_none_or_an_error() -> None:
    assert at({"a": {"b": 1}}, "a.b") == 1
    assert at({"a": None}, "a.b") is None
    with pytest.raises(LookupError, match="tells no"):
        known({"a": None}, "a")


def test_a_signal_to_end_ends_the_whole_evaluation_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the run under way alone, as one that has failed."""
    begun: list[str] = []

    def hit(trace: Trace, setup: SimSetup, *_: object) -> None:
        begun.append(setup.policy)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            time.sleep(0.001)

    monkeypatch.setattr("ownerserve.sim.suites.run.simulate", hit)
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(
            command,
            ["--quick", "--only", "goal", "--jobs", "1", "--out", str(tmp_path)],
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 1 and len(begun) == 1
