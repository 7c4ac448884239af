"""These decisions are on sessions: one owner each, moved by compare-and-set.

    UNKNOWN --Bind--> OWNED --Transfer--> OWNED by the target
                      OWNED --owner's lease runs out, or its next life registers--> ORPHAN
                      OWNED --Transfer to nobody (NO_UNIT)--> ORPHAN
                      ORPHAN --Bind by anyone alive--> OWNED
                      OWNED --EndSession | swept--> UNKNOWN

Each arrow into OWNED uses a new epoch. Binding what is one's own gives the same again only when
that answer got lost, that is, when the epoch is above all that the asker has seen; else a new one:
it has given up or lost the former, and requests under it may still be in the network.
"""

from __future__ import annotations

from ownerserve.directory.decisions import checks
from ownerserve.directory.decisions.extents import count_fork, put_prefix
from ownerserve.directory.decisions.prefixes import TAIL, claimed_tip
from ownerserve.directory.decisions.records import (
    Key,
    Records,
    SessionRecord,
    holder_of,
    session_at,
    session_key,
    session_of,
    unit_key,
)
from ownerserve.directory.decisions.transaction import (
    Moment,
    Transaction,
    TransactionDraft,
    Writes,
    refuse,
    refuse_until_open,
)
from ownerserve.directory.messages import (
    Advance,
    Advanced,
    Bind,
    Bound,
    Conflict,
    DirectoryRefusal,
    Ended,
    EndSession,
    FindSession,
    HeldBy,
    Miss,
    SessionIs,
    Transfer,
)
from ownerserve.kv.messages import NO_UNIT, RoutingUnit


def bind(records: Records, ask: Bind, at: Moment) -> Transaction:
    """Make the asker the owner of a session that is new, its own, or whose owner is gone."""
    why = checks.standing(holder_of(records, ask.unit), ask.unit, at.now_s)
    if why is not None:
        return refuse(why)
    session = session_of(records, ask.session_id)
    if session is not None and session.owner == ask.unit and checks.is_news(session, ask.seen):
        return Transaction(_bound(session))
    guards: tuple[Key, ...] = ()
    if session is not None and session.owner != ask.unit:
        holder = holder_of(records, session.owner)
        if checks.owner_lives(holder, session.owner, at.now_s):
            return Transaction(HeldBy(session.owner, session.epoch))
        # The owner may be renewing right now: then this decision must not stand.
        guards = (unit_key(session.owner),)
    if not checks.may_issue(at.now_s, at.open_at_s):
        return refuse_until_open(at)
    draft = TransactionDraft(records)
    if session is not None:
        taken = _owned_by(session, ask.unit, at)
    else:
        parent = session_of(records, ask.parent) if ask.parent is not None else None
        tip = count_fork(draft, parent.prefix_hash, +1) if parent is not None else None
        tokens = parent.tokens if parent is not None else 0
        taken = SessionRecord(ask.unit, 0, tip, tokens, at.now_s, at.epoch)
    draft.put(session_key(ask.session_id), taken)
    return draft.granted(_bound(taken), guards=guards)


def transfer(records: Records, ask: Transfer, at: Moment) -> Transaction:
    """Make the target the owner, if the source owns the session in that very state; else
    `Conflict`."""
    session = session_of(records, ask.session_id)
    if session is None:
        return refuse(DirectoryRefusal.UNKNOWN_SESSION)
    if not checks.owns(session, ask.source, ask.epoch) or not checks.version_matches(
        session, ask.version
    ):
        return Transaction(Conflict(session_is(records, session, at)))
    lives = checks.target_lives(holder_of(records, ask.target), ask.target, at.now_s)
    if not lives and ask.target != NO_UNIT:
        return refuse(DirectoryRefusal.TARGET_NOT_LIVE)
    if not checks.may_issue(at.now_s, at.open_at_s):
        return refuse_until_open(at)
    moved = _owned_by(session, ask.target, at)
    return Transaction(_bound(moved), ((session_key(ask.session_id), moved),), minted=True)


def advance(records: Records, ask: Advance, at: Moment) -> Transaction:
    """Move the session's tip on, and claim it. A fork that stayed behind keeps the old prefix
    counted."""
    if ask.kinds & TAIL:
        return refuse(DirectoryRefusal.SESSION_LOCAL)
    key = session_key(ask.session_id)
    session = session_at(records, key)
    if session is None:
        return refuse(DirectoryRefusal.UNKNOWN_SESSION)
    if checks.owns(session, ask.unit, ask.epoch) and checks.is_told_again(session, ask):
        return Transaction(Advanced())
    if not checks.owns(session, ask.unit, ask.epoch) or not checks.is_advance(session, ask.version):
        return Transaction(Conflict(session_is(records, session, at)))
    tip = claimed_tip(records, ask, at)
    draft = TransactionDraft(records)
    put_prefix(draft, ask.prefix_hash, tip.prefix)
    if session.prefix_hash != ask.prefix_hash:
        count_fork(draft, ask.prefix_hash, +1)
        count_fork(draft, session.prefix_hash, -1)
    draft.put(
        key,
        SessionRecord(ask.unit, ask.version, ask.prefix_hash, ask.tokens, at.now_s, session.epoch),
    )
    if not tip.minted:
        return draft.decided(Advanced())
    return draft.granted(Advanced(at.epoch), guards=tip.guards)


def end_session(records: Records, ask: EndSession, at: Moment) -> Transaction:
    """Forget the session. One that is not known has been forgotten already."""
    session = session_of(records, ask.session_id)
    if session is None:
        return Transaction(Ended())
    if not checks.owns(session, ask.unit, ask.epoch):
        return refuse(DirectoryRefusal.NOT_OWNER)
    return Transaction(Ended(), forget_session(records, session_key(ask.session_id), session))


def find_session(records: Records, ask: FindSession, at: Moment) -> Transaction:
    """Say who owns the session, and whether the owner lives."""
    session = session_of(records, ask.session_id)
    return Transaction(Miss() if session is None else session_is(records, session, at))


def forget_session(records: Records, key: Key, session: SessionRecord) -> Writes:
    """Return the writes after which nothing is known of the session, nor that it stands on a
    prefix.
    """
    draft = TransactionDraft(records)
    count_fork(draft, session.prefix_hash, -1)
    draft.put(key, None)
    return tuple(draft.changed.items())


def _owned_by(session: SessionRecord, unit: RoutingUnit, at: Moment) -> SessionRecord:
    """Return the session as `unit` owns it under the moment's epoch; a change of owner finishes no
    turn.
    """
    return SessionRecord(
        unit, session.version, session.prefix_hash, session.tokens, at.now_s, at.epoch
    )


def session_is(records: Records, session: SessionRecord, at: Moment) -> SessionIs:
    """Return the session as it stands at that moment, and whether its owner lives."""
    lives = checks.owner_lives(holder_of(records, session.owner), session.owner, at.now_s)
    return SessionIs(
        session.owner,
        session.epoch,
        session.version,
        session.prefix_hash,
        session.tokens,
        lives,
    )


def _bound(session: SessionRecord) -> Bound:
    return Bound(session.epoch, session.version, session.prefix_hash, session.tokens)
