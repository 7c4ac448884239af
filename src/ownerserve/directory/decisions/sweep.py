"""sweep() cleans up sessions that never ended, and copies of units that never came back."""

from __future__ import annotations

from msgspec.structs import replace

from ownerserve.directory.decisions import checks
from ownerserve.directory.decisions.extents import put_prefix
from ownerserve.directory.decisions.records import (
    Key,
    PrefixRecord,
    Records,
    SessionRecord,
    holder_of,
    prefix_named,
)
from ownerserve.directory.decisions.sessions import forget_session
from ownerserve.directory.decisions.transaction import Moment, Transaction, TransactionDraft
from ownerserve.directory.messages import Ended, Miss


def sweep(records: Records, key: Key, at: Moment, *, idle_s: float) -> Transaction:
    """Look at the record under `key`. A session whose owner is gone and that nobody took for
    `idle_s` ends; copies of former lives, and of units silent for as long, go from a prefix, as do
    wishes for them, and a prefix without copies or forks goes whole."""
    record = records.get(key)
    if isinstance(record, SessionRecord):
        if record.last_access_s + idle_s >= at.now_s:
            return _NOTHING  # as a rule
        lives = checks.owner_lives(holder_of(records, record.owner), record.owner, at.now_s)
        if not lives:
            return Transaction(Ended(), forget_session(records, key, record))
    elif isinstance(record, PrefixRecord):
        kept = [
            place
            for place in record.locations
            if place.unit is None
            or checks.copy_counts(holder_of(records, place.unit), place.unit, at.now_s - idle_s)
        ]
        wanted = tuple(
            one
            for one in record.wanted
            if checks.copy_counts(holder_of(records, one), one, at.now_s - idle_s)
        )
        is_less = len(kept) < len(record.locations) or len(wanted) < len(record.wanted)
        if is_less or not (kept or record.refs):
            fresh = replace(record, locations=tuple(kept), wanted=wanted)
            draft = TransactionDraft(records)
            put_prefix(draft, prefix_named(key), fresh if kept or record.refs else None)
            return draft.decided(Ended())
    return _NOTHING


_NOTHING = Transaction(Miss())
