"""The store's runtime is the threads that do what the engine must not wait for.

    submit_*   returns a ticket at once; never touches a medium
    poll       the answer, or NotYet; never waits
    cancel     the answer is a miss from now on
    drain      waits, for shutdown and tests

Reads run on `readers` threads, and the same read submitted twice runs once. Everything that writes
runs on one thread, which takes all waiting commits together: one fdatasync for the lot.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from threading import Condition, Thread
from typing import NewType

import msgspec

from ownerserve.kv.clock import Clock
from ownerserve.store.format.model import (
    AlreadyStored,
    Listed,
    Meta,
    MissReason,
    ReadMiss,
    ReadOutcome,
    RefusalReason,
    Want,
    WriteOutcome,
    WriteRefused,
)
from ownerserve.store.tiers.backend import Reservation, TierBackend
from ownerserve.store.tiers.tiered import TieredStore

log = logging.getLogger("ownerserve.store")

READERS = 4
DRAIN_S = 30.0
"""How long a closing store waits for what is in the air."""
JOIN_S = 10.0
"""How long a closing store then waits for its threads."""
MAX_FLYING = 1024
GROUP = 64


Ticket = NewType("Ticket", int)
Flight = NewType("Flight", int)


class StartFlight(msgspec.Struct, frozen=True):
    """The runtime is to begin the work of `flight`."""

    flight: Flight


class JoinFlight(msgspec.Struct, frozen=True):
    """The same work is under way; its result answers this ticket too."""

    flight: Flight


class Abandoned(msgspec.Struct, frozen=True):
    """The runtime need not begin the work of `flight` any more: nobody waits."""

    flight: Flight


class _Waiting(msgspec.Struct):
    flight: Flight
    deadline_s: float | None


class TicketFlights:
    """TicketFlights is the book of who waits for which work, until when. Pure: the runtime does the
    work.

        submit    -> StartFlight for new work, JoinFlight when work of an equal key is under way
        completed -> the tickets that it answers
        cancel    -> the ticket is answered at once; a flight that nobody waits for is Abandoned
        overdue   -> tickets whose deadline passed, answered; the work itself can't be stopped

    A ticket is answered exactly once. A result that comes after its ticket's answer is dropped.
    """

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[Ticket, _Waiting] = {}
        self._tickets: dict[Flight, set[Ticket]] = {}
        self._by_key: dict[Hashable, Flight] = {}
        self._key_of: dict[Flight, Hashable] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def flying(self) -> int:
        """Count the work under way or queued."""
        return len(self._tickets)

    def submit(
        self, key: Hashable | None, deadline_s: float | None = None
    ) -> tuple[Ticket, StartFlight | JoinFlight]:
        """Give a new ticket, and what the runtime must do for it. Work with `key` None is never
        shared.
        """
        self._next += 1
        ticket = Ticket(self._next)
        flight = None if key is None else self._by_key.get(key)
        effect: StartFlight | JoinFlight
        if flight is None:
            flight = Flight(self._next)
            self._tickets[flight] = set()
            if key is not None:
                self._by_key[key] = flight
                self._key_of[flight] = key
            effect = StartFlight(flight)
        else:
            effect = JoinFlight(flight)
        self._tickets[flight].add(ticket)
        self._waiting[ticket] = _Waiting(flight, deadline_s)
        return ticket, effect

    def completed(self, flight: Flight) -> set[Ticket]:
        """Forget a flight whose result is there; returns the tickets that it answers."""
        tickets = self._land(flight)
        for ticket in tickets:
            del self._waiting[ticket]
        return tickets

    def _land(self, flight: Flight) -> set[Ticket]:
        key = self._key_of.pop(flight, None)
        if key is not None and self._by_key.get(key) == flight:
            del self._by_key[key]
        return self._tickets.pop(flight, set())

    def cancel(self, ticket: Ticket) -> Abandoned | None:
        """Forget a ticket that nobody asks for any more; an unknown or answered one is no error."""
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            return None
        tickets = self._tickets[waiting.flight]
        tickets.discard(ticket)
        if tickets:
            return None
        self._land(waiting.flight)
        return Abandoned(waiting.flight)

    def overdue(self, now_s: float) -> list[tuple[Ticket, Abandoned | None]]:
        """Cancel the tickets whose deadline has passed; returns them, with the work that nobody
        waits for.
        """
        late = [
            ticket
            for ticket, waiting in self._waiting.items()
            if waiting.deadline_s is not None and waiting.deadline_s <= now_s
        ]
        return [(ticket, self.cancel(ticket)) for ticket in late]

    def check(self) -> None:
        """Assert that every ticket waits for a flight that knows it, and that every flight has a
        ticket.
        """
        for ticket, waiting in self._waiting.items():
            assert ticket in self._tickets[waiting.flight]
        assert sum(map(len, self._tickets.values())) == len(self._waiting)
        assert all(self._tickets.values())
        assert set(self._by_key.values()) <= set(self._tickets)


class NotYet(msgspec.Struct, frozen=True):
    """A ticket's work is still waited for."""


Found = Mapping[bytes, Listed]
Seen = Mapping[bytes, object]
Located = Mapping[str, frozenset[bytes]]
Reserved = Reservation | AlreadyStored | WriteRefused
Answer = ReadOutcome | WriteOutcome | Seen | Located | Reserved


class WallClock:
    """The wall clock is that of runtimes: seconds since 1970, since records outlive the process
    that wrote them.

    The clock steps when the system's does; a store only ages records by it.
    """

    def now(self) -> float:
        """Return the system's time, in seconds since 1970."""
        return time.time()


class _Job(msgspec.Struct):
    flight: Flight
    run: Callable[[], Answer]
    instead: Answer
    undo: Callable[[Answer], None] | None = None
    commit: Reservation | None = None


class StoreService:
    """A store service is a tier behind tickets. Close it before the tier; both are the caller's."""

    def __init__(self, tier: TierBackend, clock: Clock, *, readers: int = READERS) -> None:
        self._tier = tier
        self._clock = clock
        self._flights = TicketFlights()
        self._answers: dict[Ticket, Answer] = {}
        self._misses: dict[Ticket, Answer] = {}
        self._abandoned: set[Flight] = set()
        self._undoing = 0
        """Reservations that nobody saw, on their way back."""
        self._changed = Condition()
        self._closing = False
        self._read_jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._write_jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            Thread(target=self._reader, name=f"store-read-{n}", daemon=True) for n in range(readers)
        ]
        self._threads.append(Thread(target=self._writer, name="store-write", daemon=True))
        for thread in self._threads:
            thread.start()

    def add_readers(self, readers: int) -> None:
        """Read on so many threads more, where reads wait long for others than a medium."""
        added = [
            Thread(target=self._reader, name=f"store-read-{len(self._threads) + n}", daemon=True)
            for n in range(readers)
        ]
        self._threads[:0] = added  # the writer's stays the last
        for thread in added:
            thread.start()

    def submit_find(self, ids: Sequence[bytes], *, deadline_s: float | None = None) -> Ticket:
        """Ask for a find. The answer is a mapping of what is there; an empty one when late."""
        ids = tuple(ids)
        job = _Job(Flight(0), lambda: self._tier.find(ids), {})
        return self._submit(job, self._read_jobs, key=("find", ids), deadline_s=deadline_s)

    def submit_look(
        self, look: Callable[[], Seen | Located], *, deadline_s: float | None = None
    ) -> Ticket:
        """Run `look` as a find, where the caller knows more ways to look than a tier's `find`.

        The answer is a ReadMiss when late: silence does not say that nothing is there.
        """
        job = _Job(Flight(0), look, ReadMiss(MissReason.BUSY, b""))
        return self._submit(job, self._read_jobs, key=None, deadline_s=deadline_s)

    def submit_read(self, wants: Sequence[Want], *, deadline_s: float | None = None) -> Ticket:
        """Ask for a read. The answer is ReadHit or ReadMiss. Equal reads in the air are one."""
        wants = tuple(wants)
        first = wants[0].id if wants else b""
        job = _Job(Flight(0), lambda: self._tier.read(wants), ReadMiss(MissReason.DEADLINE, first))
        return self._submit(job, self._read_jobs, key=("read", wants), deadline_s=deadline_s)

    def submit_reserve(
        self, meta: Meta, payload_bytes: int, *, deadline_s: float | None = None
    ) -> Ticket:
        """Ask for room. The answer is a Reservation to fill, AlreadyStored or WriteRefused.

        A reservation that nobody fetches is aborted.
        """
        job = _Job(
            Flight(0),
            lambda: self._tier.reserve(meta, payload_bytes),
            WriteRefused(RefusalReason.BUSY, meta.id),
            undo=self._undo,
        )
        return self._submit(job, self._write_jobs, key=None, deadline_s=deadline_s)

    def submit_commit(self, reservation: Reservation) -> Ticket:
        """Ask for a commit. The answer is WriteDone or WriteRefused. A commit can't be cancelled:
        it may be durable.
        """
        job = _Job(
            Flight(0),
            lambda: self._tier.commit([reservation])[0],
            WriteRefused(RefusalReason.CLOSED, reservation.meta.id),
            commit=reservation,
        )
        return self._submit(job, self._write_jobs, key=None, deadline_s=None)

    def _undo(self, answer: Answer) -> None:
        if isinstance(answer, Reservation):
            self._tier.abort(answer)

    def _undone(self, answer: Reservation) -> Answer:
        try:
            self._tier.abort(answer)
        finally:
            with self._changed:
                self._undoing -= 1
        return {}

    def _submit(
        self,
        job: _Job,
        jobs: queue.SimpleQueue[_Job | None],
        *,
        key: Hashable | None,
        deadline_s: float | None,
    ) -> Ticket:
        with self._changed:
            full = self._flights.flying >= MAX_FLYING and job.commit is None
            ticket, effect = self._flights.submit(key, deadline_s)
            self._misses[ticket] = job.instead
            if full or self._closing:
                self._answer_instead(ticket)
                self._flights.cancel(ticket)
            elif not isinstance(effect, JoinFlight):
                job.flight = effect.flight
                jobs.put(job)
        return ticket

    def _answer_instead(self, ticket: Ticket, reason: MissReason | None = None) -> None:
        answer = self._misses.pop(ticket)
        if isinstance(answer, ReadMiss):
            answer = ReadMiss(reason or MissReason.BUSY, answer.id)
        self._answers[ticket] = answer

    def poll(self, ticket: Ticket) -> Answer | NotYet:
        """Return the answer, once; NotYet before. Raises KeyError for a ticket answered or
        cancelled.
        """
        with self._changed:
            for late, abandoned in self._flights.overdue(self._clock.now()):
                self._answer_instead(late, MissReason.DEADLINE)
                if abandoned:
                    self._abandoned.add(abandoned.flight)
            if ticket in self._answers:
                return self._answers.pop(ticket)
            if ticket not in self._misses:
                raise KeyError(f"ticket {ticket} was answered or cancelled")
            return NotYet()

    def cancel(self, ticket: Ticket) -> Abandoned | None:
        """Give up a ticket: nobody will poll it. Work not begun is not begun; an unseen hold is
        undone. Returns the work that nobody waits for any more, if that is so.
        """
        with self._changed:
            abandoned = self._flights.cancel(ticket)
            if abandoned:
                self._abandoned.add(abandoned.flight)
            self._misses.pop(ticket, None)
            unseen = self._answers.pop(ticket, None)
            if isinstance(unseen, Reservation):  # the tier may be waiting for its medium: not here
                self._undoing += 1
                self._write_jobs.put(_Job(Flight(0), partial(self._undone, unseen), {}))
            return abandoned

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until nothing is in the air; returns False when that took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._flights.flying and not self._undoing, timeout_s
            )

    def close(self) -> bool:
        """Finish what is in the air, refuse the rest, stop the threads. Returns False when a medium
        is silent, and a thread that waits for it still uses the tier.
        """
        with self._changed:
            self._closing = True
        self.drain(DRAIN_S)
        for _ in self._threads[:-1]:
            self._read_jobs.put(None)
        self._write_jobs.put(None)
        until_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the store is left behind: its medium is silent")
            return False
        for unseen in self._answers.values():
            self._undo(unseen)
        self._answers.clear()
        return True

    def _complete(self, job: _Job, answer: Answer) -> None:
        with self._changed:
            self._abandoned.discard(job.flight)
            tickets = self._flights.completed(job.flight)
            for ticket in tickets:
                del self._misses[ticket]
                self._answers[ticket] = answer
            self._changed.notify_all()
        if not tickets and job.undo is not None:
            job.undo(answer)

    def _run(self, job: _Job) -> None:
        with self._changed:
            skip = job.flight in self._abandoned
            self._abandoned.discard(job.flight)
        if skip:
            return
        try:
            answer = job.run()
        except Exception:
            log.exception("store job failed")
            answer = job.instead
        self._complete(job, answer)

    def _reader(self) -> None:
        while (job := self._read_jobs.get()) is not None:
            self._run(job)

    def _writer(self) -> None:
        while (job := self._write_jobs.get()) is not None:
            group = [job]
            while len(group) < GROUP and not self._write_jobs.empty():
                more = self._write_jobs.get()
                if more is None:
                    self._write_jobs.put(None)
                    break
                group.append(more)
            self._commit_group([item for item in group if item.commit is not None])
            for item in group:
                if item.commit is None:
                    self._run(item)
            if isinstance(self._tier, TieredStore):
                self._tier.settle()

    def _commit_group(self, jobs: Sequence[_Job]) -> None:
        reservations = [job.commit for job in jobs if job.commit is not None]
        if not reservations:
            return
        try:
            answers: Sequence[Answer] = self._tier.commit(reservations)
        except Exception:
            log.exception("store commit failed")
            answers = [job.instead for job in jobs]
        for job, answer in zip(jobs, answers, strict=True):
            self._complete(job, answer)
