"""Whoever asks, whoever answers, or who stands beside is killed as a message passes: before it
arrives, or before its answer does. Then it begins again, and nothing is lost, wrong or owned twice.

A few of all cases in CI; all of them by hand:

    OWNERSERVE_ALL_KILLS=1 python -m pytest tests/kills/test_killed_at_messages.py
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import httpx
import msgspec
import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import TURN_HEADER, TurnLine, encode_turn_line
from ownerserve.router.requests.identity import Scope
from tests.support.kills.processes import SESSION_HEADER, Fleet, Member, Worker
from tests.support.kills.wires import WAIT_S, At, Trap
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

SESSIONS = 2
"""With a new one in each round an odd number: round robin sends each elsewhere each time."""
MODEL = "tiny-qwen3"
TURN_TOKENS = 24
ROUNDS_MAX = 60


class Case(NamedTuple):
    """`victim` is killed at a message `tag` that somebody sends once `cause` has begun."""

    tag: str
    victim: str
    at: At
    cause: str = "turns"

    def __str__(self) -> str:
        return f"{self.tag}-{self.at.value}-{self.victim}"


TO_DIRECTORY = {
    "register": "worker begins",
    "renew_lease": "turns",
    "bind": "turns",
    "advance": "turns",
    "transfer": "turns",
    "publish": "turns",
    "end_session": "end",
    "find_session": "turns",
}
TO_WORKER = {"reserve": "turns", "commit": "turns", "release_session": "turns"}
ALL = [
    Case(tag, victim, at, cause)
    for tag, cause in {**TO_DIRECTORY, **TO_WORKER}.items()
    for victim in ("directory", "w0", "gateway")
    for at in At
]
IN_CI = [
    Case("register", "directory", At.ANSWER, "worker begins"),
    Case("bind", "directory", At.REQUEST),
    Case("advance", "w0", At.ANSWER),
    Case("transfer", "w0", At.REQUEST),
    Case("transfer", "directory", At.ANSWER),
    Case("publish", "directory", At.REQUEST),
    Case("publish", "w0", At.ANSWER),
    Case("end_session", "w0", At.ANSWER, "end"),
    Case("find_session", "directory", At.ANSWER),
    Case("release_session", "gateway", At.ANSWER),
    Case("release_session", "w0", At.REQUEST),
]
CASES = ALL if os.environ.get("OWNERSERVE_ALL_KILLS") else IN_CI


class Sessions:
    """What a client knows of its sessions: each turn's prompt has all that went before."""

    def __init__(self, fleet: Fleet, cold: Callable[[list[int]], list[int]]) -> None:
        self._fleet = fleet
        self._cold = cold
        self._prompts: dict[str, list[int]] = {}

    def new(self, count: int) -> list[str]:
        made = [f"{next(_NUMBERS)}" for _ in range(count)]
        self._prompts |= {one: [3 + int(one) % 50, *range(5, 60)] for one in made}
        return made

    def turn(self, session: str, *, final: bool = False) -> bool:
        """One more turn; an answer that comes is the right one."""
        prompt = self._prompts[session]
        answer = self._fleet.turn(session, prompt, final=final)
        if answer is None:
            return False
        assert answer == self._cold(prompt), f"a wrong answer to {session}"
        self._prompts[session] = [*prompt, *answer, *range(70, 70 + TURN_TOKENS)]
        if len(self._prompts[session]) > 600:
            self._prompts[session] = self._prompts[session][:60]
        return True


_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), policy="round_robin")
    try:
        made.begin()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[int]], list[int]]]:
    """What a worker of its own answers, that never saw a session."""
    folder = tmp_path_factory.mktemp("cold")
    given = "worker --model tiny-qwen3 --kv-memory 8MiB --threads 1 --port 0"
    member = Member("cold", folder, given.split())
    member.begin()
    member.await_ready()
    url = (folder / "cold.ready").read_text().strip()

    def answer(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).json()
        ids: list[int] = found["choices"][0]["token_ids"]
        return ids

    yield answer
    member.terminate()


def record(fleet: Fleet, name: SessionId) -> ask.Outcome:
    client = DirectoryClient(fleet.directory)
    try:
        return client.execute([ask.FindSession(name)])[0]
    finally:
        client.close()


def says_it_owns(worker: Worker, name: SessionId) -> bool:
    """The worker's own word, on a turn that is sent to it alone."""
    headers = {TURN_HEADER: encode_turn_line(TurnLine(name=name)).decode()}
    body = {"prompt": [1, 2, 3], "max_tokens": 1}
    url = f"http://127.0.0.1:{worker.port}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200
    return "epoch" in _line(answer)


def _line(answer: httpx.Response) -> dict[str, object]:
    if "x-ownerserve-epoch" in answer.headers:
        return {"epoch": answer.headers["x-ownerserve-epoch"]}
    found = msgspec.json.decode(answer.headers.get("x-ownerserve-answer", "{}"), type=dict)
    is_own = found.get("owner") is None or found.get("owner") == found.get("unit")
    return found if is_own else {}


def is_owned_once(fleet: Fleet, name: SessionId) -> bool:
    """One that lives owns it, by its own word and by the directory's."""
    owners = [worker.name for worker in fleet.workers if says_it_owns(worker, name)]
    assert len(owners) <= 1, f"{name} is owned twice"
    found = record(fleet, name)
    if not isinstance(found, ask.SessionIs) or not found.owner_live:
        return False
    return owners == [found.owner.worker]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_is_lost_wrong_or_owned_twice(
    case: Case, fleet: Fleet, cold: Callable[[list[int]], list[int]]
) -> None:
    sessions = Sessions(fleet, cold)
    names = sessions.new(SESSIONS)
    ending = sessions.new(1) if case.cause == "end" else []
    for session in [*names, *ending, *ending]:
        until(partial(sessions.turn, session), what="a turn of a fleet that is well")
    if case.cause == "worker begins":
        fleet.members["w1"].kill()
    trap = Trap(case.tag, case.at, fleet.members[case.victim].kill)
    fleet.wires.trap = trap
    try:
        if case.cause == "worker begins":
            fleet.members["w1"].begin()
        for _ in range(ROUNDS_MAX):
            for session in [*names, *sessions.new(1 + len(ending))]:
                sessions.turn(session)
            for session in ending:
                sessions.turn(session, final=True)
            if trap.sprung.wait(0.05):
                break
        assert trap.sprung.is_set(), f"{case.tag} was never said\n{fleet.said()}"
    finally:
        fleet.wires.trap = None
        fleet.mend()
    for session in names:
        until(partial(sessions.turn, session), what="a turn after all")
    for session in names:
        until(partial(comes_to_one_owner, fleet, sessions, session), what=fleet.said())


def comes_to_one_owner(fleet: Fleet, sessions: Sessions, session: str) -> bool:
    """Whether it has; else after another turn."""
    name = Scope("-", MODEL).name(SESSION_HEADER, session)
    if is_owned_once(fleet, name):
        return True
    sessions.turn(session)
    return False
