"""The engine loop tells a node which turns wait for state and what steps took, and asks what was
restored.

Translates between the loop's words and the node's; decides nothing. Lives on the engine thread.
A loop without a node has `WithoutNode`, and behaves as if there were none. `SchedulerObserver`
learns from the loop's own steps, with or without a node.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.pressure import Checkpoint
from ownerserve.cache.sessions import ResidentState
from ownerserve.engines.hf.metrics.prometheus import RestoreMetrics
from ownerserve.engines.hf.scheduling.requests import EngineRequest
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import AdmittedPrompt, Chunk, StepPlan
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.kv.prefix import pack
from ownerserve.node.ownership.inventory import Inventory, OnDevice
from ownerserve.node.restore.sources import Walks
from ownerserve.node.runtime.comings import Comings
from ownerserve.node.runtime.node_runtime import Calibration, NodeRuntime
from ownerserve.node.vocabulary.chains import Chains, PromptPrefix
from ownerserve.node.vocabulary.events import (
    Event,
    PrefillOrder,
    RestoreReport,
    SessionOver,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.plan.cost.events import Prefilled, Replayed, Stepped, Waited
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.explain import summary
from ownerserve.plan.inputs import Backlog


class _Prompt(msgspec.Struct, eq=False):
    """A `_Prompt` is a prompt that is being computed. Its first `restored` tokens were not."""

    restored: int
    computed: int
    is_measured: bool = True
    prefill_ms: float = 0.0
    replay_ms: float = 0.0


class SchedulerObserver:
    """A `SchedulerObserver` measures what prompts and decode steps cost on this engine, from the
    steps themselves.

    The class owns the prompts that are being measured; the calibration owns what was learnt. A
    prompt is measured whole, and only when nothing ran beside any of its chunks; a decode step when
    no prompt was computed in it.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._prompts: dict[TurnId, _Prompt] = {}

    @property
    def costs(self) -> CostModel:
        """`costs` is what was learnt so far."""
        return self._calibration.model

    def admitted(self, admission: AdmittedPrompt) -> None:
        """Begin to measure a prompt. A prompt that comes back from a preemption is no
        measurement."""
        restored = admission.restored
        if not admission.again:
            self._prompts[admission.turn_id] = _Prompt(restored, restored)

    def stepped(self, plan: StepPlan, took_ms: float) -> None:
        """Learn from a step that was planned, computed and told in `took_ms`."""
        if plan.rows and not plan.chunks:
            self._calibration.observe((Stepped(len(plan.rows), took_ms),))
        is_alone = len(plan.chunks) == 1 and not plan.rows
        for chunk in plan.chunks:
            prompt = self._prompts.get(chunk.turn_id)
            if prompt is None:
                continue
            goes_on = chunk.start == prompt.computed
            prompt.is_measured = prompt.is_measured and is_alone and goes_on
            _add(prompt, chunk, took_ms)
            if chunk.sample_for or chunk.ends_turn:
                self._done(self._prompts.pop(chunk.turn_id), chunk)

    def forget(self, turn_ids: Iterable[TurnId]) -> None:
        """Forget these turns, which are over or were given up."""
        for turn_id in turn_ids:
            self._prompts.pop(turn_id, None)

    def _done(self, prompt: _Prompt, last: Chunk) -> None:
        """Learn from a prompt that is computed. Only whole ones are measured: prices hold what many
        chunks cost."""
        if not prompt.is_measured:
            return
        floor, end = max(prompt.restored, last.write_floor), last.start + len(last.tokens)
        self._calibration.observe((Prefilled(end - floor, floor, prompt.prefill_ms),))
        if prompt.replay_ms:
            replayed = Replayed(floor - prompt.restored, prompt.restored, prompt.replay_ms)
            self._calibration.observe((replayed,))


def _add(prompt: _Prompt, chunk: Chunk, ms: float) -> None:
    """Share a chunk's time between what it replays and what it computes anew."""
    new = len(chunk.tokens)
    prompt.computed = chunk.start + new
    again = min(max(0, chunk.write_floor - chunk.start), new)
    prompt.replay_ms += ms * again / new
    prompt.prefill_ms += ms * (new - again) / new


STOP_WITHIN_S = 5.0
"""How long a stopping worker may go on copying idle sessions to the store."""


class RestoreSummary(msgspec.Struct, frozen=True):
    """A `RestoreSummary` tells what brought a turn's state: how many tokens, by where they came
    from, the actions taken, and the plan that was priced. `is_ordered`: another worker computed
    some of it for the turn, and what came from peers stands under `remote_prefill`."""

    brought: Mapping[str, int] = {}
    restore: str = ""
    plan: str = ""
    is_ordered: bool = False

    @property
    def tokens(self) -> int:
        """`tokens` are all that were brought."""
        return sum(self.brought.values())


class Restoring(Protocol):
    """A `Restoring` is what the loop tells a node, and asks of it."""

    calibration: Calibration
    """Where what is measured goes."""

    @property
    def tiers(self) -> Mapping[Tier, int | None]:
        """`tiers` are the media below the device, with the bytes that each may hold; None: not
        known."""
        ...

    @property
    def inventory(self) -> Inventory:
        """`inventory` is what is told to be held here."""
        ...

    def restorable(self, session_id: SessionId) -> int | None:
        """Return how many of the session's first tokens can be brought from below the device; None:
        it is looked for."""
        ...

    def arrived(self, turn_id: TurnId, request: EngineRequest, prompt: PromptPrefix) -> None:
        """Take in that a turn of the request is queued."""
        ...

    def poll(self) -> None:
        """Do what is due between two steps."""
        ...

    def wait_s(self) -> float | None:
        """Return the seconds that an idle loop may sleep before the next `poll`; None: until
        something comes."""
        ...

    def began(self, admission: AdmittedPrompt) -> RestoreSummary:
        """Take in that a turn left the queue; return what was brought for it."""
        ...

    def computed(self, plan: StepPlan) -> None:
        """Take in that the forwards of a step are done."""
        ...

    def ended(self, turn_ids: Iterable[TurnId]) -> None:
        """Take in that turns are over: their sessions are idle from now on."""
        ...

    def gone(self, turn_id: TurnId) -> None:
        """Take in that the turn's request was given up or has failed."""
        ...

    def over(self, session_id: SessionId) -> None:
        """Take in that the session is over, and nobody will ask for it."""
        ...

    def close(self, *, within_s: float) -> None:
        """Put away what is idle for up to `within_s` seconds, since the engine stops."""
        ...


class WithoutNode:
    """`WithoutNode` serves a loop without a node: turns run with what the device has, which goes
    last while they wait; short room is evicted."""

    def __init__(self, cache: HeteroCache, scheduler: Scheduler) -> None:
        self.inventory = Inventory()
        layout = cache.layout
        self._chains = Chains(layout.block_tokens, block_bytes=layout.packed_block_bytes)
        self._on_device = OnDevice(cache, self.inventory, digest_at=self._chains.digest_at)
        self._pressure = cache.pressure
        self._sessions, self._residents, self._lends = cache.sessions, cache.residents, cache.lends
        self._scheduler = scheduler
        self._walks = Walks(cache)
        self._session_of: dict[TurnId, SessionId] = {}
        self.calibration = Calibration(None)

    @property
    def tiers(self) -> Mapping[Tier, int | None]:
        """`tiers` is empty: state is kept on the device only."""
        return {}

    def restorable(self, session_id: SessionId) -> int | None:
        """Return 0: nothing is kept below the device."""
        return 0

    def arrived(self, turn_id: TurnId, request: EngineRequest, prompt: PromptPrefix) -> None:
        """Retain what the device has of the queued turn's prompt, and remember its session, of
        whose state the inventory tells."""
        session = SessionId(request.session_id) if request.session_id else None
        if session is not None:
            self._session_of[turn_id] = session
            self._chains.hashed(prompt.tokens, session, prompt.hashed)
        event = TurnArrived(turn_id, session, prompt.tokens, Backlog(0, 0), hashed=prompt.hashed)
        self._walks.arrived(event)
        self._walks.retain(turn_id, prompt.tokens, time.monotonic())

    def poll(self) -> None:
        """End soft references and tickets, and make room where little is left; called between two
        steps."""
        now = time.monotonic()
        self._sessions.expire(now)
        self._lends.expire(now)
        if self._pressure.is_due:
            for directive in self._pressure.relieve(now):
                if isinstance(directive, Checkpoint):
                    self._scheduler.checkpoint(directive.turns)
        self._on_device.tick()

    def wait_s(self) -> float | None:
        if self._on_device.is_due:
            return 0.0
        ends = (self._sessions.next_due(), self._lends.next_due())
        due = min((at for at in ends if at is not None), default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    def began(self, admission: AdmittedPrompt) -> RestoreSummary:
        return RestoreSummary()

    def computed(self, plan: StepPlan) -> None: ...

    def ended(self, turn_ids: Iterable[TurnId]) -> None:
        """Tell in the inventory what the turns' sessions have on the device."""
        for turn_id in turn_ids:
            self._walks.over(turn_id)
            session_id = self._session_of.pop(turn_id, None)
            if session_id is not None:
                _name_answer(self._chains, self._residents, session_id)
                self._on_device.ended(session_id)

    def gone(self, turn_id: TurnId) -> None:
        """Forget the turn, whose request was given up or has failed."""
        self._session_of.pop(turn_id, None)
        self._walks.over(turn_id)

    def over(self, session_id: SessionId) -> None:
        """Strike the session out of the inventory: it is over, and nobody will ask for it."""
        self.inventory.forget(session_id)

    def close(self, *, within_s: float) -> None: ...


def _name_answer(chains: Chains, residents: ResidentState, session_id: SessionId) -> None:
    """Have the digests of what the session's last turn left, the answer too: its prompt's were
    there before. Only new blocks are hashed."""
    tokens = residents.tokens_of(session_id)
    if tokens:
        chains.digests(tokens, session_id)


class _Turn(msgspec.Struct, eq=False):
    """A `_Turn` keeps a turn's times, in seconds of the loop's clock, and what was restored."""

    session_id: SessionId | None
    prompt: int
    backlog: Backlog
    arrived_s: float
    started_s: float = 0.0
    began_s: float = 0.0
    restored: int = 0
    sampled: int = 0
    report: RestoreReport | None = None


class WithNode:
    """`WithNode` serves a loop with a node: turns are held until their state is there."""

    def __init__(self, node: NodeRuntime, scheduler: Scheduler, metrics: RestoreMetrics) -> None:
        self._node = node
        self._scheduler = scheduler
        self._metrics = metrics
        self._turns: dict[TurnId, _Turn] = {}
        self._arrivals_ended = 0
        self.calibration = node.calibration
        self.comings = Comings(self._handle)
        """`comings` are the sessions that move here, or are put away."""
        node.came_in, node.put_away = self.comings.ended, self.comings.is_put_away

    @property
    def tiers(self) -> Mapping[Tier, int | None]:
        """`tiers` are the media where the node keeps state, and how many bytes fit; None: not
        known."""
        return self._node.tiers

    @property
    def inventory(self) -> Inventory:
        """`inventory` is what the node tells that it holds."""
        return self._node.state.inventory

    def restorable(self, session_id: SessionId) -> int | None:
        """Return how many of the session's first tokens the node can bring; None: it looks."""
        return self._node.state.residency.restorable(session_id)

    def arrived(self, turn_id: TurnId, request: EngineRequest, prompt: PromptPrefix) -> None:
        """Hold the queued turn, which keeps its place, until the node says that it may run."""
        now, load = time.monotonic(), self._scheduler.load()
        count = prompt.count
        backlog = Backlog(load.pending_prefill_tokens - count, load.waiting - 1)
        session = SessionId(request.session_id) if request.session_id else None
        self._turns[turn_id] = _Turn(session, count, backlog, now)
        self._scheduler.hold(turn_id)
        event = TurnArrived(
            turn_id,
            session,
            prompt.tokens,
            backlog,
            hashed=prompt.hashed,
            parent=request.parent,
            lender=request.bring_from,
            lent_as=request.lent_as,
            order=self._order(request, prompt),
        )
        self._start(self._node.handle(event, now))

    def _order(self, request: EngineRequest, prompt: PromptPrefix) -> PrefillOrder | None:
        """Return who is to compute the prompt, if anybody else is; what is computed for another is
        not ordered on."""
        worker, least = request.decode_from, self._node.state.order_tokens
        if request.begins or (worker is None and not 0 < least <= prompt.count):
            return None
        tokens = pack(prompt.plain(0, prompt.count))
        return PrefillOrder(worker, tokens, request.cache_salt, request.leg)

    def poll(self) -> None:
        """Take what the store has answered and copy what is idle; called between two steps."""
        self._start(self._node.poll(time.monotonic()))
        self._scheduler.checkpoint(self._node.checkpoints())
        state = self._node.state
        if state.cache.ingest.ended != self._arrivals_ended:
            self._arrivals_ended = state.cache.ingest.ended
            self._scheduler.room_returned()
        self._metrics.stored(state.idle_spills.counts, self._node.stored_bytes)
        self._metrics.store.wrote(state.checkpoints.account)
        self._metrics.store.spilled(state.checkpoints.spilled_slots)
        self._metrics.store.tidied(self._node.upkeep_counts)

    def wait_s(self) -> float | None:
        return self._node.wait_s(time.monotonic())

    def _handle(self, event: Event) -> None:
        self._start(self._node.handle(event, time.monotonic()))

    def _start(self, turn_ids: Iterable[TurnId]) -> None:
        for turn_id in turn_ids:
            turn = self._turns.get(turn_id)
            report = self._node.report(turn_id)
            self._scheduler.release(turn_id)
            if turn is not None and report is not None:
                turn.started_s, turn.report = time.monotonic(), report
                self._metrics.decided(report)

    def began(self, admission: AdmittedPrompt) -> RestoreSummary:
        """Return what was brought for the turn, and by which actions."""
        turn = self._turns.get(admission.turn_id)
        if turn is None:
            return RestoreSummary()
        turn.began_s = time.monotonic()
        turn.restored = admission.restored
        actions, plan, is_ordered = list[RestoreAction](), "", False
        brought = dict[str, int]()
        kept = max(admission.restored, admission.floor)
        if kept and turn.report is not None and turn.report.loads:
            is_ordered = turn.report.is_ordered
            brought = turn.report.by_source(most=kept)
            assert turn.report.plan is not None
            plan = summary(turn.report.plan)
            actions += turn.report.loads
        else:
            waited_ms = (turn.began_s - turn.started_s) * 1e3
            self._node.observe(Waited(turn.backlog, waited_ms))
        if admission.floor > admission.restored:
            actions.append(RestoreAction.REPLAY)
        actions.append(RestoreAction.PREFILL)
        self._metrics.acted(actions)
        return RestoreSummary(brought, " + ".join(dict.fromkeys(actions)), plan, is_ordered)

    def computed(self, plan: StepPlan) -> None:
        """Count the tokens that a step's forwards have sampled; time the prompts that got their
        first one."""
        for chunk in plan.chunks:
            turn = self._turns.get(chunk.turn_id)
            if turn is None:
                continue
            if chunk.sample_for and not turn.sampled:
                self._first_token(turn)
        for turn_id in (
            *(row.turn_id for row in plan.rows),
            *(turn_id for chunk in plan.chunks for turn_id in chunk.sample_for),
        ):
            if turn_id in self._turns:
                self._turns[turn_id].sampled += 1

    def _first_token(self, turn: _Turn) -> None:
        """Report the times of a turn whose prompt is computed."""
        self._metrics.recomputed(
            load_s=turn.report.waited_s if turn.report else 0.0,
            queue_s=turn.began_s - turn.started_s,
            recompute_s=time.monotonic() - turn.began_s,
        )

    def ended(self, turn_ids: Iterable[TurnId]) -> None:
        """Tell the node that these turns are over: their sessions are idle from now on."""
        for turn_id in turn_ids:
            turn = self._turns.pop(turn_id, None)
            if turn is not None:
                state = self._node.state
                if turn.session_id is not None:
                    _name_answer(state.chains, state.cache.residents, turn.session_id)
                # The last sampled token is never computed.
                tokens = turn.prompt + max(0, turn.sampled - 1)
                event = TurnEnded(turn_id, turn.restored, turn.prompt, tokens)
                self._node.handle(event, time.monotonic())

    def gone(self, turn_id: TurnId) -> None:
        """Tell the node that the turn's request was given up or has failed."""
        if self._turns.pop(turn_id, None) is not None:
            self._node.handle(TurnGone(turn_id), time.monotonic())
            self._node.report(turn_id)

    def over(self, session_id: SessionId) -> None:
        """Tell the node that the session is over, and nobody will ask for it."""
        self._node.handle(SessionOver(session_id), time.monotonic())

    def close(self, *, within_s: float) -> None:
        """Copy what is idle to the store for up to `within_s` seconds, since the engine stops."""
        self._node.close(time.monotonic(), within_s=within_s)
