"""The directory serves other hosts: two network namespaces, gateway and worker on the far side."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import importing
from tests.support.netns import Host, two_hosts
from tests.support.waits import until

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "ownerserve.cli.main")
WAIT_S = 300.0


@contextmanager
def running(host: Host, home: Path, *arguments: str) -> Iterator[list[str]]:
    """A command on a host until the `with` ends; the lines of its ready file."""
    home.mkdir()
    ready, said = home / "ready", home / "said"
    with said.open("w") as out:
        process = subprocess.Popen(
            host.words(*COMMAND, *arguments, "--ready-file", str(ready)),
            stdout=out, stderr=subprocess.STDOUT, env=importing(OMP_NUM_THREADS="1"),
        )  # fmt: skip
    try:
        until(lambda: ready.exists() or process.poll() is not None, within_s=WAIT_S)
        assert ready.exists(), said.read_text()
        yield ready.read_text().split()
    finally:
        process.terminate()
        process.wait(WAIT_S)
    assert "Traceback" not in said.read_text()


def ran(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        host.words(*COMMAND, *arguments),
        capture_output=True, text=True, timeout=WAIT_S, env=importing(), check=False,
    )  # fmt: skip


def keys(folder: Path, name: str) -> str:
    path = folder / name
    made = subprocess.run(
        [*COMMAND, "directory", "keys", "--out", str(path)], env=importing(), check=False
    )
    assert made.returncode == 0
    return str(path)


def test_who_has_the_keys_is_answered_on_the_other_host_and_nobody_else(tmp_path: Path) -> None:
    fleet, other = keys(tmp_path, "fleet.key"), keys(tmp_path, "other.key")
    with ExitStack() as stack:
        here, there = stack.enter_context(two_hosts())
        serve = ["directory", "serve", "--host", here.address, "--new-fleet"]
        serve += ["--curve-key-file", fleet]
        (address,) = stack.enter_context(running(here, tmp_path / "directory", *serve))
        assert address == f"curve://{here.address}:7700"
        status = ["directory", "status", address]
        good = ran(there, *status, "--curve-key-file", fleet, "--json", "-")
        assert good.returncode == 0, good.stderr
        assert json.loads(good.stdout)["term"]["ordinal"] == 1
        plain = address.replace("curve://", "tcp://")
        wrong = {
            (address, "--curve-key-file", other): "it has other keys",
            (address,): "wants the fleet's keys; give --curve-key-file",
            (plain,): "it wants keys (curve://...)",
            (address.replace(":7700", ":7799"), "--curve-key-file", fleet): "nobody is there",
        }
        for words, why in wrong.items():
            told = ran(there, "directory", "status", *words)
            assert (told.returncode, told.stderr.count("\n")) == (2, 1), told
            assert why in told.stderr
        check = ["gateway", "--check", "--worker", "http://127.0.0.1:1", "--directory", address]
        told = ran(there, *check, "--curve-key-file", fleet)
        assert "ok   directory: answers" in told.stdout.splitlines()
        told = ran(there, *check, "--curve-key-file", other)
        assert told.returncode == 1
        assert any(
            line.startswith("FAIL directory: does not answer: it has other keys")
            for line in told.stdout.splitlines()
        ), told.stdout
        told = ran(there, *check)
        assert (told.returncode, told.stderr.count("\n")) == (2, 1)


ASK = """
import json, sys, urllib.error, urllib.request
url, body, session = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"x-session-id": session})
try:
    answer = urllib.request.urlopen(request, timeout=120)
except urllib.error.HTTPError as error:
    answer = error
with answer:
    print(json.dumps([answer.status, dict(answer.headers), answer.read().decode()]))
"""


def asked(host: Host, url: str, body: str = "") -> tuple[int, dict[str, str], str]:
    """What a client on that host is answered."""
    done = subprocess.run(
        host.words(sys.executable, "-c", ASK, url, body, "s"),
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status, headers, text = json.loads(done.stdout)
    return status, headers, text


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["serve", "embedded"])
def test_a_worker_on_another_host_owns_its_session(kind: str, tmp_path: Path) -> None:
    """`serve`: directory here, gateway and worker there. `embedded`: the gateway here serves it to
    the worker there."""
    pytest.importorskip("torch")
    fleet = ("--curve-key-file", keys(tmp_path, "fleet.key"))
    with ExitStack() as stack:
        here, there = stack.enter_context(two_hosts())
        gateway = ["gateway", "--worker", f"http://{there.address}:8100", *fleet]
        directory = f"curve://{here.address}:7700"
        if kind == "serve":
            serve = ["directory", "serve", "--host", here.address, "--new-fleet", *fleet]
            stack.enter_context(running(here, tmp_path / "directory", *serve))
            at = there
            gateway += ["--directory", directory]
        else:
            at = here
            gateway += ["--directory", f"embedded:{here.address}:7700"]
            data, _, served = stack.enter_context(running(at, tmp_path / "gateway", *gateway))
            assert served == directory
        worker = ["worker", "--model", "tiny-qwen3", "--worker-id", "w0", "--allow-remote"]
        worker += ["--host", there.address, "--rpc-host", there.address, "--directory", directory]
        stack.enter_context(running(there, tmp_path / "worker", *worker, *fleet))
        if kind == "serve":
            data, _ = stack.enter_context(running(at, tmp_path / "gateway", *gateway))
        chat = json.dumps(
            {"messages": [{"role": "user", "content": "of owners and epochs. " * 40}],
             "max_tokens": 4}
        )  # fmt: skip
        health = f"{data}/health"
        until(lambda: asked(at, health)[0] == 200, within_s=WAIT_S)
        ends = time.monotonic() + WAIT_S
        turns: list[Any] = []
        metrics = f"http://{there.address}:8100/metrics"
        wanted = 'ownerserve_directory_answers_total{answer="advanced"}'
        while wanted not in asked(there, metrics)[2]:
            assert time.monotonic() < ends, "its turns are never owned"
            turns.append(asked(at, f"{data}/v1/chat/completions", chat)[0])
        assert set(turns) == {200}
        found = ran(there, "directory", "status", directory, *fleet, "--json", "-")
        assert json.loads(found.stdout)["records"]["sessions"] == 1, found
