"""Tickets: nothing waits on a medium, each is answered once, equal reads run once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.units import MIB
from ownerserve.store.format.model import (
    AlreadyStored,
    MissReason,
    ReadHit,
    ReadMiss,
    Want,
    WriteDone,
)
from ownerserve.store.service.runtime import (
    Abandoned,
    JoinFlight,
    NotYet,
    StartFlight,
    StoreService,
    TicketFlights,
)
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from tests.support.waits import WAIT_S


class SlowTier(MemoryTier):
    """Reads wait for a gate and are counted."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock, TierLimits(KindLimits(64 * MIB), KindLimits(MIB)))
        self.gate = threading.Event()
        self.reads = 0
        self.commits: list[int] = []

    def read(self, wants, landing=None):
        assert self.gate.wait(WAIT_S)
        self.reads += 1
        return super().read(wants, landing)

    def commit(self, reservations):
        self.commits.append(len(reservations))
        return super().commit(reservations)


@pytest.fixture
def slow(clock):
    tier = SlowTier(clock)
    service = StoreService(tier, clock)
    yield tier, service
    tier.gate.set()
    service.close()


def test_poll_never_waits(slow, samples):
    tier, service = slow
    put(tier, samples.meta(1), samples.payload(1))
    ticket = service.submit_read([Want(samples.meta(1).id)])
    assert service.poll(ticket) == NotYet()
    assert tier.reads == 0, "the read waits still, and nobody waited for it"
    tier.gate.set()
    service.drain()
    answer = service.poll(ticket)
    assert isinstance(answer, ReadHit)
    with pytest.raises(KeyError):
        service.poll(ticket)


def test_a_herd_reads_once(slow, samples):
    tier, service = slow
    put(tier, samples.meta(1), samples.payload(1))
    tickets = [service.submit_read([Want(samples.meta(1).id)]) for _ in range(500)]
    tier.gate.set()
    service.drain()
    assert all(isinstance(service.poll(ticket), ReadHit) for ticket in tickets)
    assert tier.reads == 1


def test_late_is_a_miss_and_the_late_result_is_dropped(slow, samples, clock):
    tier, service = slow
    put(tier, samples.meta(1), samples.payload(1))
    ticket = service.submit_read([Want(samples.meta(1).id)], deadline_s=clock.now() + 1)
    patient = service.submit_read([Want(samples.meta(1).id)])
    clock.advance(2)
    assert service.poll(ticket) == ReadMiss(MissReason.DEADLINE, samples.meta(1).id)
    tier.gate.set()
    service.drain()
    assert isinstance(service.poll(patient), ReadHit)
    with pytest.raises(KeyError):
        service.poll(ticket)


def test_work_nobody_waits_for_is_not_begun(slow, samples):
    tier, service = slow
    busy = [service.submit_read([Want(samples.meta(n).id)]) for n in range(4)]  # all readers
    queued = service.submit_read([Want(samples.meta(9).id)])
    service.cancel(queued)
    tier.gate.set()
    service.drain()
    assert all(isinstance(service.poll(ticket), ReadMiss) for ticket in busy)
    assert tier.reads == 4


def test_reserve_fill_commit(slow, samples):
    tier, service = slow
    tier.gate.set()
    ticket = service.submit_reserve(samples.meta(1), 10_000)
    service.drain()
    reserved = service.poll(ticket)
    assert isinstance(reserved, Reservation)
    reserved.payload[:] = samples.payload(1)
    ticket = service.submit_commit(reserved)
    service.drain()
    assert isinstance(service.poll(ticket), WriteDone)
    assert samples.read(tier, 1) == [samples.payload(1)]
    again = service.submit_reserve(samples.meta(1), 10_000)
    service.drain()
    assert service.poll(again) == AlreadyStored(samples.meta(1).id)


def test_cancelled_reservation_gives_its_room_back(slow, samples):
    tier, service = slow
    ticket = service.submit_reserve(samples.meta(1), 10_000)
    service.cancel(ticket)
    service.drain()
    unpolled = service.submit_reserve(samples.meta(2), 10_000)
    service.drain()
    service.cancel(unpolled)
    service.drain()
    assert isinstance(tier.reserve(samples.meta(3), 64 * MIB), Reservation), "all of it is free"


def test_waiting_commits_go_together(slow, samples, clock):
    tier, service = slow
    reserved = [tier.reserve(samples.meta(n), 1000) for n in range(20)]
    blocker = threading.Event()
    original = tier.reserve
    tier.reserve = lambda meta, size: (blocker.wait(5), original(meta, size))[1]
    service.submit_reserve(samples.meta(99), 1000)
    tickets = [service.submit_commit(item) for item in reserved]
    blocker.set()
    service.drain()
    assert all(isinstance(service.poll(ticket), WriteDone) for ticket in tickets)
    assert max(tier.commits) >= 10


def test_a_failing_job_is_a_miss_and_the_thread_lives(slow, samples, caplog):
    tier, service = slow
    tier.gate.set()
    original, tier.find = tier.find, None
    ticket = service.submit_find([samples.meta(1).id])
    service.drain()
    assert service.poll(ticket) == {}
    tier.find = original
    assert "store job failed" in caplog.text
    for _ in range(8):
        ticket = service.submit_find([samples.meta(1).id])
        service.drain()
        assert service.poll(ticket) == {}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(["a", "b", None]), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 12), st.none()),
        st.tuples(st.just("land"), st.integers(0, 12), st.none()),
        st.tuples(st.just("time"), st.integers(0, 5), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_every_ticket_is_answered_once(steps):
    flights, now, answered, tickets, flying = TicketFlights(), 0.0, set(), [], []
    for step, first, second in steps:
        if step == "submit":
            ticket, effect = flights.submit(first, now + second if second else None)
            tickets.append(ticket)
            if isinstance(effect, StartFlight):
                flying.append(effect.flight)
            else:
                assert isinstance(effect, JoinFlight)
                assert effect.flight in flying
        elif step == "cancel" and tickets:
            ticket = tickets[first % len(tickets)]
            if flights.cancel(ticket) is not None or ticket not in answered:
                answered.add(ticket)
        elif step == "land" and flying:
            done = flights.completed(flying.pop(first % len(flying)))
            assert not done & answered
            answered |= done
        elif step == "time":
            now += first
            for ticket, effect in flights.overdue(now):
                assert ticket not in answered
                assert effect is None or isinstance(effect, Abandoned)
                answered.add(ticket)
        flights.check()
        assert len(flights) == len(tickets) - len(answered)
