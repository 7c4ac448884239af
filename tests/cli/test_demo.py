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
from typing import Any

import pytest

from ownerserve.cli.demo.hot_spot import LONG_ANSWER_TOKENS
from ownerserve.kv.listening import LISTENERS, LOOPBACK
from tests.support.net import Listening, descendants, listening
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
    # Each run of each policy: a directory, two workers with an RPC port each, a gateway with its
    # admin port; then the workers of the cold resume.
    assert len({(one.pid, one.port) for one in seen}) > 2 * 2 * (1 + 2 * 2 + 2), seen
    assert {one.host for one in seen} == {LOOPBACK}
    assert not {one.port for one in seen} & {listener.port for listener in LISTENERS}
    result = json.loads(target.read_bytes())
    assert result["schema"] == "ownerserve.demo/1"
    assert result["answers_equal"] is True
    assert result["rounds"] == [["sticky", "round_robin"], ["round_robin", "sticky"]]
    # The first run's answers are what all others are compared with.
    assert list(map(len, result["comparisons"].values())) == [1, 2]
    for compared in result["comparisons"].values():
        assert all(one["tokens_compared"] > 0 for one in compared)
    stays, spread = (result["policies"][name] for name in ("sticky", "round_robin"))
    assert len(stays) == len(spread) == 2
    for run in (*stays, *spread):
        is_a_whole_run(run, requests=result["workload"]["requests"])
    for one, other in zip(stays, spread, strict=True):
        assert one["cached_token_share"] > other["cached_token_share"]
        assert one["prefill_tokens_saved"] > other["prefill_tokens_saved"]
        assert one["moves"] < other["moves"]
    ttft = result["times"]["sticky"]["ttft_p50_ms"]
    assert ttft["least"] == min(run["ttft_ms"]["p50"] for run in stays) <= ttft["median"]
    machine = result["machine"]
    assert machine["cores"] == os.cpu_count() and machine["load_average"] >= 0
    assert sorted(machine["others_cpu_shares"]) == sorted(
        run["others_cpu_share"] for run in (*stays, *spread)
    )
    assert ("WARNING" in output.decode()) == (machine["warning"] is not None)
    resumed = result["cold_resume"]
    assert resumed["fetched"]["mode"] == "fetch"
    assert resumed["fetched"]["cached_tokens"] > 600
    assert resumed["computed"]["cached_tokens"] == 0
    pairs = zip(resumed["fetched"]["logprobs"], resumed["computed"]["logprobs"], strict=True)
    assert all(abs(one - other) <= 1e-4 for one, other in pairs)


def test_a_worker_leaves_amid_an_answer_and_all_go_on_with_their_state(tmp_path: Path) -> None:
    """Whether a turn leaves for heat is the clock's to say. What is known is at hand, and the
    answers are equal."""
    target = tmp_path / "demo.json"
    process = demo("--policy", "ownerserve", "--repeats", "1", "--json", str(target))
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output.decode()
    result = json.loads(target.read_bytes())
    [spot] = result["hot_spots"]
    assert spot["policy"] == "ownerserve" and spot["errors"] == []
    assert spot["compared"]["equal"] is True and spot["compared"]["missing"] == 0
    assert spot["exit_code"] == 0, "nothing stands there any more: it does not wait for its timeout"
    assert spot["settled"] >= 1 and 0 < spot["tokens_before"] < spot["tokens"]
    assert spot["moved"], "the answer went on at another worker"
    assert spot["tokens"] == LONG_ANSWER_TOKENS, "it is whole"
    assert spot["peer_bytes"] > 0
    # A session's last 400 tokens are not brought where computing them is as good by prices.
    assert spot["cached"] > 0.7 * spot["known"], "state moved, and was not computed anew"
    assert f"told to leave after {spot['tokens_before']} of" in output.decode()


def is_a_whole_run(run: dict[str, Any], *, requests: int) -> None:
    """One run answered all and counted all."""
    assert run["errors"] == 0
    assert run["requests"] == requests
    assert sum(run["modes"].values()) == run["requests"]
    assert run["ttft_ms"]["p95"] >= run["ttft_ms"]["p50"] > 0
    assert run["kv_bytes"]["csa_main"] > 0
    assert run["tpot_ms"]["p90"] > 0
    assert 1 <= run["hotspot_index"] <= 2
    assert run["wall_clock_factor"] > 1
    assert sum(run["reasons"].values()) >= run["requests"]
    assert run["computed_tokens"] + run["prefill_tokens_saved"] == run["prompt_tokens"]
    assert run["sources"]["device"] > 0
    assert sum(run["sources"].values()) <= run["prompt_tokens"]
    assert 0 <= run["others_cpu_share"] <= 1
    said = run["directory_messages"]
    for message in ("register", "bind", "advance", "publish", "find_session"):
        assert said.get(message, 0) > 0, message
    assert 0 < run["directory_frames"] <= sum(said.values())
    assert run["node_requests"]["reserve"] > 0


def test_prompts_are_computed_apart_and_the_answers_are_the_same(tmp_path: Path) -> None:
    """By whom in truth is the workers' to say: on a busy machine who computes for others is late,
    and whoever is to answer computes."""
    target = tmp_path / "demo.json"
    chosen = ("sticky", "static_pd", "pd_hybrid")
    named = (word for name in chosen for word in ("--policy", name))
    process = demo(*named, "--repeats", "1", "--json", str(target))
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output.decode()
    result = json.loads(target.read_bytes())
    assert result["answers_equal"] is True
    for name in chosen[1:]:
        [policy] = result["policies"][name]
        assert policy["errors"] == 0
        assert list(policy["requests_by_worker"].values()) == [policy["requests"]], "one decodes"
        assert sum(policy["modes"].values()) == policy["requests"]
        assert 1 <= policy["hotspot_index"] <= 2
        read = policy["sources"].get("remote_prefill", 0)
        assert bool(policy["modes"].get("remote_prefill")) == (read > 0)
        assert bool(policy["peer_bytes"]) >= (read > 0)
    assert result["policies"]["static_pd"][0]["reasons"]["split"] == policy["requests"]
    assert result["rounds"] == [["sticky", "pd_hybrid", "static_pd"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_stopped_it_leaves_no_process(number: signal.Signals) -> None:
    process = demo()
    begun: set[int] = set()

    def has_workers() -> bool:
        """It, what keeps its forks and their books, a directory and a worker."""
        assert process.poll() is None
        begun.update(descendants(process.pid))
        return len(begun) >= 5

    until(has_workers, within_s=BEGIN_S)
    begun.discard(process.pid)
    process.send_signal(number)
    output, _ = process.communicate(timeout=BEGIN_S)
    assert process.returncode == (-number if number is signal.SIGKILL else 130), output.decode()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in begun), within_s=BEGIN_S)


def test_a_file_that_is_no_trace_gets_one_clear_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no json\n")
    process = demo("--trace", str(broken))
    output, _ = process.communicate(timeout=BEGIN_S)
    assert process.returncode == 2
    [line] = output.decode().splitlines()
    assert line.startswith("error: ")
