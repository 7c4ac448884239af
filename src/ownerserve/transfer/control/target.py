"""A target brings state from a peer: it asks, has pieces read, and commits. Pure.

    wanted ─ Lend ─> lent ─ More, again and again ─> all published
                      `─ ReserveRoom ─> reads ─> all landed ─ CommitRoom ─> the next part | over

- rooms.py has the states of what a part comes into, and of its reads. `BringOver` tells the end of
  a bring as soon as it is known; slots that somebody may still write are held without it.
- What a peer says is taken only where it was asked for: artifact, units, layers, each cell once, a
  digest for each rank. What a mover read counts only where it matches that digest.
- All ranks have all of a part, or it is not committed.
- After reads that the peer did not see, the ticket must have stood when it was asked after them.
- Each bring ends: a peer is silent for `SILENT_S` at most, a Lend waits `lend_s`, a piece is tried
  `ATTEMPTS` times, and a rate that promises less than computing does ends it (`slow_s`).
"""

from __future__ import annotations

from collections import deque
from math import inf

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Cancel
from ownerserve.transfer.control.bring import BringPart, OpenBring, OpenQuestion
from ownerserve.transfer.control.events import (
    ArenaCopied,
    AskPeer,
    BringEnd,
    BringOver,
    BringUnwanted,
    BringWanted,
    PeerAnswered,
    PeerLink,
    PeerReplaced,
    QuestionLost,
    ReadEnded,
    ReadGoal,
    ReserveRoom,
    RoomCommitted,
    RoomRefused,
    RoomReserved,
    TargetEffect,
    TargetEvent,
    TellPeer,
    WakeUp,
)
from ownerserve.transfer.control.links import PeerLinks
from ownerserve.transfer.control.messages import (
    Grown,
    Lend,
    LendGone,
    LendRefusal,
    LendRefused,
    Lent,
    More,
    PeerAnswer,
    PeerQuestion,
    ReturnLend,
)
from ownerserve.transfer.control.rooms import (
    BringRooms,
    OpenRead,
    PartRoom,
    ReadOutcome,
    ReadPhase,
    RoomState,
)
from ownerserve.transfer.vocabulary import ReadFailure, Road

LEND_S, LEND_AGAIN_S = 0.5, 0.2
LEND_SHARE, LEND_MOST_S = 1 / 2, 5.0
"""A lend is opened between two steps of its engine, and who is busy has long ones: a Lend is waited
for longer where computing would take longer. Half of that at most is lost to a peer that says
nothing; of an eighth most moves off busy workers came to nothing (docs/evidence/fidelity.md)."""
SILENT_S = 2.0
MORE_WAIT_S, MORE_AGAIN_S = 1.0, 0.3
"""How long a More may be held, and when it is asked again beyond that."""
MORE_GAP_S, KEEP_ALIVE_S = 0.02, 1.5
"""A More follows an answer that brought nothing, or one after which nothing more is needed, so much
later: the ticket has to be told that somebody reads."""
READ_S = 2.0
ATTEMPTS = 2
BACKLOG_MAX = 64
"""Published pieces that wait for their read; beyond, no more are asked for."""


def lend_s(compute_ms: float) -> float:
    """Return how long a Lend is waited for, in s, where computing would take so many ms."""
    return max(LEND_S, min(LEND_MOST_S, LEND_SHARE * compute_ms / 1e3))


class TransferTarget:
    """A `TransferTarget` is one unit as one that brings. It owns the brings, and the rooms whose
    slots somebody may still write; the slots themselves are the cache's."""

    def __init__(self, unit: RoutingUnit) -> None:
        self.unit = unit
        self._links = PeerLinks()
        self._brings: dict[int, OpenBring] = {}
        self._asking: dict[int, OpenBring] = {}  # by question
        self._rooms = BringRooms()
        self._questions = 0

    def handle(self, event: TargetEvent, now: float) -> list[TargetEffect]:
        """Take one event, and return what is to be done of it, in order."""
        match event:
            case BringWanted():
                return self._wanted(event, now)
            case BringUnwanted(number):
                bring = self._brings.get(number)
                return [] if bring is None else self._end(bring, BringEnd.UNWANTED, now)
            case PeerAnswered(question, answer):
                return self._answered(question, answer, now)
            case QuestionLost(question):
                return self._lost(question, now)
            case PeerReplaced(unit):
                return self._replaced(unit, now)
            case RoomReserved():
                return self._reserved(event, now)
            case RoomRefused():
                return self._refused(event, now)
            case RoomCommitted(reservation):
                return self._committed(reservation, now)
            case ReadEnded(ended):
                return self._read(self._rooms.ended(ended), now)
            case ArenaCopied(number):
                return self._read(self._rooms.copied(number), now)
            case WakeUp():
                return self._overdue(now)

    # -- asking --------------------------------------------------------------------------------

    def _wanted(self, wanted: BringWanted, now: float) -> list[TargetEffect]:
        parts = [BringPart(artifacts) for artifacts in wanted.parts]
        size = sum(one.bytes for part in wanted.parts for one in part)
        bring = OpenBring(wanted, now, parts, deque(wanted.peers), size)
        self._brings[wanted.number] = bring
        return self._ask_next(bring, now)

    def _ask_next(self, bring: OpenBring, now: float) -> list[TargetEffect]:
        """Ask the next peer that may be asked to lend; with none left the bring is over."""
        self._close_question(bring)
        bring.peer = None
        while bring.peers:
            peer = bring.peers.popleft()
            if not self._links.may_ask(peer, now):
                continue
            bring.peer, bring.heard_s = peer, now
            pieces = tuple(one.piece for part in bring.parts for one in part.wanted.values())
            wanted = bring.wanted
            lend = Lend(wanted.nonce, peer.unit, pieces, wanted.ranks, wanted.turn_id)
            return [
                self._ask(
                    bring,
                    lend,
                    LEND_AGAIN_S,
                    until_s=now + lend_s(bring.wanted.compute_ms),
                    now=now,
                )
            ]
        return self._end(bring, bring.refusal, now)

    def _ask(
        self, bring: OpenBring, message: PeerQuestion, every_s: float, *, until_s: float, now: float
    ) -> AskPeer:
        """Ask the bring's peer; what it was asked before is not waited for any more."""
        self._close_question(bring)
        assert bring.peer is not None
        self._questions += 1
        bring.question = OpenQuestion(self._questions, message, every_s, now + every_s, until_s)
        self._asking[self._questions] = bring
        return AskPeer(self._questions, bring.peer, message, until_s)

    def _close_question(self, bring: OpenBring) -> None:
        if bring.question is not None:
            del self._asking[bring.question.number]
            bring.question = None

    def _more(self, bring: OpenBring, wait_s: float, now: float) -> AskPeer:
        assert bring.peer is not None and bring.ticket is not None
        more = More(bring.ticket, bring.peer.unit, bring.known, int(wait_s * 1000))
        return self._ask(bring, more, wait_s + MORE_AGAIN_S, until_s=now + SILENT_S, now=now)

    def _answered(self, question: int, answer: PeerAnswer, now: float) -> list[TargetEffect]:
        bring = self._take_question(question)
        if bring is None:
            return []
        assert bring.peer is not None and bring.question is not None
        is_more = bring.question.is_more
        self._close_question(bring)
        self._links.answered(bring.peer)
        bring.heard_s = bring.answered_s = now
        match answer:
            case Lent() if not is_more:
                return self._lent(bring, answer, now)
            case LendRefused(reason) if not is_more:
                is_other = reason is LendRefusal.MISMATCH
                bring.refusal = BringEnd.MISMATCH if is_other else BringEnd.REFUSED
                return self._ask_next(bring, now)
            case Grown() if is_more:
                return self._grown(bring, answer, question=question, now=now)
            case LendGone() if is_more:
                return self._end(bring, BringEnd.GONE, now)
        return self._end(bring, BringEnd.MISMATCH, now)

    def _take_question(self, question: int) -> OpenBring | None:
        """Return the bring that waits for this answer; None: nobody does, any more."""
        return self._asking.get(question)

    def _lost(self, question: int, now: float) -> list[TargetEffect]:
        bring = self._asking.get(question)
        if bring is None or bring.question is None or bring.peer is None:
            return []
        if bring.question.is_more:  # what the ticket keeps is worth another try
            bring.question.again_s = min(bring.question.again_s, now + MORE_GAP_S)
            return []
        self._links.failed(bring.peer, now)
        return [TellPeer(bring.peer, Cancel(bring.wanted.nonce)), *self._ask_next(bring, now)]

    def _replaced(self, unit: RoutingUnit, now: float) -> list[TargetEffect]:
        self._links.forget(unit)
        effects: list[TargetEffect] = []
        for bring in list(self._brings.values()):
            if bring.peer is not None and bring.peer.unit == unit:
                if bring.ticket is None:
                    effects += self._ask_next(bring, now)
                else:
                    effects += self._end(bring, BringEnd.GONE, now)
        return effects

    def _lent(self, bring: OpenBring, lent: Lent, now: float) -> list[TargetEffect]:
        bring.ticket, bring.ranks = lent.ticket, lent.ranks
        if not self._serves_all(bring):
            return self._end(bring, BringEnd.MISMATCH, now)
        return [self._more(bring, MORE_WAIT_S, now), self._reserve(bring)]

    def _serves_all(self, bring: OpenBring) -> bool:
        """Tell whether each of our ranks, and no other, is lent each component that is wanted."""
        ranks = {rank.rank for rank in bring.wanted.ranks}
        return all(
            {one.reader_rank for one in bring.ranks if one.component in ("", wanted.component)}
            == ranks
            for part in bring.parts
            for wanted in part.wanted.values()
        )

    def _grown(
        self, bring: OpenBring, grown: Grown, *, question: int, now: float
    ) -> list[TargetEffect]:
        if grown.have != bring.known:
            return self._end(bring, BringEnd.MISMATCH, now)
        if not all(bring.publish(published) for published in grown.pieces):
            return self._end(bring, BringEnd.MISMATCH, now)
        bring.known += len(grown.pieces)
        bring.is_final, bring.brought_pieces = grown.is_final, bool(grown.pieces)
        room = bring.room
        if room is not None and room.landed_at is not None and self._is_after(question, room):
            room.landed_at = None
        return self._go_on(bring, now)

    def _is_after(self, question: int, room: PartRoom) -> bool:
        """Tell whether this was asked after all that landed, so that a ticket which stood for it
        stood while it was read."""
        return room.landed_at is not None and question > room.landed_at

    def _keep_asking(self, bring: OpenBring, now: float) -> list[TargetEffect]:
        """Ask for more when it is time to."""
        if bring.ending is not None or now < self._ask_s(bring):
            return []
        return [self._more(bring, MORE_WAIT_S, now)]

    def _ask_s(self, bring: OpenBring) -> float:
        """Return the instant at which more is asked for; inf: it is, or nothing is lent."""
        if bring.question is not None or bring.ticket is None or bring.ending is not None:
            return inf
        if bring.is_final or sum(len(part.waiting) for part in bring.parts) >= BACKLOG_MAX:
            return bring.answered_s + KEEP_ALIVE_S
        return bring.answered_s + (0.0 if bring.brought_pieces else MORE_GAP_S)

    # -- room and reads ------------------------------------------------------------------------

    def _reserve(self, bring: OpenBring) -> ReserveRoom:
        bring.room = self._rooms.wait_for(bring.wanted.number, bring.index)
        return ReserveRoom(bring.wanted.number, bring.index)

    def _reserved(self, event: RoomReserved, now: float) -> list[TargetEffect]:
        room, effects = self._rooms.reserved(event)
        bring = self._bring_of(room)
        return effects if bring is None else self._go_on(bring, now)

    def _refused(self, event: RoomRefused, now: float) -> list[TargetEffect]:
        bring = self._bring_of(self._rooms.refused(event.number, event.part))
        if bring is None:
            return []
        bring.room = None
        return self._end(bring, BringEnd.NO_ROOM, now)

    def _bring_of(self, room: PartRoom) -> OpenBring | None:
        """Return the bring that waits for the room; None: it is over."""
        bring = self._brings.get(room.number)
        return bring if bring is not None and bring.room is room else None

    def _go_on(self, bring: OpenBring, now: float) -> list[TargetEffect]:
        """Read what is published, commit what has landed, ask for what is missing."""
        room, effects = bring.room, list[TargetEffect]()
        if room is not None and room.is_open:
            part = bring.part
            if bring.is_final and part.cover.missing:
                return self._end(bring, BringEnd.SHORT, now)
            if part.has_all:
                return self._commit(bring, room, now)
            if part.waiting:
                road = self._road(bring, now)
                if road is None:
                    return self._end(bring, BringEnd.UNABLE, now)
                effects += self._start_reads(bring, room, road=road, now=now)
        return effects + self._keep_asking(bring, now)

    def _road(self, bring: OpenBring, now: float) -> Road | None:
        """Return the first road that is open to the peer."""
        assert bring.peer is not None
        for road in bring.wanted.roads:
            if self._links.is_open(bring.peer, road, now):
                return road
        return None

    def _has_other(self, bring: OpenBring, road: Road, now: float) -> bool:
        """Tell whether another road is open to the peer."""
        assert bring.peer is not None
        others = (one for one in bring.wanted.roads if one != road)
        return any(self._links.is_open(bring.peer, one, now) for one in others)

    def _start_reads(
        self, bring: OpenBring, room: PartRoom, *, road: Road, now: float
    ) -> list[TargetEffect]:
        """Start reads, as far as credit goes."""
        assert bring.peer is not None and bring.ticket is not None
        effects: list[TargetEffect] = []
        waiting = bring.part.waiting
        bring.reading_s = min(bring.reading_s, now)
        deadline_s = min(now + READ_S, bring.reading_s + bring.wanted.compute_ms / 1000)
        while waiting and self._rooms.has_credit(room, waiting[0]):
            start = self._rooms.read(
                room,
                waiting.popleft(),
                peer=bring.peer,
                ticket=bring.ticket,
                road=road,
                deadline_s=deadline_s,
            )
            effects.append(start)
        return effects

    def _read(self, outcome: ReadOutcome, now: float) -> list[TargetEffect]:
        """Go on with what came of a read."""
        reading = outcome.reading
        bring = None if reading is None else self._bring_of(reading.room)
        if reading is None or bring is None:
            return outcome.effects
        if outcome.failure is None:
            return outcome.effects + self._landed(bring, reading, now)
        return outcome.effects + self._failed(bring, reading, reason=outcome.failure, now=now)

    def _landed(self, bring: OpenBring, reading: OpenRead, now: float) -> list[TargetEffect]:
        """Count a piece that is in its slots, for one rank."""
        bring.part.open_tasks -= 1
        bring.landed_bytes += reading.task.bytes
        if not bring.is_final:
            bring.early_bytes += reading.task.bytes
        bring.read_bytes[reading.road.name] += reading.task.bytes
        bring.heard_s = now
        if not self._is_seen(reading):
            reading.room.landed_at = self._questions
        return self._go_on(bring, now)

    def _is_seen(self, reading: OpenRead) -> bool:
        """Tell whether the peer saw the read, so that the ticket stood until its end."""
        return reading.road.is_signed

    def _failed(
        self, bring: OpenBring, reading: OpenRead, *, reason: ReadFailure, now: float
    ) -> list[TargetEffect]:
        """Try the piece again, by another road where this one is closed; or end the bring."""
        assert bring.peer is not None
        bring.failures[reason] += 1
        is_unproven = reading.phase is ReadPhase.UNPROVEN
        if reason is ReadFailure.GONE:
            return self._end(bring, BringEnd.GONE, now)
        if reason is ReadFailure.PEER_LOST:
            self._links.failed(bring.peer, now)
        is_unable = reason is ReadFailure.UNABLE
        if is_unable or (is_unproven and self._has_other(bring, reading.road, now)):
            self._links.close(bring.peer, reading.road, now)
        if not is_unable:
            reading.task.attempts += 1
        is_written_on = is_unproven and reading.goal is ReadGoal.BLOCKS
        is_over = reason is ReadFailure.REFUSED or reading.task.attempts >= ATTEMPTS
        if is_over or is_written_on:
            return self._end(bring, BringEnd.FAILED, now)
        bring.part.waiting.append(reading.task)
        return self._go_on(bring, now)

    def _commit(self, bring: OpenBring, room: PartRoom, now: float) -> list[TargetEffect]:
        """Commit the part, all of which has landed; first ask for the ticket, where the peer saw
        not all reads."""
        if room.landed_at is not None:
            asked = bring.question
            if asked is not None and not asked.is_held and self._is_after(asked.number, room):
                return []
            return [self._more(bring, 0.0, now)]
        verified = {name: tuple(found) for name, found in bring.part.digests.items()}
        return [self._rooms.commit(room, verified), *self._keep_asking(bring, now)]

    def _committed(self, reservation: int, now: float) -> list[TargetEffect]:
        bring = self._bring_of(self._rooms.take(reservation))
        assert bring is not None, "a bring waits for what it commits"
        bring.room = None
        bring.index += 1
        if bring.index == len(bring.parts):
            return self._end(bring, BringEnd.BROUGHT, now)
        if bring.ending is not None:
            return self._end(bring, bring.ending, now)
        return [self._reserve(bring), *self._keep_asking(bring, now)]

    # -- time and ends -------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """Return the instant at which a `WakeUp` has something to do; inf: there is none."""
        return min((self._due_s(bring) for bring in self._brings.values()), default=inf)

    def _due_s(self, bring: OpenBring) -> float:
        first = min(self._over_s(bring), self._ask_s(bring))
        return first if bring.question is None else min(first, bring.question.again_s)

    def _over_s(self, bring: OpenBring) -> float:
        """Return the instant at which the bring ends, or goes to its next peer, if nothing happens;
        inf: it is the cache that it waits for."""
        if bring.room is not None and bring.room.state is RoomState.VERIFIED:
            return inf
        return min(_silent_s(bring), bring.slow_s())

    def _overdue(self, now: float) -> list[TargetEffect]:
        effects: list[TargetEffect] = []
        for bring in list(self._brings.values()):
            if self._over_s(bring) <= now:
                effects += self._too_late(bring, now)
            elif bring.question is not None and bring.question.again_s <= now:
                asked = bring.question
                asked.again_s = now + asked.every_s
                if asked.is_more:  # bytes may come meanwhile, from a peer that answers nothing
                    asked.until_s = now + SILENT_S
                assert bring.peer is not None
                effects.append(AskPeer(asked.number, bring.peer, asked.message, asked.until_s))
            else:
                effects += self._keep_asking(bring, now)
        return effects

    def _too_late(self, bring: OpenBring, now: float) -> list[TargetEffect]:
        assert bring.peer is not None
        if _silent_s(bring) <= now:
            self._links.failed(bring.peer, now)
        if bring.slow_s() <= now:
            return self._end(bring, BringEnd.SLOW, now)
        if bring.ticket is not None:
            return self._end(bring, BringEnd.SILENT, now)
        return [TellPeer(bring.peer, Cancel(bring.wanted.nonce)), *self._ask_next(bring, now)]

    def _end(self, bring: OpenBring, end: BringEnd, now: float) -> list[TargetEffect]:
        """End the bring: give up what it has reserved, tell its peer, and what came of it."""
        self._close_question(bring)
        room = bring.room
        if room is not None and room.state is RoomState.VERIFIED:
            bring.ending = end  # the cache has the word
            return []
        effects = list[TargetEffect]() if room is None else self._rooms.give_up(room, now)
        del self._brings[bring.wanted.number]
        if bring.peer is not None:
            told = self._farewell(bring, bring.peer)
            effects.append(TellPeer(bring.peer, told))
        return [
            *effects,
            BringOver(
                number=bring.wanted.number,
                end=end,
                parts=bring.index,
                took_ms=(now - bring.begun_s) * 1000,
                read_bytes=bring.read_bytes,
                early_bytes=bring.early_bytes,
                failures=bring.failures,
            ),
        ]

    def _farewell(self, bring: OpenBring, peer: PeerLink) -> PeerQuestion:
        if bring.ticket is None:
            return Cancel(bring.wanted.nonce)
        return ReturnLend(bring.ticket, peer.unit)

    # -- what the checks read ------------------------------------------------------------------

    def counts(self, now: float) -> dict[str, float]:
        """Count the brings, and what `BringRooms.counts` does."""
        return {"brings": len(self._brings), **self._rooms.counts(now)}

    def check(self) -> None:
        """Raise InvariantViolated unless invariants 14 and 15 hold."""
        self._rooms.check()
        asking = [one.question.number for one in self._brings.values() if one.question is not None]
        if sorted(asking) != sorted(self._asking):
            raise InvariantViolated("invariant 15: a question that nobody waits for")
        for bring in self._brings.values():
            if self._due_s(bring) == inf and bring.ending is None:
                raise InvariantViolated("invariant 15: a bring that nothing ends")


def _silent_s(bring: OpenBring) -> float:
    """Return the instant from which the bring's peer counts as one that does not answer."""
    may_s = SILENT_S if bring.ticket is not None else lend_s(bring.wanted.compute_ms)
    return bring.heard_s + may_s
