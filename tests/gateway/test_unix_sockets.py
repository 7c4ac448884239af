"""Unix sockets, towards clients and towards workers, as processes."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import pytest

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address, parse_worker
from ownerserve.gateway.service import Gateway
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import close_listener, open_unix_listener, parse_unix
from tests.gateway.test_roster import asked as asked_admin
from tests.support.children import importing
from tests.support.gateway.process import SHORT, gateway_process, worker_process
from tests.support.net import listening
from tests.support.waits import until

PATH = "/v1/chat/completions"

pytestmark = pytest.mark.slow


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def asked(path: str, target: str = PATH) -> tuple[int, Any, bytes]:
    connection = UnixConnection(path)
    try:
        connection.request("POST", target, b"{}")
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_clients_and_workers_are_met_at_unix_sockets(tmp_path: Path) -> None:
    own, at, later = tmp_path / "g.sock", tmp_path / "w.sock", tmp_path / "later.sock"
    more = ["--listen", f"unix://{own}", "--worker", f"unix://{at}=tiny", "--receipts", "open"]
    more += ["--listen-mode", "660"]
    with worker_process(at), gateway_process(tmp_path, [], *more) as gateway:
        assert gateway.data_url == f"unix://{own}"
        assert stat.S_IMODE(own.stat().st_mode) == 0o660
        status, headers, _ = asked(str(own))
        assert (status, headers["x-ownerserve-worker"]) == (200, f"unix:{at}")
        status, _, streamed = asked(str(own), f"{PATH}?short-stream")
        assert (status, streamed.count(b"word")) == (200, SHORT)
        assert len(listening(gateway.process.pid)) == 1, "the admin port alone is a port"

        # one that is not there yet joins, serves when it comes, and leaves
        admin = gateway.admin_url
        status, row = asked_admin(admin, "POST", "/workers", {"url": f"unix://{later}"})
        assert (status, row["worker"], row["up"]) == (201, f"unix:{later}", False)
        assert row["url"] == f"unix://{later}"

        def rows() -> dict[str, Any]:
            return {
                row["worker"]: row for row in asked_admin(admin, "GET", "/workers")[1]["workers"]
            }

        until(lambda: "nobody listens" in (rows()[f"unix:{later}"]["cause"] or ""))
        with worker_process(later) as second:
            until(lambda: rows()[f"unix:{later}"]["up"])
            served = {asked(str(own))[1]["x-ownerserve-worker"] for _ in range(12)}
            assert served == {f"unix:{at}", f"unix:{later}"}
            second.kill()
            until(lambda: not rows()[f"unix:{later}"]["up"])
        for name in (quote(f"unix:{later}", safe=""), f"unix:{later}"):
            status, said = asked_admin(admin, "POST", f"/workers/{name}/drain")
            assert (status, said.get("stay")) == (200, "drained"), said
        assert asked_admin(admin, "DELETE", f"/workers/unix:{later}")[0] == 202
        until(lambda: f"unix:{later}" not in rows())

        # a second gateway takes nobody's socket
        command = [sys.executable, "-m", "ownerserve.cli.main", "gateway", *more]
        done = subprocess.run(
            [*command, "--admin-port", "0"],
            capture_output=True, text=True, timeout=60, env=importing(), check=False,
        )  # fmt: skip
        assert done.returncode == 2 and "somebody serves there" in done.stderr
        assert asked(str(own))[0] == 200
        gateway.process.terminate()
        assert gateway.process.wait(timeout=60) == 0
        assert not own.exists(), "it takes its socket away"
        assert "Traceback" not in gateway.said.read_text()


def test_what_a_killed_gateway_left_is_taken_away_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    dead = open_unix_listener(path, 0o600, field="--listen")
    dead.listen()
    dead.close()  # as after SIGKILL: the file stays
    assert path.exists()
    alive = open_unix_listener(path, 0o600, field="--listen")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    alive.listen()
    with pytest.raises(InvalidInput, match=r"--listen: .*somebody serves there"):
        open_unix_listener(path, 0o600, field="--listen")
    close_listener(alive)
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(InvalidInput, match="no socket"):
        open_unix_listener(path, 0o600, field="--listen")
    assert path.read_text() == "a file of somebody's"
    with pytest.raises(InvalidInput, match="No such file"):
        open_unix_listener(tmp_path / "none" / "g.sock", 0o600, field="--listen")


NOBODY = 65534


def gets_in(path: Path) -> bool:
    """Whether another user of this machine may connect there."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(str(path))
            os._exit(0)
        except PermissionError:
            os._exit(1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is played by root alone")
def test_another_user_does_not_get_in_unless_the_mode_says_so() -> None:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "g.sock"
        for mode, is_let_in in ((0o600, False), (0o660, False), (0o666, True)):
            bound = open_unix_listener(path, mode, field="--listen")
            bound.listen()
            assert gets_in(path) is is_let_in
            close_listener(bound)


def test_a_place_that_is_no_absolute_path_is_refused() -> None:
    for bad in ("unix:a.sock", "unix://a.sock", "unix:///a\nb", f"unix:///{'a' * 120}", "/a.sock"):
        with pytest.raises(InvalidInput, match="--listen"):
            parse_unix(bad, field="--listen")
    found = parse_worker("unix:///run/a.sock=m,n")
    assert found == Address("127.0.0.1", 0, models=("m", "n"), path="/run/a.sock")
    assert json.dumps(found.worker) == '"unix:/run/a.sock"'
    with pytest.raises(InvalidInput, match="worker"):
        parse_worker("unix://run/a.sock")


def test_a_listener_s_file_is_its_giver_s(tmp_path: Path) -> None:
    """Several processes listen at one: who can't start leaves it to those that serve there, and it
    goes with the last."""
    given, own = socket.socket(socket.AF_UNIX), tmp_path / "g.sock"
    given.bind(str(tmp_path / "given.sock"))

    async def fails() -> None:
        raise OSError("cannot")

    async def start() -> None:
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),)))
        try:
            await gateway.start(given, prepare=fails)
        finally:
            await gateway.stop()

    with pytest.raises(OSError, match="cannot"):
        asyncio.run(start())
    assert given.fileno() < 0 and (tmp_path / "given.sock").exists()
    more = ["--listen", f"unix://{own}", "--processes", "2"]
    with worker_process() as worker, gateway_process(tmp_path, [worker.port], *more) as gateway:
        assert asked(str(own))[0] == 200
        gateway.process.terminate()
        assert gateway.process.wait(timeout=60) == 0
        assert not own.exists()
