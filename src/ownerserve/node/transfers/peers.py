"""Peers are the tier below the device that lies in other workers: what one of them holds of a
turn's session is offered to the restore, and read from there.

    look    asks the peer what it holds, and notes which records it could lend    Tier.PEER
            or orders them from it, where it is to compute them (orders.py)
    read    brings them, verified, all or none, as they are computed

Both wait, on the store's threads. A look is a hint: what the peer holds may go before it is read.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotInTime
from math import inf
from threading import Lock

import msgspec

from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import PrefixIs
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.node.transfers.orders import Orders
from ownerserve.node.transfers.service import TransferService
from ownerserve.node.transfers.target_side import Brought
from ownerserve.node.vocabulary.events import PeerPrefix, PeerRecord
from ownerserve.plan.cost.events import Loaded
from ownerserve.store.format.model import (
    ArtifactKind,
    Meta,
    MissReason,
    ReadHit,
    ReadMiss,
    ReadOutcome,
    ReadPart,
    Want,
)
from ownerserve.transfer.control.events import WantedArtifact
from ownerserve.transfer.control.messages import NO_TURN
from ownerserve.transfer.vocabulary import FramePiece

OFFERS_KEPT = 65536
TOLD_S, TOLD_KEPT = 1.0, 64
"""A peer's word holds so long, for so many prefixes: longer than the looks of one restore take."""
NO_DIGEST = bytes(32)
ORDER_SHARE = 4.0
"""What a peer computes may take so many times as long as it says, or as computing here would."""
MOST_S = 3600.0
"""Longer than any bring takes: the control ends each by its own deadlines."""


_Asked = tuple[LenderAddress, SessionId, int]


class PeerOffer(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A `PeerOffer` is a record that `lender` is said to hold, among the first `tokens` tokens.
    `turn_id`: its turn computes it, and is ready in `ready_ms`."""

    prefix: PeerPrefix
    lender: LenderAddress
    record: PeerRecord
    tokens: int
    turn_id: TurnId = NO_TURN
    ready_ms: float = 0.0


class Peers:
    """`Peers` bring what other workers hold. Any thread may call.

    `looks` and `brings` count what came of them, `brought_bytes` are by road; `ordered_bytes` are
    those that came `early`, while their peer computed on, and `behind`; `timings` is what each
    whole bring took.
    """

    def __init__(
        self, service: TransferService, sections: Mapping[str, PayloadSection], block_tokens: int
    ) -> None:
        self.looks: Counter[str] = Counter()
        self.brings: Counter[str] = Counter()
        self.brought_bytes: Counter[str] = Counter()
        self.ordered_bytes: Counter[str] = Counter()
        self.timings: deque[Loaded] = deque(maxlen=256)
        self.orders = Orders(service)
        self._service = service
        self._sections = sections
        self._block = block_tokens
        self._offers: OrderedDict[bytes, PeerOffer] = OrderedDict()
        self._told: OrderedDict[_Asked, tuple[PrefixIs | None, float]] = OrderedDict()
        self._bringing: dict[tuple[bytes, ...], Future[Brought]] = {}
        self._lock = Lock()

    def look(self, prefix: PeerPrefix) -> frozenset[bytes]:
        """Return which of the records that the prefix is cut into its peer could lend."""
        order = None if prefix.order is None else self.orders.placed(prefix)
        held = self._held(prefix) if order is None else order.will_hold
        lender = prefix.lender if order is None else order.worker
        if held is None or lender is None or not held.tokens:
            self.looks["silent" if held is None else "nothing"] += 1
            return frozenset()
        depth = min(held.tokens, prefix.tokens) // self._block
        if not depth or prefix.digests[depth - 1] != held.tip:
            self.looks["parted"] += 1  # another prefix, or one that went on since
            return frozenset()
        points = {position // self._block for position in held.points}
        turn_id, ready_ms = NO_TURN, 0.0
        if order is not None and order.accepted is not None:
            turn_id, ready_ms = order.accepted.turn_id, order.accepted.ready_ms
        offers = {
            id_: PeerOffer(prefix, lender, record, held.tokens, turn_id, ready_ms)
            for id_, record in prefix.records.items()
            if self._is_held(record, depth, points, grid=prefix.grid_blocks)
        }
        self.looks["found"] += 1
        with self._lock:
            self._offers.update(offers)
            while len(self._offers) > OFFERS_KEPT:
                self._offers.popitem(last=False)
        return frozenset(offers)

    def _held(self, prefix: PeerPrefix) -> PrefixIs | None:
        """Return what the peer says; a restore looks several times, and the peer is asked once."""
        assert prefix.session_id is not None and prefix.lender is not None, "it is asked by name"
        key = (prefix.lender, prefix.session_id, prefix.tokens)
        with self._lock:
            told = self._told.get(key)
        if told is not None and time.monotonic() < told[1]:
            return told[0]
        hint = SessionHint(prefix.session_id, prefix.parent, prefix.tokens)
        held = self._service.look(prefix.lender, hint, compute_ms=prefix.compute_ms)
        with self._lock:
            self._told[key] = (held, time.monotonic() + TOLD_S)
            while len(self._told) > TOLD_KEPT:
                self._told.popitem(last=False)
        return held

    def has(self, ids: Sequence[bytes]) -> frozenset[bytes]:
        """Return which of `ids` a peer is said to hold."""
        return frozenset(id_ for id_ in ids if id_ in self._offers)

    def read(self, wants: Sequence[Want], of: Sequence[Want] = ()) -> ReadOutcome:
        """Bring the wants, which one peer offered, or give a miss. They are all of what is given up
        together, or the part `of` it that is away."""
        offers = [self._offers.get(want.id) for want in wants]
        if not wants or any(one is None for one in offers):
            return ReadMiss(MissReason.ABSENT, wants[0].id if wants else b"")
        found = [one for one in offers if one is not None]
        prefix, tokens = found[0].prefix, min(one.tokens for one in found)
        wanted = tuple(
            self._wanted(want, offer.record) for want, offer in zip(wants, found, strict=True)
        )
        hint = SessionHint(prefix.session_id, prefix.parent, tokens)
        started_s = time.perf_counter()
        key = tuple(want.id for want in of or wants)
        brought = self._brought(wanted, hint, found[0], key=key)
        if brought is None:
            self.brings["stopped"] += 1
            return ReadMiss(MissReason.CANCELLED, b"")
        self.brings[str(brought.over.end)] += 1
        if brought.landing is None:
            with self._lock:
                for want in wants:
                    self._offers.pop(want.id, None)
            return ReadMiss(MissReason.ABSENT, b"")
        took_ms = (time.perf_counter() - started_s) * 1e3
        size = sum(one.bytes for one in wanted)
        if found[0].turn_id == NO_TURN:  # else its time is the computing's
            self.timings.append(Loaded(Tier.PEER, size, took_ms))
        self.brought_bytes.update(brought.over.read_bytes)
        if found[0].turn_id != NO_TURN:
            early = brought.over.early_bytes
            self.ordered_bytes.update(early=early, behind=size - early)
        parts = tuple(
            ReadPart(_meta(want, one.component), brought.landing.data(one.piece))
            for want, one in zip(wants, wanted, strict=True)
        )
        return ReadHit(parts, str(Tier.PEER))

    def give_up(self, wants: Sequence[Want]) -> None:
        """Bring these no more, if they are being brought: nobody waits for them."""
        with self._lock:
            bringing = self._bringing.get(tuple(want.id for want in wants))
        if bringing is not None:
            bringing.cancel()

    def call_off(self, turn_id: TurnId) -> None:
        """Have nobody compute the turn's prompt any more; no error where nobody does."""
        self.orders.call_off(turn_id)

    def _brought(
        self,
        wanted: tuple[WantedArtifact, ...],
        hint: SessionHint,
        offer: PeerOffer,
        *,
        key: tuple[bytes, ...],
    ) -> Brought | None:
        """Bring, and wait for it; None: it was given up, here or with the service."""
        may_ms = offer.prefix.compute_ms or inf
        if offer.turn_id != NO_TURN:
            may_ms = ORDER_SHARE * max(may_ms, offer.ready_ms)
        bringing: Future[Brought] | None = None
        try:
            bringing = self._service.bring(
                wanted, offer.lender, hint, compute_ms=may_ms, turn_id=offer.turn_id
            )
            with self._lock:
                self._bringing[key] = bringing
            return bringing.result(MOST_S)
        except (CancelledError, NotInTime, RuntimeError):  # the last: the loop has ended
            return None
        finally:
            with self._lock:
                if self._bringing.get(key) is bringing:  # not who asked for the same since
                    self._bringing.pop(key, None)

    def _wanted(self, want: Want, record: PeerRecord) -> WantedArtifact:
        section = self._sections[record.component]
        end = max(1, record.end - record.first) if want.end_unit is None else want.end_unit
        piece = FramePiece(want.id, want.first_unit, end, 0, section.layers)
        size = (end - want.first_unit) * section.payload_bytes
        return WantedArtifact(record.component, piece, size)

    def _is_held(self, record: PeerRecord, depth: int, points: set[int], *, grid: int) -> bool:
        """Tell whether the peer names such a record: a point, or a cell of the grid that it has
        whole; the last one ends where what it holds ends."""
        if record.first == record.end:
            return record.end in points and record.end <= depth
        return record.end == depth or (record.end < depth and record.end % grid == 0)


def _meta(want: Want, component: str) -> Meta:
    """Return what a part says of itself: whose it is. Nobody stores it."""
    return Meta(want.id, ArtifactKind.RANGE, component, NO_DIGEST, 0, 0)
