"""`ownerserve gateway` as a process: it says where it is, serves, and leaves clean on Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from ownerserve.cli.gateway import command
from ownerserve.kv.errors import InvalidInput


def test_it_announces_itself_serves_and_leaves(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    arguments = ["gateway", "--worker", "http://127.0.0.1:1", "--ready-file", str(ready)]
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
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert output.startswith(f"gateway {data_url}  admin {admin_url}  0 of 1 workers up")
    assert "Traceback" not in output


def test_help_teaches_and_mistakes_are_named() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    for taught in ("x-session-id", "/decisions", "round_robin", "--worker http://"):
        assert taught in shown
    missing = CliRunner().invoke(command, [])
    assert missing.exit_code == 2
    assert "--worker" in missing.output
    wrong = CliRunner().invoke(command, ["--worker", "localhost:80"])
    assert isinstance(wrong.exception, InvalidInput)
