"""Two workers of one model are two: each says its own id on its RPC port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.cli.worker import command
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Status, StatusIs
from ownerserve.node.rpc.server import RpcClient

pytestmark = pytest.mark.engine

WAIT_S = 300.0


class Process:
    """`ownerserve worker` until its `with` ends."""

    def __init__(self, home: Path, *flags: str) -> None:
        home.mkdir()
        self._ready, self._report = home / "ready", home / "report.json"
        arguments = ["worker", "--model", "tiny-qwen3", "--port", "0", "--rpc-port", "0"]
        arguments += ["--kv-memory", "8MiB", "--json", str(self._report)]
        arguments += ["--ready-file", str(self._ready), *flags]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ownerserve.cli.main", *arguments],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(WAIT_S)

    def report(self) -> dict[str, Any]:
        """What it said when it served."""
        deadline = time.monotonic() + WAIT_S
        while not self._ready.exists():
            assert self._process.poll() is None, "the worker has ended"
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report


def units(reports: Sequence[dict[str, Any]]) -> list[RoutingUnit]:
    """Who answers at each RPC port."""
    found = []
    for report in reports:
        client = RpcClient(report["rpc"])
        try:
            answer = client.ask(Status())
        finally:
            client.close()
        assert isinstance(answer, StatusIs)
        found.append(answer.status.unit)
    return found


def test_two_workers_of_one_model_say_who_they_are(tmp_path: Path) -> None:
    """Both were called by their model."""
    with ExitStack() as stack:
        flags = ((), (), ("--worker-id", "rack-7/gpu-0"))
        processes = [
            stack.enter_context(Process(tmp_path / str(number), *more))
            for number, more in enumerate(flags)
        ]
        reports = [process.report() for process in processes]
        one, two, named = units(reports)
    assert {report["model"] for report in reports} == {"tiny-qwen3"}
    assert one.worker == reports[0]["url"].removeprefix("http://")
    assert two.worker == reports[1]["url"].removeprefix("http://")
    assert named.worker == reports[2]["worker"] == "rack-7/gpu-0"
    assert len({unit.incarnation for unit in (one, two, named)}) == 3


def test_a_worker_has_an_id() -> None:
    run = CliRunner().invoke(command, ["--worker-id", ""])
    assert run.exit_code != 0
    assert "worker-id" in str(run.exception)
