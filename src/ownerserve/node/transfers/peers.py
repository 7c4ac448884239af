"""Peers are the tier below the device that lies in other workers: what one of them holds of a
turn's session is offered to the restore, and read from there.

    look    asks the peer what it holds, and notes which records it could lend    Tier.PEER
            or orders them from it, where it is to compute them (orders.py)
    read    brings them, verified, all or none, as they are computed; what is computed, part by part

Both wait, on the store's threads. A look is a hint: what the peer holds may go before it is read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from threading import Lock

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.ids import SessionId, TurnId, WorkerId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.holders import LendingRank
from ownerserve.kv.wire.rpc import PrefixIs
from ownerserve.node.transfers.landing import Landing
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.node.transfers.offers import Offers, PeerOffer
from ownerserve.node.transfers.orders import Orders
from ownerserve.node.transfers.part_bring import PartBring
from ownerserve.node.transfers.ranks import RankHolders, is_whole, misfit, reached, shares
from ownerserve.node.transfers.service import TransferService
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
from ownerserve.transfer.control.events import BringEnd, BringOver, WantedArtifact
from ownerserve.transfer.control.messages import NO_TURN
from ownerserve.transfer.layout.shards import Misfit
from ownerserve.transfer.vocabulary import FramePiece

log = logging.getLogger("ownerserve.transfer")

TOLD_S, TOLD_KEPT = 1.0, 64
"""A peer's word holds so long, for so many prefixes: longer than the looks of one restore take."""
GIVEN_UP_KEPT = 1024
"""More reads than are under way at once."""
NO_DIGEST = bytes(32)
ORDER_SHARE = 4.0
"""What a peer computes may take so many times as long as it says, or as computing here would."""


_Asked = tuple[LenderAddress, SessionId, int]
_Part = tuple[Want, ...]


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
        self.own: tuple[RankHolders, ...] = ()
        """What each of our ranks keeps that will read what is offered here; empty: one, of all."""
        self._service = service
        self._sections = sections
        self._block = block_tokens
        self._offers = Offers(self.orders.is_over)
        self._told: OrderedDict[_Asked, tuple[PrefixIs | None, float]] = OrderedDict()
        self._expected: dict[_Part, list[PartBring]] = {}
        """Parts that will be read, of brings of several: of equal prompts the first one's first."""
        self._reading: dict[_Part, PartBring] = {}
        self._given_up: OrderedDict[_Part, None] = OrderedDict()
        """What was given up, for a read that has begun on its thread and has not come here."""
        self._lock = Lock()
        self._said: set[Misfit] = set()

    def look(self, prefix: PeerPrefix) -> dict[bytes, float]:
        """Return which of the records that the prefix is cut into its peer could lend, and in how
        many ms it has them at hand; what it computes it lends as it does."""
        order = None if prefix.order is None else self.orders.placed(prefix)
        held = self._held(prefix) if order is None else order.will_hold
        lender = prefix.lender if order is None else order.worker
        if held is None or lender is None or not held.tokens:
            self.looks["silent" if held is None else "nothing"] += 1
            return {}
        tokens = self._shared(held, prefix)
        depth = tokens // self._block
        if not depth:
            self.looks["parted"] += 1  # another prefix, or one that went on since
            return {}
        ranks = self._fitting(prefix, held, lender)
        if ranks is None:
            return {}
        points = {position // self._block for position in held.points}
        turn_id, ready_ms = NO_TURN, held.ready_ms
        if order is not None and order.accepted is not None:
            turn_id, ready_ms = order.accepted.turn_id, order.accepted.ready_ms
        offers = {
            id_: PeerOffer(prefix, lender, record, tokens, turn_id, ready_ms, ranks)
            for id_, record in prefix.records.items()
            if self._is_held(record, depth, points, grid=prefix.grid_blocks)
        }
        self.looks["found"] += 1
        self.learn(offers)
        return dict.fromkeys(offers, 0.0 if order is not None else ready_ms)

    def _fitting(
        self, prefix: PeerPrefix, held: PrefixIs, lender: LenderAddress
    ) -> tuple[LendingRank, ...] | None:
        """Return the lender's ranks, as they are reached from here; None, counted by the reason,
        where they and ours do not fit each other."""
        components = {record.component for record in prefix.records.values()}
        why = misfit(self.own, held.ranks, components)
        try:
            ranks = reached(held.ranks, lender)
        except InvalidInput as error:
            log.warning("nothing is read of %s: %s", lender.unit.worker, error)
            ranks, why = (), Misfit.MISSING_RANKS
        if why is None:
            return ranks
        self.looks[why] += 1
        if why not in self._said:
            self._said.add(why)
            log.warning("nothing is read of %s, of %d ranks: %s", *_who(lender, held), why)
        return None

    def _shared(self, held: PrefixIs, prefix: PeerPrefix) -> int:
        """Return how many tokens the prefix has in common with what the peer holds, as far as the
        peer told: all of the shorter one, or up to one of the ends that it named."""
        tokens = min(held.tokens, prefix.tokens) // self._block * self._block
        ends = ((tokens, held.tip), *reversed(held.ends))
        digests = prefix.digests
        for end, digest in ends:
            depth = end // self._block
            if 0 < depth <= len(digests) and digests[depth - 1] == digest:
                return end
        return 0

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
        return frozenset(id_ for id_ in ids if self._offers.of(id_) is not None)

    def offered(self, wants: Sequence[Want]) -> dict[bytes, PeerOffer]:
        """Return what was offered of the wants, by id, for who brings it in another process."""
        found = {want.id: self._offers.of(want.id) for want in wants}
        return {id_: _slim(offer) for id_, offer in found.items() if offer is not None}

    def learn(self, offers: Mapping[bytes, PeerOffer]) -> None:
        """Take offers that were made in another process."""
        self._offers.learn(offers)

    def expect(
        self,
        wants: Sequence[Want],
        turn_id: TurnId = NO_TURN,
        computed: Sequence[Sequence[Want]] = (),
    ) -> None:
        """Have the wants read, whatever of them was given up before. `computed` are all parts of
        what one peer computes for the turn: bring them all once the first of them is read."""
        with self._lock:
            self._given_up.pop(tuple(wants), None)
        offer = self._offers.of(computed[0][0].id, turn_id) if computed else None
        if offer is None:
            return  # nor will it be brought
        coming = PartBring(tuple(map(tuple, computed)), offer.prefix.turn_id)
        with self._lock:
            for part in coming.parts:
                self._expected.setdefault(part, []).append(coming)

    def read(self, wants: Sequence[Want], of: Sequence[Want] = ()) -> ReadOutcome:
        """Bring the wants, which one peer offered, or give a miss. They are all of what is given up
        together, or the part `of` it that is away. Where the turn that ordered them is over, and
        another one ordered the same, they come as that one's."""
        part, key = tuple(wants), tuple(of or wants)
        while True:
            with self._lock:
                coming = self._next(part)
                self._reading[key] = coming
                coming.is_given_up = is_given_up = key in self._given_up
            if is_given_up:
                coming.stop()
            outcome: ReadOutcome = (
                ReadMiss(MissReason.CANCELLED, b"") if is_given_up else self._read(coming, part)
            )
            with self._lock:
                if self._reading.get(key) is coming:  # not who asked for the same since
                    del self._reading[key]
                if coming.is_given_up:  # else the mark is another read's
                    self._given_up.pop(key, None)
            is_anothers = coming.for_turn is not None and self.orders.is_over(coming.for_turn)
            if isinstance(outcome, ReadHit) or coming.is_given_up or not is_anothers:
                return outcome
            if not self.has([want.id for want in part]):
                return outcome

    def _next(self, part: _Part) -> PartBring:
        """Return the bring by which a part comes; the lock is held."""
        expected = self._expected.get(part, [])
        if not expected:
            return PartBring((part,))
        coming = expected.pop(0)
        if not expected:
            del self._expected[part]
        return coming

    def _read(self, coming: PartBring, part: _Part) -> ReadOutcome:
        if coming.over is None and not self._begin(coming):
            return ReadMiss(MissReason.ABSENT, part[0].id if part else b"")
        landing = coming.landing_of(part)
        if landing is None:
            if coming.is_stopped:
                return ReadMiss(MissReason.CANCELLED, b"")
            for want in part:
                self._offers.forget(want.id, coming.offers[want.id])
            return ReadMiss(MissReason.ABSENT, b"")
        wanted = coming.wanted[coming.parts.index(part)]
        parts = tuple(
            ReadPart(_meta(want, one.component), landing.data(one.piece))
            for want, one in zip(part, wanted, strict=True)
        )
        return ReadHit(parts, str(Tier.PEER))

    def _begin(self, coming: PartBring) -> bool:
        """Begin to bring the parts; False: somebody did not offer them."""
        turn_id = coming.for_turn or NO_TURN
        offers = [[self._offers.of(want.id, turn_id) for want in part] for part in coming.parts]
        found = [[one for one in part if one is not None] for part in offers]
        if not all(offers) or found != offers:
            return False
        offer = found[0][0]
        coming.wanted = tuple(
            tuple(self._wanted(want, at.record) for want, at in zip(part, of, strict=True))
            for part, of in zip(coming.parts, found, strict=True)
        )
        coming.offers = {
            want.id: at
            for part, of in zip(coming.parts, found, strict=True)
            for want, at in zip(part, of, strict=True)
        }
        tokens = min(one.tokens for one in coming.offers.values())
        hint = SessionHint(offer.prefix.session_id, offer.prefix.parent, tokens)
        may_ms = offer.prefix.compute_ms or inf
        if offer.turn_id != NO_TURN:
            may_ms = ORDER_SHARE * max(may_ms, offer.ready_ms)
            coming.for_turn = offer.prefix.turn_id
        else:
            coming.ready_ms = offer.ready_ms
        coming.began_s = time.perf_counter()
        try:
            if not is_whole(self.own, offer.ranks):
                coming.over = self._of_ranks(coming, offer, hint, may_ms)
            else:
                coming.over = self._service.bring(
                    coming.wanted,
                    offer.lender,
                    hint,
                    landed=coming.landed,
                    compute_ms=may_ms,
                    turn_id=offer.turn_id,
                )
        except RuntimeError:  # the loop has ended
            return False
        if coming.over is None:
            return False
        coming.over.add_done_callback(partial(self._count, coming))
        if coming.is_stopped:  # meanwhile
            coming.over.cancel()
        return True

    def _of_ranks(
        self, coming: PartBring, offer: PeerOffer, hint: SessionHint, may_ms: float
    ) -> Future[BringOver] | None:
        """Begin to bring a part from those of the lender's ranks that have what this rank needs of
        it; None: they do not fit."""
        wanted = coming.wanted[0]
        fits = len(self.own) == len(coming.wanted) == 1  # in parts comes what one rank computes
        found = shares(self.own[0], offer.ranks, wanted) if fits else Misfit.MISSING_RANKS
        if isinstance(found, Misfit):  # since the look
            self.looks[found] += 1
            log.warning("nothing is read of %s: %s", offer.lender.unit.worker, found)
            return None
        return self._service.bring_shares(
            found,
            hint,
            landing=Landing(wanted, dict(self._sections)),
            landed=coming.landed,
            compute_ms=may_ms,
        )

    def _count(self, coming: PartBring, ended: Future[BringOver]) -> None:
        """Count what came of a bring, as it ends."""
        if ended.cancelled() or ended.exception() is not None:
            self.brings["stopped"] += 1
            coming.ended()
            return
        over = ended.result()
        self.brings[str(over.end)] += 1
        if over.end is BringEnd.BROUGHT:
            size = sum(one.bytes for part in coming.wanted for one in part)
            self.brought_bytes.update(over.read_bytes)
            if coming.for_turn is not None:  # its time is the computing's
                self.ordered_bytes.update(early=over.early_bytes, behind=size - over.early_bytes)
            elif not coming.ready_ms:  # else it is that of the peer's media too
                took_ms = (time.perf_counter() - coming.began_s) * 1e3
                self.timings.append(Loaded(Tier.PEER, size, took_ms))
        coming.ended()

    def give_up(self, wants: Sequence[Want]) -> None:
        """Bring these no more: nobody waits for them. A read that has not come here yet brings
        nothing, unless they are expected anew."""
        key = tuple(wants)
        with self._lock:
            coming = self._reading.get(key)
            if coming is not None:
                coming.is_given_up = True
            self._given_up[key] = None
            while len(self._given_up) > GIVEN_UP_KEPT:
                self._given_up.popitem(last=False)
        if coming is not None:
            coming.stop()

    def call_off(self, turn_id: TurnId) -> None:
        """Have nobody compute the turn's prompt any more, and bring no more of it; no error where
        nobody does."""
        self.orders.call_off(turn_id)  # first: who reads it learns why it comes no more
        gone = dict[int, PartBring]()
        with self._lock:
            for part, expected in list(self._expected.items()):
                gone |= {id(one): one for one in expected if one.for_turn == turn_id}
                left = [one for one in expected if one.for_turn != turn_id]
                if left:
                    self._expected[part] = left
                else:
                    del self._expected[part]
        for coming in gone.values():
            coming.stop()

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


def _slim(offer: PeerOffer) -> PeerOffer:
    """Return the offer without what only a look needs."""
    prefix = msgspec.structs.replace(offer.prefix, digests=(), records={})
    return msgspec.structs.replace(offer, prefix=prefix)


def _who(lender: LenderAddress, held: PrefixIs) -> tuple[WorkerId, int]:
    return lender.unit.worker, max(1, len(held.ranks))


def _meta(want: Want, component: str) -> Meta:
    """Return what a part says of itself: whose it is. Nobody stores it."""
    return Meta(want.id, ArtifactKind.RANGE, component, NO_DIGEST, 0, 0)
