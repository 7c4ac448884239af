"""Whoever asks, whoever answers, or who stands beside is killed as a message passes: before it
arrives, or before its answer does. Then it begins again, and nothing is lost, wrong or owned twice.

Each type of message is played that hf processes and `ownerserve directory` say; what vLLM's server
asks of its engine core is played by tests/vllm/test_killed_at_lines.py.

A few of all cases in CI; all of them by hand:

    OWNERSERVE_ALL_KILLS=1 python -m pytest tests/kills/test_killed_at_messages.py
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, get_args

import httpx
import msgspec
import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.frames import ForgetAll
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire import rpc
from ownerserve.kv.wire.headers import TURN_HEADER, TurnLine, encode_turn_line
from ownerserve.router.requests.identity import Scope
from tests.support.kills.processes import SESSION_HEADER, Fleet, Worker
from tests.support.kills.wires import WAIT_S, At, Lane, Trap
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

SESSIONS = 2
"""With a new one in each round an odd number: round robin sends each elsewhere each time."""
MODEL = "tiny-qwen3"
TURN_TOKENS = 24
ROUNDS_MAX = 60
HANG_UP_S = 0.3
"""So long a client waits that hangs up: less than a long answer takes, or a frozen worker."""
LONG_ANSWER_TOKENS = 400
LEAVES_S = 3.0
"""So long a worker is drained, unless what is waited for is said before."""


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

    def hang_up(self) -> None:
        """The first turn of a new session, whose client does not wait for it."""
        (session,) = self.new(1)
        prompt = self._prompts[session]
        self._fleet.turn(session, prompt, max_tokens=LONG_ANSWER_TOKENS, within_s=HANG_UP_S)


_NUMBERS = itertools.count(1)


class Scene(NamedTuple):
    """Where a case plays: the trap lies on `lane`, and `names` have had turns."""

    fleet: Fleet
    sessions: Sessions
    names: list[str]

    def tip(self) -> str:
        """The hash of a prefix that the directory knows."""
        found = record(self.fleet, name_of(self.names[0]))
        assert isinstance(found, ask.SessionIs) and found.prefix_hash is not None
        return found.prefix_hash.hex()


Cause = Callable[[Scene], Iterator[None]]
"""What is done beside the turns of each round so that a message is said: a step for each round."""


def turns(scene: Scene) -> Iterator[None]:
    """Nothing more: sessions move, new ones come."""
    while True:
        yield


def begins(scene: Scene) -> Iterator[None]:
    """A worker dies and begins again."""
    scene.fleet.members["w0"].kill()
    scene.fleet.members["w0"].begin()
    yield from turns(scene)


def stops(scene: Scene) -> Iterator[None]:
    """A worker is asked to stop."""
    scene.fleet.members["w0"].terminate()
    yield from turns(scene)


def ends(scene: Scene) -> Iterator[None]:
    """Sessions end, and come again."""
    ending = scene.sessions.new(1)
    for session in [*ending, *ending]:
        scene.sessions.turn(session)
    while True:
        for session in ending:
            scene.sessions.turn(session, final=True)
        scene.sessions.turn(scene.sessions.new(1)[0])
        yield


def hangs_up(scene: Scene) -> Iterator[None]:
    """Clients hang up before their answers begin, one at each worker."""
    while True:
        for _ in scene.fleet.workers:
            scene.sessions.hang_up()
        yield


def freezes(scene: Scene) -> Iterator[None]:
    """A worker stands still, and clients hang up that would be asked a place for there."""
    while True:
        scene.fleet.members["w0"].freeze()
        try:
            for _ in scene.fleet.workers:
                scene.sessions.hang_up()
        finally:
            scene.fleet.members["w0"].thaw()
        yield


def drains(scene: Scene) -> Iterator[None]:
    """A worker is drained, and its sessions leave it for the other."""
    trap = scene.fleet.wires.trap
    assert trap is not None
    while True:
        scene.fleet.drain("w0")
        trap.sprung.wait(LEAVES_S)
        scene.fleet.undrain("w0")
        yield


def commanded(*words: str) -> Cause:
    """Somebody runs `ownerserve directory WORDS`; `TIP` stands for a prefix that is known."""

    def cause(scene: Scene) -> Iterator[None]:
        verb, *given = [scene.tip() if word == "TIP" else word for word in words]
        command = scene.fleet.command
        while True:
            if command.is_dead:
                command.begin_with(verb, scene.fleet.asked, *given)
            yield

    return cause


class Said(NamedTuple):
    """Over whose wire a message goes, and what makes it go."""

    lane: Lane
    cause: Cause = turns


def _tag(message: type[msgspec.Struct]) -> str:
    return str(message.__struct_config__.tag)


OWNER, GATEWAY = Lane("w0", "directory"), Lane("gateway", "directory")
COMMAND, PLACES = Lane("command", "directory"), Lane("gateway", "w0")
LOOKS = ("status", "--prefix", "TIP", "--group", "none")
PLAYED = {
    _tag(ask.Register): Said(OWNER, begins),
    _tag(ask.RenewLease): Said(OWNER),
    _tag(ask.Bind): Said(OWNER),
    _tag(ask.Advance): Said(OWNER),
    _tag(ask.Transfer): Said(OWNER),
    _tag(ask.Publish): Said(OWNER),
    _tag(ask.EndSession): Said(OWNER, ends),
    _tag(ask.Drop): Said(OWNER, stops),
    _tag(ask.Retire): Said(OWNER, stops),
    _tag(ask.FindSession): Said(GATEWAY),
    _tag(ask.Lookup): Said(COMMAND, commanded(*LOOKS)),
    _tag(ask.FindGroup): Said(COMMAND, commanded(*LOOKS)),
    _tag(ask.ReplicateReadonly): Said(COMMAND, commanded("replicate", "TIP", "--to", "w1")),
    _tag(ForgetAll): Said(COMMAND, commanded("rebuild", "--wait", "0")),
    _tag(rpc.Reserve): Said(PLACES),
    _tag(rpc.Commit): Said(PLACES),
    _tag(rpc.Release): Said(PLACES, hangs_up),
    _tag(rpc.Cancel): Said(PLACES, freezes),
    _tag(rpc.ReleaseSession): Said(PLACES),
    _tag(rpc.Take): Said(Lane("gateway", "w1"), drains),
    # The other worker asks these, at the address that the gateway tells it: over the same wire.
    _tag(rpc.AskSession): Said(PLACES, drains),
    _tag(rpc.HandOver): Said(PLACES, drains),
}
BY_PEERS = {"ask_prefix", "ask_lender", "prefill", "end_prefill", "suspend"}
"""Workers ask these of each other, and a gateway a Suspend of a node that this fleet's workers
lack: a lender that is frozen or killed is engines/hf/test_bringing.py's, one that computes for
another test_prefilling.py's, one that puts a session away test_suspended.py's."""
AMID_TURNS = {_tag(one) for one in (rpc.StopTurn, rpc.MoveTurn, rpc.DropTurn)}
"""These are said while an answer is written: test_turns_killed.py, with Take."""
BY_REPLICAS = {"take_prefix", "ask_tokens"}
"""Said for forks that wait, or for a wish, and this fleet's turns take each worker in turn: who
dies amid a replica is engines/hf/test_replicas_cut_short.py's."""
BY_VLLM = {_tag(one) for one in (rpc.Status, rpc.ListHeld, rpc.Probe, rpc.AskLine)}


class Case(NamedTuple):
    """`victim` is killed at a message `tag`, or as its answer passes."""

    tag: str
    victim: str
    at: At

    def __str__(self) -> str:
        return f"{self.tag}-{self.at.value}-{self.victim}"


def victims(lane: Lane) -> list[str]:
    """Whoever asks and whoever answers, and those beside."""
    return list(dict.fromkeys([*lane, "w0", "w1", "gateway", "directory"]))


ALL = [
    Case(tag, victim, at)
    for tag, said in PLAYED.items()
    for victim in victims(said.lane)
    for at in At
]
IN_CI = [
    Case("register", "directory", At.ANSWER),
    Case("bind", "directory", At.REQUEST),
    Case("advance", "w0", At.ANSWER),
    Case("transfer", "w0", At.REQUEST),
    Case("transfer", "w1", At.ANSWER),
    Case("transfer", "directory", At.ANSWER),
    Case("publish", "directory", At.REQUEST),
    Case("end_session", "w0", At.ANSWER),
    Case("drop", "directory", At.REQUEST),
    Case("retire", "w0", At.REQUEST),
    Case("find_session", "directory", At.ANSWER),
    Case("forget", "directory", At.REQUEST),
    Case("replicate_readonly", "command", At.ANSWER),
    Case("release", "gateway", At.REQUEST),
    Case("cancel", "w0", At.REQUEST),
    Case("release_session", "gateway", At.ANSWER),
    Case("release_session", "w0", At.REQUEST),
    Case("take", "w1", At.REQUEST),
    Case("ask_session", "w0", At.REQUEST),
    Case("hand_over", "w0", At.ANSWER),
    Case("hand_over", "w1", At.ANSWER),
]
CASES = ALL if os.environ.get("OWNERSERVE_ALL_KILLS") else IN_CI


def test_every_message_is_played() -> None:
    types = {_tag(one) for one in (*get_args(ask.Request), ForgetAll)}
    types |= {_tag(one) for one in (*get_args(rpc.RpcRequest), rpc.Cancel)}
    assert types == PLAYED.keys() | BY_VLLM | BY_PEERS | AMID_TURNS | BY_REPLICAS
    assert set(IN_CI) <= set(ALL)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), policy="round_robin")
    try:
        made.begin()
        yield made
    finally:
        made.close()


def name_of(session: str) -> SessionId:
    return Scope("-", MODEL).name(SESSION_HEADER, session)


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
    for session in names:
        until(partial(sessions.turn, session), what="a turn of a fleet that is well")
        until(partial(is_told, fleet, session), what="its owner and tip to be known")
    lane, cause = PLAYED[case.tag]
    members = {**fleet.members, "command": fleet.command}
    trap = Trap(case.tag, case.at, members[case.victim].kill, lane=lane)
    fleet.wires.trap = trap
    try:
        rounds = cause(Scene(fleet, sessions, names))
        for _ in itertools.islice(rounds, ROUNDS_MAX):
            for session in [*names, *sessions.new(1)]:
                sessions.turn(session)
            if trap.sprung.wait(0.05):
                break
        assert trap.sprung.is_set(), f"{case.tag} was never said\n{fleet.said()}"
    finally:
        fleet.wires.trap = None
        fleet.command.kill()
        fleet.mend()
    for session in names:
        until(partial(sessions.turn, session), what="a turn after all")
    for session in names:
        until(partial(comes_to_one_owner, fleet, sessions, session), what=fleet.said())
    if lane == COMMAND:
        until(partial(is_answered, fleet), what="a command")
    until(fleet.at_rest, what=f"every request to end\n{fleet.said()}")
    assert not fleet.violations()


def is_answered(fleet: Fleet) -> bool:
    fleet.command.begin_with("status", fleet.asked)
    return fleet.command.ended() == 0


def is_told(fleet: Fleet, session: str) -> bool:
    found = record(fleet, name_of(session))
    return isinstance(found, ask.SessionIs) and found.prefix_hash is not None


def comes_to_one_owner(fleet: Fleet, sessions: Sessions, session: str) -> bool:
    """Whether it has; else after another turn."""
    if is_owned_once(fleet, name_of(session)):
        return True
    sessions.turn(session)
    return False
