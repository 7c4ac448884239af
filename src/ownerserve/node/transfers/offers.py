"""Offers are what peers are said to hold, by record, and who asked: what a peer computes for one
turn is that turn's, however alike another's prompt is.

    held by a peer       one offer of each record, the last that was told; for whoever reads it
    computed for a turn  one of each record and turn, until that turn is over
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock

import msgspec

from ownerserve.kv.ids import TurnId
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.holders import LendingRank
from ownerserve.node.vocabulary.events import PeerPrefix, PeerRecord
from ownerserve.transfer.control.messages import NO_TURN

OFFERS_KEPT = 65536
"""Records of which something is offered; who asked first is forgotten first."""


class PeerOffer(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A `PeerOffer` is a record that `lender` is said to hold, among the first `tokens` tokens.
    It has it at hand in `ready_ms`; `turn_id`: its turn computes it until then. `ranks`: who lends
    it, each its own part; empty: the lender does, whole."""

    prefix: PeerPrefix
    lender: LenderAddress
    record: PeerRecord
    tokens: int
    turn_id: TurnId = NO_TURN
    ready_ms: float = 0.0
    ranks: tuple[LendingRank, ...] = ()

    @property
    def for_turn(self) -> TurnId:
        """Return our turn for which the lender's computes it; NO_TURN: it is for any."""
        return NO_TURN if self.turn_id == NO_TURN else self.prefix.turn_id


class Offers:
    """`Offers` owns what is offered; `is_over` tells whether a turn of ours is. Any thread may
    call."""

    def __init__(self, is_over: Callable[[TurnId], bool]) -> None:
        self._is_over = is_over
        self._offers: OrderedDict[bytes, dict[TurnId, PeerOffer]] = OrderedDict()
        self._lock = Lock()

    def learn(self, offers: Mapping[bytes, PeerOffer]) -> None:
        """Take offers by the ids of their records."""
        with self._lock:
            for id_, offer in offers.items():
                told = self._offers.setdefault(id_, {})
                for turn_id in [one for one in told if self._is_over(one)]:
                    del told[turn_id]
                told.pop(offer.for_turn, None)  # the last one told is last
                told[offer.for_turn] = offer
            while len(self._offers) > OFFERS_KEPT:
                self._offers.popitem(last=False)

    def of(self, id_: bytes, turn_id: TurnId = NO_TURN) -> PeerOffer | None:
        """Return what is offered of a record: for that turn of ours, else the last that was told
        and stands."""
        with self._lock:
            told = self._offers.get(id_, {})
            if turn_id in told and not self._is_over(turn_id):
                return told[turn_id]
            standing = (one for turn, one in reversed(told.items()) if not self._is_over(turn))
            return next(standing, None)

    def forget(self, id_: bytes, offer: PeerOffer) -> None:
        """Forget an offer that was not kept; what was told since is another."""
        with self._lock:
            told = self._offers.get(id_, {})
            if told.get(offer.for_turn) is offer:
                del told[offer.for_turn]
                if not told:
                    del self._offers[id_]
