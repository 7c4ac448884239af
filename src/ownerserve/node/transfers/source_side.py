"""The source side performs what `transfer.control.source` decides: it lends, on the engine's
thread, has digests made on a thread of its own, and answers peers. All its calls are made on the
loop's thread but `ask`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from typing import NamedTuple

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import AskLender, LenderSays, Nonce, Reject, RpcAnswer
from ownerserve.node.transfers.frames import decode_question, encode_message
from ownerserve.node.transfers.lenders import Lenders, OnEngine
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.transfer.control.events import (
    AnswerPeer,
    CheckTicket,
    DigestsMade,
    EndLend,
    LendNotOpened,
    LendOpened,
    MakeDigests,
    OpenLend,
    PeerAsked,
    SourceEffect,
    SourceEvent,
    TicketOver,
    TicketRead,
    TicketStands,
    WakeUp,
)
from ownerserve.transfer.control.messages import Grown, Lend, LendRefusal, Lent, More, PeerAnswer
from ownerserve.transfer.control.source import TransferSource
from ownerserve.transfer.movers.digests import Digests, digest_of

HINTS_KEPT = 1024
QUESTIONS_KEPT = 1024
"""A question that is asked again under another number is answered there; the former one is given
up by the port."""


class _Question(NamedTuple):
    """A question is who waits for an answer, and whether it may read by address: it is on this
    host, or there is an engine; `ticket`: of which lend it asks for more."""

    answer: Future[RpcAnswer]
    by_address: bool
    ticket: int


class SourceSide:
    """A `SourceSide` lends for one unit."""

    def __init__(
        self,
        unit: RoutingUnit,
        lending: Lenders,
        on_engine: OnEngine,
        *,
        digests: Digests,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.state = TransferSource(unit)
        self._lending = lending
        self._on_engine = on_engine
        self._digests = digests
        self._loop = loop
        self._digesting = ThreadPoolExecutor(1, "transfer-digest")
        self._hints: OrderedDict[tuple[RoutingUnit, Nonce], SessionHint] = OrderedDict()
        self._open: OrderedDict[int, _Question] = OrderedDict()
        self._questions = 0
        self._timer: asyncio.TimerHandle | None = None
        lending.hear_revoked(lambda ticket: self.tell(TicketOver(ticket)))

    def ask(self, asked: AskLender) -> Future[RpcAnswer]:
        """Have a peer's question answered; any thread may call."""
        answer: Future[RpcAnswer] = Future()
        answer.set_running_or_notify_cancel()
        self._loop.call_soon_threadsafe(self._asked, asked, answer)
        return answer

    def was_read(self, ticket: int) -> None:
        """Note that a mover has read under the ticket; any thread may call."""
        self.tell(TicketRead(ticket))

    def handle(self, event: SourceEvent) -> None:
        """Take an event, and perform what follows."""
        self._perform(self.state.handle(event, self._loop.time()))
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.state.next_deadline()
        self._timer = None if due_s == inf else self._loop.call_at(due_s, self.handle, WakeUp())

    def close(self) -> None:
        """Answer nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._digesting.shutdown(wait=False, cancel_futures=True)
        for question in self._open.values():
            question.answer.set_result(Reject(WorkerRefusal.ENGINE_BUSY))
        self._open.clear()

    def _asked(self, asked: AskLender, answer: Future[RpcAnswer]) -> None:
        try:
            message = decode_question(asked.frame)
        except InvalidInput:
            answer.set_result(Reject(WorkerRefusal.MALFORMED))
            return
        self._questions += 1
        by_address = asked.boot == self._lending.boot or bool(self._lending.engines)
        ticket = message.ticket if isinstance(message, More) else 0
        self._open[self._questions] = _Question(answer, by_address, ticket)
        if len(self._open) > QUESTIONS_KEPT:
            _, given_up = self._open.popitem(last=False)
            given_up.answer.set_result(Reject(WorkerRefusal.ENGINE_BUSY))
        if isinstance(message, Lend):
            hint = SessionHint(asked.session_id, asked.parent, asked.tokens)
            self._hints[asked.reader, message.nonce] = hint
            if len(self._hints) > HINTS_KEPT:
                self._hints.popitem(last=False)
        self.handle(PeerAsked(self._questions, asked.reader, message))

    # -- effects -------------------------------------------------------------------------------

    def _perform(self, effects: Iterable[SourceEffect]) -> None:
        for effect in effects:
            match effect:
                case OpenLend():
                    self._open_lend(effect)
                case EndLend(ticket):
                    self._call(partial(self._lending.end, ticket))
                case MakeDigests():
                    made = self._digesting.submit(self._make_digests, effect)
                    made.add_done_callback(self._digested)
                case CheckTicket(ticket, check):
                    self._check(ticket, check)
                case AnswerPeer(question, message):
                    self._answer(question, message)

    def _answer(self, number: int, message: PeerAnswer) -> None:
        question = self._open.pop(number, None)
        if question is None:
            return
        memory = b""
        if question.by_address and isinstance(message, Lent):
            memory = self._lending.memory(message.ticket)
        elif question.by_address and isinstance(message, Grown):
            ids = {published.piece.artifact for published in message.pieces}
            memory = self._lending.memory(question.ticket, ids) if ids else b""
        question.answer.set_result(LenderSays(encode_message(message), memory))

    def _open_lend(self, effect: OpenLend) -> None:
        hint = self._hints.pop((effect.reader, effect.lend.nonce), SessionHint(None, None, 0))
        refused = LendNotOpened(effect.number, LendRefusal.BUSY)

        def told(done: Future[object]) -> None:
            found = None if done.exception() else done.result()
            self.tell(found if isinstance(found, LendOpened | LendNotOpened) else refused)
            if isinstance(found, LendOpened):
                self._lending.opened(found.ticket)  # and what that tells comes behind

        opened = self._call(lambda: self._lending.open(effect, hint, time.monotonic()))
        if opened is None:
            self.tell(refused)
        else:
            opened.add_done_callback(told)

    def _call(self, work: Callable[[], object]) -> Future[object] | None:
        """Run `work` on the engine's thread; None: that has ended."""
        try:
            return self._on_engine(work)
        except RuntimeError:
            return None

    def _make_digests(self, effect: MakeDigests) -> SourceEvent:
        """Return the digests, or that the ticket is over; on the digests' thread."""
        made = []
        for piece in effect.pieces:
            runs = self._lending.runs(effect.ticket, piece)
            if runs is None or not self._lending.stands(effect.ticket):
                return TicketOver(effect.ticket)
            made.append((digest_of(runs, self._digests),))
        return DigestsMade(effect.ticket, effect.batch, tuple(made))

    def _check(self, ticket: int, check: int) -> None:
        """Answer at once, since any thread may ask whether a ticket stands; its end is put off as
        soon as the engine comes to it."""
        if not self._lending.stands(ticket):
            self._loop.call_soon(self.handle, TicketOver(ticket))
            return
        self._call(partial(self._lending.touch, ticket))
        self._loop.call_soon(self.handle, TicketStands(ticket, check))

    def _digested(self, done: Future[SourceEvent]) -> None:
        if not done.cancelled():
            self.tell(done.result())

    def tell(self, event: SourceEvent) -> None:
        """Take the event on the loop's thread; any thread may call."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.handle, event)
