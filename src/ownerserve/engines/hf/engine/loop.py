"""The engine thread takes commands, runs steps, and hands out events.

Owns the runner, the scheduler and the cache from the moment it starts; nobody else may touch them.
It never decides what a step holds (the scheduler does) and never waits for a reader (events go to
a callback that must not block).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from ownerserve.cache.effects import Effect
from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Table
from ownerserve.cache.metrics import snapshot
from ownerserve.engines.hf.engine.commands import (
    Abort,
    AskCache,
    AskInventory,
    CacheWork,
    Call,
    Command,
    DeliverEvents,
    EngineDead,
    Inbox,
    LetIn,
    LivenessProbe,
    StopLoop,
    Submit,
    TurnAdmission,
)
from ownerserve.engines.hf.engine.moving import LiveRequest, MovableTurns, Voice
from ownerserve.engines.hf.metrics.prometheus import WorkerMetrics
from ownerserve.engines.hf.metrics.status import (
    HfStatus,
    LoadShares,
    WorkerIdentity,
    worker_load,
    worker_profile,
    worker_status,
)
from ownerserve.engines.hf.model.runner import NOBODY, DecodeRow, Sampler, sample
from ownerserve.engines.hf.model.text import Choice, Decoder
from ownerserve.engines.hf.node.restoring import (
    STOP_WITHIN_S,
    RestoreSummary,
    Restoring,
    SchedulerObserver,
    WithoutNode,
)
from ownerserve.engines.hf.scheduling.requests import (
    Admitted,
    Delta,
    EngineRequest,
    RequestFailed,
    RequestFinished,
    Sampled,
    Stopping,
    StreamEvent,
)
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import (
    AdmittedPrompt,
    Intake,
    QueuedPrompt,
    RequestArrival,
    RequestRejected,
    StepPlan,
)
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import ExecutionMode, Tier, execution_mode, lost_tokens
from ownerserve.kv.prefix import HashedPrefix, PrefixSalt
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Admit,
    ListHeld,
    PageIs,
    Probe,
    Reject,
    ReleaseSession,
    Reserve,
    RpcAnswer,
    RpcRequest,
)
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.ownership import Owning, SessionLeft, TurnCame, TurnLeft, Unowned
from ownerserve.node.ownership.taking_over import take_over
from ownerserve.node.runtime.busy import BusyMeter
from ownerserve.node.runtime.refill import RefillGauge
from ownerserve.node.transfers.prefills import (
    NoPrefills,
    OrderedPrompt,
    Prefills,
    PrefillTimes,
)
from ownerserve.node.vocabulary.chains import KnownSessions, PromptPrefix, prefix_of

# ---- taking turns in
#
#     submit ── judged, queued, its node told ──> plan ── opened in the cache ──> announced
#     `──────────── counted ────────────'         `── counted, shared by those that the step opens
#
# A turn that waits for state or for room is counted for its two ends, not for the wait.


class IntakeClock:
    """An `IntakeClock` counts the CPU seconds that taking in a turn costs the calling thread, by
    request.

    `observe` is told of each turn once.
    """

    def __init__(self, observe: Callable[[Intake, float], None]) -> None:
        self._observe = observe
        self._since_s = 0.0
        self._spent: dict[str, float] = {}

    def start(self) -> None:
        """Begin to count, for turns that are taken in."""
        self._since_s = time.thread_time()

    def submitted(self, request_id: str) -> None:
        """Count the time since `start` for this request, which is queued now."""
        self._spent[request_id] = time.thread_time() - self._since_s

    def planned(self, plan: StepPlan) -> None:
        """Share the time since `start` among what the plan opens for the first time."""
        opened = [one for one in plan.admitted if one.request_id in self._spent]
        if opened:
            share_s = (time.thread_time() - self._since_s) / len(opened)
            for one in opened:
                self._observe(one.intake, self._spent.pop(one.request_id, 0.0) + share_s)

    def forget(self, request_id: str) -> None:
        """Forget the request, which is over or was refused."""
        self._spent.pop(request_id, None)


logger = logging.getLogger(__name__)


class RunnerPort(Protocol):
    """A `RunnerPort` is what a step needs of `runner.ModelRunner`."""

    device: torch.device

    @property
    def vocab_size(self) -> int:
        """`vocab_size` counts the tokens that the model knows."""
        ...

    def apply(self, effects: Sequence[Effect]) -> None:
        """Perform the cache's effects in order."""
        ...

    def prefill(
        self,
        table: Table,
        tokens: Sequence[int],
        start: int,
        *,
        write_floor: int = 0,
        turn_id: TurnId = NOBODY,
    ) -> Tensor:
        """Compute `tokens` of one sequence from position `start` on and return logits [kept,
        vocab]."""
        ...

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        """Compute one token for each row and return logits [rows, vocab]."""
        ...


class StepLoop:
    """A `StepLoop` is the loop of the engine thread. `run` runs it, `inbox` is the way in,
    `deliver` the way out.

    `latest` is the load after the last step, replaced whole: any thread may read it.
    """

    def __init__(
        self,
        runner: RunnerPort,
        scheduler: Scheduler,
        *,
        cache: HeteroCache,
        decoder: Decoder,
        identity: WorkerIdentity,
        metrics: WorkerMetrics,
    ) -> None:
        self.inbox = Inbox()
        self._runner = runner
        self._scheduler = scheduler
        self._cache = cache
        self._decoder = decoder
        self._identity = identity
        self._metrics = metrics
        self._restoring: Restoring = WithoutNode(cache, scheduler)
        self._measuring = SchedulerObserver(self._restoring.calibration)
        self._intake = IntakeClock(metrics.taken_in)
        self._turn_admission = TurnAdmission(cache, scheduler, self._load)
        self.ownership: Owning = Unowned()
        self._known = KnownSessions(cache.layout.block_tokens)
        self._live: dict[str, LiveRequest] = {}
        self._voices: dict[TurnId, Voice] = {}
        self.movable = MovableTurns(
            identity.model, self._live, self._voices, scheduler=scheduler, leave=self._moved
        )
        """Turns that may go on elsewhere; asked on the engine's thread."""
        self._events: list[tuple[str, StreamEvent]] = []
        self._over: list[SessionId] = []
        """Sessions whose last turn ends with the present step."""
        self._steps = 0
        self._computed_s = 0.0
        self._busy = BusyMeter(time.monotonic())
        self._refill = self._refill_gauge()
        self._prefills: Prefills | NoPrefills = NoPrefills()
        self._prefills_begun = 0
        self.latest = self._load()
        self.step_s = 0.0
        """What the last step took."""
        self._in_hand: Command | None = None
        """The command that is being handled."""
        self.standing = self._turn_admission.standing()
        """What seeds are judged by, as of the last step; replaced whole, as `latest`."""

    def attach(self, restoring: Restoring) -> None:
        """Serve with a node beside the engine; call it before `run`."""
        self._restoring = restoring
        self._measuring = SchedulerObserver(restoring.calibration)
        self._refill = self._refill_gauge()

    def _refill_gauge(self) -> RefillGauge:
        return RefillGauge(self._cache, self._restoring.inventory, self._measuring.costs)

    @property
    def inventory(self) -> Inventory:
        """`inventory` is what is held here."""
        return self._restoring.inventory

    def own(self, ownership: Owning) -> None:
        """Serve with a directory that knows whose the sessions are; call it before `run`."""
        self.ownership = ownership

    def run(self, deliver: DeliverEvents) -> None:
        """Serve until told to stop. However it ends, every stream gets its last event."""
        because, within_s = "the engine has stopped", STOP_WITHIN_S
        self.ownership.start()
        try:
            while self._drain():
                self._restoring.poll()
                self._prefills.poll(time.monotonic())
                if self._scheduler.has_work:
                    self._step(deliver)
                self._hand_out(deliver)
        except Exception as error:  # a thread's root: the reason must reach the callers
            within_s = 0.0
            because = f"the engine has crashed: {type(error).__name__}: {error}"
            logger.exception("the engine thread ends")
        finally:
            self._die(because, deliver)
            self._restoring.close(within_s=within_s)
            self.ownership.close(within_s=within_s)

    def serve_peers(self, prefills: Prefills) -> None:
        """Compute prompts for other workers too; call it before `run`."""
        self._prefills = prefills

    def is_serving(self) -> bool:
        """Return whether a turn is here, or a peer reads; called on the engine's thread."""
        return bool(self._live) or len(self._cache.lends) > 0

    def _prefill_wait_s(self) -> float | None:
        due_s = self._prefills.next_due()
        return None if due_s == inf else max(0.0, due_s - time.monotonic())

    # ---- commands

    def _drain(self) -> bool:
        """Handle what has come in, waiting when there is nothing else to do; False: stop."""
        if self._scheduler.has_work:
            command = self.inbox.take_ready()
        else:
            waits = (
                self._restoring.wait_s(),
                self._turn_admission.wait_s(),
                self._prefill_wait_s(),
            )
            command = self.inbox.take(min((s for s in waits if s is not None), default=None))
        is_told = command is not None
        while command is not None:
            if isinstance(command, StopLoop):
                return False
            self._in_hand = command
            self._handle(command)
            self._in_hand = None
            command = self.inbox.take_ready()
        self.standing = self._turn_admission.standing()
        if is_told and not self._scheduler.has_work:
            self._metrics.levels(self._scheduler.load(), self._cache)
        return True

    def _handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Abort(request_id):
                self._abort(request_id)
            case LivenessProbe(answer):
                if answer.set_running_or_notify_cancel():
                    answer.set_result(self._status())
            case Call(request, called):
                if called.set_running_or_notify_cancel():
                    called.set_result(self._answer(request))
            case CacheWork(run, done):
                if done.set_running_or_notify_cancel():
                    done.set_result(run())
            case AskCache(asked):
                if asked.set_running_or_notify_cancel():
                    asked.set_result(snapshot(self._cache, time.monotonic()))
            case AskInventory(after, wanted):
                if wanted.set_running_or_notify_cancel():
                    life = self._identity.incarnation
                    wanted.set_result(self._restoring.inventory.page(after, incarnation=life))

    def _answer(self, request: RpcRequest) -> RpcAnswer:
        if isinstance(request, ReleaseSession):
            return self._release(request)
        if isinstance(request, ListHeld):
            life = self._identity.incarnation
            return PageIs(self._restoring.inventory.page(request.after, incarnation=life))
        answer = self._turn_admission.answer(request)
        if isinstance(request, Reserve):
            self._metrics.reserved(answer)
        if isinstance(request, Probe) and isinstance(answer, Admit) and request.session_id:
            return msgspec.structs.replace(
                answer,
                resident_tokens=self.inventory.tokens(request.session_id, Tier.DEVICE),
                restorable_tokens=self._restoring.restorable(request.session_id),
            )
        return answer

    def _release(self, asked: ReleaseSession) -> RpcAnswer:
        """Let another own the session: its state here is ordinary cached state. Rejected while a
        turn of it is here, if only in the queue."""
        session_id = asked.session_id
        if self.ownership.standing(session_id) is not None and self.is_live(session_id):
            return Reject(WorkerRefusal.SESSION_IS_RUNNING)
        given_up = self.ownership.release(asked)
        if isinstance(given_up, Reject):
            return given_up
        let_go = self.let_go(session_id)
        return let_go if asked.epoch is None else given_up

    # ---- sessions that move (node.transfers.moves.MovingEngine)

    def is_live(self, session_id: SessionId) -> bool:
        """Return whether a turn of the session is here, if only in the queue; called on the
        engine's thread, as all here."""
        return any(live.request.session_id == session_id for live in self._live.values())

    def let_go(self, session_id: SessionId) -> RpcAnswer:
        """Have what the session has here go before all else, since it is another's."""
        self._known.forget(session_id)
        return self._turn_admission.answer(ReleaseSession(session_id))

    def met(self, session_id: SessionId, hashed: HashedPrefix) -> None:
        """Know the session as if its last turn had left these whole blocks here."""
        block = self._cache.layout.block_tokens
        left = PromptPrefix(hashed.tokens, hashed, len(hashed.digests), block)
        self._known.left(session_id, left, prompt_tokens=left.count)

    def _submit(self, submit: Submit) -> RequestRejected | None:
        """Take a request in; return why not, where it is refused."""
        self._intake.start()
        request = submit.request
        turn_ids = _turn_ids(request)
        block = self._cache.layout.block_tokens
        prompt = request.prefix or prefix_of(request.prompt, block, PrefixSalt(request.cache_salt))
        answer: LetIn | QueuedPrompt | RequestRejected = self._turn_admission.let_in(request)
        if isinstance(answer, LetIn):
            answer = self._scheduler.arrive(
                RequestArrival(
                    request_id=request.request_id,
                    turn_ids=turn_ids,
                    prompt=prompt,
                    max_new_tokens=request.new_tokens,
                    session_id=request.session_id,
                    order=answer.order,
                    is_promised=answer.is_promised,
                    begins=request.begins,
                )
            )
        if isinstance(answer, RequestRejected):
            self._emit(request.request_id, RequestFailed(answer.reason, answer.message))
            self._metrics.refused(answer.reason)
            return answer
        self._restoring.arrived(turn_ids[0], request, prompt)
        if request.is_named and request.session_id is not None:
            name = SessionId(request.session_id)
            now = time.monotonic()
            if take_over(self._cache, name, self.ownership, prompt=prompt, now=now):
                self._metrics.took_over()
            self.ownership.tell(TurnCame(name, request.parent, request.epoch))
        live = LiveRequest(request, prompt, submit.arrived_s, request.choices)
        live.completion_tokens = request.said_tokens
        self._live[request.request_id] = live
        for i, turn_id in enumerate(turn_ids):
            self._voices[turn_id] = Voice(
                live,
                Choice(i, request.stopping, self._decoder, request.said),
                Sampler(request, i, self._runner.device),
            )
        self._intake.submitted(request.request_id)
        return None

    # ---- prompts computed for others (node.transfers.prefills.PrefillEngine)

    def begin_prefill(self, ordered: OrderedPrompt) -> TurnId | WorkerRefusal:
        """Queue a prompt that another worker reads; called on the engine's thread."""
        self._prefills_begun += 1
        request = EngineRequest(
            request_id=f"prefill-{self._prefills_begun}",
            prompt=ordered.prefix.plain(0, ordered.prefix.count),
            stopping=Stopping(max_tokens=0),
            prefix=ordered.prefix,
            begins=ordered.whole_tokens,
            cache_salt=ordered.cache_salt,
            bring_from=ordered.source,
            lent_as=ordered.lent_as,
        )
        if max(request.prompt) >= self._runner.vocab_size:
            return WorkerRefusal.MALFORMED
        rejected = self._submit(Submit(request, time.monotonic()))
        return _turn_ids(request)[0] if rejected is None else rejected.reason

    def abort_prefill(self, turn_id: TurnId) -> None:
        """Give up a prompt that nobody reads any more; called on the engine's thread."""
        self._abort(turn_id.removesuffix(".0"))

    def prefill_ms(self, tokens: int, known: int) -> PrefillTimes:
        """Return what computing so many tokens behind `known` ones takes, by what was measured."""
        prefill = self._measuring.costs.prices().prefill
        pending = self._scheduler.load().pending_prefill_tokens
        wait_ms = prefill.ms(pending, 0) if pending else 0.0
        return PrefillTimes(wait_ms, prefill.ms(tokens, known))

    def _prefilled(self, plan: StepPlan) -> None:
        """Tell how far the step has come with prompts that others read, and end those that are
        computed."""
        for chunk in plan.chunks:
            self._prefills.computed(chunk.turn_id, chunk.start + len(chunk.tokens))
        over = [chunk.turn_id for chunk in plan.chunks if chunk.ends_turn]
        for turn_id in over:
            self._prefills.over(turn_id)
            self._forget(turn_id.removesuffix(".0"))
            self._metrics.finished("prefilled")
        self._restoring.ended(over)

    def _abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id, time.monotonic())
        self._restoring.gone(TurnId(f"{request_id}.0"))
        self._prefills.over(TurnId(f"{request_id}.0"))
        if self._forget(request_id):
            self._metrics.finished("aborted")
            self.latest = self._load()

    def _moved(self, request_id: str, event: StreamEvent) -> None:
        """End a request that goes on elsewhere; what it has left here can be read."""
        self._emit(request_id, event)
        self._scheduler.abort(request_id, time.monotonic())
        self._restoring.ended([TurnId(f"{request_id}.0")])
        self._forget(request_id)
        self._metrics.finished("moved")
        self.latest = self._load()

    def _load(self) -> WorkerLoad:
        now = time.monotonic()
        shares = LoadShares(self._refill.shares(now), self._busy.read(self._computed_s, now))
        return worker_load(
            self._identity,
            self._cache,
            load=self._scheduler.load(),
            shares=shares,
            as_of_s=time.time(),
        )

    def _status(self) -> HfStatus:
        profile = worker_profile(
            self._identity,
            self._cache.layout,
            costs=self._measuring.costs,
            tiers=self._restoring.tiers,
        )
        return worker_status(self._load(), profile, self._cache, steps=self._steps)

    # ---- one step

    def _step(self, deliver: DeliverEvents) -> None:
        started_s = time.monotonic()
        self._intake.start()
        plan = self._scheduler.plan(started_s)
        self._announce(plan)
        self._intake.planned(plan)
        self._hand_out(deliver)
        self._runner.apply(plan.effects)
        sampled = self._compute(plan)
        now = time.monotonic()
        self._restoring.computed(plan)
        ended = [turn_id for turn_id, token in sampled.items() if self._speak(turn_id, token, now)]
        tokens = {turn_id: token.token for turn_id, token in sampled.items()}
        self._runner.apply(self._scheduler.step_done(tokens, ended, now=now))
        self._runner.apply(self._cache.border.move(now))
        self._end_sessions()
        self._restoring.ended(ended)
        self._steps += 1
        self.step_s = time.monotonic() - started_s
        self._computed_s += self.step_s
        self.latest = self._load()
        took_s = time.monotonic() - started_s
        self._measuring.stepped(plan, took_s * 1e3)
        self._prefilled(plan)
        self._metrics.generated(len(sampled))
        self._metrics.step(
            _kind(plan),
            took_s=took_s,
            load=self._scheduler.load(),
            cache=self._cache,
        )

    def _announce(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            self._measuring.admitted(admission)
            self._prefills.began(admission.turn_id, max(admission.restored, admission.floor))
            if not admission.again and admission.request_id in self._live:
                self._admitted(admission)
        for request_id in plan.failed:
            reason = WorkerRefusal.NO_ROOM
            message = "the request needs more KV memory than there is, even alone"
            self._emit(request_id, RequestFailed(reason, message))
            self._forget(request_id)
            self._restoring.gone(TurnId(f"{request_id}.0"))
            self._prefills.over(TurnId(f"{request_id}.0"))
            self._metrics.refused(reason)
        self._metrics.preempted(len(plan.preempted))

    def _admitted(self, admission: AdmittedPrompt) -> None:
        live = self._live[admission.request_id]
        request, restored = live.request, admission.restored
        if admission.turn_id != _turn_ids(request)[0]:
            return  # another choice of the same prompt, which found no room to fork
        live.cached_tokens = restored if request.said is None else request.said.cached_tokens
        kept, session_id = max(restored, admission.floor), request.session_id
        known = self._known.tokens_of(SessionId(session_id), live.prompt) if session_id else 0
        brought = self._restoring.began(admission)
        admitted = Admitted(
            restored,
            _mode(request, brought, execution_mode(known, kept, brought.tokens)),
            kept - restored,
            restore=brought.restore,
            plan=brought.plan,
            lost_tokens=lost_tokens(known, kept),
            brought=brought.brought,
        )
        self._emit(request.request_id, admitted)
        if request.said is not None and request.said.whole is not None:
            live.unsent.append(request.said.whole)
            self._emit(request.request_id, request.said.whole)
        layout = self._cache.layout
        self._metrics.admitted(
            admitted,
            prompt_tokens=request.prompt_tokens,
            cached=dict.fromkeys(layout.range_names, kept)
            | dict.fromkeys(layout.point_names, restored),
        )

    def _compute(self, plan: StepPlan) -> dict[TurnId, Sampled]:
        """Run the plan's forwards and draw a token for every turn that has new logits."""
        turns: list[TurnId] = []
        logits: list[Tensor] = []
        if plan.rows:
            rows = [DecodeRow(row.table, row.token, row.position, row.turn_id) for row in plan.rows]
            logits += self._runner.decode(rows).unbind(0)
            turns += [row.turn_id for row in plan.rows]
        for chunk in plan.chunks:
            last = self._runner.prefill(
                chunk.table,
                chunk.tokens,
                chunk.start,
                write_floor=chunk.write_floor,
                turn_id=chunk.turn_id,
            )[-1]
            logits += [last] * len(chunk.sample_for)
            turns += chunk.sample_for
        samplers = [self._voices[turn_id].sampler for turn_id in turns]
        with torch.inference_mode():
            return dict(zip(turns, sample(logits, samplers), strict=True))

    def _speak(self, turn_id: TurnId, sampled: Sampled, now: float) -> bool:
        """Tell the caller about a new token; return whether it was the choice's last."""
        voice = self._voices[turn_id]
        live = voice.live
        request_id = live.request.request_id
        if not live.completion_tokens:
            self._metrics.first_token(now - live.arrived_s)
        live.completion_tokens += 1
        delta: Delta = voice.choice.push(sampled)
        if delta.index == 0:
            live.first_choice.append(sampled.token)
        if live.keeps_deltas:
            live.unsent.append(delta)
        self._emit(request_id, delta)
        if delta.finish is None:
            return False
        live.open -= 1
        if not live.open:
            self._emit(
                request_id,
                RequestFinished(
                    live.request.prompt_tokens, live.completion_tokens, live.cached_tokens
                ),
            )
            self._left(live)
            self._forget(request_id)
            self._metrics.finished(delta.finish.value)
            if live.request.is_final and live.request.session_id:
                self._over.append(SessionId(live.request.session_id))
        return True

    def _left(self, live: LiveRequest) -> None:
        """Remember what a complete turn leaves, so that its session's next one can be told from a
        new prompt."""
        request = live.request
        if request.session_id is not None:
            # The last sampled token is never computed.
            left = live.prompt.answered(live.first_choice[:-1])
            name = SessionId(request.session_id)
            self._known.left(name, left, prompt_tokens=live.prompt.count)
            if request.is_named:
                tokens = live.prompt.tokens + left.said
                self.ownership.tell(TurnLeft(name, tokens, request.group, before=request.version))

    def _end_sessions(self) -> None:
        """Release the sessions that have ended: what they have here is ordinary cached state from
        now on. A session that another turn still runs in goes on: whoever said that it ends was
        wrong."""
        sessions = self._cache.sessions
        while self._over:
            session = sessions.get(self._over.pop())
            if session is not None and not session.running:
                sessions.release(session.session_id)
                self._known.forget(session.session_id)
                self._restoring.over(session.session_id)
                self.ownership.tell(SessionLeft(session.session_id))

    # ---- events out

    def _emit(self, request_id: str, event: StreamEvent) -> None:
        self._events.append((request_id, event))

    def _hand_out(self, deliver: DeliverEvents) -> None:
        if self._events:
            events, self._events = self._events, []
            deliver(events)

    def _forget(self, request_id: str) -> bool:
        """Drop what is known of a request; return whether it was live."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        self._intake.forget(request_id)
        turn_ids = _turn_ids(live.request)
        for turn_id in turn_ids:
            self._voices.pop(turn_id, None)
        self._measuring.forget(turn_ids)
        return True

    def _die(self, because: str, deliver: DeliverEvents) -> None:
        """Close the inbox and fail all requests and questions that wait, with the reason."""
        left = self.inbox.close(because)
        if self._in_hand is not None:  # in whose handling it crashed
            left.insert(0, self._in_hand)
        waiting = [*self._live, *(c.request.request_id for c in left if isinstance(c, Submit))]
        for request_id in dict.fromkeys(waiting):
            self._emit(request_id, RequestFailed(WorkerRefusal.ENGINE_DEAD, because))
        for command in left:
            if not isinstance(command, LivenessProbe | AskCache | AskInventory | Call | CacheWork):
                continue
            answer = command.answer
            if answer.running() or (not answer.done() and answer.set_running_or_notify_cancel()):
                answer.set_exception(EngineDead(because))
        self._hand_out(deliver)


def _turn_ids(request: EngineRequest) -> tuple[TurnId, ...]:
    """Return a turn id for each choice of the request; the first one runs the prompt."""
    return tuple(TurnId(f"{request.request_id}.{i}") for i in range(request.choices))


def _mode(
    request: EngineRequest, brought: RestoreSummary, on_the_spot: ExecutionMode
) -> ExecutionMode:
    """Return how the turn is served, which without a move or an order is `on_the_spot`."""
    if request.said is not None:
        return ExecutionMode.MIGRATE
    return ExecutionMode.REMOTE_PREFILL if brought.is_ordered else on_the_spot


def _kind(plan: StepPlan) -> str:
    if plan.chunks:
        return "mixed" if plan.rows else "prefill"
    return "decode"
