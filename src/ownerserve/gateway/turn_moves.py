"""This module has running turns go on elsewhere: from workers that get no turns any more, so that
who is drained or leaves does not wait for the longest answer.

    a worker is drained, by its operator's word or its own, and lends
      each turn that runs there, of a client of this process: where would it run, did it come now?
        Take(turn) ──> that worker: it brings what the turn has sealed, and has it sent by the one
                       that runs it; the exchange follows (exchange/leaving.py)
        TurnSent, Reject(reason), or nothing in TAKE_S; counted

A turn of which nothing is written yet is asked again. Where the target is silent it is not: it may
have the turn, and the exchange goes where its first worker's last word says.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from weakref import WeakKeyDictionary

from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.exchange import Exchange
from ownerserve.gateway.exchange.leaving import leave, leaving_from
from ownerserve.gateway.http.client import ClientConnection
from ownerserve.gateway.turns import Turns
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject, Take, TurnSent
from ownerserve.router.worker import Receipt, Worker

LOOK_S = 0.25
AT_ONCE = 4
"""Turns that leave one worker at a time: each brings its state, which costs those that still run
there."""
TAKE_S = 25.0
"""Longer than a worker tries (node/transfers/turn_states.py, turn_moves.py)."""
AGAIN_S = 1.0
"""A turn that could not leave is asked again after so long."""
_LATER = (
    WorkerRefusal.NOT_DECODING,
    WorkerRefusal.QUEUE_FULL,
    WorkerRefusal.ENGINE_BUSY,
    WorkerRefusal.NO_ANSWER,
    WorkerRefusal.SESSION_IS_MOVING,
)
"""Why a turn stays for now."""
NEVER_S = float("inf")
NO_SESSION = SessionId("")


class _Order:
    """An order is of one leg of a turn, which may be asked to leave again from `again_at_s` on."""

    def __init__(self, receipt: Receipt, again_at_s: float) -> None:
        self.receipt = receipt
        self.again_at_s = again_at_s


class TurnMoves:
    """This class orders the moves of running turns of the `clients` of one gateway process.
    `counts`: by how each order ended, refusals by reason; metric labels."""

    def __init__(self, turns: Turns, clients: Collection[ClientConnection]) -> None:
        self.counts: Counter[str] = Counter()
        self._turns = turns
        self._clients = clients
        self._orders: WeakKeyDictionary[Exchange, _Order] = WeakKeyDictionary()
        self._under_way: Counter[Worker] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look for turns that are to leave, until cancelled; what is under way is then called
        off."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if self._turns.rollout.is_normal:
                    self._look()
        finally:
            for task in self._tasks:
                task.cancel()

    def _look(self) -> None:
        for worker in self._turns.state.fleet:
            if worker.is_drained and Tier.DEVICE in worker.profile.lends:
                self._relieve(worker)

    def _relieve(self, worker: Worker) -> None:
        """Have turns leave a drained worker, a few at a time."""
        for client in list(self._clients):
            if self._under_way[worker] >= AT_ONCE:
                return
            exchange = client.answering
            if not isinstance(exchange, Exchange):
                continue
            attempt = leaving_from(exchange, worker)
            if attempt is not None and self._may_leave(exchange, attempt):
                self._leave(exchange, attempt, worker)

    def _may_leave(self, exchange: Exchange, attempt: Attempt) -> bool:
        """Return whether this leg of the turn was not asked to leave, or may be again."""
        order = self._orders.get(exchange)
        is_new = order is None or order.receipt != attempt.dispatch.receipt
        return is_new or (order is not None and order.again_at_s <= self._turns.now())

    def _leave(self, exchange: Exchange, attempt: Attempt, source: Worker) -> None:
        """Have the turn leave for where it would run, were it to come now."""
        turns = self._turns
        arrive, lines, names = attempt.asked.arrive, turns.lines, turns.worker_names
        target = turns.state.idle.place_running(arrive, source, turns.now())
        self._orders[exchange] = order = _Order(attempt.dispatch.receipt, turns.now() + AGAIN_S)
        if target is None:
            self.counts["no_target"] += 1
            return
        here, there = lines.read_by(target, source, names), lines.read_by(source, target, names)
        if here is None or there is None or target.unit is None:
            self.counts["unreachable"] += 1
            return
        if leave(exchange, target.unit) is None:
            self.counts["torn"] += 1
            return
        turn = exchange.request_id.decode()
        take = Take(attempt.dispatch.session or NO_SESSION, here, turn, there)
        order.again_at_s = NEVER_S
        self._under_way[source] += 1
        task = asyncio.get_running_loop().create_task(self._take(order, target, take))
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._under_way[source] -= 1

        task.add_done_callback(ended)

    async def _take(self, order: _Order, target: Worker, take: Take) -> None:
        line = self._turns.lines.of(target.id)
        said = None if line is None else await line.ask(take, TAKE_S)
        if isinstance(said, TurnSent):
            self.counts["sent"] += 1
        elif isinstance(said, Reject):
            self.counts[said.reason.value] += 1
            if said.reason in _LATER:
                order.again_at_s = self._turns.now() + AGAIN_S
        else:
            self.counts["no_answer" if said is None else "malformed"] += 1
