"""The accounts are a simulated fleet's books: each turn's row, what lies on two devices, who has
moved.

Owns what outlives a turn: by whom each conversation was served, and up to where it was computed.
Must never decide anything, or change a worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Listed

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import ExecutionMode, RoutingUnit, execution_mode
from ownerserve.node.vocabulary.chains import KnownSessions, Plain
from ownerserve.router.messages import Dispatch
from ownerserve.router.worker import Worker
from ownerserve.sim.engine.sequence import SimSequence
from ownerserve.sim.fleet.gateway import SimGateway
from ownerserve.sim.metrics.counters import FleetCounters, Migration
from ownerserve.sim.metrics.rows import NO_WORKER, TurnRow
from ownerserve.sim.timeline.turns import UNIT_BYTES, SimTurn
from ownerserve.sim.worker.worker import SimWorker


class LiveTurn(msgspec.Struct, gc=False, eq=False):
    """A live turn stands between its release and its end, at one attempt."""

    turn: SimTurn
    row: TurnRow
    dispatch: Dispatch
    worker: SimWorker
    sequence: SimSequence
    gateway: SimGateway
    has_begun: bool = False
    mode: ExecutionMode | None = None
    brought_bytes: int = 0
    decided_s: float = 0.0
    landed_s: float = 0.0
    running: SimSequence | None = None
    """What is at a worker for it: all of it, or its prompt where that is computed apart; None while
    state is brought."""


class ConversationState(msgspec.Struct, gc=False):
    """A conversation's state outlives its turns: it names the workers that served them."""

    served_by: set[int]


class Accounts:
    """The accounts fill the rows of turns and count moves. The T_hot of a turn's router, as it is
    in force, tells an avoidable duplicate from a needed one."""

    def __init__(self, workers: Listed[SimWorker], counters: FleetCounters) -> None:
        self._workers = workers
        self._counters = counters
        self._conversations: dict[SessionId, ConversationState] = {}
        self._known = KnownSessions(1, limit=sys.maxsize)

    def left(self, live: LiveTurn, now: float, *, released: RoutingUnit | None) -> None:
        """Book what a turn that is complete leaves on devices. `released`: who is asked to let its
        session go."""
        if live.mode is ExecutionMode.MIGRATE:
            self._moved(live, released, now)
        self._place(live)

    def moved_in_gap(self, conversation: SessionId, source: SimWorker, target: SimWorker) -> None:
        """Book that an idle session went elsewhere: its source keeps nothing for it."""
        known = self._conversations.get(conversation)
        if known is not None:
            known.served_by.discard(source.index)
            known.served_by.add(target.index)

    def gap_move_ended(self, end: str) -> None:
        """Count how a move between turns ended."""
        moves = self._counters.in_gaps.moves
        moves[end] = moves.get(end, 0) + 1

    def replica_ended(self, end: str) -> None:
        """Count how the copying of a hot prefix ended."""
        replicas = self._counters.in_gaps.replicas
        replicas[end] = replicas.get(end, 0) + 1

    def ended(self, conversation: SessionId) -> None:
        """Forget a conversation of which no later turn will come."""
        self._conversations.pop(conversation, None)
        self._known.forget(conversation)

    def served(self, live: LiveTurn, now: float) -> None:
        """Fill the row of a turn that is complete."""
        row, sequence, turn = live.row, live.sequence, live.turn
        is_apart = live.mode is ExecutionMode.REMOTE_PREFILL
        row.worker = live.worker.index
        row.preemptions = sequence.preempted
        started_s = row.started_s if is_apart else sequence.begun_s
        row.started_s = started_s if started_s > row.routed_s else row.routed_s
        row.first_token_s, row.done_s = sequence.first_token_s, now
        row.output_tokens = turn.output_tokens
        row.computed_tokens += sequence.computed_tokens
        if not is_apart:
            row.cached_tokens = sequence.restored_tokens
        from_elsewhere = live.brought_bytes + sequence.loaded_bytes
        if from_elsewhere:
            row.restored_tokens = min(
                row.cached_tokens,
                round(from_elsewhere / live.worker.unit_bytes * sequence.unit_tokens),
            )
        row.restore_load_ms += sequence.load_s * 1000.0
        # Attention left out: replays are short, and their tokens' share of a step is what delays.
        if sequence.replayed_tokens:
            prefill = live.dispatch.decision.worker.speed.prefill
            row.restore_recompute_ms = sequence.replayed_tokens * prefill.b_ms
        row.mode = live.mode or self._mode(live)

    def _mode(self, live: LiveTurn) -> ExecutionMode:
        """Return the mode of a turn that ran where its prompt was computed."""
        row, unit = live.row, live.sequence.unit_tokens
        known_tokens = self._known.tokens_of(live.turn.name, Plain(live.turn.prompt)) * unit
        return execution_mode(known_tokens, row.cached_tokens, row.restored_tokens)

    def _place(self, live: LiveTurn) -> None:
        """Book what the turn placed on devices, and what of it lies on two."""
        turn, row, here = live.turn, live.row, live.worker
        known = self._conversations.get(turn.name)
        if known is None:
            known = self._conversations[turn.name] = ConversationState(set())
        unit_bytes, unit = here.unit_bytes, live.sequence.unit_tokens
        fresh_tokens = turn.prompt_tokens + turn.output_tokens - 1 - row.cached_tokens
        row.placed_bytes = (
            round(fresh_tokens / unit * unit_bytes)
            + live.brought_bytes
            + live.sequence.loaded_bytes
        )
        if row.prefill_worker != NO_WORKER:
            known.served_by.add(row.prefill_worker)
        elsewhere = known.served_by - here.alone
        if elsewhere:
            before_units = self._before(live)
            for index in sorted(elsewhere):
                units = self._workers[index].resident_units(turn.prompt)
                if not units:
                    known.served_by.discard(index)
                count = min(round((units - before_units) * unit_bytes), row.placed_bytes)
                row.duplicate_bytes = max(row.duplicate_bytes, count)
            if row.duplicate_bytes and row.owner_wait_ms <= live.gateway.router.settings.hot_ms:
                row.avoidable_bytes = row.duplicate_bytes
        known.served_by.add(here.index)
        full = turn.prompt_tokens // unit
        computed = turn.prompt[: full * UNIT_BYTES] + turn.output
        self._known.left(turn.name, Plain(computed), prompt_tokens=full)

    @staticmethod
    def _before(live: LiveTurn) -> int:
        """Return the units of the prompt that lay on this device before the turn."""
        row, unit = live.row, live.sequence.unit_tokens
        if live.mode is not ExecutionMode.REMOTE_PREFILL:
            return (row.cached_tokens - row.restored_tokens) // unit
        brought_units = round(live.brought_bytes / live.worker.unit_bytes)
        return max(0, live.turn.prompt_tokens // unit - brought_units)

    def _moved(self, live: LiveTurn, released: RoutingUnit | None, now: float) -> None:
        """Book a session's move: a source that lets it go keeps nothing for it."""
        source = live.dispatch.decision.source
        assert source is not None and source.worker is not None, "a migration comes from somewhere"
        holder = self._at(source.worker)
        known = self._conversations.get(live.turn.name)
        if known is not None and released == holder.unit:
            known.served_by.discard(holder.index)
        self._note_move(live, completed=1, now=now)

    def _at(self, worker: Worker) -> SimWorker:
        return next(one for one in self._workers if one.name == worker.id)

    def gave_up(self, live: LiveTurn, now: float) -> None:
        """Book a move that has come to nothing: its state stays where it was, and the turn is
        computed."""
        live.landed_s = now
        self._note_move(live, completed=0, now=now)

    def _note_move(self, live: LiveTurn, *, completed: int, now: float) -> None:
        source = live.dispatch.decision.source
        assert source is not None and source.worker is not None, "a migration comes from somewhere"
        moved = Migration(
            session=live.turn.session,
            conversation=live.turn.name,
            source=self._at(source.worker).index,
            target=live.worker.index,
            decided_s=live.decided_s,
            landed_s=live.landed_s,
            done_s=now,
            bytes=live.brought_bytes,
            completed=completed,
        )
        self._counters.migrations.append(moved)
