"""`ownerserve gateway --check`: what a gateway would find, before it starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.children import importing
from tests.support.gateway.process import worker_process

pytestmark = pytest.mark.slow


def checked(*words: str) -> tuple[int, list[str], str]:
    """Exit status, the lines said, and what went to stderr."""
    command = [sys.executable, "-m", "ownerserve.cli.main", "gateway", "--check", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=importing(), check=False
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_fleet_that_is_well_is_0_also_beside_the_gateway_that_serves() -> None:
    with ExitStack() as stack:
        ports = [stack.enter_context(worker_process()).port for _ in range(2)]
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        words = [word for port in ports for word in ("--worker", f"http://127.0.0.1:{port}=tiny")]
        status, said, _ = checked(*words, "--port", str(taken.getsockname()[1]))
        assert status == 0
        assert said == [
            *(f"ok   worker 127.0.0.1:{port}: up, a plain engine, models: tiny" for port in ports),
            "ok   policy ownerserve: has what it needs",
        ]


def test_what_is_not_well_is_said_with_its_cause_and_1() -> None:
    with ExitStack() as stack:
        port = stack.enter_context(worker_process()).port
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()[1]
        workers = ("--worker", f"http://127.0.0.1:{port}", "--worker", f"http://127.0.0.1:{closed}")
        more = ("--policy", "static_pd", "--directory", f"tcp://127.0.0.1:{closed}")
        status, said, _ = checked(*workers, *more)
        assert status == 1
        (down,) = [line for line in said if f":{closed}:" in line]
        assert down.startswith("FAIL worker") and "nobody listens there" in down
        assert any(line.startswith(f"ok   worker 127.0.0.1:{port}: up") for line in said)
        assert "FAIL policy static_pd: needs remote_prefill, which no worker that" in said[2]
        assert said[3] == "FAIL directory: does not answer: nobody is there"


def test_what_would_not_start_is_2() -> None:
    status, said, told = checked("--worker", "http://127.0.0.1:1", "--host", "0.0.0.0")
    assert (status, said) == (2, [])
    assert "reachable from outside" in told


def test_the_tenants_and_their_terms_are_said_and_a_wrong_file_is_2(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"

    def written(more: str) -> str:
        text = f'secret = "{"s" * 40}"\n[tenants.b]\nkeys = ["sk-b-0123456789012"]\n'
        file.write_text(text + f'[tenants.a]\nkeys = ["sk-a-0123456789012"]\n{more}\n')
        file.chmod(0o600)
        return str(file)

    with ExitStack() as stack:
        port = stack.enter_context(worker_process()).port
        words = ("--worker", f"http://127.0.0.1:{port}=tiny", "--tenants-file")
        terms = 'weight = 2\nclass = "batch"\nrequests_per_minute = 60\ntokens_per_minute = 1e6'
        status, said, _ = checked(*words, written(terms))
        assert status == 0
        told = "a (weight 2, batch, 60 requests a minute, 1,000,000 tokens a minute), b"
        assert said[-1] == f"ok   tenants: {told}"
        status, said, problem = checked(*words, written("weight = -1"))
        assert (status, said) == (2, [])
        assert "--tenants-file: tenants.a.weight" in problem
