"""An idle session goes to another simulated worker: its state first, its ownership after, by
production's own S side and the directory's word. What does not come leaves all as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ownerserve.directory.owner.state import SessionGrant
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import PrefixTaken, Reject, SessionTaken
from ownerserve.node.transfers.state_brings import ANSWER_S
from ownerserve.sim.config.setup import Links
from ownerserve.sim.fleet.takes import NO_ANSWER, Taken
from ownerserve.sim.worker.worker import SimWorker
from ownerserve.trace.model import Trace, TraceRequest, TraceSession
from tests.support.sim.fleet_driver import U, ready, setup

S = SessionId("s0")
UNITS, MORE = 300, 100
STARTS_S = 5.0
NIC_GB_S = 10.0
UNIT_BYTES = 96 * 1024 * U
COMES_S = UNITS * UNIT_BYTES / NIC_GB_S / 1e9


FIRST_S = 0.6
"""Before then the first turn has ended."""
BACK_S = STARTS_S - FIRST_S + COMES_S / 2
"""Who comes back after so long comes while the bytes are on their way."""


def one_session(think_s: float, output: int) -> Trace:
    """Three turns, each `think_s` behind the one before; the second one answers `output`
    tokens."""
    requests = []
    for position in range(3):
        grown = [(20_000 * (number + 1), MORE) for number in range(position)]
        tokens = (UNITS + MORE * position) * U
        after = (position - 1,) if position else ()
        think = think_s if position else None
        runs = ((10_000, UNITS), *grown)
        told = output if position == 1 else 8
        request = TraceRequest(float(position), tokens, told, runs=runs, after=after, think_s=think)
        requests.append(request)
    session = TraceSession("s0", tuple(requests))
    return Trace("idle", "hand", U, "trace", "recorded", "unknown", (session,))


class Idle:
    """A fleet of two in which the first turn of a session has ended at one."""

    def __init__(self, think_s: float = 60.0, output: int = 8) -> None:
        links = Links(nic_gb_s=NIC_GB_S)
        wanted = setup("sticky", workers=2, kv_bytes=0, gap_moves="never", links=links)
        self.built = ready(one_session(think_s, output), wanted)
        self.heap, self.fleet = self.built.heap, self.built.fleet
        self.fleet.begin()
        self.until(STARTS_S)
        held = [worker for worker in self.fleet.workers if worker.cache.sessions.get(S)]
        (self.source,) = held
        (self.target,) = [one for one in self.fleet.workers if one is not self.source]
        self.heard: list[tuple[float, Taken]] = []

    def until(self, when_s: float) -> None:
        self.heap.run(until_s=when_s)
        self.heap.now = when_s
        self.fleet.check()

    def hears(self, said: Taken, now: float) -> None:
        self.heard.append((now, said))

    def take(self) -> None:
        self.fleet.takes.take(S, self.source, self.target, ended=self.hears, now=self.heap.now)

    def copy(self, units: int) -> None:
        self.fleet.takes.copy(
            S, self.source, self.target, units=units, ended=self.hears, now=self.heap.now
        )

    def at(self, when_s: float, call: Callable[[float], object]) -> None:
        self.heap.at(when_s, lambda now: (call(now), None)[1])

    def grant(self, worker: SimWorker) -> SessionGrant | None:
        return self.fleet.ownership.standing(S, worker.unit, self.heap.now)

    def said(self) -> Taken:
        [(_, said)] = self.heard
        return said

    def check_nothing_is_left(self) -> None:
        self.fleet.check()
        assert not len(self.fleet.takes)
        for worker in self.fleet.workers:
            assert not len(worker.cache.lends) and not len(worker.cache.ingest)


def test_an_idle_session_is_the_targets_once_the_directory_says_so() -> None:
    idle = Idle()
    idle.take()
    idle.until(STARTS_S + COMES_S)
    assert idle.grant(idle.source) is not None and not idle.heard, "it serves on meanwhile"
    idle.until(STARTS_S + COMES_S + 1.0)
    said = idle.said()
    assert isinstance(said, SessionTaken)
    assert (said.version, said.tokens) == (1, UNITS * U)
    grant = idle.grant(idle.target)
    assert grant is not None and (grant.epoch, grant.version) == (said.epoch, 1)
    assert idle.grant(idle.source) is None
    session = idle.target.cache.sessions.get(S)
    assert session is not None and session.version == 1
    assert idle.fleet.takes.moved_bytes == idle.source.host.nic.out.moved_bytes
    assert idle.fleet.takes.moved_bytes == UNITS * UNIT_BYTES
    idle.check_nothing_is_left()


def test_what_a_turn_finished_meanwhile_is_brought_once_more() -> None:
    idle = Idle(think_s=BACK_S, output=1)
    idle.take()
    idle.until(STARTS_S + COMES_S + 2.0)
    said = idle.said()
    assert isinstance(said, SessionTaken)
    assert (said.version, said.tokens) == (2, (UNITS + MORE) * U)
    assert idle.fleet.takes.moved_bytes == (UNITS + MORE) * UNIT_BYTES
    idle.check_nothing_is_left()


def test_a_session_whose_turn_runs_stays() -> None:
    idle = Idle(think_s=BACK_S, output=800)
    idle.take()
    idle.until(STARTS_S + COMES_S + 1.0)
    assert idle.said() == Reject(WorkerRefusal.SESSION_IS_RUNNING)
    assert idle.grant(idle.source) is not None and idle.grant(idle.target) is None
    idle.check_nothing_is_left()


@pytest.mark.parametrize("after_s", [0.0002, COMES_S / 2])
def test_a_target_that_dies_is_known_at_once(after_s: float) -> None:
    idle = Idle()
    idle.take()
    idle.at(STARTS_S + after_s, lambda now: idle.fleet.down(idle.target, now))
    idle.until(STARTS_S + after_s + 0.01)
    assert idle.said() == NO_ANSWER
    idle.until(STARTS_S + COMES_S + 10.0)
    assert idle.grant(idle.source) is not None
    idle.check_nothing_is_left()


@pytest.mark.parametrize(
    ("after_s", "refusal"),
    [(0.0002, WorkerRefusal.NO_ANSWER), (COMES_S / 2, WorkerRefusal.NOT_BROUGHT)],
)
def test_a_source_that_dies_gives_nothing_up(after_s: float, refusal: WorkerRefusal) -> None:
    idle = Idle()
    idle.take()
    idle.at(STARTS_S + after_s, lambda now: idle.fleet.down(idle.source, now))
    idle.until(STARTS_S + COMES_S + ANSWER_S + 1.0)
    assert idle.said() == Reject(refusal)
    assert idle.grant(idle.target) is None
    idle.check_nothing_is_left()


def test_without_the_directory_both_are_guests_until_it_is_back() -> None:
    idle = Idle()
    idle.take()
    idle.at(STARTS_S + COMES_S / 2, lambda now: idle.fleet.ownership.lose())
    idle.until(STARTS_S + COMES_S + ANSWER_S + 1.0)
    assert idle.said() == Reject(WorkerRefusal.NO_ANSWER)
    assert idle.grant(idle.source) is None, "it has stopped, and asks on"
    assert idle.grant(idle.target) is None
    assert idle.target.resident_units(idle.source.cache.residents.tokens_of(S)) == UNITS


def test_a_session_that_comes_already_is_not_taken_twice() -> None:
    idle = Idle()
    idle.take()
    idle.take()
    idle.until(STARTS_S + COMES_S + 1.0)
    first, second = [said for _, said in idle.heard]
    assert first == Reject(WorkerRefusal.SESSION_IS_MOVING)
    assert isinstance(second, SessionTaken)


def test_a_session_that_nobody_knows_stays_unknown() -> None:
    idle = Idle()
    source, target = idle.source, idle.target
    idle.fleet.takes.take(SessionId("nobody"), source, target, ended=idle.hears, now=idle.heap.now)
    idle.until(STARTS_S + 1.0)
    assert idle.said() == Reject(WorkerRefusal.UNKNOWN_SESSION)


def test_a_replica_is_nobodys_and_goes_first() -> None:
    idle = Idle()
    idle.copy(100)
    idle.until(STARTS_S + COMES_S)
    assert idle.said() == PrefixTaken(100 * U, 100 * UNIT_BYTES)
    assert idle.grant(idle.source) is not None and idle.grant(idle.target) is None
    session = idle.target.cache.sessions.get(S)
    assert session is not None and not session.is_referenced
    idle.check_nothing_is_left()


def test_a_replica_of_what_is_there_moves_nothing() -> None:
    idle = Idle()
    idle.copy(100)
    idle.until(STARTS_S + COMES_S)
    idle.copy(100)
    idle.until(STARTS_S + 2 * COMES_S)
    assert [said for _, said in idle.heard] == [
        PrefixTaken(100 * U, 100 * UNIT_BYTES),
        PrefixTaken(100 * U, 0),
    ]
