"""`ownerserve gateway` as a process: it says where it is, serves, and leaves clean on Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from ownerserve.cli.gateway import command
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import KIB, MIB
from tests.support.waits import until


@contextmanager
def gateway(ready: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A gateway's process over a worker that is not there, once its ports are open."""
    arguments = ["gateway", "--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
    arguments += ["--worker", "http://127.0.0.1:1", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "ownerserve.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline_s:
            assert process.poll() is None
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
def test_it_announces_itself_serves_and_leaves(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with gateway(ready) as process:
        data_url, admin_url = ready.read_text().split()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{data_url}/v1/models")
        with caught.value as error:
            assert error.code == 503
            assert json.load(error)["error"]["code"] == "no_worker"
        with urllib.request.urlopen(f"{admin_url}/status") as answer:
            assert json.load(answer)["never_up"] == ["127.0.0.1:1"]
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"gateway {data_url}  admin {admin_url}  0 of 1 workers up" in output
    assert "Traceback" not in output


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * KIB


@pytest.mark.slow
def test_uploads_that_are_given_up_leave_nothing_in_memory(tmp_path: Path) -> None:
    """64 of 31 MiB took a gateway from 37 to 2,023 MB. More: OWNERSERVE_UPLOADS=1000."""
    uploads, at_once = int(os.environ.get("OWNERSERVE_UPLOADS", "12")), 4
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n"
    most, piece, ready = 32 * MIB, b"x" * (31 * MIB), tmp_path / "ready"
    with gateway(ready) as process:
        url = urllib.parse.urlsplit(ready.read_text().split()[0])
        idle_bytes = resident_bytes(process.pid)
        for _ in range(uploads // at_once):
            clients = [socket.create_connection((url.hostname, url.port)) for _ in range(at_once)]
            for client in clients:
                client.sendall(head % most + piece)
            for client in clients:
                client.close()
        try:
            until(lambda: resident_bytes(process.pid) < idle_bytes + 64 * MIB, within_s=60)
        except AssertionError:
            with urllib.request.urlopen(f"{ready.read_text().split()[1]}/metrics") as answer:
                said = answer.read().decode().partition("\nownerserve_request_body_bytes ")[2]
            now_bytes = resident_bytes(process.pid)
            pytest.fail(f"idle {idle_bytes}, now {now_bytes}, of bodies {said.split()[0]} bytes")


def test_help_teaches_and_mistakes_are_named() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    for taught in ("x-session-id", "/decisions", "round_robin", "--worker http://"):
        assert taught in shown
    missing = CliRunner().invoke(command, [])
    assert isinstance(missing.exception, InvalidInput)
    assert "--worker" in str(missing.exception)
    wrong = CliRunner().invoke(command, ["--worker", "localhost:80"])
    assert isinstance(wrong.exception, InvalidInput)
