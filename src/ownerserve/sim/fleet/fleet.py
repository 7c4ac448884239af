"""A simulated fleet has gateways, workers, a workload, and a directory, on one heap.

Owns the turns that are live. Sessions are spread over the gateways, each with all of its turns, as
by a balancer that goes by session. Every choice is RouterState's; what is chosen is performed here
with modelled workers and transfers, and what comes of it goes back as the events a gateway sends.

    released -> Arrive -> Dispatch -> (bring | prefill elsewhere) -> worker -> FirstByte -> Done
                   |                      ^                             |          `-----> Broken
                   `----> Refuse          `----- another attempt <--- Failed

Every released turn ends in exactly one row: served, refused or failed (invariant 3; `check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from ownerserve.directory.owner.state import SessionTip
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import TurnId, WorkerId
from ownerserve.kv.messages import ExecutionMode, PlacementAction, Tier, UnservedReason
from ownerserve.router.entry.terms import refilled_ms
from ownerserve.router.messages import (
    Aborted,
    Answer,
    Arrive,
    AskRelease,
    Broken,
    Dispatch,
    Done,
    Failed,
    Failure,
    FirstByte,
    LetGo,
    Refuse,
    Reported,
)
from ownerserve.router.requests.body import Usage
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile, Worker
from ownerserve.sim.config.clients import ClientSettings
from ownerserve.sim.engine.sequence import SimSequence, sequence_of
from ownerserve.sim.fleet import gauge
from ownerserve.sim.fleet.accounts import Accounts, LiveTurn
from ownerserve.sim.fleet.clients import Clients
from ownerserve.sim.fleet.gateway import SimGateway
from ownerserve.sim.fleet.ownership import SimOwnership
from ownerserve.sim.fleet.takes import SimTakes
from ownerserve.sim.metrics.counters import FleetCounters
from ownerserve.sim.metrics.rows import NO_WORKER, Rows, TurnRow
from ownerserve.sim.oracle.horizon import Foresight
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.turns import UNIT_BYTES, SimTurn, prefix_name
from ownerserve.sim.transfer.outcomes import TransferOutcome, TransferResult
from ownerserve.sim.transfer.transfers import Transfers
from ownerserve.sim.worker.worker import SimWorker
from ownerserve.sim.workload import WorkloadDriver

BYTES_PER_TOKEN = 4
"""Bytes of a request's body for one token; the router learns each session's own ratio."""

REFUSED_RETRY_S = 1.0
"""The Retry-After of a gateway that has no worker for a turn."""

_BRINGING = frozenset(
    {
        PlacementAction.ARTIFACT_FETCH,
        PlacementAction.STATE_MIGRATION,
        PlacementAction.TAIL_RECOMPUTE,
    }
)

_COMPUTED_HERE = (TransferOutcome.LATE, TransferOutcome.GONE, TransferOutcome.SOURCE_LOST)


class SimFleet:
    """The fleet performs what the router decides. It is wired by `build`; `run` lets all of the
    workload happen."""

    def __init__(
        self,
        heap: Heap,
        workload: WorkloadDriver,
        routers: Sequence[RouterState],
        *,
        ownership: SimOwnership,
        transfers: Transfers,
        clients: ClientSettings,
    ) -> None:
        self.rows = Rows()
        self.counters = FleetCounters()
        self.workers: list[SimWorker] = []
        self.ownership = ownership
        self.gateways = [
            SimGateway(heap, router, ownership, workers=self.workers) for router in routers
        ]
        self.foresight: Foresight | None = None
        """An oracle that is told what turns do, and knows when they come back."""
        self._heap = heap
        self._workload = workload
        self._transfers = transfers
        self.named: dict[WorkerId, SimWorker] = {}
        self.accounts = Accounts(self.workers, self.counters)
        self.takes = SimTakes(transfers, ownership)
        self._live: dict[TurnId, LiveTurn] = {}
        self._apart: dict[TurnId, LiveTurn] = {}
        self._coming = 0  # releases on the heap
        self.clients = Clients(heap, clients, ask=self._ask, hang_up=self._hang_up)

    @property
    def live(self) -> int:
        """How many turns are between their release and their end."""
        return len(self._live)

    @property
    def is_busy(self) -> bool:
        """Whether a turn is live or will be released."""
        return self._coming > 0 or bool(self._live) or self.clients.waiting > 0 or self._waits()

    def join(self, worker: SimWorker, profile: Profile | None, now: float) -> None:
        """Tell gateways and the directory that a worker is up. `profile` None: as in its former
        life."""
        self.named[worker.name] = worker
        for gateway in self.gateways:
            gateway.up(worker, profile, now)
        self.ownership.lives(worker.unit, now)

    def down(self, worker: SimWorker, now: float) -> None:
        """Let a worker die.

        Its connections break, so that gateways know at once: what it had not begun to answer is
        tried elsewhere, what it had begun has failed.
        """
        for gateway in self.gateways:
            gateway.down(worker, now)
        self.ownership.silent(worker.unit)
        worker.crash(now)
        self._transfers.room_at(worker, now)  # nobody waits for room at the dead

    def back(self, worker: SimWorker, now: float) -> None:
        """Bring the worker up again, in its next life."""
        worker.rise()
        self.join(worker, None, now)

    def begin(self) -> None:
        """Release what is known at the start."""
        releases = self._workload.first(self._heap.now)
        self._coming += len(releases)
        self._heap.begin_with([(when_s, partial(self._release, key)) for when_s, key in releases])

    def gateway_of(self, turn: SimTurn) -> SimGateway:
        """Return the gateway to which the turn's session comes, sub-agents and all."""
        return self.gateways[turn.session % len(self.gateways)]

    def _waits(self) -> bool:
        return any(len(gateway.admission) for gateway in self.gateways)

    # -- a turn's way in ------------------------------------------------------------------------

    def _release_all(self, releases: list[tuple[float, Any]]) -> None:
        heap = self._heap
        self._coming += len(releases)
        for when_s, key in releases:
            heap.at(when_s if when_s > heap.now else heap.now, partial(self._release, key))

    def _release(self, key: Any, now: float) -> None:
        turn = self._workload.turn(key, now)
        claims = self.gateway_of(turn).claims
        if claims.is_stranger(turn.name):
            claims.look_up(turn.name, partial(self._enter, turn), now)
        else:
            self._enter(turn, now)

    def _enter(self, turn: SimTurn, now: float) -> None:
        self._coming -= 1
        self.counters.turns_released += 1
        self._ask(turn, now)

    def _ask(self, turn: SimTurn, now: float) -> None:
        """Have the turn's client ask for it, for the first time or again."""
        self.clients.asked(turn, now)
        admission = self.gateway_of(turn).admission
        admission.enter(turn, self._arrive, self._turned_away, now=now)

    def _arrive(self, turn: SimTurn, now: float) -> None:
        if self.foresight is not None:
            self.foresight.arrived(turn, now)
        row = _row_of(turn, now)
        shared_bytes = turn.shared_tokens * BYTES_PER_TOKEN if turn.parent else None
        arrive = Arrive(
            turn.name, turn.prompt_tokens * BYTES_PER_TOKEN, None, turn.parent, shared_bytes
        )
        gateway = self.gateway_of(turn)
        known = gateway.router.sessions.get(turn.name)
        owner = None if known is None else known.live_home
        if owner is not None:
            row.owner, row.owner_wait_ms = self._at(owner).index, owner.queue_ms
        outcome = gateway.router.handle(arrive, now)
        if isinstance(outcome, Refuse):
            self._refused(turn, row, REFUSED_RETRY_S, now)
            return
        worker = self._at(outcome.decision.worker)
        sequence = self._sequence(turn)
        live = LiveTurn(turn, row, outcome, worker, sequence, gateway)
        self._live[live.sequence.turn_id] = live
        if owner is None:
            row.owner_wait_ms = outcome.decision.worker.queue_ms
        self._place(live, now)

    def _turned_away(self, turn: SimTurn, retry_after_s: float, now: float) -> None:
        if self.foresight is not None:
            self.foresight.arrived(turn, now)
        self._refused(turn, _row_of(turn, now), retry_after_s, now)

    def _hang_up(self, turn: SimTurn, now: float) -> None:
        """End a try whose answer has not begun in time, wherever it is."""
        gateway = self.gateway_of(turn)
        row = _row_of(turn, now)
        if not gateway.admission.leave(turn, now):
            live = self._live.pop(self._sequence(turn).turn_id)
            row = live.row
            gateway.router.handle(Aborted(live.dispatch.receipt), now)
            if live.running is not None:
                is_apart = self._apart.pop(live.running.turn_id, None) is not None
                where = self.workers[row.prefill_worker] if is_apart else live.worker
                where.give_up(live.running, now)
            self._call_off(live, now)
            if live.running is not None:
                self._transfers.room_at(where, now)
        if not self._comes_again(turn, None, now):
            row.mode, row.reason = ExecutionMode.FAILED, UnservedReason.CLIENT_TIMEOUT
            self._close(turn, row, now)

    def _call_off(self, live: LiveTurn, now: float) -> None:
        """Bring no more for a turn, and send it no more of a prompt computed elsewhere."""
        turn_id = live.sequence.turn_id
        for asked in (turn_id, _part_of(turn_id)):
            moved_bytes = self._transfers.call_off(asked, now)
            live.row.network_bytes += moved_bytes

    def _comes_again(self, turn: SimTurn, retry_after_s: float | None, now: float) -> bool:
        if not self.clients.ask_again(turn, retry_after_s, now):
            return False
        self.gateway_of(turn).admission.stopped(turn, now)
        return True

    def _at(self, worker: Worker) -> SimWorker:
        return self.named[worker.id]

    def _sequence(self, turn: SimTurn) -> SimSequence:
        """Return the sequence of a try of the turn, under a name of its own."""
        sequence, retries = (
            sequence_of(turn, self._workload.block_tokens),
            self.clients.retries_of(turn),
        )
        if retries:
            sequence.turn_id = TurnId(f"{sequence.turn_id}r{retries}")
        return sequence

    def _place(self, live: LiveTurn, now: float) -> None:
        """Perform the decision."""
        decision, turn = live.dispatch.decision, live.turn
        live.decided_s = live.row.routed_s = now
        live.row.action = decision.action
        if live.gateway.gaps is not None:
            live.gateway.gaps.sent(live.dispatch, now)
        if self.foresight is not None:
            self.foresight.runs_at(turn, live.worker)
        source = None if decision.source is None else decision.source.worker
        if decision.prefill is not None:
            prefiller = self._at(decision.prefill)
            live.row.prefill_worker = prefiller.index
            part = _prefill_of(live.sequence)
            self._apart[part.turn_id] = live
            live.running = part
            prefiller.submit(part, now)
            self._transfers.follow(prefiller, live.worker, part, now)
        elif decision.action in _BRINGING and source is not None and source is not decision.worker:
            holder = self._at(source)
            then = partial(self._brought, live)
            prompt, turn_id = live.sequence.prompt, live.sequence.turn_id
            self._transfers.bring(holder, live.worker, prompt, then=then, now=now, for_turn=turn_id)
        else:
            self._submit(live, now)

    def _submit(self, live: LiveTurn, now: float) -> None:
        """Hand the turn to the worker that is to answer it."""
        turn, worker = live.turn, live.worker
        epoch = live.gateway.claims.epoch_of(turn.name)
        self.ownership.came(turn.name, worker.unit, parent=turn.parent, epoch=epoch, now=now)
        live.running = live.sequence
        worker.submit(live.sequence, now)

    def _brought(self, live: LiveTurn, brought: TransferResult, now: float) -> None:
        """Go on after a transfer for this turn, which ended well or not: what landed is in the
        cache."""
        live.row.network_bytes += brought.bytes
        if self._is_over(live):
            return
        moves = live.dispatch.decision.action is PlacementAction.STATE_MIGRATION
        if brought.landing is TransferOutcome.LOST:
            if moves:
                self.accounts.gave_up(live, now)
            self._lost(live, now, reason=UnservedReason.ENGINE_ERROR)
            return
        self._waited(live, brought, now)
        if brought.landing is TransferOutcome.LANDED:
            live.landed_s = now
            live.mode = ExecutionMode.MIGRATE if moves else ExecutionMode.FETCH
        elif moves and brought.landing is not TransferOutcome.NOTHING_TO_BRING:
            self.accounts.gave_up(live, now)
        self._submit(live, now)

    def _is_over(self, live: LiveTurn) -> bool:
        """Return whether the turn's client has hung up meanwhile."""
        return self._live.get(live.sequence.turn_id) is not live

    @staticmethod
    def _waited(live: LiveTurn, brought: TransferResult, now: float) -> None:
        row = live.row
        row.restore_queue_ms += brought.waited_s * 1000.0
        row.restore_load_ms += (now - live.decided_s - brought.waited_s) * 1000.0
        if brought.landing is TransferOutcome.LANDED:
            live.brought_bytes = brought.bytes

    # -- what workers say -----------------------------------------------------------------------

    def began(self, sequence: SimSequence, now: float) -> None:
        """Tell the router that the first token is there: the prefill is over."""
        live = self._live.get(sequence.turn_id)
        if live is None:
            return  # the prefill part of a turn that decodes elsewhere
        live.has_begun = True
        self.clients.answered(live.turn)
        status = gauge.status(live.worker, now)
        gateway = live.gateway
        claimed = gateway.claims.named(live.turn.name, live.worker.unit, now)
        first_byte = FirstByte(live.dispatch.receipt, status, claimed=claimed)
        moved = gateway.router.handle(first_byte, now)
        if isinstance(moved, LetGo):
            gateway.claims.let_go(moved, now)
        self._report(live, now)

    def _report(self, live: LiveTurn, now: float) -> None:
        """Tell the router where the prompt's state is now, as a worker stamps it on its answer."""
        session, full = live.dispatch.session, live.turn.prompt_tokens // live.sequence.unit_tokens
        if session is not None and full:
            tip, unit = _tip(live.sequence, full), live.worker.unit
            said = Reported(unit, Tier.DEVICE, tip.prefix_hash, tip.tokens, session)
            live.gateway.router.handle(said, now)

    def _left(self, live: LiveTurn, now: float) -> None:
        """Tell of ownership what the worker and the gateway tell when a turn is complete."""
        turn, unit, sequence = live.turn, live.worker.unit, live.sequence
        full = (turn.prompt_tokens + turn.output_tokens - 1) // sequence.unit_tokens
        if full:
            self.ownership.left(turn.name, unit, _tip(sequence, full), now)
        if turn.is_last:
            self.ownership.over(turn.name, unit, now)

    def served(self, sequence: SimSequence, now: float) -> None:
        """End a turn that is complete, or its prefill part."""
        live = self._apart.pop(sequence.turn_id, None)
        if live is not None:
            self._prefilled(live, sequence, now)
            return
        live = self._live.pop(sequence.turn_id)
        turn, row = live.turn, live.row
        self._left(live, now)
        self.accounts.served(live, now)
        usage = Usage(turn.prompt_tokens, turn.output_tokens, row.cached_tokens)
        gateway = live.gateway
        known = gateway.router.sessions.get(turn.name)
        lost_ms = refilled_ms(usage, known, live.dispatch.decision.worker)
        gateway.admission.answered(now - row.first_token_s, lost_ms / 1000.0)
        done = Done(live.dispatch.receipt, usage, status=gauge.status(live.worker, now))
        wanted = gateway.router.handle(done, now)
        source = None
        if isinstance(wanted, AskRelease):
            source = wanted.source
            gateway.claims.ask(wanted, now)
        self.accounts.left(live, now, released=source)
        self._end(turn, row)
        self._over(turn, self._workload.finished(turn, now), now)
        self._transfers.room_at(live.worker, now)

    def _prefilled(self, live: LiveTurn, part: SimSequence, now: float) -> None:
        """Bring the prompt that was computed elsewhere, then decode."""
        prefiller = self.workers[live.row.prefill_worker]
        live.decided_s, live.running = now, None
        live.row.started_s = part.begun_s
        live.row.computed_tokens += part.computed_tokens
        live.row.cached_tokens = part.restored_tokens
        live.sequence.landed_tokens = live.turn.prompt_tokens
        live.mode = ExecutionMode.REMOTE_PREFILL
        then = partial(self._sent, live)
        self._transfers.send(prefiller, live.worker, part, then=then, now=now)
        self._transfers.room_at(prefiller, now)

    def _sent(self, live: LiveTurn, brought: TransferResult, now: float) -> None:
        """Go on with what was computed elsewhere, if it has come. When it is late, or its source
        died or had it no more, it is computed here; without room the attempt is lost."""
        live.row.network_bytes += brought.bytes
        if self._is_over(live):
            return
        if brought.landing is TransferOutcome.LOST:
            self._lost(live, now, reason=UnservedReason.ENGINE_ERROR)
            return
        if brought.landing is TransferOutcome.NO_ROOM:
            self._lost(live, now, reason=UnservedReason.NO_ROOM)
            return
        self._waited(live, brought, now)
        if brought.landing in _COMPUTED_HERE:
            live.sequence.landed_tokens, live.mode = 0, None
            live.row.prefill_worker = NO_WORKER
        self._submit(live, now)

    def lost(self, sequence: SimSequence, now: float) -> None:
        """Give up an attempt that the worker can never run, or that has died with it."""
        live = self._apart.pop(sequence.turn_id, None)
        if live is not None:
            live.row.network_bytes += self._transfers.call_off(sequence.turn_id, now)
            where = self.workers[live.row.prefill_worker]
        else:
            found = self._live.get(sequence.turn_id)
            if found is None:
                return  # its client hung up at this instant
            live, where = found, found.worker
        self._lost(
            live,
            now,
            reason=UnservedReason.TOO_LONG if where.is_up else UnservedReason.ENGINE_ERROR,
        )
        self._transfers.room_at(where, now)

    def _lost(self, live: LiveTurn, now: float, *, reason: UnservedReason) -> None:
        """Try another worker while nothing has reached the client; else the turn has failed."""
        turn, row, receipt = live.turn, live.row, live.dispatch.receipt
        gateway, router = live.gateway, live.gateway.router
        del self._live[live.sequence.turn_id]
        outcome: Dispatch | Refuse | None = None
        if reason is UnservedReason.TOO_LONG:  # a client's error: nobody else is asked
            router.handle(FirstByte(receipt, None, Answer.ERROR), now)
            router.handle(Done(receipt), now)
        elif live.has_begun:
            router.handle(Broken(receipt), now)
        else:
            died = reason is UnservedReason.ENGINE_ERROR
            failure = Failure.CLOSED if died else Failure.REFUSED
            outcome = router.handle(Failed(receipt, failure), now)
        if isinstance(outcome, Dispatch):
            worker = self._at(outcome.decision.worker)
            again = LiveTurn(turn, row, outcome, worker, self._sequence(turn), gateway)
            row.attempts, row.prefill_worker = outcome.attempt, NO_WORKER
            self._live[again.sequence.turn_id] = again
            self._place(again, now)
            return
        is_refused = not live.has_begun and reason is not UnservedReason.TOO_LONG
        if is_refused and self._comes_again(turn, REFUSED_RETRY_S, now):
            return
        row.worker, row.mode, row.reason = live.worker.index, ExecutionMode.FAILED, reason
        if live.has_begun:
            row.started_s = max(row.started_s, live.sequence.begun_s)
            row.first_token_s = live.sequence.first_token_s
        self._close(turn, row, now)

    def _refused(
        self, turn: SimTurn, row: TurnRow, retry_after_s: float | None, now: float
    ) -> None:
        if self._comes_again(turn, retry_after_s, now):
            return
        row.mode, row.reason = ExecutionMode.REFUSED, UnservedReason.OVERLOADED
        self._close(turn, row, now)

    def _close(self, turn: SimTurn, row: TurnRow, now: float) -> None:
        """End a turn that was not served: its times after the last one known are its end."""
        row.started_s = max(row.started_s, row.routed_s)
        row.first_token_s = max(row.first_token_s, row.started_s)
        row.done_s = now
        self._end(turn, row)
        self._over(turn, self._workload.failed(turn, now), now)

    def _end(self, turn: SimTurn, row: TurnRow) -> None:
        row.client_retries = self.clients.retries_of(turn)
        self.clients.over(turn)
        self.rows.add(row)

    def _over(self, turn: SimTurn, releases: list[tuple[float, Any]], now: float) -> None:
        if self.foresight is not None:
            self.foresight.over(turn, releases, now)
        if self._workload.ended > len(self.counters.completed):
            self.counters.completed.append(turn.session)
        if turn.is_last:
            self.accounts.ended(turn.name)
        self.gateway_of(turn).admission.ended(turn, now)
        self._release_all(releases)
        if not self.is_busy:
            self._heap.stop()

    def tally(self) -> None:
        """Bring the counters of all workers together, once, at the end."""
        counters = self.counters
        counters.sessions_released = self._workload.sessions
        counters.in_gaps.moved_bytes = self.takes.moved_bytes
        for worker in self.workers:
            gauge.tally(worker, counters)

    def check(self) -> None:
        """Raise InvariantViolated unless nothing was lost and everybody's books are whole."""
        released, ended, live = self.counters.turns_released, len(self.rows), len(self._live)
        waiting = self.clients.waiting + sum(len(gateway.admission) for gateway in self.gateways)
        if released != ended + live + waiting:
            raise InvariantViolated(
                f"invariant 3: {released} released, {ended} ended, {live} live, {waiting} waiting"
            )
        routed = sum(gateway.router.live for gateway in self.gateways)
        if routed != live:
            raise InvariantViolated(f"invariant 3: {live} live, the routers have {routed}")
        if not all(other.sequence.turn_id in self._live for other in self._apart.values()):
            raise InvariantViolated("invariant 3: a prompt is computed for a turn that has ended")
        for gateway in self.gateways:
            gateway.router.check()
        for worker in self.workers:
            worker.check()
        self._transfers.check()
        self.ownership.check(self._heap.now)


def _row_of(turn: SimTurn, now: float) -> TurnRow:
    """Return the row of a turn that reaches the router, or is turned away, now."""
    row = TurnRow(
        turn.number, turn.session, turn.position, turn.arrived_s, turn.prompt_tokens,
        turn.output_tokens,
    )  # fmt: skip
    row.routed_s = now
    return row


def _tip(sequence: SimSequence, full: int) -> SessionTip:
    """Return the tip where the sequence's first `full` units end."""
    name = prefix_name(sequence.units[full * UNIT_BYTES - UNIT_BYTES : full * UNIT_BYTES])
    return SessionTip(name, full * sequence.unit_tokens)


def _prefill_of(sequence: SimSequence) -> SimSequence:
    """Return the same prompt as a sequence for a worker that only computes it."""
    turn = msgspec.structs.replace(sequence.turn, output_tokens=1, output=b"")
    part = sequence_of(turn, sequence.unit_tokens)
    part.turn_id = _part_of(sequence.turn_id)
    return part


def _part_of(turn_id: TurnId) -> TurnId:
    """Return the name of a turn's prompt, where that is computed apart."""
    return TurnId(f"{turn_id}p")
