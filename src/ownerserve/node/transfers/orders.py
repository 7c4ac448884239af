"""Orders are prompts that other workers compute for the turns of this one.

    placed ── accepted ──> read, as any peer's state is ──> called off with the turn's start
       └───── refused, silent, too late: the turn computes its prompt here

Any thread may call. Each turn has one order, however often it is looked for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from threading import Lock

import msgspec

from ownerserve.kv.ids import TurnId
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import NO_NONCE, Accepted, Nonce, Prefill, PrefixIs, new_nonce
from ownerserve.node.transfers.service import TransferService
from ownerserve.node.vocabulary.events import PeerPrefix, PrefillOrder
from ownerserve.transfer.control.target import LEND_S

PLACED_KEPT = 1024
"""More turns than wait at once, and than are over while a look of theirs is still under way."""
LATE_SHARE = 4.0
"""A peer that is ready only after so many times what computing takes, here or there, is not waited
for: it has others to serve first. A worker that decodes knows its own price of a prompt least."""


class PlacedOrder(msgspec.Struct, frozen=True, eq=False):
    """A `PlacedOrder` is what was asked of whom, and what was answered; `accepted` None: nobody
    computes it."""

    worker: LenderAddress | None
    nonce: Nonce
    accepted: Accepted | None

    @property
    def will_hold(self) -> PrefixIs | None:
        """What the peer will hold of the prompt; None: nothing of it."""
        if self.accepted is None:
            return None
        tokens = self.accepted.tokens
        return PrefixIs(tokens, (tokens,), self.accepted.tip)


class Orders:
    """`Orders` owns the orders of the turns that are here. `own`: where this worker's peers reach
    it, to read what a session has here; None: they can't. `known`: RPC addresses of peers of which
    one computes where nobody was named. `counts` says what came of them: metric labels."""

    def __init__(self, service: TransferService) -> None:
        self.counts: Counter[str] = Counter()
        self.own: LenderAddress | None = None
        self.known: tuple[str, ...] = ()
        self._service = service
        self._placed: OrderedDict[TurnId, PlacedOrder] = OrderedDict()
        self._under_way: dict[TurnId, bool] = {}
        """Whether a turn whose order has not been answered yet still waits for it."""
        self._over: OrderedDict[TurnId, None] = OrderedDict()
        """Turns that want none any more: a look that was begun for one places none."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._placed) + len(self._under_way)

    def placed(self, prefix: PeerPrefix) -> PlacedOrder:
        """Return the order for the turn of `prefix`, placed where it was not. Waits."""
        with self._lock:
            before = self._placed.get(prefix.turn_id)
            if before is None and prefix.turn_id in self._over:
                return PlacedOrder(None, NO_NONCE, None)
            if before is None:
                self._under_way[prefix.turn_id] = True
        if before is not None:
            return before
        assert prefix.order is not None
        worker, nonce, accepted = prefix.order.worker or self._least(), new_nonce(), None
        if worker is not None:
            asked = self._asked(prefix.order, prefix)
            accepted = self._service.order(worker, asked, nonce, compute_ms=prefix.compute_ms)
        if worker is not None and accepted is not None and _is_late(accepted, prefix):
            self._service.call_off(worker, nonce)
            self.counts["late"] += 1
            accepted = None
        else:
            self.counts["refused" if accepted is None else "accepted"] += 1
        order = PlacedOrder(worker, nonce, accepted)
        with self._lock:
            is_wanted = self._under_way.pop(prefix.turn_id)
            if is_wanted:
                self._placed[prefix.turn_id] = order
                if len(self._placed) > PLACED_KEPT:
                    self._placed.popitem(last=False)
        if not is_wanted and worker is not None and accepted is not None:
            self._service.call_off(worker, nonce)
        return order

    def _least(self) -> LenderAddress | None:
        return self._service.least_pending(self.known, within_s=LEND_S) if self.known else None

    def _asked(self, order: PrefillOrder, prefix: PeerPrefix) -> Prefill:
        """Return what is asked, with where the beginning of the prompt is to be had."""
        known = prefix.resident_tokens
        if self.own is None or not known:
            return Prefill(order.tokens, order.cache_salt, leg=order.leg)
        session, leg = prefix.session_id, order.leg
        return Prefill(order.tokens, order.cache_salt, session, self.own, known, leg)

    def is_over(self, turn_id: TurnId) -> bool:
        """Tell whether the turn wants no order any more."""
        return turn_id in self._over

    def call_off(self, turn_id: TurnId) -> None:
        """Forget the turn's order, and tell who computes: it is done with. One without is no
        error."""
        with self._lock:
            order = self._placed.pop(turn_id, None)
            self._over[turn_id] = None
            if len(self._over) > PLACED_KEPT:
                self._over.popitem(last=False)
            if turn_id in self._under_way:
                self._under_way[turn_id] = False
        if order is not None and order.worker is not None and order.accepted is not None:
            self._service.call_off(order.worker, order.nonce)


def _is_late(accepted: Accepted, prefix: PeerPrefix) -> bool:
    return accepted.ready_ms > LATE_SHARE * max(prefix.compute_ms, accepted.compute_ms)
