"""Each wire is cut once, over real processes: what it is for does not come, and comes when the wire
is whole. So there is no dead wire, and none that only looks alive.

A few in CI; all of them by hand:

    OWNERSERVE_ALL_CUTS=1 python -m pytest tests/kills/test_cut_wires.py
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import httpx
import msgspec
import pytest
import zmq

from ownerserve.cli.directory.holdings import group_body, prefix_body, wished_body
from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.kv.errors import PeerLost
from ownerserve.kv.ids import Incarnation, SessionId, TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire import rpc
from ownerserve.kv.wire.headers import (
    ANSWER_HEADER,
    TURN_HEADER,
    AnswerLine,
    TurnLine,
    encode_turn_line,
    read_answer_line,
)
from ownerserve.kv.wire.status import ProfileStatement
from ownerserve.router.requests.identity import Scope
from tests.support.kills.processes import SESSION_HEADER, Fleet
from tests.support.kills.wires import WAIT_S
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

SOON_S = 4.0
"""Where a wire is cut, so long is waited for what must not come."""
GROUP = "c" * 32
TESTS = Path(__file__).parents[1]


class World:
    """The fleet, and what the rows do with it: two gateways (round robin), three workers."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._numbers = itertools.count()

    def new(self) -> tuple[str, list[int]]:
        """A session of its own, and a prompt that no other begins with."""
        number = next(self._numbers)
        return f"cut-{os.getpid()}-{number}", [3 + number % 90, 3 + number // 90, *range(5, 60)]

    def at(
        self,
        worker: int,
        prompt: list[int],
        line: TurnLine,
        *,
        max_tokens: int = 4,
        within_s: float = WAIT_S,
    ) -> httpx.Response | None:
        """A turn as a gateway sends it, to one worker over its wire; None: no answer in time."""
        headers = {TURN_HEADER: encode_turn_line(line).decode()}
        told = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        url = f"{self.fleet.workers[worker].url}/v1/completions"
        try:
            return httpx.post(url, json=told, headers=headers, timeout=within_s)
        except httpx.TimeoutException:
            return None

    def status_at(self, prompt: list[int], line: TurnLine, *, within_s: float = WAIT_S) -> int:
        """The HTTP status of such a turn at the first worker; 0: no answer in time."""
        answer = self.at(0, prompt, line, within_s=within_s)
        return 0 if answer is None else answer.status_code

    def turn(self, session: str, prompt: list[int], *, through: int = 0) -> dict[str, Any]:
        """A turn through a gateway; the line that the gateway said to the worker."""
        assert self.fleet.turn(session, prompt, through=through) is not None, self.fleet.said()
        return self.fleet.cuts.lines.get(name_of(session), {})

    def record(self, name: SessionId) -> ask.SessionIs | None:
        with client(self.fleet.directory) as asking:
            (found,) = asking.execute([ask.FindSession(name)])
        return found if isinstance(found, ask.SessionIs) else None

    def owned(self, worker: int, **fields: Any) -> tuple[SessionId, list[int], ask.SessionIs]:
        """A new session that the worker owns, a turn of it told."""
        session, prompt = self.new()
        name = name_of(session)
        self.at(worker, prompt, TurnLine(name=name, **fields))
        until(lambda: (found := self.record(name)) and found.version, what=self.fleet.said())
        found = self.record(name)
        assert found is not None
        return name, prompt, found

    def unit(self, worker: int) -> RoutingUnit:
        url = f"http://127.0.0.1:{self.fleet.workers[worker].port}/health"
        head = httpx.get(url, timeout=WAIT_S).headers[ANSWER_HEADER]
        unit = read_answer_line(head.encode()).line.unit
        assert unit is not None
        return unit

    def node(self, worker: int, request: Any, nonce: rpc.Nonce = rpc.NO_NONCE) -> rpc.Said | None:
        """What a worker's RPC port answers; None: nothing, within a second."""
        asking: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        with asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(self.fleet.workers[worker].rpc)
            asking.send(rpc.encode(request, nonce))
            return rpc.decode_answer(asking.recv()) if asking.poll(1000) else None

    def place(self, worker: int, tokens: int, nonce: rpc.Nonce = rpc.NO_NONCE) -> int:
        held = self.node(worker, rpc.Reserve(TurnId("t"), rpc.Seed(tokens)), nonce)
        assert isinstance(held, rpc.Reserved), held
        return held.reservation

    def is_held(self, worker: int, place: int) -> bool:
        return isinstance(self.node(worker, rpc.Commit(place)), rpc.Committed)

    def gateway(self, number: int = 0) -> dict[str, Any]:
        """What a gateway knows."""
        url = f"http://127.0.0.1:{self.fleet.admins[number]}/status"
        return dict(httpx.get(url, timeout=WAIT_S).json())

    def workers_metric(self, start: str) -> float:
        return sum(worker.metric(start) for worker in self.fleet.workers)


def name_of(session: str) -> SessionId:
    return Scope("-", "tiny-qwen3").name(SESSION_HEADER, session)


@contextmanager
def client(address: str) -> Iterator[DirectoryClient]:
    one = DirectoryClient(address)
    try:
        yield one
    finally:
        one.close()


def soon(condition: Callable[[], object], *, within_s: float = SOON_S) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


# ---- to the directory


def is_bound(world: World) -> bool:
    session, prompt = world.new()
    world.at(0, prompt, TurnLine(name=name_of(session)))
    return soon(lambda: world.record(name_of(session)))


def is_advanced(world: World) -> bool:
    session, prompt = world.new()
    name = name_of(session)
    world.at(0, prompt, TurnLine(name=name))
    return soon(lambda: (found := world.record(name)) and found.version == 1 and found.tokens)


def is_ended(world: World) -> bool:
    name, prompt, _ = world.owned(0)
    world.at(0, prompt, TurnLine(name=name, final=True))
    return soon(lambda: world.record(name) is None)


def is_transferred(world: World) -> bool:
    """The owner was asked to let it go to who did its last turn."""
    name, prompt, found = world.owned(0)
    world.at(1, prompt, TurnLine(name=name))
    let_go = rpc.ReleaseSession(name, found.epoch, world.unit(1))
    until(lambda: isinstance(world.node(0, let_go), rpc.Released), what="it to be let go")
    return soon(lambda: (now := world.record(name)) and now.owner.worker == "w1")


def is_held_on_disk(world: World) -> bool:
    _, _, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    with client(world.fleet.directory) as asking:
        return soon(lambda: "disk" in {copy["tier"] for copy in prefix_body(asking, tip)["copies"]})


def is_owned_on(world: World) -> bool:
    """An idle worker's session stays its own under one epoch, longer than a lease."""
    name, _, found = world.owned(0)
    time.sleep(SOON_S)
    now = world.record(name)
    return now is not None and now.owner_live and now.epoch == found.epoch


def is_registered_anew(world: World) -> bool:
    """A directory that has forgotten all: who registers owns again."""
    with client(world.fleet.directory) as asking:
        asking.forget()
    session, prompt = world.new()
    world.at(0, prompt, TurnLine(name=name_of(session)))
    return soon(lambda: world.record(name_of(session)), within_s=2 * SOON_S)


def is_found(world: World) -> bool:
    """A gateway that never saw a session says under which epoch it is owned."""
    session, prompt = world.new()
    world.at(0, prompt, TurnLine(name=name_of(session)))
    until(lambda: world.record(name_of(session)))
    return "epoch" in world.turn(session, prompt)


def said_as_it_stops(world: World) -> str:
    """What a worker says that owns a session and stops."""
    world.owned(2)
    member = world.fleet.members["w2"]
    member.terminate()
    said = member.said()
    world.fleet.mend()
    until(lambda: all(one["up"] for one in world.gateway()["workers"]), what="it to be back")
    return said[said.rindex("serving ") :]


def is_told_to_retire(world: World) -> bool:
    return "its lease runs out" not in said_as_it_stops(world)


def is_told_of_last_copies(world: World) -> bool:
    return "leave with this worker" in said_as_it_stops(world)


def is_looked_up(world: World) -> bool:
    _, _, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    return answers(world, lambda asking: prefix_body(asking, tip)["copies"])


def is_in_its_group(world: World) -> bool:
    world.owned(0, group=GROUP)
    members = answers(world, lambda asking: group_body(asking, GROUP)["members"])
    return bool(members)


def is_wished(world: World) -> bool:
    _, _, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    return answers(world, lambda asking: wished_body(asking, tip, "w1")["wanted"])


def answers(world: World, question: Callable[[DirectoryClient], object]) -> bool:
    """Whether the directory says something to who asks it over its wire."""
    with client(world.fleet.asked) as asking:
        try:
            return bool(question(asking))
        except PeerLost:
            return False


# ---- to a node


def is_asked_for_a_place(world: World) -> bool:
    before = world.workers_metric('ownerserve_reservations_total{outcome="reserved"}')
    session, prompt = world.new()
    world.turn(session, prompt)
    return world.workers_metric('ownerserve_reservations_total{outcome="reserved"}') > before


def is_held_longer(world: World) -> bool:
    """Who says that the turn is on its way has its place for as long again."""
    place = world.place(0, 16)
    time.sleep(6.0)
    world.node(0, rpc.Commit(place))
    time.sleep(5.0)
    return world.status_at([3, 4, 5], TurnLine(reservation=place)) == 200


def is_given_back(world: World) -> bool:
    place = world.place(0, 16)
    world.node(0, rpc.Release(place))
    return not world.is_held(0, place)


def is_called_off(world: World) -> bool:
    nonce = rpc.new_nonce()
    place = world.place(0, 16, nonce)
    world.node(0, rpc.Cancel(nonce))
    return not world.is_held(0, place)


def is_moved(world: World) -> bool:
    """Turns are done elsewhere, so the owner hands over."""
    session, prompt = world.new()
    name = name_of(session)
    world.turn(session, prompt)
    until(lambda: world.record(name))
    first = world.record(name)
    assert first is not None

    def has_moved() -> bool:
        world.turn(session, prompt)
        found = world.record(name)
        return found is not None and found.owner != first.owner

    return soon(has_moved)


# ---- down with a turn


def is_named(world: World) -> bool:
    session, prompt = world.new()
    world.turn(session, prompt)
    return soon(lambda: world.record(name_of(session)))


def is_a_fork(world: World) -> bool:
    """Before its first turn has ended a fork stands where its parent does."""
    parent, prompt, found = world.owned(0)
    child = name_of(world.new()[0])
    line = TurnLine(name=child, parent=parent)
    running = threading.Thread(target=world.at, args=(0, prompt, line), kwargs={"max_tokens": 300})
    running.start()
    seen: list[int] = []

    def has_begun() -> bool:
        now = world.record(child)
        if now is not None:
            seen.append(now.tokens if now.version == 0 else 0)
        return now is not None

    until(has_begun)
    running.join()
    return seen == [found.tokens]


def is_grouped(world: World) -> bool:
    group = f"{next(_GROUPS):032x}"
    world.owned(0, group=group)
    with client(world.fleet.directory) as asking:
        return bool(group_body(asking, group)["members"])


_GROUPS = itertools.count(1 << 40)


def is_outdone(world: World) -> bool:
    """An owner hears of a later epoch: what it has is void, and it binds anew."""
    name, prompt, found = world.owned(0)
    _, _, later = world.owned(1)
    world.at(0, prompt, TurnLine(name=name, epoch=later.epoch))
    return soon(lambda: (now := world.record(name)) and now.epoch > found.epoch)


def is_counted_on(world: World) -> bool:
    _, _, found = world.owned(0, version=7)
    return found.version == 8


def is_refused_elsewhere(world: World) -> bool:
    unit = world.unit(0)
    other = RoutingUnit(unit.worker, unit.dp_rank, Incarnation(unit.incarnation + 1))
    return world.status_at([3, 4, 5], TurnLine(target=other)) == 409


def is_a_place_checked(world: World) -> bool:
    return world.status_at([3, 4, 5], TurnLine(reservation=424_242)) == 409


def is_judged(world: World) -> bool:
    """A worker that has promised its room does not let an append wait that nobody asked about."""
    room, places = 256, list[int]()
    while isinstance(held := world.node(0, rpc.Reserve(TurnId("t"), rpc.Seed(room))), rpc.Reserved):
        places.append(held.reservation)
    try:
        said = world.status_at([3] * room, TurnLine(judged=True), within_s=SOON_S)
    finally:
        for place in places:
            world.node(0, rpc.Release(place))
    return said == 503


# ---- up with an answer


def says_down(field: str) -> Callable[[World], bool]:
    """What answers said of a session comes down with its next turn."""

    def effect(world: World) -> bool:
        session, prompt = world.new()
        return soon(lambda: world.turn(session, prompt).get(field))

    return effect


# ---- what a worker states, and holds


def is_held_known(world: World) -> bool:
    """A gateway hears of what is held though no turn of it passed there."""
    name = 'ownerserve_worker_inventory_total{kind="words"'
    admin = f"http://127.0.0.1:{world.fleet.admins[0]}/metrics"

    def words() -> float:
        lines = httpx.get(admin, timeout=WAIT_S).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    time.sleep(SOON_S / 2)  # what was told before is read
    before = words()
    world.owned(0)
    return soon(lambda: words() > before)


def is_stated(*path: str) -> Callable[[World], bool]:
    """A gateway's /status has it of each worker."""

    def effect(world: World) -> bool:
        def all_say() -> bool:
            found: Any = world.gateway()["workers"]
            for one in found:
                for step in path:
                    one = one and one.get(step)
                if not one:
                    return False
            return len(found) == len(world.fleet.workers)

        time.sleep(SOON_S / 2)  # the next statements
        return soon(all_say)

    return effect


class Wire(NamedTuple):
    """What a wire is for, and whether CI cuts it."""

    effect: Callable[[World], bool]
    is_in_ci: bool = False


STATED = ("profile", "stated")
CUT: dict[str, Wire] = {
    "directory bind": Wire(is_bound, is_in_ci=True),
    "directory advance": Wire(is_advanced, is_in_ci=True),
    "directory end_session": Wire(is_ended, is_in_ci=True),
    "directory transfer": Wire(is_transferred, is_in_ci=True),
    "directory publish": Wire(is_held_on_disk, is_in_ci=True),
    "directory renew_lease": Wire(is_owned_on),
    "directory register": Wire(is_registered_anew),
    "directory find_session": Wire(is_found, is_in_ci=True),
    "directory retire": Wire(is_told_to_retire),
    "directory drop": Wire(is_told_of_last_copies),
    "directory lookup": Wire(is_looked_up),
    "directory find_group": Wire(is_in_its_group),
    "directory replicate_readonly": Wire(is_wished),
    "node reserve": Wire(is_asked_for_a_place, is_in_ci=True),
    "node commit": Wire(is_held_longer),
    "node release": Wire(is_given_back, is_in_ci=True),
    "node cancel": Wire(is_called_off, is_in_ci=True),
    "node release_session": Wire(is_moved, is_in_ci=True),
    "turn name": Wire(is_named),
    "turn parent": Wire(is_a_fork, is_in_ci=True),
    "turn group": Wire(is_grouped, is_in_ci=True),
    "turn final": Wire(is_ended),
    "turn epoch": Wire(is_outdone),
    "turn version": Wire(is_counted_on, is_in_ci=True),
    "turn target": Wire(is_refused_elsewhere, is_in_ci=True),
    "turn reservation": Wire(is_a_place_checked, is_in_ci=True),
    "turn judged": Wire(is_judged),
    "answer unit": Wire(says_down("epoch")),
    "answer owner": Wire(says_down("epoch")),
    "answer epoch": Wire(says_down("epoch"), is_in_ci=True),
    "answer version": Wire(says_down("version"), is_in_ci=True),
    "status models": Wire(is_stated(*STATED, "models")),
    "status actions": Wire(is_stated(*STATED, "actions")),
    "status spec_digest": Wire(is_stated("profile", "spec_digest")),
    "status kv_bytes_per_token": Wire(is_stated(*STATED, "kv_bytes_per_token")),
    "status load": Wire(is_stated("profile", "kv_bytes_total")),
    "status speed": Wire(is_stated(*STATED, "speed")),
    "status tiers": Wire(is_stated(*STATED, "tiers")),
    "status rpc": Wire(is_stated(*STATED, "rpc"), is_in_ci=True),
    "status sequence_tokens": Wire(is_stated(*STATED, "sequence_tokens")),
    "status owns_sessions": Wire(is_stated(*STATED, "owns_sessions")),
    "inventory": Wire(is_held_known, is_in_ci=True),
}
_EDGES = "gateway/test_edges.py"
_PRICED = (
    "gateway/test_worker_statements.py::test_two_unlike_workers_are_priced_by_their_own_figures"
)
_PLACES = "gateway/test_places.py::test_no_more_tokens_are_lost_than_the_prompt_has"
_PLUGIN = "engines/vllm/test_plugin.py::test_the_routes_answer_for_the_engine_core"
CUT_BY_HAND: dict[str, str] = {
    "node ask_line": _PLUGIN,
    "node list_held": _PLUGIN,
    "node probe": _PLUGIN,
    "node status": _PLUGIN,
    "status kv_bytes_per_sequence": _PRICED,
    "status role": _PRICED,
    "status unit": _PRICED,
    "answer load": f"{_EDGES}::test_stamps_are_the_workers_load_also_when_it_idles",
    "answer tip": f"{_EDGES}::test_what_a_worker_says_of_its_prompt_is_expected_there",
    "answer tokens": f"{_EDGES}::test_what_a_worker_says_of_its_prompt_is_expected_there",
    "answer mode": _PLACES,
    "answer lost_tokens": _PLACES,
}
"""Over real sockets on other tests' fleets; each of these failed when the wire was cut in src."""

IN_CI = [wire for wire, one in CUT.items() if one.is_in_ci]
CASES = list(CUT) if os.environ.get("OWNERSERVE_ALL_CUTS") else IN_CI


def test_every_wire_has_its_row() -> None:
    types = [f"directory {_tag(one)}" for one in get_args(ask.Request)]
    types += [f"node {_tag(one)}" for one in (*get_args(rpc.RpcRequest), rpc.Cancel)]
    for kind, record in (("turn", TurnLine), ("answer", AnswerLine), ("status", ProfileStatement)):
        types += [f"{kind} {field}" for field in record.__struct_fields__]
    types += ["status unit", "status load", "inventory"]
    assert {*CUT, *CUT_BY_HAND} == set(types)
    assert not CUT.keys() & CUT_BY_HAND.keys()


@pytest.mark.parametrize("test", sorted(set(CUT_BY_HAND.values())))
def test_what_was_cut_by_hand_still_has_its_test(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}(" in (TESTS / path).read_text()


def _tag(message: type[msgspec.Struct]) -> str:
    return str(message.__struct_config__.tag)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), policy="round_robin", workers=3, gateways=2)
    try:
        made.begin()
        until(lambda: made.turn("warm", [*range(5, 60)]), what="workers to be probed")
        yield World(made)
    finally:
        made.close()


@pytest.mark.parametrize("wire", CASES)
def test_without_a_wire_its_effect_does_not_come(wire: str, world: World) -> None:
    cuts, effect = world.fleet.cuts, CUT[wire].effect
    cuts.wire = wire
    try:
        assert not effect(world), f"without {wire}\n{world.fleet.said()}"
    finally:
        cuts.wire = ""
    assert wire in cuts.taken, "nothing of it was said"
    assert effect(world) or effect(world), f"with {wire} whole\n{world.fleet.said()}"
