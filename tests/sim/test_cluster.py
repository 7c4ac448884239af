"""The same runs on a real Ray cluster: of this machine's cores, or behind a head that is reached
by Ray's client. The test starts and ends both."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from ownerserve.cli.simulation import simulate
from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.cluster import LOCAL, SERVER_FAILED, SERVER_TRIES, RayRunner
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.pool import PARTS, Told, run_tasks
from ownerserve.sim.run import Result
from ownerserve.sim.sweep import Jobs, run_all
from tests.support.children import importing
from tests.support.sim.fleet_driver import agents, setup
from tests.support.waits import until

ray = pytest.importorskip("ray")
IMPORTED = importing()["PYTHONPATH"]
pytestmark = [
    pytest.mark.slow,
    # Ray's own start leaves files to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster's processes import what a task names, as from an installed package."""
    monkeypatch.setenv("PYTHONPATH", IMPORTED)


def kept(result: Result) -> tuple[str, int]:
    return digest(result.metrics), len(result.rows)


def seven(told: Told) -> int:
    told(1, 2)
    return 7


def fails(told: Told) -> int:
    raise InvalidInput("field", "is wrong", "mend it")


def test_a_cluster_gives_what_this_machine_gives() -> None:
    jobs = Jobs(agents(), {name: setup(name) for name in ("ear", "ownerserve", "sticky")}, kept)
    told: list[int] = []
    here = {one.name: one.kept for one in run_all(jobs, runner=run_tasks)}
    there = {
        one.name: one.kept for one in run_all(jobs, runner=RayRunner(LOCAL), progress=told.append)
    }
    assert here == there
    assert sum(told) == 3 * PARTS
    assert not ray.is_initialized()


def test_one_that_fails_is_told_and_the_others_go_on() -> None:
    ends = {one.name: one for one in RayRunner(LOCAL)({"good": seven, "bad": fails})}
    assert ends["good"].answer == 7
    assert isinstance(ends["bad"].error, InvalidInput)


def lose_first(monkeypatch: pytest.MonkeyPatch, losses: int) -> list[str]:
    """Ray's start fails so often as a head fails that lost the process it began for a client."""
    began, init = list[str](), ray.init

    def start(**given: object) -> object:
        began.append("init")
        if len(began) <= losses:
            raise ConnectionAbortedError(f"Initialization failure from server: {SERVER_FAILED}.")
        return init(**given)

    monkeypatch.setattr(ray, "init", start)
    return began


def test_a_head_that_loses_its_process_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    began = lose_first(monkeypatch, SERVER_TRIES - 1)
    assert [one.answer for one in RayRunner(LOCAL)({"good": seven})] == [7]
    assert len(began) == SERVER_TRIES


def test_one_that_always_does_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    began = lose_first(monkeypatch, SERVER_TRIES)
    with pytest.raises(InvalidInput, match=SERVER_FAILED):
        list(RayRunner(LOCAL)({"good": seven}))
    assert len(began) == SERVER_TRIES


@pytest.mark.parametrize("client", ["with Ray's client", "without"])
def test_no_head_is_one_error_before_ray_is_asked(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's client alone takes 30 s to say so."""
    began = lose_first(monkeypatch, 0)
    if client == "without":
        monkeypatch.setitem(sys.modules, "grpc", None)  # importing it fails
    else:
        pytest.importorskip("grpc", reason="needs ray[client]")
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        address = f"ray://127.0.0.1:{held.getsockname()[1]}"
        found = CliRunner().invoke(
            simulate.command, ["--sessions", "2", "--policy", "ear", "--ray", address]
        )
    assert isinstance(found.exception, InvalidInput)
    assert address in str(found.exception) and not began
    assert ("needs grpc" if client == "without" else "refused") in str(found.exception)


@pytest.mark.parametrize("address", ["ray://127.0.0.1", "ray://:10001", "ray://127.0.0.1:port"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    pytest.importorskip("grpc", reason="needs ray[client]")
    with pytest.raises(InvalidInput, match=re.escape(address) + ": (is not ray://HOST:PORT|Port)"):
        list(RayRunner(address)({"good": seven}))


def test_jobs_and_a_cluster_exclude_each_other() -> None:
    given = ["--sessions", "2", "--jobs", "2", "--ray", LOCAL]
    found = CliRunner().invoke(simulate.command, given)
    assert isinstance(found.exception, InvalidInput)


class Head:
    """`ray start --head` on a free port, in a session of its own, with a token of its own: a head
    listens beyond this machine. Its processes are those of that session."""

    def __init__(self, folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"ray://127.0.0.1:{self.port}"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env = {**os.environ, **token, "PYTHONPATH": IMPORTED, "PYTHONWARNINGS": "ignore"}
        given = "start --head --block --port=0 --num-cpus=2 --include-dashboard=false"
        given += f" --disable-usage-stats --temp-dir={folder}"
        given += f" --ray-client-server-port={self.port}"
        start = "from ray.scripts.scripts import main; main()"
        self.log = Path(folder, "head.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, *given.split()],
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def listens(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def said(self) -> str:
        """What the processes that the head began for clients left behind."""
        logs = sorted(self.log.parent.glob("session_*/logs/ray_client_server*"))
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)

    def processes(self) -> dict[int, str]:
        """What runs in the head's session: process ids and titles."""
        listed = subprocess.run(
            ["ps", "-eo", "pid=,sess=,args="], capture_output=True, text=True, check=True
        )
        rows = (line.split(maxsplit=2) for line in listed.stdout.splitlines())
        ours = (row for row in rows if row[1] == str(self.process.pid))
        return {int(pid): title for pid, _, title in ours if "<defunct>" not in title}

    def hands(self) -> list[str]:
        return [title for title in self.processes().values() if "_Hand" in title]

    def command(self, *given: str) -> list[str]:
        return [sys.executable, "-m", "ownerserve.cli.main", "simulate", *given]

    def stop(self) -> None:
        """Nothing of it is left, however it goes."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.process.wait()


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    pytest.importorskip("grpc", reason="needs ray[client]")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        made = Head(folder)
        try:
            until(made.listens, within_s=90)
            yield made
        finally:
            made.stop()


def told_by(head: Head, *given: str) -> str:
    """What `ownerserve simulate` prints, but for the CPU time it took."""
    ended = subprocess.run(
        head.command(*given), env=head.env, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, ""), head.said()
    return re.sub(r".* requests a CPU second", "", ended.stdout)


def test_rays_client_gives_what_this_machine_gives(head: Head) -> None:
    given = ["--sessions", "4", "--policy", "ear,sticky"]
    here = told_by(head, *given)
    assert "sticky" in here
    assert "digest" in here
    assert told_by(head, *given, "--ray", head.address) == here


FAILING = """
import sys
from tests.sim.test_cluster import RayRunner, fails, seven
ends = {one.name: one for one in RayRunner(sys.argv[1])({"good": seven, "bad": fails})}
print(ends["good"].answer, repr(ends["bad"].error))
"""


def test_rays_client_tells_of_one_that_fails(head: Head) -> None:
    """In a process of its own: Ray reads its token once."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, head.address],
        env=head.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.startswith("7 InvalidInput("), ended.stdout + ended.stderr


def test_a_head_that_wants_a_token_is_one_error(head: Head) -> None:
    """After Ray's client has tried for as long as its settings say."""
    env = {**head.env, "RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "default"}
    env |= {"RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "1"}
    env |= {"RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "1"}
    given = ["--sessions", "2", "--policy", "ear", "--ray", head.address]
    ended = subprocess.run(
        head.command(*given), env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: --ray: {head.address}")
    assert "RAY_AUTH_MODE=token" in line


def test_ctrl_c_ends_the_client_and_its_actors(head: Head) -> None:
    given = ["--sessions", "2000", "--policy", "ear,sticky", "--ray", head.address]
    running = subprocess.Popen(
        head.command(*given), env=head.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        until(lambda: len(head.hands()) == 2, within_s=90)
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    assert (running.returncode, said.decode().split()) == (130, ["interrupted"]), head.said()
    until(lambda: not head.hands(), within_s=60)
