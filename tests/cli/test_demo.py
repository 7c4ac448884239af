"""The demo as a user runs it: real processes, JSON, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ownerserve.kv.listening import LISTENERS, LOOPBACK
from tests.support.net import Listening, listening
from tests.support.waits import until

pytestmark = pytest.mark.engine

SMALL = ["--sessions", "3", "--turns", "4", "--context", "700", "--time-scale", "0.001"]

BEGIN_S = 300.0
"""Processes that import torch begin in seconds; beside many others at work, in minutes."""


def demo(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "ownerserve.cli.main", "demo", *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def children_of(pid: int) -> set[int]:
    return {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_policies_agree_and_staying_re_uses_more(tmp_path: Path) -> None:
    target = tmp_path / "demo.json"
    process = demo("--policy", "sticky", "--policy", "round_robin", "--json", str(target))
    seen: set[Listening] = set()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(process.communicate, timeout=600)
        while not ended.done():
            seen |= listening(process.pid)
            time.sleep(0.1)
    output, _ = ended.result()
    assert process.returncode == 0, output.decode()
    # Each policy: a directory, two workers with an RPC port each, a gateway with its admin port;
    # then the workers of the cold resume.
    assert len({(one.pid, one.port) for one in seen}) > 2 * (1 + 2 * 2 + 2), seen
    assert {one.host for one in seen} == {LOOPBACK}
    assert not {one.port for one in seen} & {listener.port for listener in LISTENERS}
    result = json.loads(target.read_bytes())
    assert result["schema"] == "ownerserve.demo/1"
    assert result["answers_equal"] is True
    assert result["comparisons"]["round_robin"]["tokens_compared"] > 0
    stays, spread = (result["policies"][name] for name in ("sticky", "round_robin"))
    for policy in (stays, spread):
        assert policy["errors"] == 0
        assert policy["requests"] == result["workload"]["requests"]
        assert sum(policy["modes"].values()) == policy["requests"]
        assert policy["ttft_ms"]["p95"] >= policy["ttft_ms"]["p50"] > 0
        assert policy["kv_bytes"]["csa_main"] > 0
        assert policy["tpot_ms"]["p90"] > 0
        assert 1 <= policy["hotspot_index"] <= 2
        assert policy["wall_clock_factor"] > 1
        assert sum(policy["reasons"].values()) >= policy["requests"]
        said = policy["directory_messages"]
        for message in ("register", "bind", "advance", "publish", "find_session"):
            assert said.get(message, 0) > 0, message
        assert 0 < policy["directory_frames"] <= sum(said.values())
        assert policy["node_requests"]["reserve"] > 0
    assert stays["cached_token_share"] > spread["cached_token_share"]
    assert stays["prefill_tokens_saved"] > spread["prefill_tokens_saved"]
    resumed = result["cold_resume"]
    assert resumed["fetched"]["mode"] == "fetch"
    assert resumed["fetched"]["cached_tokens"] > 600
    assert resumed["computed"]["cached_tokens"] == 0
    pairs = zip(resumed["fetched"]["logprobs"], resumed["computed"]["logprobs"], strict=True)
    assert all(abs(one - other) <= 1e-4 for one, other in pairs)


def test_prompts_are_computed_apart_and_the_answers_are_the_same(tmp_path: Path) -> None:
    """By whom in truth is the workers' to say: on a busy machine who computes for others is late,
    and whoever is to answer computes."""
    target = tmp_path / "demo.json"
    chosen = ("sticky", "static_pd", "pd_hybrid")
    process = demo(*(word for name in chosen for word in ("--policy", name)), "--json", str(target))
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output.decode()
    result = json.loads(target.read_bytes())
    assert result["answers_equal"] is True
    for name in chosen[1:]:
        policy = result["policies"][name]
        assert policy["errors"] == 0
        assert list(policy["requests_by_worker"].values()) == [policy["requests"]], "one decodes"
        assert sum(policy["modes"].values()) == policy["requests"]
        assert 1 <= policy["hotspot_index"] <= 2
    assert result["policies"]["static_pd"]["reasons"]["split"] == policy["requests"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_stopped_it_leaves_no_process(number: signal.Signals) -> None:
    process = demo()
    workers: set[int] = set()

    def has_workers() -> bool:
        assert process.poll() is None
        workers.update(children_of(process.pid))
        return len(workers) >= 2

    until(has_workers, within_s=BEGIN_S)
    process.send_signal(number)
    output, _ = process.communicate(timeout=BEGIN_S)
    assert process.returncode == (-number if number is signal.SIGKILL else 130), output.decode()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), within_s=BEGIN_S)


def test_a_file_that_is_no_trace_gets_one_clear_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no json\n")
    process = demo("--trace", str(broken))
    output, _ = process.communicate(timeout=BEGIN_S)
    assert process.returncode == 2
    [line] = output.decode().splitlines()
    assert line.startswith("error: ")
