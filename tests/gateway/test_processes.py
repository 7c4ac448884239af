"""A gateway of several processes, over real ones: each session is one process's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.children import importing
from tests.support.gateway.echoing import digest, echoing_worker, let_go
from tests.support.gateway.several import Several, several
from tests.support.waits import until

pytestmark = pytest.mark.slow

SESSIONS = 200
CHAT = "/v1/chat/completions"


@pytest.fixture
def workers() -> Iterator[list[int]]:
    with echoing_worker() as first, echoing_worker() as second:
        yield [first, second]


class Client:
    """An agent with a kind of name for its session. Each turn comes on a new connection, so that
    the kernel deals them out at random."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.kind = ("header", "field", "content", "agent", "answer")[number % 5]
        self.messages = [{"role": "user", "content": "You are an agent. " * 100}]
        self.messages.append({"role": "user", "content": f"task {number} of {os.getpid()}"})
        self.answer_id: str | None = None

    def turn(self, gateway: Several) -> None:
        headers, path = dict[str, str](), CHAT
        body = {"model": "m", "messages": self.messages}
        if self.kind == "header":
            headers["x_session_id"] = f"header-{self.number}"
        elif self.kind == "field":
            body["prompt_cache_key"] = f"field-{self.number}"
        elif self.kind == "agent":  # each of a hundred with the same parent, which never asks
            headers["x_claude_code_session_id"] = "parent"
            headers["x_claude_code_agent_id"] = f"agent-{self.number}"
        elif self.kind == "answer":
            path, body = "/v1/responses", {"model": "m", "input": self.messages}
            if self.answer_id is not None:
                body = {"model": "m", "input": "go on", "previous_response_id": self.answer_id}
        status, _, said = gateway.post(path, body, **headers)
        assert status == 200, said
        assert said["digest"] == digest(json.dumps(body).encode())
        self.answer_id = said["id"]
        self.messages.append({"role": "assistant", "content": f"done {said['id']}"})
        self.messages.append({"role": "user", "content": f"then this: {len(self.messages)}"})


@pytest.mark.crash
@pytest.mark.parametrize("processes", [2, 3])
def test_each_session_is_one_process_s_also_after_a_kill(
    processes: int, workers: list[int], tmp_path: Path
) -> None:
    clients = [Client(number) for number in range(SESSIONS)]
    with several(tmp_path, processes, workers) as all_of_it, ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            list(pool.map(lambda client: client.turn(all_of_it), clients))
        until(lambda: len(all_of_it.entries("turn")) == 3 * SESSIONS)
        before = one_process_each(all_of_it)
        requests = all_of_it.metric("ownerserve_gateway_requests_total")
        assert requests == 3 * SESSIONS
        assert all_of_it.metric("ownerserve_gateway_requests_placed_total", at="elsewhere") > 0
        all_of_it.kill(1)
        # What it had counted is not counted again, nor lost.
        assert all_of_it.metric("ownerserve_gateway_requests_total") == requests
        list(pool.map(lambda client: client.turn(all_of_it), clients))
        until(lambda: len(all_of_it.entries("turn")) == 4 * SESSIONS)
        after = one_process_each(all_of_it)
        # A killed process's content chain and answers' ids are gone, as a killed gateway's are: its
        # sessions without a name have new ones, and nobody two processes.
        kept = {name: process for name, process in after.items() if name in before}
        assert kept == before
        assert all_of_it.metric("ownerserve_gateway_requests_total") == requests + SESSIONS
        assert all_of_it.metric("ownerserve_gateway_process_life", process="1") == 2


def one_process_each(all_of_it: Several) -> dict[str, str]:
    """The process of each session; all its turns were there, and each process has its share."""
    served = all_of_it.served()
    assert {name: turns for name, turns in served.items() if len(set(turns)) > 1} == {}
    assert len(served) >= SESSIONS
    at = {name: turns[0] for name, turns in served.items()}
    shares = Counter(at.values())
    assert len(shares) == all_of_it.processes
    # A fifth are sub-agents of one session, all at its process.
    assert min(shares.values()) >= SESSIONS // all_of_it.processes // 3
    return at


def test_sub_agents_are_at_their_parent_s_process(workers: list[int], tmp_path: Path) -> None:
    """Whoever comes first, and however deep."""
    homes: list[set[str]] = []
    with several(tmp_path, 3, workers) as all_of_it:
        for family in range(12):
            names = [f"family-{family}-{depth}" for depth in range(4)]
            chain = [(names[0], None), *zip(names[1:], names, strict=False)]
            # The child first: its parent goes where it went.
            order = [chain[1], chain[0], chain[2], chain[3]] if family % 2 else chain
            for name, parent in order:
                headers = {} if parent is None else {"x_parent_session_id": parent}
                answer = all_of_it.post(CHAT, {"model": "m"}, x_session_id=name, **headers)
                assert answer.status == 200
            # Each process writes its entries when it comes to it.
            known = 4 * len(homes)
            until(lambda: len(all_of_it.entries("turn")) == known + 4)  # noqa: B023
            homes.append({row["process"] for row in all_of_it.entries("turn")[known:]})
        assert all(len(home) == 1 for home in homes), homes
        assert len(set.union(*homes)) > 1


@pytest.mark.crash
def test_what_an_operator_changes_all_processes_do_also_one_that_starts_again(
    workers: list[int], tmp_path: Path
) -> None:
    with several(tmp_path, 2, workers[:1]) as all_of_it, echoing_worker() as joined:
        admin = all_of_it.gateway.admin_url
        first, second = f"127.0.0.1:{workers[0]}", f"127.0.0.1:{joined}"
        answer = httpx.post(f"{admin}/workers", json={"url": f"http://{second}"}, timeout=30)
        assert answer.status_code == 201 and answer.json()["worker"] == second
        again = httpx.post(f"{admin}/workers", json={"url": f"http://{second}"}, timeout=30)
        assert again.status_code == 409 and again.json()["error"]["code"] == "known_worker"
        drained = httpx.post(f"{admin}/workers/{first}/drain", timeout=30)
        assert drained.json()["stay"] == "drained"
        ran = Counter[str]()
        for life in range(2):
            for number in range(24):
                answer = all_of_it.post(CHAT, {"model": "m"}, x_session_id=f"{life}-{number}")
                ran[answer.headers["x-ownerserve-worker"]] += 1
            if not life:
                all_of_it.kill(1)
        assert ran == {second: 48}
        rows = {row["worker"]: row for row in all_of_it.admin("/workers")["workers"]}
        assert rows[first]["stay"] == "drained" and rows[second]["stay"] == "serving"
        page = httpx.get(admin + "/", timeout=30)
        assert page.status_code == 200 and "<script>" in page.text
        assert len(all_of_it.admin("/sessions?last=500")["sessions"]) >= 24
        assert len(all_of_it.admin("/decisions?last=500")["decisions"]) >= 24
        for path, methods in all_of_it.admin("/openapi.json")["paths"].items():
            if "get" in methods:
                assert httpx.get(admin + path, timeout=30).status_code == 200, path
        assert len(all_of_it.admin("/owners?last=500")["sessions"]) >= 24
        bad = httpx.get(f"{admin}/decisions?last=x", timeout=30)
        assert bad.status_code == 400
        assert httpx.get(f"{admin}/status?last=x", timeout=30).status_code == 200
        for path in ("/nothing", "/%E2%82%AC", "/workers/a%3Fb%2Fc/arm"):
            nothing = httpx.get(admin + path, timeout=30)
            assert nothing.status_code in (404, 405), (path, nothing.text)


@pytest.mark.crash
def test_who_starts_again_reads_the_files_first_then_does_what_was_asked_since(
    workers: list[int], tmp_path: Path
) -> None:
    """Two hangups: the files bring a worker, which is drained; then they say nothing new."""
    file = tmp_path / "gateway.toml"
    first, second = (f"http://127.0.0.1:{port}" for port in workers)
    listed = f'[[worker]]\nurl = "{second}"\n'
    file.write_text(listed)
    with several(tmp_path, 2, [], "--config", str(file)) as all_of_it:
        process, admin = all_of_it.gateway.process, all_of_it.gateway.admin_url
        name = first.removeprefix("http://")

        def stays() -> list[str]:
            rows = all_of_it.admin("/workers")["workers"]
            return [row["stay"] for row in rows if row["worker"] == name]

        file.write_text(f'{listed}[[worker]]\nurl = "{first}"\n')
        process.send_signal(signal.SIGHUP)
        until(lambda: len(all_of_it.entries("reloaded")) == 2)
        assert httpx.post(f"{admin}/workers/{name}/drain", timeout=30).status_code == 200
        process.send_signal(signal.SIGHUP)
        until(lambda: len(all_of_it.entries("reloaded")) == 4)
        all_of_it.kill(0)
        for number in range(16):
            answer = all_of_it.post(CHAT, {"model": "m"}, x_session_id=f"s{number}")
            assert answer.headers["x-ownerserve-worker"] != name
        assert stays() == ["drained"]


PLAYED = """
import select, sys, time
from pathlib import Path
from ownerserve.gateway.processes.supervisor import FRONT, RELOAD, Became, Ready, Supervisor
import msgspec

folder = Path(sys.argv[1])
supervisor = Supervisor(
    1, started=lambda front, relay: (folder / "started").touch(), close_listeners=lambda: None
)
outcome = supervisor.run()
if isinstance(outcome, Became):
    if outcome.role != FRONT:
        (folder / "starting").touch()
        while not (folder / "go").exists():
            time.sleep(0.005)
    outcome.line.send(msgspec.json.encode(Ready()) + b"\\n")
    while word := outcome.line.recv(1):
        if word == RELOAD:
            (folder / f"reload-{(folder / 'started').exists()}").touch()
"""


def test_a_hangup_amid_the_start_waits_for_its_end(tmp_path: Path) -> None:
    """No relay would hear the front sooner, and one that starts again later would miss it."""
    process = subprocess.Popen([sys.executable, "-c", PLAYED, str(tmp_path)], env=importing())
    try:
        until((tmp_path / "starting").exists)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        until(lambda: any(tmp_path.glob("reload-*")))
        assert [one.name for one in tmp_path.glob("reload-*")] == ["reload-True"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.crash
def test_it_drains_as_one_and_ends_with_its_supervisor(workers: list[int], tmp_path: Path) -> None:
    """A turn that runs has its answer; nobody is let in; all processes are gone."""
    for number, stop in enumerate((signal.SIGTERM, signal.SIGKILL)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with several(folder, 2, workers) as all_of_it, ThreadPoolExecutor(8) as pool:
            pids = [all_of_it.pid(process) for process in range(2)]

            def held(session: int, gateway: Several = all_of_it) -> int:
                body = {"model": "m", "said": "held"}
                return gateway.post(CHAT, body, x_session_id=f"s{session}").status

            turns = [pool.submit(held, session) for session in range(8)]
            until(lambda: all_of_it.admin("/status")["live"] == 8)
            all_of_it.gateway.process.send_signal(stop)
            for port in workers:
                let_go(port)
            assert [turn.result() for turn in turns] == [200] * 8
            code = all_of_it.gateway.process.wait(60)
            assert code == (0 if stop is signal.SIGTERM else -signal.SIGKILL)
            until(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids))
            with pytest.raises(ConnectionRefusedError):
                all_of_it.connect()


def test_a_second_gateway_on_the_port_is_refused(workers: list[int], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with several(tmp_path, 2, workers) as all_of_it:
        port = str(all_of_it.place[1])
        other = several(tmp_path / "other", 2, workers, "--port", port)
        with pytest.raises(AssertionError, match="Address already in use"), other:
            pass


def test_all_relays_together_keep_what_a_worker_may_run_at_once(
    workers: list[int], tmp_path: Path
) -> None:
    """Three turns at once at the only worker, whichever relay's they are, and no fewer."""
    options = ("--max-running", "3")
    with (
        several(tmp_path, 2, workers[:1], *options) as all_of_it,
        ThreadPoolExecutor(24) as pool,
    ):

        def slow(session: int) -> int:
            body = {"model": "m", "said": "slow"}
            answer = all_of_it.post(CHAT, body, x_session_id=f"s{session}")
            assert answer.status == 200
            at_once: int = answer.said["at_once"]
            return at_once

        assert max(pool.map(slow, range(24))) == 3
        assert len({row["process"] for row in all_of_it.entries("turn")}) == 2


@pytest.mark.parametrize("limit", ["--max-running", "--max-waiting"])
def test_a_limit_that_can_t_be_shared_is_refused(
    limit: str, workers: list[int], tmp_path: Path
) -> None:
    gateway = several(tmp_path, 3, workers, limit, "2")
    with pytest.raises(AssertionError, match=f"error: {limit}: 2 .* 3 processes"), gateway:
        pass


def test_what_no_relay_can_start_with_is_told_once(workers: list[int], tmp_path: Path) -> None:
    gateway = several(tmp_path, 3, workers, "--policy", "static_pd")
    with pytest.raises(AssertionError) as said, gateway:
        pass
    assert str(said.value).count("error: ") == 1
