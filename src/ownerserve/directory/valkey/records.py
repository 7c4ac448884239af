"""This module has records as fetched, and decisions as written: bytes on one side, structs on the
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from msgspec.structs import replace

from ownerserve.directory import messages
from ownerserve.directory.decisions.records import (
    Key,
    PrefixRecord,
    Record,
    SessionRecord,
    decode_record,
    encode_record,
    group_key,
    holder_key,
    prefix_key,
    session_key,
    unit_key,
)
from ownerserve.directory.decisions.transaction import Transaction
from ownerserve.directory.messages import Outcome
from ownerserve.kv.messages import Epoch

COUNTER_BYTES = 8
PROVISIONAL = 1 << 40
"""The counter of an epoch that is not issued yet: it is encoded in nine bytes, whose last eight the
script writes."""
NAMESPACE = b"ownerserve:"
KEEP, SET, DELETE, MINT = range(4)
ABSENT = b""


class RecordNotFetched(Exception):
    """A decision needs a record that was not read yet."""

    def __init__(self, key: Key) -> None:
        self.key = key


class FetchedRecords:
    """Fetched records were read at one instant or a little later. `get` raises RecordNotFetched for
    all others.
    """

    __slots__ = ("_decoded", "raw")

    def __init__(self) -> None:
        self.raw: dict[Key, bytes] = {}
        self._decoded: dict[Key, Record] = {}

    def add(self, keys: Iterable[Key], values: Iterable[bytes | None]) -> None:
        """Take in the values that the server gave for `keys`."""
        for key, value in zip(keys, values, strict=True):
            self.raw[key] = value or ABSENT

    def expect_new(self, keys: Iterable[Key]) -> None:
        """Take the records under all these keys to be absent. Each must be written, so that the
        commit finds out."""
        self.raw.update(dict.fromkeys(keys, ABSENT))

    def knows_none(self, keys: Iterable[Key]) -> bool:
        """Tell whether the records under all these keys are absent."""
        raw = self.raw
        return all(raw[key] == ABSENT for key in keys)

    def get(self, key: Key) -> Record | None:
        """Return the record under `key`; None when there is none. Raises RecordNotFetched if it was
        not read.
        """
        raw = self.raw.get(key)
        if raw is None:
            raise RecordNotFetched(key)
        if raw == ABSENT:
            return None
        found = self._decoded.get(key)
        if found is None:
            found = self._decoded[key] = decode_record(raw)
        return found


_DECISION = Struct(">BI")
_pack_item = Struct(">BIII").pack
_WITH_EPOCH = (SessionRecord, PrefixRecord)


class CommitBatch:
    """A commit batch is the decisions of one round, as the commit script takes them."""

    __slots__ = ("_parts", "_touched")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._touched: set[Key] = set()

    def touches(self, keys: Iterable[Key]) -> bool:
        """Tell whether an earlier decision of this round changes what was read of these keys."""
        return not self._touched.isdisjoint(keys)

    def add(self, decision: Transaction, fetched: FetchedRecords, epoch: Epoch) -> None:
        """Add a decision, which stands if all that it rests on is still as in `fetched`."""
        items = len(decision.guards) + len(decision.writes)
        raw, add = fetched.raw, self._parts.extend
        add((_DECISION.pack(decision.minted, items),))
        self._touched.update(decision.guards)
        for key in decision.guards:
            add(_item(KEEP, key, raw[key], b""))
        for key, record in decision.writes:
            self._touched.add(key)
            before = raw[key]
            if record is None:
                add(_item(DELETE, key, before, b""))
                continue
            value = encode_record(record)
            if decision.minted and isinstance(record, _WITH_EPOCH) and record.epoch is epoch:
                add(_item(MINT, key, before, value[:-COUNTER_BYTES]))
            else:
                add(_item(SET, key, before, value))

    def encoded(self) -> bytes:
        """Return the batch's bytes, as the script reads them."""
        return b"".join(self._parts)


def _item(action: int, key: Key, before: bytes, value: bytes) -> tuple[bytes, ...]:
    name = NAMESPACE + key
    return _pack_item(action, len(name), len(before), len(value)), name, before, value


def with_counter(outcome: Outcome, epoch: Epoch) -> Outcome:
    """Return the outcome of a decision that used up an epoch, with `epoch`, which is known only
    now.
    """
    if isinstance(outcome, messages.Bound):
        return replace(outcome, epoch=epoch)
    if isinstance(outcome, messages.Advanced):
        return replace(outcome, duty=epoch)
    return outcome


def keys_of(request: messages.Request) -> Iterator[Key]:
    """Iterate over the keys that the decision reads for certain, but for those of `new_to`; others
    are fetched when it asks for them.
    """
    for field in ("unit", "source", "target"):
        unit = getattr(request, field, None)
        if unit is not None:
            yield unit_key(unit)
    match request:
        case messages.Publish():
            yield from (prefix_key(prefix_hash) for prefix_hash, _ in request.gone)
            yield from (prefix_key(prefix_hash) for prefix_hash, _ in request.left)
            for one in request.sessions:
                yield session_key(one.session_id)
                if one.prefix_hash is not None:
                    yield prefix_key(one.prefix_hash)
            yield from (group_key(one.group) for one in request.extents if one.group)
        case messages.Lookup():
            yield from map(prefix_key, request.candidates)
        case messages.FindGroup():
            yield group_key(request.group)
        case messages.ReplicateReadonly():
            yield holder_key(request.worker, request.dp_rank)
            yield prefix_key(request.prefix_hash)
        case messages.Drop():
            yield prefix_key(request.prefix_hash)
        case messages.Bind() | messages.Transfer() | messages.EndSession() | messages.FindSession():
            yield session_key(request.session_id)
        case messages.Advance():
            yield session_key(request.session_id)
            yield prefix_key(request.prefix_hash)


def new_to(request: messages.Request) -> frozenset[Key]:
    """Return the keys of an inventory's extents, none of which a directory knows that is being
    rebuilt.
    """
    if not isinstance(request, messages.Publish):
        return frozenset()
    return frozenset([prefix_key(one.prefix_hash) for one in request.extents])


def is_read_only(request: messages.Request) -> bool:
    """Tell whether the request only asks: its answer may come from what is not replicated yet, for
    acting on it is checked again.
    """
    return isinstance(request, messages.Lookup | messages.FindSession | messages.FindGroup)
