"""The scheduler's side turns vLLM's hooks into a node's events, and effects into commands for the
workers.

Owns which requests are turns of ours and the commands of the step being built. Decides nothing
(HostedNodeState does) and waits for nothing: lookups run on a thread, bytes move in the workers.

    on_new_request                Arrived -> Find
    get_num_new_matched_tokens    Asked -> Offer, nothing, or wait
    update_state_after_alloc      Placed -> Bring
    build_connector_meta          Computing -> Copy, Pin; late turns -> Copy
    update_connector_output       Filled | NotFetched | Copied | Kept | NotKept
    request_finished_all_groups   Ended | Gone -> Copy
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.identity import why_bypassed
from ownerserve.engines.vllm.layout.places import BlockPlaces
from ownerserve.engines.vllm.layout.shape import StateShape
from ownerserve.engines.vllm.replay.replays import Replays
from ownerserve.engines.vllm.scheduler_side.device import EngineDevice, Holds
from ownerserve.engines.vllm.scheduler_side.holding import Holding
from ownerserve.engines.vllm.scheduler_side.late_turns import UNSAVED_LEVELS, LateTurns
from ownerserve.engines.vllm.scheduler_side.lookup import StoreLookup
from ownerserve.engines.vllm.scheduler_side.measure import ConnectorObserver
from ownerserve.engines.vllm.scheduler_side.owning import PromptCame, SessionsHere
from ownerserve.engines.vllm.scheduler_side.pending_commands import PendingCommands, Tally
from ownerserve.engines.vllm.scheduler_side.resuming import Resuming
from ownerserve.engines.vllm.scheduler_side.soft_references import SoftReferences
from ownerserve.engines.vllm.scheduler_side.worker_reports import WorkerReports
from ownerserve.engines.vllm.tenants import Tenants
from ownerserve.engines.vllm.turns.prompts import HashedPrompt, Prompts
from ownerserve.engines.vllm.turns.turn import (
    MAX_IN_FLIGHT,
    TrackedRequest,
    is_final,
    session_of,
)
from ownerserve.engines.vllm.worker_commands import (
    STORED_BY,
    LoadInto,
    LoadResult,
    SaveCommand,
    Tables,
    WorkerCommands,
    WorkerStepReport,
)
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import execution_mode, lost_tokens
from ownerserve.kv.prefix import TOKEN_BYTES
from ownerserve.kv.units import format_bytes
from ownerserve.kv.wire.headers import is_name
from ownerserve.node.hosted_state import HostedNodeState
from ownerserve.node.ownership.inventory import FOUND_LESS
from ownerserve.node.vocabulary.chains import KnownSessions, PromptPrefix
from ownerserve.node.vocabulary.events import (
    Computing,
    Copied,
    DeviceAsked,
    DevicePlaced,
    DropOperation,
    Effect,
    FetchAndFill,
    Filled,
    FindRecords,
    Kept,
    NotFetched,
    NotKept,
    Offer,
    Pin,
    SessionOver,
    Start,
    StoreCopy,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.plan.explain import summary
from ownerserve.store.format.model import MissReason

log = logging.getLogger("vllm.ownerserve")

ANSWERS_A_CALL = 1
"""Answers of other threads that one hook takes in, at most: every waiting request asks in a step,
so that many at once do not fall on one of them."""
QUIET_WAIT_S = 0.002
"""How long a step waits at most for those answers while no request computes: the next one would
come later."""
HASHED_WITHIN_S = 5.0
"""How long a request waits at most until another thread has hashed its prompt."""


class SchedulerParts(msgspec.Struct, frozen=True):
    """`SchedulerParts` are the parts that a scheduler's side works with, each of which decides
    nothing about a turn. `bypassed` says why no state of this engine has an identity; None when it
    has. `step_tokens` is the most that one step computes. `transfers` counts what was lent, and
    asked of peers, since the start (node.transfers.counting)."""

    lookup: StoreLookup
    holding: Holding
    soft: SoftReferences
    prompts: Prompts
    measuring: ConnectorObserver
    reports: WorkerReports
    sessions: SessionsHere
    tenants: Tenants
    replays: Replays
    workers: int
    step_tokens: int
    bypassed: str | None = None
    transfers: Callable[[], Mapping[str, int]] = dict


class Counting:
    """A `Counting` adds up the counters of several owners, since the start or since they were last
    taken, and tells levels that have changed."""

    def __init__(
        self,
        sources: Mapping[str, Callable[[], Mapping[str, int]]],
        levels: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Make it; `sources` maps a prefix to what counts under it; `levels` are told as they
        are."""
        self._sources = sources
        self._levels = levels
        self._level_told: dict[str, int] = {}
        self._told: dict[str, dict[str, int]] = {prefix: {} for prefix in sources}
        self._stirred = False

    def stir(self) -> None:
        """Note that something may have been counted."""
        self._stirred = True

    def totals(self) -> Counter[str]:
        """Return the counts since the start."""
        totals: Counter[str] = Counter()
        for prefix, source in self._sources.items():
            totals.update({f"{prefix}{name}": number for name, number in source().items()})
        return totals

    def take(self) -> dict[str, int]:
        """Return the counts since the last call, which comes with every step: it is free where
        nothing stirred."""
        taken: dict[str, int] = {}
        if self._stirred:
            self._stirred = False
            for prefix, source in self._sources.items():
                told = self._told[prefix]
                for name, number in source().items():
                    if number != (before := told.get(name, 0)):
                        told[name] = number
                        taken[prefix + name] = number - before
            for name, level in self._levels().items():
                if level != self._level_told.get(name, 0):
                    self._level_told[name] = taken[name] = level
        return taken


class SchedulerSide:
    """A `SchedulerSide` is the scheduler's side of one engine core, called on its thread."""

    def __init__(
        self, state: HostedNodeState, device: EngineDevice, shape: StateShape, parts: SchedulerParts
    ) -> None:
        self.state = state
        self.holds = Holds()
        self.pending = PendingCommands()
        self.reports = parts.reports
        self._counts: Counter[str] = Counter()
        self.counting = Counting(
            {
                "": self._all_counts,
                "unsaved_": lambda: self.state.saves.unsaved,
                "save_": lambda: self.state.saves.counts,
                "soft_": lambda: parts.soft.counts,
                "owner_": lambda: parts.sessions.counts,
            },
            self._unsaved_levels,
        )
        self._late = LateTurns(
            shape, record_blocks=state.names.blocks, step_tokens=parts.step_tokens
        )
        self._has_warned = False
        self._device = device
        self._places = BlockPlaces(shape)
        self._block = shape.payload.block_tokens
        self._shape = shape
        self._lookup, self._holding = parts.lookup, parts.holding
        self._watch = parts.holding.watch(shape)
        self._sessions = parts.sessions
        self._transfers = parts.transfers
        self._soft, self._prompts = parts.soft, parts.prompts
        self._measuring = parts.measuring
        self._tenants = parts.tenants
        self._bypassed = parts.bypassed
        self._replays = parts.replays
        self._known = KnownSessions(max(self._block, *shape.group_tokens))
        self._tally = Tally(parts.workers)
        self._turns: dict[TurnId, TrackedRequest] = {}
        self._computing_ids: set[str] = set()
        """Requests that the last step computed for, and that have not ended."""
        self._patience_s = QUIET_WAIT_S
        """What is left of it in the step that is being scheduled."""
        self.resuming = Resuming(
            self, self._turns, replays=parts.replays, block_tokens=self._block, ask=self._ask
        )
        self._manager: Any = None
        self._pool: Any = None

    def bind(self, pool: Any, manager: Any) -> None:
        """Use vLLM's block pool, and the manager of its block tables where it has one to give."""
        self._pool, self._manager = pool, manager
        self.holds.bind(pool)
        self._late.bind(pool)
        if self._soft.bind(pool, self._shape.group_tokens, on_taken=self._watch.taken):
            self._watch.bind(pool)
            self._holding.watches(self._shape, pool)
        self._prompts.bind(pool.hash_block_size)
        self.reports.bind(pool)

    # -- hooks ---------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Take in a new request and look for its state."""
        self.counting.stir()
        # An idle engine hears only now of what went elsewhere, before the request takes room.
        self._let_go(self.reports.arrived(request))
        self._soft.resumed(session_of(request), _now())
        self._sessions.came(request)
        reason = self._bypassed or why_bypassed(request)
        tenant = self._tenants.salt(request.cache_salt)
        if reason is not None or tenant is None:
            self._counts[f"bypassed_{reason or 'cache_salt'}"] += 1
            return
        self._turns[TurnId(request.request_id)] = TrackedRequest(request, tenant)
        self._look(request)

    def matched(self, request: Any, hit: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond `hit` will be brought, and whether they are loaded beside
        the steps; None: not known yet."""
        turn_id = TurnId(request.request_id)
        turn = self._turns.get(turn_id)
        self._late.asks(request.request_id, request.num_tokens - hit)
        if turn is None:
            return 0, False
        if self.resuming.waits():
            return None, False
        if not turn.is_asked:
            self._ask(turn, hit, hit)
        if turn.prompt is None:
            turn.is_asked = False
            return self._unhashed(turn)
        turn.is_asked, turn.is_promised = False, True
        self.state.saves.junctions.parted(turn_id, compat.parts_at(request))
        compat.end_a_step_at(request, self.state.saves.junctions.of(turn_id))
        if turn.resume is not None:
            turn.hit, tokens = hit, turn.resume.hit - hit
            return tokens, tokens > 0
        if turn.start < turn.offer:  # only a replay could take this, and the request has none
            turn.offer = turn.start = 0
            self._perform(self.state.handle(TurnGone(turn_id), _now()))
        if turn.offer > hit:
            return turn.offer - hit, True
        return (None, False) if self.state.is_waiting(turn_id) else (0, False)

    def placed(self, request: Any, tables: Tables, tokens: int) -> None:
        """Take in that the request has blocks; `tokens` beyond the hit are to be brought into
        them."""
        self.counting.stir()
        self._late.has_blocks(request.request_id)
        turn_id = TurnId(request.request_id)
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        turn.tables = tables
        if tokens == 0:
            self._discredit(turn)
            self._perform(self.state.handle(TurnGone(turn_id), _now()))
            return
        before, effects = len(self.pending.bringing), list[Effect]()
        if turn.hit + tokens == turn.offer:
            self._device.took(turn_id, turn.hit)
            effects = self.state.handle(DevicePlaced(turn_id), _now())
            self._perform(effects)
        if len(self.pending.bringing) == before:  # vLLM waits for a word on this load
            self._counts["misplaced"] += 1
            self._perform(self.state.handle(TurnGone(turn_id), _now()))
            for never in (one for one in effects if isinstance(one, FetchAndFill)):
                self.state.handle(NotFetched(never.operation_id, MissReason.BUSY), _now())
            self.pending.fail(request.request_id)

    def build(self, output: Any) -> WorkerCommands:
        """Return the commands of a step: what it saves and loads."""
        self._poll()
        for loaded in self._turns.values():
            self._discredit(loaded)
        scheduled, now = output.num_scheduled_tokens, _now()
        self._computing_ids, self._patience_s = set(scheduled), QUIET_WAIT_S
        self._measuring.scheduled(scheduled, now)
        self._save_late(sum(scheduled.values()))
        for request_id, count in scheduled.items():
            turn = self._turns.get(TurnId(request_id))
            if turn is not None:
                self._computing(turn, count, output)
        self._let_go(self.reports.stepped(scheduled))
        self._soft.tidy(now)
        self._watch.stepped()
        self._late.asked()
        return self.pending.take(is_idle=not scheduled)

    def reported(self, report: WorkerStepReport | None) -> None:
        """Take in what the workers did in a step, as they report it; None: nothing was reported."""
        now = _now()
        if report is not None and not report.is_empty:
            self.counting.stir()
            for operation_id in self._tally.complete("copied", report.copied):
                self.holds.release(operation_id)
                self._perform(self.state.handle(Copied(operation_id), now))
            for saved in self._tally.saved(report.kept, report.not_kept):
                self._saved(saved, now)
            for result in report.loads:
                self._loaded(result, now)
            for lost in report.lost:
                self._holding.lost(lost)
            self._tell_left()
            self._counts["stored_bytes"] += report.stored_bytes
            for brought in report.brought:
                self._counts.update(brought.counts)
                self._measuring.brought(brought.timings)
            for rank, stored in report.by_rank:
                self._counts[f"{STORED_BY}{rank}"] += stored
            if report.unable:
                self._unable(report.unable[0])
            if report.can_pad:
                self._replays.heard(report.can_pad)
                self.resuming.plan()
        self._measuring.reported(now)

    def finished(self, request: Any, tables: Tables) -> None:
        """Take in that a request is over, or was given up: keep what is computed beyond doubt."""
        self.counting.stir()
        self._computing_ids.discard(request.request_id)
        self.reports.gone(request.request_id)
        self._late.has_blocks(request.request_id)
        if request.status.name != "FINISHED_ABORTED":
            self._measuring.stepped(_now())  # its last step may have ended the prompt
            self._turn_ended(request, tables)
        turn_id = TurnId(request.request_id)
        turn = self._turns.pop(turn_id, None)
        if turn is None:
            self._sessions.ended(request, b"")
            return
        now = _now()
        is_loading = self.state.is_waiting(turn_id)
        self._perform(self.state.handle(TurnGone(turn_id), now))
        turn.tables = tables
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        # After a reset amid steps vLLM has computed none and counts those in flight on.
        known = 0 if is_loading else max(0, min(turn.end, computed, request.num_tokens))
        added = self._added(turn, known)
        effects = self.state.handle(Computing(turn_id, known, known, added), now)
        session, tokens = session_of(request), b""
        if session is not None and known and turn.prompt is not None:
            text = self._prompts.extended(turn.prompt, request, known)
            tokens = turn.prompt.tokens[: known * TOKEN_BYTES] if text is None else text.tokens
            if text is not None and not is_final(request):
                prompt = min(known, request.num_prompt_tokens)
                self._known.left(SessionId(session), text, prompt_tokens=prompt)
                self._prompts.left(SessionId(session), text, request)
                self._left_in_pool(turn, tables, known, text)
        # A replay goes on where no point stands.
        replay = self._replays.of(request.request_id)
        restored = 0 if replay is not None else max(turn.hit, turn.offer)
        ended = TurnEnded(turn_id, restored, request.num_prompt_tokens, known)
        self._perform(effects + self.state.handle(ended, now), turn)
        if (cell := self.state.saves.late.cell(turn_id)) is not None:
            self._late.ended(turn_id, turn, cell)
        self._tell_left()
        self._sessions.ended(request, tokens, turn.tenant)
        self.holds.unpin(turn_id)
        self._device.forget(turn_id)
        self._measuring.forget(turn_id)
        self._discredit(turn)

    def status(self) -> dict[str, int]:
        """Return what is under way, and the totals."""
        return {
            "turns": len(self._turns),
            "holds": len(self.holds),
            "loads": len(self.pending.bringing),
            "late_turns": len(self.state.saves.late),
            "wished_blocks": len(self._soft),
            **self.counting.totals(),
        }

    def frees_soon(self) -> bool:
        """Return whether blocks are about to come back; asked when a running request finds none.
        Pinned points are given up."""
        self._late.is_short()
        return self.holds.unpin_all() > 0 or self.holds.is_releasing()

    def switch_off(self) -> None:
        """Serve no request any more.

        What is being loaded fails; what is held is released when it is copied.
        """
        self._counts["switched_off"] += 1
        self._bypass("switched_off")

    def _unable(self, why: str) -> None:
        """Keep and restore nothing: a worker's pages can't be read. Turns that are here are
        bypassed like those that come."""
        if self._bypassed is None:
            log.warning("state is neither kept nor restored: %s", why)
            self._counts["bypassed_model"] += len(self._turns)
            self._bypass("model")
            self._holding.renamed(self.state.names)  # nothing that is stored can be had

    def _bypass(self, reason: str) -> None:
        self.counting.stir()
        self._bypassed = reason
        self.pending.give_up_loads()
        self._turns.clear()
        self.holds.unpin_all()
        self._late.clear()
        self.state.saves.give_up()

    def reset(self, state: HostedNodeState) -> None:
        """Go on with `state`, which knows nothing from before. Under another name it finds nothing
        either."""
        self.pending.give_up_loads()
        self._turns.clear()
        self.holds.unpin_all()
        self._soft.clear()
        self._late.clear()
        self._prompts.clear()
        state.take_over(self.state)
        if state.names.identity != self.state.names.identity:
            self._holding.renamed(state.names)
        self.state = state
        self.resuming.plan()

    def close(self) -> None:
        """Give everything back and stop the threads, since the engine stops."""
        self.state.saves.give_up()
        self._warn_of_unsaved()
        self._late.clear()
        self._soft.clear()
        self.holds.release_all()
        self._measuring.close()
        self._lookup.close()
        self._holding.close()
        self._sessions.close()
        self.reports.close()

    # -- events --------------------------------------------------------------------------------

    def _look(self, request: Any) -> None:
        """Look for the state of a request that is here, or lost its blocks: now, or once its prompt
        is hashed."""
        turn_id, session = TurnId(request.request_id), session_of(request)
        turn = self._turns[turn_id]
        self._device.forget(turn_id)
        self._late.forget(turn_id)
        self._measuring.forget(turn_id)
        turn.end, turn.late_s = 0, _now() + HASHED_WITHIN_S
        turn.prompt = self._prompts.hashed(request, SessionId(session) if session else None)
        if turn.prompt is not None:
            self._hashed(turn, turn.prompt)

    def _hashed(self, turn: TrackedRequest, prompt: HashedPrompt) -> None:
        turn.prompt, session = prompt, session_of(turn.request)
        line = self._sessions.brought_from(turn.request)
        event = TurnArrived(
            prompt.turn_id,
            SessionId(session) if session else None,
            prompt.tokens,
            tenant=turn.tenant,
            hashed=prompt.hashed,
            parent=None if line is None else line.parent,
            lender=None if line is None else line.bring_from,
        )
        self._perform(self.state.handle(event, _now()))

    def _ask(self, turn: TrackedRequest, hit: int, resident: int) -> None:
        """Let the node decide where the turn goes on, given what vLLM has of it."""
        request, turn_id = turn.request, TurnId(turn.request.request_id)
        self._poll()
        if request.num_preemptions != turn.preemptions:
            turn.preemptions = request.num_preemptions
            self._let_go(self.reports.arrived(request))
            self._look(request)
        self._hear_out(turn)
        turn.hit = turn.window_hit = hit
        turn.offer, turn.start, turn.partial = 0, 0, set()
        turn.resume, turn.is_promised = None, False
        if turn.prompt is None:
            return
        self._device.heard(turn_id, hit, resident)
        self._perform(self.state.handle(DeviceAsked(turn_id), _now()))

    def _hear_out(self, turn: TrackedRequest) -> None:
        """Wait a moment for what another thread is about to say of the turn, where nothing
        computes."""
        turn_id, began_s = TurnId(turn.request.request_id), _now()
        until_s = began_s + self._patience_s
        while not self._computing_ids and (
            turn.prompt is None or self.state.restores.is_looking(turn_id)
        ):
            left_s = until_s - _now()
            is_told = self._lookup.has_answers or self._prompts.has_answers
            if left_s <= 0 or not (is_told or self._lookup.wait(left_s)):
                break
            self._poll()
        self._patience_s -= _now() - began_s

    def _unhashed(self, turn: TrackedRequest) -> tuple[int | None, bool]:
        """Let a request wait whose prompt is not hashed yet; after HASHED_WITHIN_S it runs, as if
        there were no connector."""
        if _now() < turn.late_s:
            return None, False
        self._counts["bypassed_hashed_late"] += 1
        self._perform(self.state.handle(TurnGone(TurnId(turn.request.request_id)), _now()))
        del self._turns[TurnId(turn.request.request_id)]
        return 0, False

    def _turn_ended(self, request: Any, tables: Tables) -> None:
        """Let the session of a finished request idle from now on, or end."""
        session = session_of(request)
        if session is not None and is_final(request):
            self._soft.released(session)
            self._known.forget(SessionId(session))
            self._prompts.forget(SessionId(session))
            self._perform(self.state.handle(SessionOver(SessionId(session)), _now()))
            self._holding.over(SessionId(session))
        else:
            self._soft.finished(session, tables, _now())

    def _let_go(self, gone_elsewhere: Iterable[str]) -> None:
        """Let what these sessions have be taken before what any other one wishes for."""
        for session in gone_elsewhere:
            self._soft.released(session)

    def _tell_left(self) -> None:
        """Tell where a gateway's sessions were left, now that the store has all that will be of
        it."""
        if self.state.saves.left:
            left, self.state.saves.left = self.state.saves.left, []
            self._holding.left([tip for tip in left if is_name(tip.session_id)])

    def _poll(self) -> None:
        if self._prompts.has_answers:
            for prompt in islice(self._prompts.poll(), ANSWERS_A_CALL):
                turn = self._turns.get(prompt.turn_id)
                if turn is not None and turn.prompt is None:
                    self._hashed(turn, prompt)
        if self._lookup.has_answers or len(self.state.restores):
            now = _now()
            for found in islice(self._lookup.poll(), ANSWERS_A_CALL):
                self._perform(self.state.handle(found, now))
            self._perform(self.state.handle(Tick(), now))

    def _computing(self, turn: TrackedRequest, count: int, output: Any) -> None:
        request, block = turn.request, self._block
        start = request.num_computed_tokens
        if not turn.is_told:
            self._begun(turn, start)
        # With steps in flight a token is computed before it is known: it counts once it is.
        if turn.end and start < turn.end + MAX_IN_FLIGHT:
            start = min(start, turn.end)
        # A drafted token may be rejected: what the sequence holds already is computed for good.
        end = min(start + count, request.num_tokens)
        prompt = request.num_prompt_tokens
        turn_id = TurnId(request.request_id)
        if start < prompt:
            others = len(output.num_scheduled_tokens) - 1
            self._measuring.computing(turn_id, start, end, prompt=prompt, others=others, now=_now())
        turn.end = end
        turn.partial = set()
        replay = self._replays.of(request.request_id)
        if replay is not None:  # what is computed below the hit stands there already
            start = max(start, replay.hit)
            if end <= start:
                return
        if end // block == start // block and not start < prompt <= end:
            return
        turn.tables = compat.block_tables(output, self._manager, request.request_id)
        self.counting.stir()
        event = Computing(turn_id, start, end, self._added(turn, end))
        self._perform(self.state.handle(event, _now()), turn)

    def _begun(self, turn: TrackedRequest, cached: int) -> None:
        """Count what came of a prompt, at its first step. vLLM's hits end at whole blocks of all
        groups."""
        turn.is_told = True
        session, prompt, known = session_of(turn.request), self._prompt(turn), 0
        if session and prompt is not None:
            known = self._known.tokens_of(SessionId(session), prompt)
        restored = max(0, cached - turn.hit) if turn.offer else 0
        mode, lost = execution_mode(known, cached, restored), lost_tokens(known, cached)
        self._counts[f"mode_{mode}"] += 1
        self._counts["lost_tokens"] += lost
        brought = {} if turn.report is None else turn.report.by_source(most=restored)
        came = PromptCame(turn.request.request_id, mode, lost, brought=brought)
        if prompt is not None and self._pool.enable_caching:
            tokens = prompt.blocks * self._block
            came = msgspec.structs.replace(came, tip=prompt.tip, tokens=tokens)
        self._sessions.begun(turn.request, came)
        if (replay := self._replays.of(turn.request.request_id)) is not None:
            self._counts["replays"] += 1
            self._counts["replayed_tokens"] += replay.hit - replay.start

    def _prompt(self, turn: TrackedRequest) -> PromptPrefix | None:
        """Return the turn's prompt with the digests of its full blocks; those of its session may go
        on behind them. None: it is not hashed."""
        if turn.prompt is None:
            return None
        tokens = turn.prompt.tokens
        blocks = len(tokens) // TOKEN_BYTES // self._block
        return PromptPrefix(tokens, turn.prompt.hashed, blocks, self._block)

    def _added(self, turn: TrackedRequest, end: int) -> bytes:
        known = self.state.saves.tokens(TurnId(turn.request.request_id))
        if known is None or known >= end:
            return b""
        return self._prompts.words.of(turn.request, known, end)

    def _save_late(self, scheduled: int) -> None:
        """Save what late turns have left, as far as there is room for copies beside a step of so
        many tokens."""
        saves = self.state.saves
        if len(saves.late) or len(self._late):
            self.counting.stir()
            for turn, copy in self._late.copies(saves, self._turns, scheduled=scheduled):
                self._copy(turn, copy)

    def _saved(self, saved: Kept | NotKept, now: float) -> None:
        """Take in what came of a save on all ranks. Its blocks are free by their other word, that
        they need them no more."""
        if isinstance(saved, Kept):
            self.reports.kept(saved.operation_id)
        else:
            self.reports.not_kept(saved.operation_id)
        self._perform(self.state.handle(saved, now))

    def _warn_of_unsaved(self) -> None:
        """Warn, once, that something was not stored."""
        saves = self.state.saves
        if saves.unsaved["tokens"] and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d tokens of KV (%s) were not stored: vLLM took their blocks first, or stopped. "
                "Raise copy_bytes (now %d: held in the pool until copied) or save_buffer_bytes "
                "(now %d: copied, waiting for the drive), or use a faster drive. There is one "
                'warning; ownerserve_vllm_tokens_total{kind="unsaved"} counts on',
                saves.unsaved["tokens"],
                format_bytes(saves.unsaved["bytes"]),
                saves.room.limits.copy_bytes,
                saves.room.limits.buffer_bytes,
            )

    def _all_counts(self) -> Counter[str]:
        """Return what was counted here, by the workers and beside the scheduler, each once."""
        counts = self._counts.copy()
        counts.update(self._transfers())
        return counts

    def _unsaved_levels(self) -> dict[str, int]:
        """Return the bytes that are computed and not durable, by where they are."""
        room, late = self.state.saves.room, self.state.saves.late
        bytes_by_state = (room.held_bytes, room.open_bytes - room.held_bytes, late.bytes)
        return dict(zip(UNSAVED_LEVELS, bytes_by_state, strict=True))

    def _loaded(self, result: LoadResult, now: float) -> None:
        over = self._tally.over(result)
        if over is None:
            return
        operation_id = over.operation_id
        self.pending.bringing.discard(operation_id)
        if over.reason:
            reason = MissReason(over.reason)
            event: NotFetched | Filled = NotFetched(operation_id, reason, over.failed_id)
            if (turn := self._turns.get(TurnId(over.request_id))) is not None:
                self.reports.missed(turn.request, turn.offer)
        else:
            event = Filled(operation_id, over.ids)
            self._measuring.loaded(over)
        self._perform(self.state.handle(event, now))

    # -- effects -------------------------------------------------------------------------------

    def _perform(self, effects: Iterable[Effect], turn: TrackedRequest | None = None) -> None:
        """Do what the node wants; `turn` is the one whose step or end it is about."""
        for effect in effects:
            self.counting.stir()
            match effect:
                case FindRecords():
                    self._lookup.submit(effect)
                case Offer(turn_id, position, computed_from):
                    offered = self._turns.get(turn_id)
                    if offered is not None:  # since it was asked we may have been switched off
                        offered.offer, offered.start = position, computed_from
                case FetchAndFill():
                    self._bring(effect)
                case StoreCopy():
                    assert turn is not None
                    self._copy(turn, effect)
                case Pin(position=position):
                    assert turn is not None
                    self._pin(turn, position)
                case DropOperation(operation_id):
                    self.pending.drop(operation_id)
                case Start(turn_id):
                    self._started(turn_id)
                case _:
                    raise AssertionError(f"a guest has no {type(effect).__name__}")

    def _started(self, turn_id: TurnId) -> None:
        report = self.state.report(turn_id)
        if report is not None:
            if report.plan is not None and log.isEnabledFor(logging.DEBUG):
                log.debug("%s: %s: %s", turn_id, report.outcome, summary(report.plan))
            self._counts[f"restore_{report.outcome}"] += 1
            self._counts["restore_trials"] += report.is_trial
            self._counts["loaded_bytes"] += report.loaded_bytes
            if (turn := self._turns.get(turn_id)) is not None:
                turn.report = report
                session = session_of(turn.request)
                if session is not None and report.outcome in FOUND_LESS:
                    self._holding.missed(SessionId(session))

    def _bring(self, bring: FetchAndFill) -> None:
        turn = self._turns[bring.turn_id]
        places = tuple(
            self._places.goal(turn.tables, filling, hit=turn.hit, window_hit=turn.window_hit)
            for filling in bring.fillings
        )
        if not all(map(self._places.is_there, places)):
            return  # `placed` sees that there is no load
        turn.partial = set().union(*map(self._places.in_part, places))
        until_s = bring.deadline_s - _now()
        request_id = turn.request.request_id
        load = LoadInto(
            request_id,
            bring.operation_id,
            bring.wants,
            places,
            until_s,
            self._lookup.offered(bring.wants),
        )
        self.pending.load(load)

    def _copy(self, turn: TrackedRequest, copy: StoreCopy) -> None:
        turn_id = TurnId(turn.request.request_id)
        pinned = self.holds.pinned(turn_id, copy.slots[0])
        place = pinned.get(copy.component) or self._places.source(turn.tables, copy)
        if not self._places.is_there(place) or not self._late.holds(turn_id, place):
            self._counts["gone_first"] += 1
            self.state.handle(NotKept(copy.operation_id), _now())
            if turn_id in self._late:
                self.state.saves.late.lost(turn_id)
            self._warn_of_unsaved()
            return
        self.holds.hold(copy.operation_id, (place,))
        self.reports.ordered(copy.operation_id, turn.request, copy.meta)
        self.pending.save(SaveCommand(copy.operation_id, copy.meta, place))

    def _pin(self, turn: TrackedRequest, position: int) -> None:
        places = self._places.point(turn.tables, position)
        if places:
            self.holds.pin(TurnId(turn.request.request_id), position, places)

    def _left_in_pool(
        self, turn: TrackedRequest, tables: Tables, tokens: int, text: PromptPrefix
    ) -> None:
        """Note what a turn that ended well has left in vLLM's pool of a gateway's session."""
        request, session = turn.request, session_of(turn.request)
        if session is None or not is_name(session) or request.status.name == "FINISHED_ABORTED":
            return
        self._watch.finished(
            SessionId(session),
            request,
            tables=tables,
            tokens=tokens,
            digests=text.hashed.digests,
            tenant=turn.tenant,
        )

    def _discredit(self, turn: TrackedRequest) -> None:
        """Take the hash off blocks that were filled in part: they may not serve another hit."""
        if turn.partial:
            self._pool.evict_blocks(turn.partial)
            self._watch.lost(turn.partial)


def _now() -> float:
    return time.monotonic()
