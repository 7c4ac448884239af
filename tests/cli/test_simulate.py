"""`ownerserve simulate` as people and programs use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ownerserve.cli.main import main
from ownerserve.sim.metrics.summary import digest
from ownerserve.trace.write import write_trace
from tests.support.sim.fleet_driver import all_back_at_once

RUN = (sys.executable, "-m", "ownerserve.cli.main", "simulate")
PD = "static_pd_delta,round_robin_pd"
SMALL = ("--sessions", "4", "--workers", "2", "--mode", "capped:4", "--policy", "ear,least_load")
AGAIN = (*SMALL[:-1], "ear", "--policy", "least_load, ear", "--jobs", "1")


def simulate(*given: str) -> subprocess.CompletedProcess[str]:
    """A process of its own; 80 columns, as into a pipe."""
    env = {**os.environ, "COLUMNS": "80"}
    return subprocess.run((*RUN, *given), capture_output=True, text=True, env=env, timeout=120)


def inside(monkeypatch: pytest.MonkeyPatch, *given: str) -> None:
    """The same in this process, where what is said is all that matters."""
    monkeypatch.setattr(sys, "argv", ["ownerserve", "simulate", *given])
    main()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("simulate") / "out.json"
    done = simulate(*SMALL, "--json", str(path))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def test_without_a_trace_a_workload_is_made_and_the_body_has_the_keys_of_the_design(
    told: tuple[str, dict[str, Any]],
) -> None:
    _, body = told
    assert body["schema"] == "ownerserve.simulate/1"
    assert {"policies", "cpu_s", "requests_per_cpu_s", "trace", "seed", "digest"} <= set(body)
    assert list(body["policies"]) == ["ear", "least_load"]
    metrics = body["policies"]["ear"]
    for name in ("ttft_ms", "tpot_ms", "e2e_s", "cached_token_share", "network_kv_bytes", "modes"):
        assert name in metrics
    assert metrics["requests"] == body["trace"]["requests"] > 0
    assert body["requests"] == 2 * metrics["requests"]
    assert body["cpu_s"] > 0 and body["requests_per_cpu_s"] > 0 and len(body["digest"]) == 64


def nulls(value: Any, path: str) -> list[str]:
    """The paths below `path` at which nothing is said."""
    if value is None:
        return [path]
    within = value.items() if isinstance(value, dict) else ()
    return [found for name, inner in within for found in nulls(inner, f"{path}.{name}")]


def test_what_did_not_happen_is_left_out_or_counted_as_none(
    told: tuple[str, dict[str, Any]],
) -> None:
    """No SSD, no restore, no move: no null, and the counts say so."""
    _, body = told
    assert nulls(body["policies"], "policies") == []
    assert nulls(body["trace"], "trace") == []
    metrics = body["policies"]["ear"]
    assert metrics["ssd_written_bytes"] == 0 and "ssd_write_amplification" not in metrics
    assert metrics["restore"] == {"turns": 0}
    assert metrics["migrations"] == {"count": 0, "given_up": 0, "rate": 0.0, "bytes": 0}
    assert body["digest"] == digest(body["policies"]), "of what stands there"


def test_the_table_fits_80_columns_and_nothing_is_cut_off(
    told: tuple[str, dict[str, Any]],
) -> None:
    text, body = told
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "…" not in text
    assert body["digest"][:16] in text
    for name in ("ear", "least_load"):
        assert any(line.startswith(name) for line in lines)


def test_long_names_of_policies_fit_too() -> None:
    few = ("--sessions", "2", "--workers", "2")
    done = simulate(*few, "--policy", PD, "--engine-abilities", "ideal")
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout and "round_robin_" in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80


def test_the_digest_is_that_of_the_seed_and_policies_may_be_given_one_by_one(
    told: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "again.json"
    assert simulate(*AGAIN, "--json", str(path)).returncode == 0
    assert json.loads(path.read_text())["digest"] == told[1]["digest"]


def test_a_fold_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    means = []
    for fold in ("1000", "1"):
        path = tmp_path / f"{fold}.json"
        given = ("--sessions", "1", "--policy", "ear", "--jobs", "1", "--fold", fold)
        inside(monkeypatch, *given, "--json", str(path))
        metrics = json.loads(path.read_text())["policies"]["ear"]
        means.append((metrics["ttft_ms"]["mean"], metrics["tpot_ms"]["mean"]))
    assert means[0] == pytest.approx(means[1], rel=0.005)


def test_workers_that_share_a_host_wait_for_each_others_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sessions come back to four workers at once: on one host over a link of 20 GB/s their
    first tokens are late, over one of 80 as on four hosts."""
    trace = tmp_path / "back.jsonl"
    write_trace(all_back_at_once(), trace)
    fleet = ("--workers", "4", "--kv", "5GiB", "--host", "64GiB", "--mode", "open", "--seats", "0")
    base = (str(trace), *fleet, "--policy", "round_robin", "--jobs", "1")

    def p50_ms(*given: str) -> float:
        path = tmp_path / "out.json"
        inside(monkeypatch, *base, *given, "--json", str(path))
        metrics = json.loads(path.read_text())["policies"]["round_robin"]
        return float(metrics["modes"]["fetch"]["ttft_ms"]["p50"])

    apart = p50_ms("--pcie", "20")
    assert p50_ms("--pcie", "20", "--workers-per-host", "4") > 1.5 * apart
    assert p50_ms("--pcie", "80", "--workers-per-host", "4") < 1.1 * apart


def test_the_eviction_order_that_is_named_is_the_one_that_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("--sessions", "6", "--workers", "1", "--kv", "40GB", "--policy", "sticky")
    found = {}
    for order in ("lru", "pinned-slot"):
        path = tmp_path / f"{order}.json"
        inside(monkeypatch, *small, "--jobs", "1", "--evict", order, "--json", str(path))
        found[order] = json.loads(path.read_text())["policies"]["sticky"]
    assert found["lru"]["error_rate"] < found["pinned-slot"]["error_rate"], (
        "idle sessions lock the pool"
    )


def test_faults_are_performed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = simulate(*SMALL, "--faults", "death:w0@5+20,directory@3+9", "--json", str(path))
    assert done.returncode == 0, done.stderr
    for metrics in json.loads(path.read_text())["policies"].values():
        assert metrics["requests"] == json.loads(path.read_text())["trace"]["requests"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (("--policy", "best"), "--policy"),
        (("--pace", "gpt-9@h200"), "pace"),
        (("--pace", "no-such-file.json"), "no-such-file.json"),
        (("--mode", "loop"), "--mode"),
        (("--mode", "capped:0"), "lanes"),
        (("--kv", "much"), "--kv"),
        (("--kv", "1MiB"), "kv"),
        (("--workers", "0"), "workers"),
        (("--workers-per-host", "0"), "--workers-per-host"),
        (("--workers-per-host", "two"), "--workers-per-host"),
        (("--pcie", "0"), "--pcie"),
        (("--faults", "flood:w1@1+1"), "--faults"),
        (("--faults", "slow_disk:w1@1+1x2"), "disk"),
        (("--fold", "0"), "fold"),
        (("no-such-trace.jsonl",), "no-such-trace.jsonl"),
        (("--generate", "chatter"), "chatter"),
        (("--tool-scale", "-1"), "--tool-scale"),
    ],
)
def test_what_can_not_be_is_one_clear_line_and_exit_code_2(
    given: tuple[str, ...],
    names: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ("--sessions", "2", "--workers", "2", "--policy", "ear", "--jobs", "1")
    with pytest.raises(SystemExit) as left:
        inside(monkeypatch, *base, *given)
    errors = capsys.readouterr().err
    assert left.value.code == 2 and names in errors
    assert len(errors.strip().splitlines()) == 1


def test_ctrl_c_ends_all_processes_and_exits_130() -> None:
    many = ("--sessions", "400", "--policy", "ear,least_load,sticky", "--jobs", "2")
    process = subprocess.Popen(
        (*RUN, *many, "--fold", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    group = process.pid
    deadline_s = time.monotonic() + 60.0
    while members(group) < 4 and time.monotonic() < deadline_s:  # itself, the manager, two runs
        time.sleep(0.1)
    assert members(group) >= 4
    os.killpg(group, signal.SIGINT)
    _, errors = process.communicate(timeout=60.0)
    assert process.returncode == 130, errors
    assert "interrupted" in errors and "Traceback" not in errors
    assert members(group) == 0


def members(group: int) -> int:
    """Live processes of a process group."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):
                continue
            count += int(its_group) == group and state != "Z"
    return count


def test_turns_that_were_refused_are_told_with_reason_and_mend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    small = ("--sessions", "4", "--workers", "2", "--kv", "3GiB", "--policy", "least_load")
    inside(monkeypatch, *small, "--json", str(path))  # exit code 0: what was served was measured
    said, body = " ".join(capsys.readouterr().out.split()), json.loads(path.read_text())
    metrics = body["policies"]["least_load"]
    refused = f"{metrics['error_rate']:.1%} of turns refused or failed"
    assert 0 < metrics["error_rate"] < 1
    assert refused in said and f"{metrics['reasons']['too_long']:,} too_long" in said
    assert "served turns only" in said and "--kv" in said
    assert any(refused in line for line in body["warnings"])


def test_a_fleet_that_serves_nothing_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="1"):
        down = ("--workers", "1", "--faults", "death:w0@0+9000000")
        inside(monkeypatch, "--sessions", "2", "--policy", "ear", *down)


def test_a_fleet_that_serves_everything_warns_of_nothing(told: tuple[str, dict[str, Any]]) -> None:
    text, body = told
    assert body["warnings"] == [] and "refused" not in text


def test_what_engines_are_granted_is_told_and_by_default_it_is_what_real_ones_do(
    told: tuple[str, dict[str, Any]],
) -> None:
    text, body = told
    engine = body["engine_abilities"]
    assert engine["name"] == "hf" and engine["modelled_not_built"] == []
    assert "engine abilities: hf" in text and "state_migration" not in engine["actions"]


def test_what_is_modelled_and_not_yet_built_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside(monkeypatch, *SMALL[:-1], "ear", "--engine-abilities", "ideal", "--json", "-")
    body = json.loads(capsys.readouterr().out)
    assert body["engine_abilities"]["modelled_not_built"] == ["overlap=layerwise"]


def test_a_policy_that_no_such_engine_can_carry_out_names_the_mend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        inside(monkeypatch, *SMALL[:-1], "static_pd")
    assert "--engine-abilities ideal" in " ".join(capsys.readouterr().err.split())
