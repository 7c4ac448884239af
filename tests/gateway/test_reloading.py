"""A gateway reads its files again (SIGHUP, POST /reload) while turns run, as a process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ownerserve.gateway.config import Config
from ownerserve.gateway.discovery.members import Member
from ownerserve.gateway.discovery.watching import Discovery
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.rollout.reloading import ReadSettings, Reloading
from ownerserve.gateway.roster import Stay
from ownerserve.gateway.service import Gateway
from tests.gateway.test_roster import asked
from tests.support.children import importing
from tests.support.gateway.process import worker_process
from tests.support.waits import until

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
RELOADS = 50
ACME, GLOBEX, LATER = (f"sk-{name}-0123456789" for name in ("acme", "globex", "later"))


class Served:
    """A gateway process whose settings are in files."""

    def __init__(self, folder: Path, workers: list[int]) -> None:
        self.workers = workers
        self.path, self.tenants = folder / "gateway.toml", folder / "tenants.toml"
        self._folder = folder
        self.says: dict[str, str] = {"receipts": '"open"', "tenants-file": '"tenants.toml"'}
        self.arms: dict[int, str] = {}
        self.keys = {"acme": ACME, "globex": GLOBEX}
        self.process: subprocess.Popen[str]

    def write(self) -> None:
        """Write both files as they should be now."""
        text = "port = 0\nadmin-port = 0\n"
        text += "".join(f"{key} = {value}\n" for key, value in self.says.items())
        for port in self.workers:
            arm = self.arms.get(port, "main")
            text += f'[[worker]]\nurl = "http://127.0.0.1:{port}"\narm = "{arm}"\n'
        self.path.write_text(text)
        keys = (f'[tenants.{name}]\nkeys = ["{key}"]\n' for name, key in self.keys.items())
        self.tenants.write_text(f'secret = "{"s" * 40}"\n' + "".join(keys))
        self.tenants.chmod(0o600)

    @contextmanager
    def running(self) -> Iterator[Served]:
        self.write()
        ready = self._folder / "ready"
        words = ["gateway", "--config", str(self.path), "--ready-file", str(ready)]
        with (self._folder / "said").open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ownerserve.cli.main", *words],
                stdout=out, stderr=out, text=True, env=importing(),
            )  # fmt: skip
        try:
            until(lambda: ready.exists() or self.process.poll() is not None)
            assert ready.exists(), self.said
            self.data_url, self.admin_url = ready.read_text().split()
            yield self
        finally:
            self.process.kill()
            self.process.wait()

    @property
    def said(self) -> str:
        return (self._folder / "said").read_text()

    def reload(self) -> dict[str, Any]:
        status, said = asked(self.admin_url, "POST", "/reload")
        assert status == 200, said
        assert isinstance(said, dict)
        return said

    def hang_up(self) -> str:
        """SIGHUP; what the log says of it."""
        before = len(self.said)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: "reload" in self.said[before:])
        return self.said[before:]

    def turn(self, key: str = ACME, client: httpx.Client | None = None, **more: str) -> Any:
        headers = {"authorization": f"Bearer {key}", **more}
        post = httpx.post if client is None else client.post
        return post(self.data_url + PATH, json={"a": 1}, headers=headers, timeout=60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:

        def make(workers: int = 2) -> Served:
            ports = [stack.enter_context(worker_process()).port for _ in range(workers)]
            return stack.enter_context(Served(tmp_path, ports).running())

        yield make


def test_what_the_files_say_anew_is_so_and_what_can_not_be_is_named(
    start: Callable[..., Served],
) -> None:
    served = start(3)
    assert served.reload() == {"changed": [], "stays": []}
    with httpx.Client() as kept:
        assert served.turn(client=kept).status_code == 200
        served.keys = {"acme": LATER, "globex": GLOBEX}
        served.write()
        assert served.reload() == {"changed": ["tenants-file"], "stays": []}
        assert served.turn(client=kept).status_code == 401, "also on an open connection"
        assert served.turn(LATER, kept).status_code == 200
    left, served.workers = served.workers[2], served.workers[:2]
    served.arms = {served.workers[1]: "canary"}
    served.says |= {"hot-ms": "500", "canary-share": "1.0", "log-level": '"debug"'}
    served.says |= {"receipts": '"opaque"', "drain-timeout": "9", "seats": "0.9"}
    served.write()
    said = served.reload()
    assert set(said["changed"]) == {
        "hot-ms, cool-s, long-tokens", "canary-share", "log-level", "receipts", "drain-timeout",
        "worker",
    }  # fmt: skip
    assert said["stays"] == ["seats"]
    assert "x-ownerserve-priced" not in served.turn(LATER, **{"x-session-id": "s"}).headers
    rows = asked(served.admin_url, "GET", "/workers")[1]["workers"]
    assert f"127.0.0.1:{left}" not in {row["worker"] for row in rows if row["stay"] == "serving"}
    for name in range(6):
        served.turn(LATER, **{"x-session-id": str(name)})
    rows = asked(served.admin_url, "GET", "/decisions?last=6")[1]["decisions"]
    assert {row["worker"] for row in rows} == {f"127.0.0.1:{served.workers[1]}"}
    assert served.reload()["stays"] == ["seats"], "it is named until it is so"
    served.workers.append(left)
    served.write()
    assert served.reload()["changed"] == ["worker"]
    rows = asked(served.admin_url, "GET", "/workers")[1]["workers"]
    assert {row["worker"]: row["up"] for row in rows}[f"127.0.0.1:{left}"]


def test_what_an_operator_did_since_stays_unless_the_file_says_something_of_it(
    start: Callable[..., Served],
) -> None:
    served = start(2)
    assert asked(served.admin_url, "PUT", "/mode", {"mode": "bypass"})[0] == 200
    served.says["hot-ms"] = "500"
    served.write()
    assert 'changed="hot-ms, cool-s, long-tokens"' in served.hang_up()
    assert asked(served.admin_url, "GET", "/rollout")[1]["mode"] == "bypass"
    served.says["mode"] = '"shadow"'
    served.write()
    served.hang_up()
    assert asked(served.admin_url, "GET", "/rollout")[1]["mode"] == "shadow"


def test_who_waits_is_told_as_often_as_the_file_says_now(tmp_path: Path) -> None:
    with worker_process() as worker, httpx.Client(timeout=60) as client:
        served = Served(tmp_path, [worker.port])
        served.says |= {"max-running": "1", "wait-comments": "0"}
        with served.running():
            headers, turn = {"authorization": f"Bearer {ACME}"}, {"stream": True}
            url = f"{served.data_url}/v1/completions?stream"
            with client.stream("POST", url, json=turn, headers=headers) as first:
                events = first.iter_bytes()  # it closes the connection when nobody has it
                next(events)
                served.says["wait-comments"] = "0.1"
                served.write()
                assert served.reload() == {"changed": ["wait-comments"], "stays": []}
                with client.stream("POST", url, json=turn, headers=headers) as held:
                    said = next(held.iter_lines())
                    assert said.startswith(": waiting for a running turn's place, place 1 of 1, ")


WRONG = {
    "gateway.toml": (
        ('policy = "best"\n', "policy", "'best' is not one of"),
        ("cool-s = -1.0\n", "cool-s", "-1.0 is not in the range"),
        ("prot = 1\n", "prot", "did you mean port?"),
        ("port = \n", "gateway.toml", "no TOML"),
        ('host = "0.0.0.0"\nallow-remote = "yes"\n', "allow-remote", "true or false"),
    ),
    "tenants.toml": (
        ('secret = "short"\n[tenants.a]\nkeys = []\n', "secret", "shorter"),
        (f'secret = "{"s" * 40}"\n[tenants.a]\nkeys = []\n', "tenants.a.keys", "empty"),
    ),
}


class Names:
    """A source that names workers when it is told to."""

    name = "names"

    def __init__(self, *workers: Address) -> None:
        self.heard: Callable[[Sequence[Member]], None]
        self._first = [Member(one) for one in workers]

    async def watch(
        self, heard: Callable[[Sequence[Member]], None], lost: Callable[[str], None]
    ) -> None:
        self.heard = heard
        heard(self._first)
        await asyncio.Event().wait()


def test_a_file_and_discovery_may_name_the_same_worker_in_any_order() -> None:
    """Whom the file lists no more stays by its name, and whom it lists now outlasts the name."""
    one, other, third = (Address("127.0.0.1", port) for port in (1, 2, 3))

    def says(*workers: Address) -> ReadSettings:
        return ReadSettings(Config(workers=workers), "info", {})

    async def main() -> None:
        gateway = Gateway(Config(workers=(one, third)))
        names = Names(one, other)
        gateway.discovery = Discovery(gateway.roster, [names])
        files = [says(other, third), says(third)]
        reloading = Reloading(gateway, says(one, third), lambda: files.pop(0))
        try:
            await gateway.start()
            for named in ((one, other), (one,), ()):
                names.heard([Member(address) for address in named])
                if len(named) == 2:
                    await reloading.reload()
                here = {one.worker, other.worker, third.worker} - (
                    {one.worker} if not named else set()
                )
                assert staying(gateway) == here
            await reloading.reload()
            assert staying(gateway) == {third.worker}
        finally:
            await gateway.stop()

    asyncio.run(main())


def staying(gateway: Gateway) -> set[str]:
    """The workers that do not leave."""
    roster = gateway.roster
    return {worker for worker in roster.monitors if roster.stay(worker) is not Stay.LEAVING}


def test_a_file_with_an_error_changes_nothing(start: Callable[..., Served]) -> None:
    served = start(1)

    def rollout() -> Any:
        said = asked(served.admin_url, "GET", "/rollout")[1]
        return {name: said[name] for name in said.keys() - {"arms"}}

    before = rollout()
    for name, wrong in WRONG.items():
        for text, field, problem in wrong:
            served.says["canary-share"], served.keys = "0.5", {"acme": LATER}
            served.write()
            path = served.path.with_name(name)
            path.write_text(text if name == "tenants.toml" else text + path.read_text())
            status, said = asked(served.admin_url, "POST", "/reload")
            assert (status, said["error"]["code"]) == (400, "invalid")
            told = f"{said['error']['message']}; {said['error']['mend']}"
            assert field in told and problem in told and said["error"]["mend"], told
            assert str(path) in told
            log = served.hang_up()
            assert "reload_refused" in log and field in log
            assert rollout() == before
            assert served.turn(ACME).status_code == 200
            assert served.turn(LATER).status_code == 401
    served.tenants.unlink()
    assert asked(served.admin_url, "POST", "/reload")[0] == 400


def test_a_hangup_amid_the_start_ends_nobody(tmp_path: Path) -> None:
    """A worker that hangs makes the start last; the signal waits for its end."""
    with ExitStack() as stack:
        hung = stack.enter_context(worker_process())
        hung.stop()
        served = Served(tmp_path, [hung.port])
        stop, early = threading.Event(), []

        def hang_up() -> None:
            while not stop.is_set():
                process = getattr(served, "process", None)
                if process is not None and catches_hangups(process.pid):
                    early.append(not (tmp_path / "ready").exists())
                    process.send_signal(signal.SIGHUP)
                    return

        aside = threading.Thread(target=hang_up)
        aside.start()
        try:
            with served.running():
                assert early == [True]
                until(lambda: "reloaded" in served.said)
        finally:
            stop.set()
            aside.join()


def catches_hangups(pid: int) -> bool:
    """Whether a process has a handler for SIGHUP."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (signal.SIGHUP - 1) & 1)


def test_no_request_is_lost_while_the_files_are_read_again(start: Callable[..., Served]) -> None:
    served = start(3)
    everyone, stop = served.workers, threading.Event()
    statuses: Counter[int] = Counter()
    lock = threading.Lock()

    def client(number: int) -> None:
        with httpx.Client(timeout=60) as http:
            turn = 0
            while not stop.is_set():
                turn += 1
                kind = {0: "?short-stream", 1: "?slow"}.get(number, "")
                headers = {
                    "authorization": f"Bearer {ACME if number % 2 else GLOBEX}",
                    "x-session-id": f"{number}-{turn % 5}",
                }
                answer = http.post(served.data_url + PATH + kind, json={}, headers=headers)
                whole = "[DONE]" if "stream" in kind else "{}"
                with lock:
                    statuses[answer.status_code if whole in answer.text else 0] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for one in clients:
        one.start()
    try:
        for number in range(RELOADS):
            served.workers = everyone[: 2 + number % 2]
            served.arms = {everyone[1]: ("main", "canary")[number % 2]}
            served.says |= {
                "mode": ('"normal"', '"shadow"', '"bypass"')[number % 3],
                "canary-share": str((number % 5) / 5),
                "hot-ms": str(100 + number),
                "receipts": ('"open"', '"opaque"')[number % 2],
            }
            served.keys = {"acme": ACME, "globex": GLOBEX, f"t{number}": f"{LATER}-{number:04}"}
            served.write()
            until(lambda: statuses[200] >= 4 * number)  # noqa: B023 - at once
            if number % 2:
                served.hang_up()
            else:
                served.reload()
    finally:
        stop.set()
        for one in clients:
            one.join(60)
    assert set(statuses) == {200}, statuses
    assert statuses[200] >= 4 * (RELOADS - 1)
    status = asked(served.admin_url, "GET", "/status")[1]
    assert status["requests"]["received"] == status["requests"]["done"] == statuses[200]
    assert served.said.count("reloaded") == RELOADS
