"""This module keeps the dated copy of extents and owners by what is told, and asks for hand-overs.

Owns the names of prefixes and the hand-overs under way. Workers (turn reports, inventories) and the
directory tell, in any order and late: nothing here is trusted beyond an estimate, and what names an
earlier life of a worker is ignored.

A session whose turns are done at T while S owns it is handed over: one hand-over for each session
at a time, and none again before its next turn ends.

    done at T, home is T, S is up and owns ── AskRelease ──> S
                                 <── ReleaseEnded: released: S is not known as owner now
                                                   not_owner: the same, until an answer names it
                                                   kept: S still is; the next turn's end asks again
"""

from __future__ import annotations

from collections import OrderedDict

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, Term, Tier
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import (
    NOTED,
    Arrive,
    AskRelease,
    Claimed,
    Gone,
    LeftToStore,
    Noted,
    ReleaseEnd,
    ReleaseEnded,
    Reported,
    TakenOver,
)
from ownerserve.router.sessions import Grant, Prefix, PrefixIndex, RoutedSession, SessionTable
from ownerserve.router.worker import Worker

ENDED_KEPT = 8192
NO_TERM = Term(0, 0)


class Knowledge:
    """The knowledge applies Reported, Gone and Claimed to sessions and prefixes, and forks
    sessions."""

    def __init__(self, fleet: Fleet, sessions: SessionTable) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._prefixes = PrefixIndex()
        self._term = NO_TERM
        self._ended: OrderedDict[SessionId, None] = OrderedDict()

    def fork(self, child: RoutedSession, arrive: Arrive) -> None:
        """Let a new session begin like its parent: it stands on the parent's prefix (rule 3)."""
        assert arrive.parent is not None
        name = self._sessions.resolve(arrive.parent)
        parent = self._sessions.get(name)
        if parent is None or parent is child:
            return
        child.bytes_per_token = parent.bytes_per_token
        child.output_tokens = parent.output_tokens
        prefix = parent.prefix or parent.stem
        if prefix is None:
            return  # its first turn still runs
        tokens = parent.known_tokens
        if arrive.shared_bytes is not None:
            tokens = min(tokens, int(arrive.shared_bytes / parent.bytes_per_token))
        if tokens > 0:
            child.fork(prefix, tokens)

    def ended(self, session: SessionId) -> None:
        """Note that the session is over: what workers still hold of it brings it back no more."""
        self._ended[session] = None
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def reported(self, event: Reported, now_s: float) -> Noted:
        """Note what a holder says that it holds; a word of an earlier life is ignored."""
        worker = None if event.unit is None else self._fleet.find(event.unit)
        if worker is None and event.unit is not None:
            return NOTED  # an earlier life of it
        prefix = None
        if event.session is not None:
            prefix = self._stands_on(event, now_s)
        elif event.prefix_hash is not None:
            prefix = self._prefixes.get(event.prefix_hash)
        if prefix is None:
            return NOTED  # no session here stands on it
        if not prefix.copies and worker is not None:
            prefix.spec_digest = worker.profile.spec_digest
        prefix.hold(worker, event.tier, event.tokens, use=event.use)
        return NOTED

    def gone(self, event: Gone, now_s: float) -> Noted:
        """Note that a holder dropped its copy of a prefix."""
        prefix = session = None
        if event.session is not None:
            session = self._sessions.get(self._sessions.resolve(event.session))
            prefix = None if session is None else session.prefix
        elif event.prefix_hash is not None:
            prefix = self._prefixes.get(event.prefix_hash)
        worker = None if event.unit is None else self._fleet.find(event.unit)
        if session is not None and event.tier is Tier.DEVICE:
            session.emptied = worker
        if prefix is not None and (event.unit is None or worker is not None):
            prefix.drop(worker, event.tier)
        return NOTED

    def claimed(self, event: Claimed, now_s: float) -> Noted:
        """Note a word on who owns a session, unless a later one was heard.

        An epoch is one grant: heard again, it says nothing of where the session runs, only the
        number of its turns.
        """
        session = self._sessions.touch(self._sessions.resolve(event.session), now_s)
        known, worker = session.epoch, self._granted(session, event)
        if worker is not None and (event.epoch != known or session.live_home is None):
            self._sessions.claim(session, worker)
        return NOTED

    def answered(self, event: Claimed, now_s: float) -> Noted:
        """Note whom an answer names as its session's owner: as any such word, and who said that it
        is none is known as the owner again, for it may have asked the directory since."""
        session = self._sessions.touch(self._sessions.resolve(event.session), now_s)
        self._known_again(session, event)
        return self.claimed(event, now_s)

    def named(self, event: Claimed, now_s: float) -> Noted:
        """Note such a word of an answer that the session is beyond: it is where that says only if
        nobody else has it.

        The first word of to whom it was handed over may come before that one knows of it: it is
        known as the owner with the next answer that names it.
        """
        session = self._sessions.touch(self._sessions.resolve(event.session), now_s)
        is_first_word = session.is_handed_over and event.epoch != session.epoch
        self._known_again(session, event)
        worker = self._granted(session, event)
        if worker is not None and is_first_word:
            session.grant = None
        if worker is not None and session.live_home is None:
            self._sessions.claim(session, worker)
        return NOTED

    def _known_again(self, session: RoutedSession, event: Claimed) -> None:
        """Note the owner under the known epoch, where nobody is known as the owner and that one has
        not handed the session over."""
        worker, epoch = self._fleet.find(event.unit), session.epoch
        is_unknown = session.grant is None and not session.is_handed_over
        if worker is not None and epoch is not None and event.epoch == epoch and is_unknown:
            session.grant = Grant(worker, worker.life, epoch, event.version)

    def _granted(self, session: RoutedSession, event: Claimed) -> Worker | None:
        """Note under which epoch the session was granted to whom, and return that worker; None: it
        is of an earlier life, or a later epoch was heard."""
        worker, epoch, known = self._fleet.find(event.unit), event.epoch, session.epoch
        if worker is None or _is_earlier(epoch, known):
            return None
        version, grant = event.version, session.grant
        if epoch != known:
            session.epoch = epoch = self._sharing_its_term(epoch)
            session.is_handed_over = False
        elif grant is not None:
            epoch, version = grant.epoch, max(version, grant.version)
        if (
            epoch != known or grant is not None
        ):  # else it was handed over since, or that one said no
            session.grant = Grant(worker, worker.life, epoch, version)
        return worker

    def taken_over(self, event: TakenOver, now_s: float) -> Noted:
        """Note that a session moved while no turn of it ran, unless it went elsewhere since."""
        session = self._sessions.get(self._sessions.resolve(event.session))
        worker = self._fleet.find(event.unit)
        if session is None or worker is None:
            return NOTED
        former = session.owner
        if former is not None and former.id == event.source:
            if session.prefix is not None:
                session.prefix.drop(former, Tier.DEVICE)
            session.moved_at_s = now_s
            self._sessions.claim(session, worker)
        if session.owner is worker and session.prefix is not None and event.tokens:
            session.prefix.hold(worker, Tier.DEVICE, event.tokens)
        return NOTED

    def left_to_store(self, event: LeftToStore, now_s: float) -> Noted:
        """Note that nobody owns the session any more, unless it went elsewhere since."""
        session = self._sessions.get(self._sessions.resolve(event.session))
        former = None if session is None else session.owner
        if session is None or former is None or former.id != event.source:
            return NOTED
        if session.prefix is not None:
            session.prefix.drop(former, Tier.DEVICE)
        session.grant, session.is_handed_over = None, True
        self._sessions.disown(session)
        return NOTED

    def _sharing_its_term(self, epoch: Epoch) -> Epoch:
        """Return the epoch, built on the term object that other sessions' epochs have: there may be
        10^5 of them."""
        if epoch.term != self._term:
            self._term = epoch.term
        return Epoch(self._term, epoch.counter)

    def _stands_on(self, event: Reported, now_s: float) -> Prefix | None:
        """Return the prefix that the event's session stands on, under the event's hash from now on;
        None when the report is of no use.

        A session that nobody here has seen ran before this router began: it is known from now on,
        as one that has run and whose owner is not known.
        """
        assert event.session is not None
        name = self._sessions.resolve(event.session)
        session = self._sessions.get(name)
        if session is None:
            if name in self._ended:
                return None
            session = self._sessions.touch(name, now_s)
            session.turns = 1
        if session.prefix is None:
            session.prefix = Prefix()
        prefix = session.prefix
        if prefix.refs > 1 and event.tokens > prefix.tokens:
            return None  # shared and sealed: the next turn gives the session one of its own
        is_its_own = prefix.refs == 1 or event.tokens == prefix.tokens
        if event.prefix_hash is not None and is_its_own:
            self._prefixes.name(prefix, event.prefix_hash)
        return prefix


def _is_earlier(epoch: Epoch, known: Epoch | None) -> bool:
    """Return whether the word came late, or from a directory that lost its memory."""
    return known is not None and epoch < known


IN_FLIGHT_MAX = 1024
"""Hand-overs under way; beyond, a session waits for the end of its next turn."""


_NO_OWNER = (
    WorkerRefusal.STALE_EPOCH,
    WorkerRefusal.NOT_OWNER,
    WorkerRefusal.UNKNOWN_SESSION,
)


def end_of(refusal: WorkerRefusal) -> ReleaseEnd:
    """Return what an owner's refusal to hand over says of who owns the session."""
    return ReleaseEnd.NOT_OWNER if refusal in _NO_OWNER else ReleaseEnd.KEPT


class Handovers:
    """The hand-overs decide when an owner is asked to hand a session over; they own which are under
    way."""

    def __init__(self) -> None:
        self._under_way: set[SessionId] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def done(self, name: SessionId, session: RoutedSession, worker: Worker) -> AskRelease | Noted:
        """After a turn of the session ended at `worker`, return the question to its owner, if that
        is another worker, to hand it over; else NOTED."""
        grant, target = session.grant, worker.unit
        if grant is None or target is None or session.live_home is not worker:
            return NOTED
        source = grant.live_owner
        if source is None or source is worker or source.unit is None:
            return NOTED
        if name in self._under_way or len(self._under_way) >= IN_FLIGHT_MAX:
            return NOTED
        self._under_way.add(name)
        return AskRelease(name, source.unit, grant.epoch, target)

    def over(self, name: SessionId) -> None:
        """Forget the hand-over of a session that has ended."""
        self._under_way.discard(name)

    def ended(self, event: ReleaseEnded, session: RoutedSession | None) -> None:
        """Note how a hand-over ended: unless the owner kept the session, it is not known as its
        owner any more."""
        self._under_way.discard(event.session)
        grant = None if session is None else session.grant
        if grant is None or grant.epoch != event.epoch or event.end is ReleaseEnd.KEPT:
            return
        assert session is not None
        session.grant = None
        session.is_handed_over = event.end is ReleaseEnd.RELEASED
