"""Each wire is cut once, over real processes: what it is for does not come, and comes when the wire
is whole. So there is no dead wire, and none that only looks alive.

A few in CI; all of them by hand:

    OWNERSERVE_ALL_CUTS=1 python -m pytest tests/kills/test_cut_wires.py
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
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

from ownerserve.cli.directory.holdings import (
    group_body,
    prefix_body,
    session_body,
    wished_body,
)
from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.kv.errors import PeerLost
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, TurnId, WorkerId
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
from ownerserve.kv.wire.inventory import Has, Lost, Page
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    SpeedStatement,
    TierStatement,
    UnitStatement,
)
from ownerserve.router.requests.identity import Scope
from tests.support.children import importing
from tests.support.kills.processes import LEASE_S, SESSION_HEADER, Fleet
from tests.support.kills.wires import WAIT_S
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

SOON_S = 4.0
"""Where a wire is cut, so long is waited for what must not come; where it is whole, thrice, and
the effect is tried again."""
GROUP = "c" * 32
TESTS = Path(__file__).parents[1]


class World:
    """The fleet, and what the rows do with it: two gateways (round robin), three workers."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._numbers = itertools.count()

    def soon(self, condition: Callable[[], object], *, within_s: float = SOON_S) -> bool:
        """Whether it comes, on a busy machine too where no wire is cut."""
        factor = 1.0 if self.fleet.cuts.wire else 3.0
        deadline_s = time.monotonic() + factor * within_s
        while time.monotonic() < deadline_s:
            if condition():
                return True
            time.sleep(0.05)
        return False

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
        """What a worker's RPC port answers; None: nothing, where a wire is cut within a second."""
        within_s = 1.0 if self.fleet.cuts.wire else WAIT_S
        asking: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        with asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(self.fleet.workers[worker].rpc)
            asking.send(rpc.encode(request, nonce))
            return rpc.decode_answer(asking.recv()) if asking.poll(1000 * within_s) else None

    def place(self, worker: int, tokens: int) -> tuple[int, rpc.Nonce]:
        """A place at a worker, and under which nonce; asked for anew while its engine is busy."""
        deadline_s, busy = time.monotonic() + WAIT_S, rpc.Reject(WorkerRefusal.ENGINE_BUSY)
        while True:
            nonce = rpc.new_nonce()
            held = self.node(worker, rpc.Reserve(TurnId("t"), rpc.Seed(tokens)), nonce)
            if isinstance(held, rpc.Reserved):
                return held.reservation, nonce
            assert held in (None, busy) and time.monotonic() < deadline_s, held

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


# ---- to the directory


def is_bound(world: World) -> bool:
    session, prompt = world.new()
    world.at(0, prompt, TurnLine(name=name_of(session)))
    return world.soon(lambda: world.record(name_of(session)))


def is_advanced(world: World) -> bool:
    session, prompt = world.new()
    name = name_of(session)
    world.at(0, prompt, TurnLine(name=name))
    return world.soon(lambda: (found := world.record(name)) and found.version == 1 and found.tokens)


def is_advanced_under_its_next_lease(world: World) -> bool:
    time.sleep(1.5 * LEASE_S)  # the one of before the cut is over
    return is_advanced(world)


def is_ended(world: World) -> bool:
    name, prompt, _ = world.owned(0)
    world.at(0, prompt, TurnLine(name=name, final=True))
    return world.soon(lambda: world.record(name) is None)


def is_transferred(world: World) -> bool:
    """The owner was asked to let it go to who did its last turn."""
    name, prompt, found = world.owned(0)
    world.at(1, prompt, TurnLine(name=name))
    let_go = rpc.ReleaseSession(name, found.epoch, world.unit(1))
    until(lambda: isinstance(world.node(0, let_go), rpc.Released), what="it to be let go")
    return world.soon(lambda: (now := world.record(name)) and now.owner.worker == "w1")


def is_held_by_a_guest(world: World) -> bool:
    """Who did a turn of another's session holds a copy. (What lies on disk would not do: a worker
    spills only what takes longer to compute than to load, by its own measure.)"""
    name, prompt, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    world.at(1, prompt, TurnLine(name=name))

    def is_known() -> bool:
        return any(
            str(copy["unit"]).startswith("w1 ") for copy in prefix_body(asking, tip)["copies"]
        )

    with client(world.fleet.directory) as asking:
        return world.soon(is_known)


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
    return world.soon(lambda: world.record(name_of(session)), within_s=2 * SOON_S)


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


# ---- what the directory answers


def forgets(world: World) -> None:
    with client(world.fleet.directory) as asking:
        asking.forget()


def is_told_again(world: World) -> bool:
    """A directory that forgets all hears anew who holds what, without a turn, each time: by the
    memory that its leases name."""
    _, _, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    with client(world.fleet.directory) as asking:
        for _ in range(2):
            forgets(world)
            if not world.soon(lambda: prefix_body(asking, tip)["copies"], within_s=2 * SOON_S):
                return False
    return True


def has_duty_again(world: World) -> bool:
    """The same, and who has last-copy duty."""
    _, _, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    forgets(world)
    with client(world.fleet.directory) as asking:
        return world.soon(lambda: prefix_body(asking, tip).get("duty"), within_s=2 * SOON_S)


def is_kept_over_a_rebuild(world: World) -> bool:
    """Who owned it before the directory forgot owns it under the same epoch: it is told at once
    that it is not known any more, before its lease is over, and is adopted."""
    name, _, found = world.owned(0)
    forgets(world)
    world.soon(lambda: world.record(name), within_s=2 * SOON_S)
    time.sleep(SOON_S / 2)  # whoever would be given it anew has it
    now = world.record(name)
    return now is not None and now.epoch == found.epoch


def is_kept_for_a_fork(world: World) -> bool:
    """A session goes on from where a fork stands: that copy is told again once the directory has
    forgotten."""
    name, prompt, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    here = RoutingUnit(WorkerId(f"fork-of-{name}"), 0, Incarnation(1))
    with client(world.fleet.directory) as asking:
        fork = SessionId(f"fork of {name}")
        _, bound = asking.execute([ask.Register(here), ask.Bind(fork, here, parent=name)])
        assert isinstance(bound, ask.Bound) and bound.prefix_hash == tip
        world.at(0, [*prompt, *range(5, 60)], TurnLine(name=name))
        until(lambda: (now := world.record(name)) and now.version == 2, what="its next turn")
        time.sleep(SOON_S / 2)  # what it went on from is told as left, and answered
        forgets(world)
        return world.soon(lambda: prefix_body(asking, tip)["copies"], within_s=2 * SOON_S)


_OUTDONE = 'ownerserve_owner_refusals_total{reason="stale_epoch",verb="advance"}'


def is_refused_as_outdone(world: World) -> bool:
    """The report of who does not know that its session has moved is refused, and counted as
    such."""
    name, prompt, found = world.owned(0)
    with client(world.fleet.directory) as asking:
        ours, theirs = found.owner, world.unit(1)
        move = ask.Transfer(name, ours, theirs, found.epoch, found.version)
        assert isinstance(asking.execute([move])[0], ask.Bound)
    before = world.fleet.workers[0].metric(_OUTDONE)
    world.at(0, prompt, TurnLine(name=name))
    return world.soon(lambda: world.fleet.workers[0].metric(_OUTDONE) > before)


def is_the_candidate_that_is_held(world: World) -> bool:
    """Of several prefixes the directory says which one it found."""
    _, _, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    unknown = PrefixHash(bytes(32))
    return answers(
        world, lambda asking: prefix_body(asking, unknown, tip)["prefix_hash"] == tip.hex()
    )


def is_shown_as_wished(world: World) -> bool:
    _, _, found = world.owned(0)
    tip = found.prefix_hash
    assert tip is not None
    with client(world.fleet.directory) as asking:
        wished_body(asking, tip, "w1")
    return answers(world, lambda asking: prefix_body(asking, tip)["wanted"])


def found_by_a_gateway(world: World) -> tuple[dict[str, Any], ask.SessionIs]:
    """What a gateway that never saw a session says down with its first turn; the record before."""
    session, prompt = world.new()
    name = name_of(session)
    world.at(0, prompt, TurnLine(name=name))
    until(lambda: (found := world.record(name)) and found.version)
    found = world.record(name)
    assert found is not None
    return world.turn(session, prompt), found


def is_found_under_its_epoch(world: World) -> bool:
    line, found = found_by_a_gateway(world)
    return bool(line.get("epoch") == msgspec.to_builtins(found.epoch))


def is_found_with_its_version(world: World) -> bool:
    line, found = found_by_a_gateway(world)
    return bool(line.get("version") == found.version)


def shown(*path: str) -> Callable[[World], bool]:
    """`directory status --session` has it."""

    def effect(world: World) -> bool:
        name, _, _ = world.owned(0, group=GROUP)

        def value(asking: DirectoryClient) -> object:
            found: Any = session_body(asking, name)
            for step in path:
                found = found and found.get(step)
            return found

        return answers(world, value)

    return effect


def moved(world: World) -> tuple[SessionId, list[int], ask.SessionIs]:
    """A session that w0 owned and w1, which had a turn of it, was given; its record before."""
    name, prompt, _ = world.owned(0)
    world.at(0, prompt, TurnLine(name=name))
    until(lambda: (found := world.record(name)) and found.version == 2, what="two turns")
    found = world.record(name)
    assert found is not None
    world.at(1, prompt, TurnLine(name=name))
    let_go = rpc.ReleaseSession(name, found.epoch, world.unit(1))
    until(lambda: isinstance(world.node(0, let_go), rpc.Released), what="it to be let go")
    until(lambda: (now := world.record(name)) and now.owner.worker == "w1", what="it to move")
    return name, prompt, found


def is_counted_on_after_a_move(world: World) -> bool:
    """The next owner goes on from the version that it is told with its grant."""
    name, prompt, found = moved(world)
    time.sleep(SOON_S / 2)  # it asks for what is its own, and hears how many turns there were
    world.at(1, prompt, TurnLine(name=name))
    return world.soon(lambda: (now := world.record(name)) and now.version == found.version + 1)


def keeps_its_tip(field: str) -> Callable[[World], bool]:
    """The next owner, which has told nothing yet, knows where the session stands."""

    def effect(world: World) -> bool:
        name, _, _ = moved(world)
        time.sleep(SOON_S / 2)
        forgets(world)
        world.soon(lambda: world.record(name), within_s=2 * SOON_S)
        return bool(getattr(world.record(name), field, None))

    return effect


def names_the_owner(field: str) -> Callable[[World], bool]:
    """A guest's answer says whose guest the turn is."""

    def effect(world: World) -> bool:
        name, prompt, found = world.owned(0)
        expected = getattr(found, field)

        def says() -> bool:
            answer = world.at(1, prompt, TurnLine(name=name))
            assert answer is not None
            line = read_answer_line(answer.headers[ANSWER_HEADER].encode()).line
            return bool(getattr(line, field) == expected)

        return world.soon(says)

    return effect


# ---- to a node


def is_asked_for_a_place(world: World) -> bool:
    before = world.workers_metric('ownerserve_reservations_total{outcome="reserved"}')
    session, prompt = world.new()
    world.turn(session, prompt)
    return world.workers_metric('ownerserve_reservations_total{outcome="reserved"}') > before


def is_held_longer(world: World) -> bool:
    """Who says that the turn is on its way has its place for as long again."""
    place, _ = world.place(0, 16)
    time.sleep(6.0)
    world.node(0, rpc.Commit(place))
    time.sleep(5.0)
    return world.status_at([3, 4, 5], TurnLine(reservation=place)) == 200


def is_given_back(world: World) -> bool:
    place, _ = world.place(0, 16)
    world.node(0, rpc.Release(place))
    return not world.is_held(0, place)


def is_called_off(world: World) -> bool:
    place, nonce = world.place(0, 16)
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

    return world.soon(has_moved)


# ---- down with a turn


def is_named(world: World) -> bool:
    session, prompt = world.new()
    world.turn(session, prompt)
    return world.soon(lambda: world.record(name_of(session)))


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
    return world.soon(lambda: (now := world.record(name)) and now.epoch > found.epoch)


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
        return world.soon(lambda: world.turn(session, prompt).get(field))

    return effect


# ---- what a worker states, and holds


def expected_at(world: World, worker: int, session: str, prompt: list[int]) -> int | None:
    """What a gateway expects to be cached of a turn; None: the turn was another worker's."""
    url = f"http://127.0.0.1:{world.fleet.ports[0]}/v1/completions"
    told = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(url, json=told, headers={SESSION_HEADER: session}, timeout=WAIT_S)
    at = answer.headers["x-ownerserve-worker"].rpartition(":")[2]
    if at != world.fleet.workers[worker].url.rpartition(":")[2]:
        return None
    return int(answer.headers["x-ownerserve-expected-cached-tokens"])


def expected_of_unseen(world: World, *ends: bool) -> int:
    """What is expected at a worker of a session of which turns were done there, past the gateway:
    for each of `ends` one, that ends the session or does not. Turns go to each worker in turn, so
    one of these sessions' is that worker's."""
    unseen = [world.new() for _ in world.fleet.workers]
    for final in ends:
        for session, prompt in unseen:
            world.at(0, prompt, TurnLine(name=name_of(session), final=final))
        time.sleep(SOON_S / 2)  # what is told is read
    found = [expected_at(world, 0, session, prompt) for session, prompt in unseen]
    return max(tokens for tokens in found if tokens is not None)


def is_expected(world: World) -> bool:
    """A gateway expects what a worker says that it holds."""
    return expected_of_unseen(world, False) > 0


def is_expected_no_more(world: World) -> bool:
    """What a worker says to be gone is not expected there."""
    return expected_of_unseen(world, False, True) == 0


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
        return world.soon(all_say)

    return effect


class Wire(NamedTuple):
    """What a wire is for, and whether CI cuts it."""

    effect: Callable[[World], bool]
    is_in_ci: bool = False


def is_a_place_known_by_its_number(world: World) -> bool:
    place, _ = world.place(0, 16)
    try:
        return place != 0 and world.is_held(0, place)
    finally:
        world.node(0, rpc.Release(place))


STATED = ("profile", "stated")
CUT: dict[str, Wire] = {
    "directory bind": Wire(is_bound, is_in_ci=True),
    "directory advance": Wire(is_advanced, is_in_ci=True),
    "directory end_session": Wire(is_ended, is_in_ci=True),
    "directory transfer": Wire(is_transferred, is_in_ci=True),
    "directory publish": Wire(is_held_by_a_guest, is_in_ci=True),
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
    "inventory": Wire(is_expected, is_in_ci=True),
    "page words": Wire(is_expected),
    "has session": Wire(is_expected),
    "has tier": Wire(is_expected),
    "has tokens": Wire(is_expected),
    "gone session": Wire(is_expected_no_more),
    "gone tier": Wire(is_expected_no_more),
    "outcome leased.lease_s": Wire(is_advanced_under_its_next_lease),
    "outcome leased.memory": Wire(is_told_again),
    "outcome published.adopted": Wire(is_kept_over_a_rebuild),
    "outcome published.forked": Wire(is_kept_for_a_fork),
    "outcome advanced.duty": Wire(has_duty_again),
    "outcome conflict.current": Wire(is_refused_as_outdone),
    "outcome refused.reason": Wire(is_kept_over_a_rebuild),
    "outcome session_is.owner": Wire(is_found),
    "outcome session_is.owner_live": Wire(is_found),
    "outcome session_is.epoch": Wire(is_found_under_its_epoch, is_in_ci=True),
    "outcome session_is.version": Wire(is_found_with_its_version),
    "outcome session_is.prefix_hash": Wire(shown("tip")),
    "outcome session_is.tokens": Wire(shown("tokens")),
    "outcome bound.epoch": Wire(is_advanced, is_in_ci=True),
    "outcome bound.version": Wire(is_counted_on_after_a_move),
    "outcome bound.prefix_hash": Wire(keeps_its_tip("prefix_hash")),
    "outcome bound.tokens": Wire(keeps_its_tip("tokens")),
    "outcome held_by.owner": Wire(names_the_owner("owner"), is_in_ci=True),
    "outcome held_by.epoch": Wire(names_the_owner("epoch")),
    "outcome found.prefix_hash": Wire(is_the_candidate_that_is_held),
    "outcome found.wanted": Wire(is_shown_as_wished),
    "outcome found.tokens": Wire(shown("tip", "tokens")),
    "outcome found.owner": Wire(shown("tip", "duty")),
    "outcome found.locations": Wire(shown("tip", "copies")),
    "outcome found.refs": Wire(shown("tip", "sessions")),
    "outcome found.group": Wire(shown("tip", "group")),
    "outcome wished.wanted": Wire(is_wished),
    "outcome group_is.members": Wire(is_in_its_group),
    "said reserved.reservation": Wire(is_a_place_known_by_its_number, is_in_ci=True),
}
_EDGES = "gateway/test_edges.py"
_PRICED = (
    "gateway/test_worker_statements.py::test_two_unlike_workers_are_priced_by_their_own_figures"
)
_PLACES = "gateway/test_places.py::test_no_more_tokens_are_lost_than_the_prompt_has"
_READ = "node/test_transfers.py::test_what_one_node_holds_another_reads"
_PREFILLS = "node/test_prefills.py"
_MOVES = "engines/hf/test_moves.py"
_TAKEN = f"{_MOVES}::test_its_next_turn_is_an_append_where_it_went"
_WENT_ON = (
    "engines/hf/test_turns_move.py::test_a_streamed_answer_goes_on_where_its_worker_is_drained"
)
_CALLED_OFF = "node/test_turn_moves.py::test_what_is_kept_goes_with_the_wish_that_brought_it"
_COPIED = "engines/hf/test_hot_prefixes.py::test_forks_run_where_their_prefix_was_copied_to"
_ORDERED = f"{_PREFILLS}::test_a_prompt_is_read_as_it_is_computed"
_BOTH_LEGS = (
    "engines/hf/test_prefill_both_legs.py"
    "::test_the_prompt_is_computed_while_who_answers_has_not_asked_for_it"
)
_PLUGIN = "engines/vllm/test_plugin.py::test_the_routes_answer_for_the_engine_core"
CUT_BY_HAND: dict[str, str] = {
    "node ask_lender": _READ,
    "node ask_line": _PLUGIN,
    "node ask_prefix": _READ,
    "node ask_session": _TAKEN,
    "node hand_over": _TAKEN,
    "node suspend": "engines/hf/test_suspended.py"
    "::test_a_drained_worker_that_nobody_relieves_puts_its_sessions_away",
    "node take": _TAKEN,
    "node stop_turn": _WENT_ON,
    "node move_turn": _WENT_ON,
    "node drop_turn": _CALLED_OFF,
    "node take_prefix": _COPIED,
    "node ask_tokens": _COPIED,
    "node end_prefill": f"{_PREFILLS}::test_asked_again_under_its_nonce_it_is_one_prompt",
    "node list_held": _PLUGIN,
    "node prefill": _ORDERED,
    "node probe": _PLUGIN,
    "node status": _PLUGIN,
    "turn bring_from": "engines/hf/test_bringing_fleet.py"
    "::test_a_session_leaves_a_busy_worker_with_its_state",
    "turn joins": _WENT_ON,
    "turn decode_from": "engines/hf/test_prefilling.py"
    "::test_a_prompt_is_computed_elsewhere_and_answered_here",
    "turn nonce": _BOTH_LEGS,
    "turn prefill": _BOTH_LEGS,
    "status kv_bytes_per_sequence": _PRICED,
    "status leaving": "engines/hf/test_leaving.py"
    "::test_each_session_goes_on_with_its_state_as_one_worker_after_the_other_leaves",
    "status lends": "gateway/test_worker_statements.py"
    "::test_state_is_brought_from_what_its_holder_lends_alone",
    "status frees_prompts": "engines/hf/test_prefill_both_legs.py"
    "::test_what_was_computed_is_the_next_prompt_s_or_is_free_at_once",
    "status role": _PRICED,
    "status unit": _PRICED,
    "answer load": f"{_EDGES}::test_stamps_are_the_workers_load_also_when_it_idles",
    "answer tip": f"{_EDGES}::test_what_a_worker_says_of_its_prompt_is_expected_there",
    "answer tokens": f"{_EDGES}::test_what_a_worker_says_of_its_prompt_is_expected_there",
    "answer mode": _PLACES,
    "answer lost_tokens": _PLACES,
}
"""Over real sockets on other tests' fleets; each of these failed when the wire was cut in src."""
_STATED = "gateway/test_worker_statements.py"
_STAMPS = f"{_EDGES}::test_stamps_are_the_workers_load_also_when_it_idles"
_READER = (
    "gateway/test_inventory_reader.py"
    "::test_it_goes_on_where_it_ended_and_reads_a_new_life_from_the_start"
)
_HELD = "gateway/test_places.py::test_what_a_worker_without_places_says_that_it_holds_is_counted_on"
_BROUGHT = (
    "gateway/test_places.py"
    "::test_what_a_worker_without_places_could_bring_back_is_known_from_then_on"
)
_WORDS = (
    "gateway/test_inventory_reader.py"
    "::test_words_are_told_of_their_rank_and_prefix_until_they_are_said_to_be_gone"
)
_LIKE = f"{_STATED}::test_a_worker_that_has_measured_nothing_is_priced_as_its_like_that_has"
_FOLLOWED = "gateway/test_releasing.py::test_the_owner_is_asked_and_its_word_is_followed"
_SHARES = f"{_STATED}::test_what_refilling_it_costs_and_how_busy_it_is_are_heard_with_its_load"
CUT_AS_READ: dict[str, str] = {
    "outcome published.lost": "engines/hf/test_published.py"
    "::test_a_last_copy_that_is_evicted_is_told_and_counted",
    "outcome refused.retry_after_s": "node/test_ownership.py"
    "::test_a_directory_that_is_being_rebuilt_is_asked_for_a_session_when_that_is_over",
    "said admit.ahead_prefill_tokens": _PLUGIN,
    "said status_is.status": _PLUGIN,
    "said status_is.profile": _PLUGIN,
    "said line_is.line": _PLUGIN,
    "said line_is.brought": "engines/vllm/test_answer_lines.py"
    "::test_people_read_what_came_of_it_on_lines_of_their_own",
    "said page_is.page": _PLUGIN,
    "said reject.reason": _FOLLOWED,
    "load as_of_s": _STAMPS,
    "load pending_prefill_tokens": _STAMPS,
    "load running_sequences": _STAMPS,
    "load waiting_sequences": _STAMPS,
    "load kv_bytes_free": _STAMPS,
    "load kv_bytes_total": _STAMPS,
    "load kv_bytes_evictable": f"{_STATED}"
    "::test_a_stated_load_is_heard_and_evictable_state_fills_memory_and_makes_room",
    "load refill_shares": _SHARES,
    "load busy_share": _SHARES,
    "unit worker": _FOLLOWED,
    "unit rank": f"{_STATED}::test_an_address_whose_process_changes_its_rank_is_one_candidate",
    "unit incarnation": _PRICED,
    "speed prefill_pass_ms": _PRICED,
    "speed prefill_token_ms": _PRICED,
    "speed prefill_attention_ms": _PRICED,
    "speed step_ms": _PRICED,
    "speed step_ms_per_sequence": _PRICED,
    "speed replay_tokens": _PRICED,
    "speed prefill_measured_s": _LIKE,
    "speed step_measured_s": _LIKE,
    "tier name": _PRICED,
    "tier bytes_total": _PRICED,
    "tier latency_ms": _PRICED,
    "tier bytes_per_ms": _PRICED,
    "tier measured_s": _PRICED,
    "page incarnation": _READER,
    "page rank": _WORDS,
    "page floor": _WORDS,
    "page last": _WORDS,
    "has number": _READER,
    "said accepted.compute_ms": f"{_PREFILLS}::test_a_busy_a_late_and_a_silent_worker_cost_a_look",
    "said accepted.turn_id": _ORDERED,
    "said accepted.tokens": _ORDERED,
    "said accepted.tip": _ORDERED,
    "said accepted.ready_ms": f"{_PREFILLS}::test_a_busy_a_late_and_a_silent_worker_cost_a_look",
    "said admit.resident_tokens": _HELD,
    "said admit.restorable_tokens": _BROUGHT,
    "said lender_says.frame": _READ,
    "said lender_says.memory": _READ,
    "said prefix_is.tokens": _READ,
    "said prefix_is.points": _READ,
    "said prefix_is.tip": _READ,
    "said prefix_is.ends": "engines/hf/test_bringing.py"
    "::test_a_fork_that_shares_the_beginning_alone_reads_that",
    "said prefix_is.ready_ms": "node/test_restores.py"
    "::test_a_peer_that_has_to_read_first_is_asked_where_that_is_soon_enough",
    "said prefix_is.ranks": "engines/vllm/test_rank_peers.py"
    "::test_each_rank_brings_its_heads_of_what_the_ranks_of_another_engine_have",
    "said moved.epoch": _TAKEN,
    "said moved.open_tokens": f"{_MOVES}::test_it_comes_back_with_all_that_its_owners_left",
    "said session_stands.epoch": _TAKEN,
    "said session_stands.restorable_tokens": f"{_MOVES}::"
    "test_it_stays_while_its_owner_does_not_say_what_it_holds",
    "said session_stands.sealed_tokens": _TAKEN,
    "said session_stands.tip": _TAKEN,
    "said session_stands.tokens": _TAKEN,
    "said session_stands.version": _TAKEN,
    "said prefix_taken.moved_bytes": _COPIED,
    "said prefix_taken.tokens": _COPIED,
    "said tokens_are.tokens": _COPIED,
    "said session_taken.epoch": _TAKEN,
    "said session_taken.tokens": _TAKEN,
    "said session_taken.version": _TAKEN,
    "said turn_kept.turn": _CALLED_OFF,
    "said admit.planned_tokens": "gateway/test_places.py"
    "::test_what_a_worker_would_do_by_its_own_prices_is_expected",
    "has prefix_hash": _WORDS,
    "gone number": _WORDS,
}
"""Where a test's own fleet reads it, by tests/support/kills/cut_fields.py: each test fails so.
None is a field that nobody acts on: such a one is not said (tests below)."""

_OF_ANSWERS = ("outcome ", "said ", "page ", "has ", "gone ")
"""What rows of an answer's fields begin with."""

IN_CI = [wire for wire, one in CUT.items() if one.is_in_ci]
CASES = list(CUT) if os.environ.get("OWNERSERVE_ALL_CUTS") else IN_CI


def test_every_wire_has_its_row() -> None:
    types = [f"directory {_tag(one)}" for one in get_args(ask.Request)]
    types += [f"node {_tag(one)}" for one in (*get_args(rpc.RpcRequest), rpc.Cancel)]
    for kind, record in (("turn", TurnLine), ("answer", AnswerLine), ("status", ProfileStatement)):
        types += [f"{kind} {field}" for field in record.__struct_fields__]
    types += ["status unit", "status load", "inventory"]
    messages = {wire for wire in CUT if not wire.startswith(_OF_ANSWERS)}
    assert messages | CUT_BY_HAND.keys() == set(types)
    assert not CUT.keys() & CUT_BY_HAND.keys()


def test_every_field_of_an_answer_has_its_row() -> None:
    fields = [
        f"{kind} {_tag(one)}.{field}"
        for kind, answers in (("outcome", get_args(ask.Outcome)), ("said", get_args(rpc.Said)))
        for one in answers
        for field in one.__struct_fields__
    ]
    nested = {
        "load": LoadStatement,
        "unit": UnitStatement,
        "speed": SpeedStatement,
        "tier": TierStatement,
        "page": Page,
        "has": Has,
        "gone": Lost,
    }
    fields += [f"{kind} {field}" for kind, one in nested.items() for field in one.__struct_fields__]
    cut = {wire for wire in CUT if wire.startswith(_OF_ANSWERS)}
    rows = [*cut, *CUT_AS_READ]
    assert sorted(rows) == sorted(fields)


@pytest.mark.parametrize("wire", CUT_AS_READ if os.environ.get("OWNERSERVE_ALL_CUTS") else [])
def test_without_a_field_the_test_of_its_effect_fails(wire: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.support.kills.cut_fields", str(TESTS / CUT_AS_READ[wire])]
    told = importing(OWNERSERVE_CUT=wire)
    ended = subprocess.run(command, env=told, cwd=TESTS.parent, capture_output=True, check=False)
    assert ended.returncode == 1 and b" failed" in ended.stdout, ended.stdout.decode()[-2000:]


@pytest.mark.parametrize("test", sorted({*CUT_BY_HAND.values(), *CUT_AS_READ.values()}))
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
        until(lambda: wire in cuts.taken, what=f"{wire} to be said")  # late, on a busy machine
    finally:
        cuts.wire = ""
    what = f"the effect of {wire} whole\n{world.fleet.said()}"
    until(lambda: effect(world), within_s=4 * WAIT_S, what=what)
