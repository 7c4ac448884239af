"""Turns is what an exchange asks of the gateway at each step, from who asks to what came of it; the
observer remembers what came.

`Turns` owns the router's state and all that a turn passes beside its bytes: who asks and whose the
session is (asking), limits and the queue before the fleet (entry), places and connections at
workers. One call of each step of a turn; nothing here knows a socket's bytes.

`Observer` keeps what the gateway did, for people: latencies, token counts, the last decisions. It
owns no decision. It costs two list look-ups and a few additions a request; everything with a name
or a label is made when somebody asks (metrics, admin).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import structs

from ownerserve.directory.port import Directory
from ownerserve.gateway.asking import Asking, IdentifiedRequest, SessionFinder
from ownerserve.gateway.config import Config
from ownerserve.gateway.entry.comments import WaitComments
from ownerserve.gateway.entry.entering import Entering
from ownerserve.gateway.entry.telling import wait_line
from ownerserve.gateway.histograms import PLACE_BUCKETS, TOKEN_BUCKETS, Histogram
from ownerserve.gateway.http.access import Address, open_access
from ownerserve.gateway.http.client import HttpRequest
from ownerserve.gateway.http.door import descriptor_limit, share_of
from ownerserve.gateway.http.heads import RequestHead, ResponseHead
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.http.upstream import IDLE_MAX, UpstreamConnection, WorkerPool
from ownerserve.gateway.logs import AccessLog, WorkerLog
from ownerserve.gateway.owner_changes import Heard, OwnerChanges
from ownerserve.gateway.patterns import SessionPatterns
from ownerserve.gateway.processes.homes import Homes
from ownerserve.gateway.receipts import receipts_of
from ownerserve.gateway.refusals import Refusals
from ownerserve.gateway.rollout.choice import Rollout
from ownerserve.gateway.stamps import (
    PromptOutcome,
    Stamp,
    TurnRefused,
    answer_of,
    order_lines,
    read_stamp,
    refusal_of,
    retry_after_s,
    turn_line_of,
    what_came,
)
from ownerserve.gateway.tracing.opening import open_tracer
from ownerserve.gateway.tracing.trace import TurnStep, TurnTrace
from ownerserve.gateway.workers.rpc import (
    HeldPlace,
    Places,
    Releasing,
    WorkerLines,
    WorkerNames,
    seed_of,
)
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import ExecutionMode, RoutingUnit, Tier
from ownerserve.kv.wire.headers import TurnLine
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import NO_NONCE, Admit, Reject
from ownerserve.router.decision import DispatchReason, Label, TurnClass
from ownerserve.router.entry.limits import LimitKind
from ownerserve.router.entry.queue import Entrant, HeldTurn
from ownerserve.router.entry.terms import (
    EnteringTurn,
    SessionClass,
    TenantTerms,
    TurnAwayReason,
    TurnWait,
    WaitReason,
    refilled_ms,
)
from ownerserve.router.gap_moves import GapMoves
from ownerserve.router.hot_prefixes import HotPrefixes
from ownerserve.router.learning import Learning
from ownerserve.router.messages import (
    Aborted,
    Arm,
    AskRelease,
    Broken,
    CarryOn,
    Claimed,
    Dispatch,
    Done,
    Down,
    Failed,
    Failure,
    FirstByte,
    Gone,
    LeftToStore,
    LetGo,
    Misjudged,
    MovedOn,
    NotComputedApart,
    Refuse,
    ReleaseEnd,
    ReleaseEnded,
    Reported,
    SessionEnd,
    Stamped,
    TakenOver,
    Unpromised,
)
from ownerserve.router.opening import OpeningRule
from ownerserve.router.requests.body import (
    AnswerFinish,
    Usage,
    believed,
    scan_finish,
    scan_usage,
)
from ownerserve.router.requests.identity import SessionIdentity
from ownerserve.router.sessions import RoutedSession, Use
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Worker


class Correction(Label):
    """A correction says why a turn is decided anew: its worker's own word on the session, which is
    known now."""

    HOLDS_LESS = "holds_less"
    """The worker holds less than the decision counted on."""
    LOADS = "loads"
    """The worker would load what the decision computes."""
    COMPUTES = "computes"
    """The worker would compute what the decision loads."""


Why: TypeAlias = Failure | WorkerRefusal | Correction
"""Why nothing of an answer came: what went wrong, what the worker's admission said, or that the
turn was not sent after its word."""


_KEPT = (ExecutionMode.DIRECT_APPEND, ExecutionMode.FETCH, ExecutionMode.MIGRATE)
"""Modes in which a turn had its session's state from before."""
DOWN_ASKED_MAX = 2
"""How many workers that are down a turn is tried at when nobody is up: who listens again serves it
before the next probe finds that out."""
DECIDED_MAX = 3
"""From this attempt on a turn goes where it was decided, whatever is held there."""

_NO_PROMISE = (WorkerRefusal.NO_ROOM, WorkerRefusal.UNKNOWN_RESERVATION)
"""Refusals of a promise, not of the turn: there is no room, or the place was gone when the turn
came. When nobody promises it is sent without."""

LookUp: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Asks the directory about one session; ends with its answer, or after a moment."""


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """An arrived request is what was read of it at `at_s`. `look_up` asks the directory whose its
    session is; None: it knows no more of that than this gateway."""

    asked: IdentifiedRequest
    at_s: float
    look_up: LookUp | None


class BegunAnswer(msgspec.Struct, frozen=True, gc=False):
    """A begun answer is one whose first byte is here: the worker's word on it, and how long its
    client had waited for that."""

    stamp: Stamp
    first_byte_s: float

    @property
    def says_kept(self) -> bool:
        """Whether the worker says that it has compared the prompt, and had its session's state."""
        return self.stamp.mode in _KEPT


class LostDispatch(msgspec.Struct, frozen=True, gc=False):
    """A lost dispatch is one of which nothing came, for the reason `why`."""

    dispatch: Dispatch
    why: Why


class LostPrefill(msgspec.Struct, frozen=True, gc=False):
    """A lost prefill is one of a dispatch that goes on without it: its worker computes the
    prompt."""

    dispatch: Dispatch
    why: Failure


class LostStream(msgspec.Struct, frozen=True, gc=False):
    """A lost stream is an answer that stopped in its middle; another worker is to carry on."""

    dispatch: Dispatch
    why: Failure


class SentOn(msgspec.Struct, frozen=True, gc=False):
    """A dispatch that is sent on has ended amid its turn's answer, which goes on at `target`: all
    that it needs was sent there."""

    dispatch: Dispatch
    target: RoutingUnit


EndedLeg: TypeAlias = LostDispatch | LostPrefill | LostStream | SentOn
"""After which a turn is decided anew, or goes on."""


class NotLetIn(msgspec.Struct, frozen=True, gc=False):
    """A turn that was not let in has ended; `held`: by the queue, if it came so far."""

    held: HeldTurn | None = None


class Route:
    """A route is how a turn that was decided gets to its worker: over which connections, with which
    lines in its head, and with a place where the worker's admission gives one."""

    __slots__ = ("_trace", "_turns", "dispatch", "leg", "prefiller")

    def __init__(self, turns: Turns, dispatch: Dispatch, trace: TurnTrace | None) -> None:
        self._turns = turns
        self.dispatch = dispatch
        self._trace = None if trace is None else trace.leg(dispatch)
        self.prefiller = turns.lines.prefiller_of(dispatch.decision, turns.worker_names)
        """Whom the worker itself asks to compute the prompt; None: nobody."""
        self.leg = NO_NONCE
        """The number of both legs, where the gateway asks who computes the prompt too."""

    @property
    def pool(self) -> WorkerPool:
        """Return the connections to the worker."""
        return self._turns.pools[self.dispatch.worker]

    @property
    def prefill_pool(self) -> WorkerPool | None:
        """Return the connections to the worker that computes the prompt apart; None: nobody
        does."""
        prefill = self.dispatch.decision.prefill
        return None if prefill is None else self._turns.pools[prefill.id]

    @property
    def can_ask(self) -> bool:
        """Return whether the worker's admission can be asked of a turn."""
        turns = self._turns
        return turns.rollout.is_normal and turns.places.can_ask(self.dispatch.worker)

    @property
    def gives_places(self) -> bool:
        """Return whether the worker's admission can be asked, and holds places as far as is
        known."""
        return self._turns.places.are_held(self.dispatch.worker)

    async def reserve(self, request_id: bytes) -> HeldPlace | Reject | Correction | None:
        """Ask the worker for a place for the turn: the place, or why not; None when it is sent
        without one: nothing was heard in time, or the worker holds none and lets it come."""
        turns, dispatch = self._turns, self.dispatch
        if self._trace is not None:
            self._trace.step(TurnStep.PLACE)
        seed = seed_of(dispatch, turns.state.sessions)
        came = await turns.places.reserve(
            dispatch.worker, request_id.decode(), seed=seed, session=dispatch.session
        )
        if isinstance(came, Admit):
            return turns.told_held(dispatch, came)
        if came is None:
            turns.observer.pressed("unasked", "no_word")
        return came

    async def connect(self) -> UpstreamConnection:
        """Open a new connection to the worker. Raises OSError when there is none."""
        if self._trace is not None:
            self._trace.step(TurnStep.CONNECT)
        return await self.pool.connect()

    def answered(self, status: int) -> None:
        """Hear that the worker's answer begins, with that status."""
        if self._trace is not None:
            self._trace.answered(status)

    def line(self, asked: IdentifiedRequest) -> TurnLine:
        """Make the line that tells the worker of the turn, by what is known now."""
        turns, dispatch = self._turns, self.dispatch
        lender = turns.lines.lender_of(dispatch.decision, turns.worker_names)
        known = turns.session_of(dispatch)
        line = turn_line_of(dispatch, asked, known, lender=lender, prefiller=self.prefiller)
        return structs.replace(line, nonce=self.leg) if self.leg else line

    def prompt_line(self) -> TurnLine:
        """Make the line of the leg that computes the prompt alone: what the worker that answers has
        of the session is to be brought from there."""
        turns, dispatch = self._turns, self.dispatch
        prefill, known = dispatch.decision.prefill, turns.session_of(dispatch)
        assert prefill is not None
        worker, lender = dispatch.decision.worker, None
        if known is not None and known.prompt_tokens:
            lender = turns.lines.read_by(prefill, worker, turns.worker_names)
        return TurnLine(
            name=None if lender is None else dispatch.session,
            target=prefill.unit,
            bring_from=lender,
            nonce=self.leg,
            prefill=True,
        )

    @property
    def leg_lines(self) -> bytes:
        """Return the lines that the head of each leg has for its worker: the workers' key, where
        they want one, and the trace that its part joins."""
        line = self._turns.access.line
        return line if self._trace is None else line + self._trace.lines()

    def head_lines(self, line: TurnLine) -> bytes:
        """Return the lines that the turn's head has for the worker alone: a leg's, and `line`. It
        is sent with them at once."""
        if self._trace is not None:
            self._trace.step(TurnStep.FIRST_BYTE)
        return self.leg_lines + order_lines(line)


_END_OF: dict[type, str] = {NotLetIn: "not_let_in", Aborted: "aborted", Broken: "broken"}


def _lost_of(lost: EndedLeg | None) -> tuple[Dispatch | None, str]:
    """Return the dispatch that a trace is to end, if there is one, and why: empty where nothing
    went wrong."""
    if lost is None or isinstance(lost, LostPrefill):
        return None, ""
    if isinstance(lost, SentOn) or isinstance(lost.why, Correction):
        return lost.dispatch, ""
    return lost.dispatch, lost.why.value


class Turns:
    """This class joins what turns pass in one gateway. `directory` is the Gateway's; `homes`: which
    sessions are at other processes of it."""

    def __init__(
        self, config: Config, directory: Directory | None, homes: Homes | None = None
    ) -> None:
        self.now = asyncio.get_running_loop().time
        self.first_byte_timeout_s = config.first_byte_timeout_s
        self.whole_answer_timeout_s = config.whole_answer_timeout_s
        self.rollout = Rollout(config.rollout)
        self.state = RouterState(
            self.rollout.steering.policy,
            settings=config.settings,
            down_asked_max=DOWN_ASKED_MAX,
            learning=Learning(spilled_to=Tier.DISK),
            opening=OpeningRule(self.now() + config.opening_s, behind_ms=config.settings.hot_ms),
        )
        self.rollout.steer_by(self.state.steer)
        self.gap_moves = GapMoves(self.state, lambda name: self.rollout.arm_of(name, None))
        self.hot_prefixes = HotPrefixes(self.state)
        self.access = open_access(config.worker_key, config.worker_ca_file)
        self.share = share_of(descriptor_limit(), config.workers_expected)
        self.pools: dict[WorkerId, WorkerPool] = {}
        """Whom turns may run at, also of a worker that leaves while something runs there."""
        self._connect_timeout_s = config.connect_timeout_s
        self.homes = homes
        self.asking = Asking(
            resolve=self.state.sessions.resolve, is_known=self._is_known, homes=homes
        )
        self.worker_names = WorkerNames()
        self.finder = None
        if directory is not None:
            self.finder = SessionFinder(directory, self.worker_names, tell=self.told)
        self.worker_log = WorkerLog()
        self.access_log = AccessLog() if config.access_log else None
        self.tracer = open_tracer(config.otlp_endpoint, share=config.otlp_share)
        self.refusals = Refusals(self)
        self.observer = Observer(self.now, decisions_kept=config.decisions_kept)
        self.entering = Entering(
            self.state, seats=config.seats, queue=config.queue, watch=self.observer
        )
        self.admission = self.entering.queue
        self.comments = WaitComments(self.admission, config.wait_comments_s)
        self.lines = WorkerLines(key=config.fleet_key)
        self.places = Places(self.lines)
        self.receipts = receipts_of(config.receipts)
        self.releasing = Releasing(self.lines, self.worker_names, tell=self.told)

    def open_pool(self, address: Address) -> None:
        """Make the pool of connections to a worker; none is opened yet."""
        self.pools[address.worker] = WorkerPool(
            address,
            self.access,
            connect_timeout_s=self._connect_timeout_s,
            idle_max=min(self.share.idle_max, IDLE_MAX),
        )

    def told(
        self, event: Reported | Gone | ReleaseEnded | Claimed | TakenOver | LeftToStore
    ) -> None:
        """Tell the state the news of a worker or the directory."""
        now = self.now()
        if not isinstance(event, Claimed | TakenOver):
            self.state.handle(event, now)
            return
        session = self.state.sessions.resolve(event.session)
        owner = self._owner_of(session)
        self.state.handle(event, now)
        self.observer.owner_changes.look(
            session, owner, self._owner_of(session), how="told", now_s=now
        )
        if self.finder is not None and isinstance(event, Claimed):
            self.finder.heard(event.epoch)

    # A turn, step by step

    def read(self, request: HttpRequest) -> Arrived:
        """Read who asks, and for what. Raises Rejected, or Elsewhere."""
        at_s, caller = self.now(), request.head.caller
        is_limited = caller.terms.is_limited
        if is_limited:
            self.entering.check(caller)
        asked = self.asking.read(request)
        if is_limited:
            asked = self._charged(asked)
        arm = self.rollout.arm_of(asked.arrive.session, caller.canary_share)
        if arm is not Arm.MAIN:
            asked = structs.replace(asked, arrive=structs.replace(asked.arrive, arm=arm))
        trace = self.tracer.begin(request.head)
        if trace is not None:
            trace.asked(asked.fields)
            asked = structs.replace(asked, trace=trace)
        return Arrived(asked, at_s, self._look_up(asked))

    def _charged(self, asked: IdentifiedRequest) -> IdentifiedRequest:
        """Charge the turn to its tenant's limits. Raises Rejected when it is over one."""
        try:
            return self.entering.charged(asked)
        except Rejected:
            self.asking.ended(asked.identity)
            raise

    def _look_up(self, asked: IdentifiedRequest) -> LookUp | None:
        """Return what asks the directory, if it may know more of the session than this gateway;
        else None.

        One without a place to go to is new here, known by a worker's inventory alone, or its owner
        is lost: another gateway may have sent it elsewhere since.
        """
        name = asked.arrive.session
        if not name or self.finder is None or not self.rollout.is_normal:
            return None
        known = self.state.sessions.get(self.state.sessions.resolve(name))
        if known is not None and known.live_home is not None:
            return None
        return partial(self.finder.look_up, name)

    def enter(
        self, asked: IdentifiedRequest, head: RequestHead, entrant: Entrant, *, came_s: float
    ) -> HeldTurn | None:
        """Let the turn, which came at `came_s`, in or turn it away at once, and return None; or
        hold it in the queue. Raises Rejected. Where not the policy decides, nobody waits for a
        seat."""
        held = self.entering.enter(asked, head, entrant, came_s=came_s)
        if held is None or held.seat is None or self.rollout.is_normal:
            return held
        self.admission.let_past_seats(self.now())
        return held if held.waits else None

    def decide(
        self,
        asked: IdentifiedRequest,
        lost: EndedLeg | None = None,
        *,
        request_id: bytes,
    ) -> Route | Refuse:
        """Decide where the turn runs, for the first time or after a dispatch, its prefill or its
        stream was lost, or sent on, and note the decision."""
        trace = asked.trace
        if trace is not None:
            trace.deciding(*_lost_of(lost))
        event = asked.arrive if lost is None else self._end_of(lost)
        outcome = self.state.handle(event, self.now())
        if trace is not None:
            trace.decided(request_id, asked.arrive.session, outcome)
        self.observer.decided(request_id, asked, outcome)
        is_lost = lost is not None and not isinstance(lost, SentOn)
        if is_lost and lost is not None and not lost.dispatch.decision.worker.up:
            self.worker_log.down(
                lost.dispatch.worker, why=Down.UNREACHABLE, cause="a turn's connection failed"
            )
        if self.access_log is not None:
            self.access_log.decided(
                request_id,
                outcome,
                session=asked.arrive.session,
                lost=None if lost is None else lost.dispatch.receipt,
                trace_id=asked.trace_id,
                now_s=self.now(),
            )
        if isinstance(outcome, Refuse):
            self.rollout.books[asked.arrive.arm].ends["refused"] += 1
            return outcome
        self.rollout.sent(outcome)
        self.gap_moves.sent(outcome, self.now())
        self.hot_prefixes.sent(outcome, self.now())
        if lost is not None and outcome.reason is DispatchReason.RETRY_UNASKED:
            self.observer.pressed("unasked", "all_refused")
        return Route(self, outcome, asked.trace)

    def patience_s(self, asked: IdentifiedRequest) -> float:
        """Return how long a worker that is up may send nothing of the answer, in seconds."""
        if asked.fields.raw("stream") == b"true":
            return self.first_byte_timeout_s
        return self.whole_answer_timeout_s

    def told_held(self, dispatch: Dispatch, admit: Admit) -> Correction | None:
        """Tell the state what the worker says that it holds of a turn's session, and does with it;
        return what the decision was wrong in, if anything."""
        session, decision = dispatch.session, dispatch.decision
        unit = decision.worker.unit
        if session is None or unit is None:
            return None
        has = {Tier.DEVICE: admit.resident_tokens, Tier.DISK: admit.restorable_tokens}
        use = _use_of(admit)
        for tier, tokens in has.items():
            if tokens:
                said = use if tier is Tier.DISK else Use.BY_PRICE
                self.told(Reported(unit, tier, None, tokens, session, said))
            elif tokens is not None:
                self.told(Gone(unit, tier, session=session))
        source = decision.source
        counted_on = [has[Tier.DEVICE]] if source is None else list(has.values())
        if (
            None in counted_on
            or decision.prefill is not None
            or dispatch.turn is TurnClass.FORKED_ROLLOUT  # it counts on its parent's state
            or (source is not None and source.worker is not decision.worker)
            or dispatch.attempt >= DECIDED_MAX
        ):
            return None
        if decision.cached_tokens > max(tokens or 0 for tokens in counted_on):
            return Correction.HOLDS_LESS
        if not decision.alternatives:
            return None  # by a policy that prices nothing, which decides the same again
        if use is Use.LOADED and source is None:
            return Correction.LOADS
        return Correction.COMPUTES if use is Use.LEFT and source is not None else None

    def _end_of(
        self, lost: EndedLeg
    ) -> Failed | Unpromised | Misjudged | NotComputedApart | CarryOn | MovedOn:
        """Count a dispatch that was lost, and return what the state is told of it."""
        if isinstance(lost, SentOn):
            return MovedOn(lost.dispatch.receipt, lost.target)
        receipt, why = lost.dispatch.receipt, lost.why
        if isinstance(lost, LostPrefill):
            return NotComputedApart(receipt, lost.why)
        if isinstance(lost, LostStream):
            self.observer.pressed("failed", "broken")
            return CarryOn(receipt, lost.why)
        if isinstance(why, Correction):
            self.observer.pressed("corrected", why.value)
            return Misjudged(receipt)
        if isinstance(why, Failure):
            self.observer.pressed("failed", why.value)
            return Failed(receipt, why)
        self.observer.pressed("refused", why.value)
        is_unpromised = why in _NO_PROMISE
        return Unpromised(receipt) if is_unpromised else Failed(receipt, Failure.REFUSED)

    def began(
        self, dispatch: Dispatch, head: ResponseHead, *, started_s: float
    ) -> BegunAnswer | TurnRefused:
        """Take in an answer's head: return the worker's word on it, or its no to the turn. Who is
        asked while it is down and answers with a fault has said no."""
        now = self.now()
        stamp = read_stamp(dispatch.worker, head.stamp, self.observer.bad_lines)
        refusal = refusal_of(head.status, head.stamp)
        is_last_resort = dispatch.reason is DispatchReason.NOBODY_UP
        if refusal is None and is_last_resort and head.status >= _SERVER_ERROR:
            refusal = WorkerRefusal.ENGINE_BUSY
        if refusal is not None:
            if stamp.status is not None:
                self.state.handle(Stamped(stamp.status), now)
            return TurnRefused(refusal, head.status, retry_after_s(head.lines, time.time()))
        answer = answer_of(head.status, stamp)
        session = dispatch.session
        owner = None if session is None else self._owner_of(session)
        claimed = self._claimed_by(dispatch, stamp)
        first_byte = FirstByte(dispatch.receipt, stamp.status, answer, stamp.mode, claimed)
        began = self.state.handle(first_byte, now)
        if isinstance(began, LetGo) and self.rollout.is_normal:
            self.releasing.let_go(began)
        if claimed is not None and self.finder is not None:
            self.finder.heard(claimed.epoch)
        if session is not None and owner is not None:
            after, here = self._owner_of(session), dispatch.decision.worker
            how: Heard = "answered" if after is here else "told"
            self.observer.owner_changes.look(session, owner, after, how=how, now_s=now)
        self.observer.first_byte(now - started_s)
        if self.access_log is not None:
            self.access_log.began(dispatch.receipt, head.status, now_s=now)
        self._report(dispatch, stamp, now)
        return BegunAnswer(stamp, now - started_s)

    def receipt(self, asked: IdentifiedRequest, dispatch: Dispatch, head: ResponseHead) -> bytes:
        """Return the header lines that tell the client of the decision, and of what it waited
        for before."""
        tenant, terms = asked.scope.tenant, asked.terms
        lines = self.receipts.lines(dispatch, head, tenant=tenant)
        if asked.waits:
            lines += wait_line(asked.waits)
        return lines + self.entering.limit_lines(tenant, terms) if terms.is_limited else lines

    def finished(
        self,
        asked: IdentifiedRequest,
        dispatch: Dispatch,
        begun: BegunAnswer,
        tail: bytes,
        *,
        alias: SessionId | None,
        started_s: float,
    ) -> None:
        """Close the books of a turn whose answer is whole; `tail` are its last bytes. Asks for a
        hand-over where the state wants one, and ends the session after its final turn."""
        now, session = self.now(), asked.arrive.session
        told = scan_usage(tail)
        usage = believed(told, dispatch.decision.worker.profile.sequence_tokens)
        known = self.session_of(dispatch)
        came = what_came(begun.stamp, usage, 0 if known is None else known.prompt_tokens)
        seats = self.admission.seats
        if seats is not None and usage is not None:
            lost_ms = refilled_ms(usage, known, dispatch.decision.worker)
            seats.stay.answered(now - started_s - begun.first_byte_s, lost_ms / 1000.0)
        done = Done(dispatch.receipt, told, alias, prompt=asked.prompt)
        wanted = self.state.handle(done, now)
        if alias is not None and self.homes is not None:
            self.homes.note_alias(alias)
        if isinstance(wanted, AskRelease) and asked.identity.final:
            self.releasing.end(wanted)
        elif isinstance(wanted, AskRelease) and not self.rollout.is_normal:
            kept = ReleaseEnded(wanted.session, wanted.epoch, ReleaseEnd.KEPT)
            self.state.handle(kept, now)
        elif isinstance(wanted, AskRelease):
            self.releasing.ask(wanted)
        self.observer.finished(now - started_s, usage)
        self.observer.finishes[scan_finish(tail)] += 1
        if session is not None and came.mode is not None:
            self.observer.patterns.ran(session, came.mode, begun.first_byte_s)
        self.observer.ran(came.mode, first_byte_s=begun.first_byte_s, duration_s=now - started_s)
        if self.access_log is not None:
            self.access_log.ended(dispatch.receipt, "finished", usage=usage, now_s=now)
        self.rollout.books[dispatch.arm].finished(
            usage, first_byte_s=begun.first_byte_s, duration_s=now - started_s
        )
        self.observer.compared(dispatch, usage, came)
        if asked.trace is not None:
            asked.trace.ended("finished", usage)
        if asked.charged_tokens:
            self.entering.settle(asked, usage)
        self._over(asked, 0 if usage is None else usage.prompt_tokens + usage.output_tokens)
        if asked.identity.final and session is not None:
            self.state.handle(SessionEnd(session), now)
            self.asking.chain.forget(session)
            self.admission.over(session, self.now())

    def ended(
        self, asked: IdentifiedRequest, event: NotLetIn | Aborted | Broken | None = None
    ) -> None:
        """End a turn without a whole answer: one that was not let in, one whose live dispatch ends
        with `event`, or one that has none."""
        if asked.charged_tokens and isinstance(event, (Aborted, Broken)):
            self.entering.settle(asked, None)
        elif asked.charged_tokens:
            self.entering.refund(asked)
        if asked.trace is not None:
            asked.trace.ended(_END_OF.get(type(event), "refused"))
        if isinstance(event, NotLetIn):
            if event.held is not None:
                self.entering.leave(event.held)
            self.asking.ended(asked.identity)
            return
        if isinstance(event, Broken):
            self.observer.pressed("failed", "broken")
        if event is not None:
            self.state.handle(event, self.now())
            end = "broken" if isinstance(event, Broken) else "aborted"
            self.rollout.books[asked.arrive.arm].ends[end] += 1
            if self.access_log is not None:
                self.access_log.ended(event.receipt, end, usage=None, now_s=self.now())
        self._over(asked, 0)

    def _over(self, asked: IdentifiedRequest, tokens: int) -> None:
        """Note that nothing of the turn runs any more; its session's context is `tokens` (0: not
        told)."""
        self.asking.ended(asked.identity)
        self.entering.ended(asked, tokens)

    def _report(self, dispatch: Dispatch, stamp: Stamp, now: float) -> None:
        """Tell the state where the worker says that the prompt's state will be once the turn has
        run."""
        session, extent = dispatch.session, stamp.extent
        if session is None or extent is None:
            return
        tip, tokens = extent.prefix_hash, extent.tokens
        self.state.handle(Reported(stamp.unit, Tier.DEVICE, tip, tokens, session=session), now)

    def _claimed_by(self, dispatch: Dispatch, stamp: Stamp) -> Claimed | None:
        """Return whom the worker says to own the turn's session; None: it does not say."""
        session, owned = dispatch.session, stamp.owned
        if session is None or owned is None:
            return None
        owner = self.worker_names.here(owned.unit)
        return Claimed(session, owner, owned.epoch, owned.version)

    def session_of(self, dispatch: Dispatch) -> RoutedSession | None:
        """Return the turn's session, as the router knows it now."""
        name = dispatch.session
        return None if name is None else self.state.sessions.get(name)

    def _owner_of(self, name: SessionId) -> Worker | None:
        known = self.state.sessions.get(name)
        return None if known is None else known.owner

    def _is_known(self, name: SessionId) -> bool:
        return self.state.sessions.get(name) is not None


def _use_of(admit: Admit) -> Use:
    """Return what the worker does with what it could bring, by what it says."""
    resident, planned = admit.resident_tokens, admit.planned_tokens
    if planned is None or resident is None or (admit.restorable_tokens or 0) <= resident:
        return Use.BY_PRICE
    return Use.LOADED if planned > resident else Use.LEFT


_SERVER_ERROR = 500
_TOO_MANY = 429
"""From this status on an error is the fleet's or ours, not the client's."""


class ModeLatency:
    """The latencies of one execution mode's turns whose answers came whole."""

    def __init__(self) -> None:
        self.first_byte_s = Histogram()
        self.duration_s = Histogram()


class Decided(NamedTuple):
    """This is one decision: when (s), and of whose request; `waits`: for what that waited before
    it."""

    at_s: float
    request_id: bytes
    outcome: Dispatch | Refuse
    identity: SessionIdentity | None
    trace_id: str | None
    waits: tuple[TurnWait, ...]


class Observer:
    """The observer is the gateway's memory of what it did. `now` stamps decisions."""

    def __init__(self, now: Callable[[], float], *, decisions_kept: int) -> None:
        self.decisions: deque[Decided] = deque(maxlen=decisions_kept)
        self.first_byte_s = Histogram()
        self.duration_s = Histogram()
        self.by_mode: dict[ExecutionMode | None, ModeLatency] = {}
        """None: turns of which nobody says how they were served."""
        self.patterns = SessionPatterns()
        self.finishes: Counter[AnswerFinish] = Counter()
        """Whole answers by why they ended: `length` is one that is cut off."""
        self.owner_changes = OwnerChanges()
        self.began_at_s = now()
        self.rejections: Counter[str] = Counter()
        self.pressure: Counter[tuple[str, str]] = Counter()
        """(kind, reason): all that did not go as decided. Errors and fallbacks are one pressure:
        who counts only one of them hides it in the other (seed 003, v5)."""
        self.waits_for_s = {reason: Histogram() for reason in WaitReason}
        """By what they waited for, of turns that did and went on."""
        self.places = {reason: Histogram(PLACE_BUCKETS) for reason in WaitReason}
        """Where the same turns stood in line when they came."""
        self.waits_s: dict[tuple[str, SessionClass], Histogram] = {}
        """By tenant and class, of turns that were let in through a queue that is not open."""
        self.not_let_in: Counter[tuple[str, str, str]] = Counter()
        """By tenant, class and reason; over a rate limit before a class is known: ""."""
        self.bad_lines: Counter[str] = Counter()
        """Fields of workers' answer lines that could not be used."""
        self.receipt_error_tokens = Histogram(TOKEN_BUCKETS)
        self.expected_cached_tokens = self.zero_hits = 0
        self.reseeds = self.lost_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._now = now

    def decided(
        self,
        request_id: bytes,
        asked: IdentifiedRequest,
        outcome: Dispatch | Refuse,
    ) -> None:
        """Count a decision."""
        who = asked.identity, asked.trace_id, asked.waits
        self.decisions.append(Decided(self._now(), request_id, outcome, *who))
        if isinstance(outcome, Dispatch) and outcome.decision.reason is DispatchReason.NOT_OFFERED:
            self.pressure["fallback", DispatchReason.NOT_OFFERED.value] += 1

    def rejected(self, rejected: Rejected) -> None:
        """Count a turn that was not let in."""
        self.rejections[rejected.code] += 1
        if rejected.status >= _TOO_MANY:
            self.pressure["error", rejected.code] += 1

    def let_in(self, turn: EnteringTurn, waited_s: float) -> None:
        """Count how long a turn waited before the fleet (QueueWatch)."""
        key = turn.terms.name, turn.session_class
        waits = self.waits_s.get(key)
        if waits is None:
            waits = self.waits_s[key] = Histogram()
        waits.observe(waited_s)

    def waited(self, wait: TurnWait) -> None:
        """Count how long a turn waited for one thing, and behind how many it came (QueueWatch)."""
        self.waits_for_s[wait.reason].observe(wait.waited_s)
        self.places[wait.reason].observe(wait.came.place)

    def turned_away(self, turn: EnteringTurn, reason: TurnAwayReason) -> None:
        """Count a turn that the queue turned away (QueueWatch)."""
        self.not_let_in[turn.terms.name, turn.session_class.value, reason.value] += 1

    def limited(self, terms: TenantTerms, kind: LimitKind) -> None:
        """Count a request that is over its tenant's rate limit."""
        self.not_let_in[terms.name, "", f"limit_{kind.value}"] += 1

    def pressed(self, kind: str, reason: str) -> None:
        """Count a turn that could not go as it was decided."""
        self.pressure[kind, reason] += 1

    def compared(self, dispatch: Dispatch, usage: Usage | None, came: PromptOutcome) -> None:
        """Set the receipt against the engine's own count: was what we sent it for really there? Of
        a prompt that was to be computed apart the receipt says what was there, and the count is of
        what came here."""
        expected = dispatch.decision.cached_tokens
        prompt_tokens = dispatch.prompt_tokens if usage is None else usage.prompt_tokens
        self.lost_tokens += min(came.lost_tokens, prompt_tokens)
        self.reseeds += came.mode is ExecutionMode.RESEED
        if came.mode is ExecutionMode.RESEED or (
            expected and came.mode is ExecutionMode.COLD_PREFILL
        ):
            self.pressure["fallback", came.mode.value] += 1
        if usage is None or not usage.tells_cached or dispatch.session is None:
            return
        if dispatch.decision.prefill is not None:
            return
        self.expected_cached_tokens += expected
        self.receipt_error_tokens.observe(abs(expected - usage.cached_tokens))
        if expected and not usage.cached_tokens:
            self.zero_hits += 1

    def first_byte(self, duration_s: float) -> None:
        """Count the time to a turn's first byte."""
        self.first_byte_s.observe(duration_s)

    def ran(self, mode: ExecutionMode | None, *, first_byte_s: float, duration_s: float) -> None:
        """Count how long a turn that is over took, served in that mode."""
        latency = self.by_mode.get(mode)
        if latency is None:
            latency = self.by_mode[mode] = ModeLatency()
        latency.first_byte_s.observe(first_byte_s)
        latency.duration_s.observe(duration_s)

    def finished(self, duration_s: float, usage: Usage | None) -> None:
        """Count a turn that is over, with what its answer said."""
        self.duration_s.observe(duration_s)
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.output_tokens += usage.output_tokens
