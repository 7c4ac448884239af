"""What `TransferService` is to a node: both sides of transfer on the schedule's loop, and the calls
that wait, which fibers make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from ownerserve.kv.ids import TurnId
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import Accepted, AskLender, Nonce, Prefill, PrefixIs, RpcAnswer
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.node.transfers.service import STOP_S
from ownerserve.node.transfers.source_side import SourceSide
from ownerserve.node.transfers.target_side import BringParts, PartLanded, TargetSide
from ownerserve.transfer.control.events import BringOver
from ownerserve.transfer.control.messages import NO_TURN
from ownerserve.transfer.control.target import lend_s
from tests.support.node.schedules.clock import VirtualLoop, waited

if TYPE_CHECKING:
    from tests.support.node.schedules.node import SimNode

T = TypeVar("T")


class FiberFuture(Future[T]):
    """A future that a fiber waits for, in virtual time."""

    def result(self, timeout: float | None = None) -> T:
        if timeout and not self.done():
            return waited(self, timeout)
        return super().result(0)


class SimService:
    """See the module."""

    def __init__(self, node: SimNode, source: SourceSide, target: TargetSide) -> None:
        self._loop: VirtualLoop = node.world.loop
        self.source, self.target = source, target

    def ask(self, asked: AskLender) -> Future[RpcAnswer]:
        return self.source.ask(asked)

    def look(
        self, lender: LenderAddress, hint: SessionHint, *, compute_ms: float
    ) -> PrefixIs | None:
        within_s = lend_s(compute_ms)
        return self._waited(self.target.look(lender, hint, within_s), within_s)

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
        bring = self.target.bring(
            parts, lender, hint, landed=landed, compute_ms=compute_ms, turn_id=turn_id
        )
        return asyncio.run_coroutine_threadsafe(bring, self._loop)

    def order(
        self, worker: LenderAddress, asked: Prefill, nonce: Nonce, *, compute_ms: float
    ) -> Accepted | None:
        within_s = lend_s(compute_ms)
        order = self.target.order(worker, asked, nonce, within_s=within_s)
        return self._waited(order, within_s)

    def least_pending(self, addresses: Sequence[str], *, within_s: float) -> LenderAddress | None:
        raise AssertionError("each turn here says whom it orders from")

    def call_off(self, worker: LenderAddress, nonce: Nonce) -> None:
        self._loop.call_soon(self.target.call_off, worker, nonce)

    def _waited(self, call: Any, within_s: float) -> Any:
        asking = asyncio.run_coroutine_threadsafe(call, self._loop)
        return waited(asking, within_s + STOP_S)


class SimExecutor:
    """A thread of its own, which takes a while."""

    def __init__(self, loop: VirtualLoop, delay_s: Callable[[], float]) -> None:
        self._loop, self._delay_s = loop, delay_s

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(work(*args))

        self._loop.call_later(self._delay_s(), run)
        return done

    def shutdown(self, **_: Any) -> None: ...
