"""The transfer service is the thread on which a node lends and brings: an event loop with both
sides of transfer's control, and the calls by which other threads reach it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from threading import Thread

from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.ids import TurnId
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import Accepted, AskLender, Nonce, Prefill, PrefixIs, RpcAnswer
from ownerserve.node.transfers.landing import Landing
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.node.transfers.rank_bring import bring_shares
from ownerserve.node.transfers.ranks import RankShare
from ownerserve.node.transfers.source_side import SourceSide
from ownerserve.node.transfers.target_side import BringParts, PartLanded, TargetSide
from ownerserve.transfer.control.events import BringOver
from ownerserve.transfer.control.messages import NO_TURN
from ownerserve.transfer.control.target import lend_s

log = logging.getLogger("ownerserve.transfer")

STOP_S = 5.0

Sides = Callable[[asyncio.AbstractEventLoop], tuple[SourceSide, TargetSide]]


class TransferService:
    """A `TransferService` runs from `start` to `stop`."""

    def __init__(self, sides: Sides) -> None:
        """Make the service; `sides` makes both sides, on the service's thread."""
        self._make = sides
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="transfer", daemon=True)
        self._begun: Future[None] = Future()
        self.source: SourceSide
        self.target: TargetSide

    def start(self) -> None:
        """Begin. Raises what making the sides raises."""
        self._thread.start()
        self._begun.result()

    def stop(self) -> None:
        """End all lends and brings, and the thread."""
        if self._thread.ident is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def ask(self, asked: AskLender) -> Future[RpcAnswer]:
        """Answer a peer; any thread may call."""
        return self.source.ask(asked)

    def run(self, work: Coroutine[None, None, RpcAnswer]) -> Future[RpcAnswer]:
        """Do work that asks peers, on the service's thread; any thread may call."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def look(
        self, lender: LenderAddress, hint: SessionHint, *, compute_ms: float
    ) -> PrefixIs | None:
        """Return what a peer holds of a session, where computing it would take so many ms; None: no
        answer in time. Waits; not for the engine's thread."""
        within_s = lend_s(compute_ms)
        looking = asyncio.run_coroutine_threadsafe(
            self.target.look(lender, hint, within_s), self._loop
        )
        try:
            return looking.result(within_s + STOP_S)
        except NotInTime:
            looking.cancel()
            return None

    def bring(
        self,
        parts: BringParts,
        lender: LenderAddress,
        hint: SessionHint,
        *,
        landed: PartLanded,
        compute_ms: float,
        turn_id: TurnId = NO_TURN,
    ) -> Future[BringOver]:
        """Begin to bring from a peer, part by part; cancelled, it is given up there too."""
        bring = self.target.bring(
            parts, lender, hint, landed=landed, compute_ms=compute_ms, turn_id=turn_id
        )
        return asyncio.run_coroutine_threadsafe(bring, self._loop)

    def bring_shares(
        self,
        shares: Sequence[RankShare],
        hint: SessionHint,
        *,
        landing: Landing,
        landed: PartLanded,
        compute_ms: float,
    ) -> Future[BringOver]:
        """Begin to bring from several ranks of a peer, all or nothing; cancelled, it is given up at
        each."""
        bring = bring_shares(
            self.target, shares, hint, landing=landing, landed=landed, compute_ms=compute_ms
        )
        return asyncio.run_coroutine_threadsafe(bring, self._loop)

    def order(
        self, worker: LenderAddress, asked: Prefill, nonce: Nonce, *, compute_ms: float
    ) -> Accepted | None:
        """Have a peer compute a prompt, which would take so many ms here; None: it does not. Waits;
        not for the engine's thread."""
        within_s = lend_s(compute_ms)
        ordering = asyncio.run_coroutine_threadsafe(
            self.target.order(worker, asked, nonce, within_s=within_s), self._loop
        )
        try:
            return ordering.result(within_s + STOP_S)
        except NotInTime:
            ordering.cancel()
            return None

    def least_pending(self, addresses: Sequence[str], *, within_s: float) -> LenderAddress | None:
        """Return which of the peers at these RPC addresses has the least to compute; None: none
        answers. Waits; not for the engine's thread."""
        asking = asyncio.run_coroutine_threadsafe(
            self.target.least_pending(addresses, within_s), self._loop
        )
        try:
            return asking.result(within_s + STOP_S)
        except NotInTime:
            asking.cancel()
            return None

    def call_off(self, worker: LenderAddress, nonce: Nonce) -> None:
        """Tell a peer that what was ordered under the nonce is not wanted any more; any thread may
        call."""
        with suppress(RuntimeError):  # the loop has ended, and the peer hears nothing more
            self._loop.call_soon_threadsafe(self.target.call_off, worker, nonce)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self.source, self.target = self._loop.run_until_complete(self._made())
        except (OwnerServeError, OSError) as error:  # who starts it hears
            self._begun.set_exception(error)
            return
        self._begun.set_result(None)
        try:
            self._loop.run_forever()
        finally:
            self.source.close()
            self.target.close()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _made(self) -> tuple[SourceSide, TargetSide]:
        return self._make(asyncio.get_running_loop())
