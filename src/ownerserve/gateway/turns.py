"""Turns is what an exchange asks of the gateway at each step, from who asks to what came of it; the
observer remembers what came.

`Turns` owns the router's state and all that a turn passes beside its bytes: who asks and whose the
session is (asking), the queue before the fleet (admission), places and connections at workers. One
call of each step of a turn; nothing here knows a socket's bytes.

`Observer` keeps what the gateway did, for people: latencies, token counts, the last decisions. It
owns no decision. It costs two list look-ups and a few additions a request; everything with a name
or a label is made when somebody asks (metrics, admin).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from ownerserve.directory.port import Directory
from ownerserve.gateway.asking import Asking, IdentifiedRequest, SessionFinder
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address, open_access
from ownerserve.gateway.http.callers import Caller
from ownerserve.gateway.http.client import HttpRequest
from ownerserve.gateway.http.door import descriptor_limit, share_of
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.http.upstream import IDLE_MAX, WorkerPool
from ownerserve.gateway.logs import AccessLog, WorkerLog
from ownerserve.gateway.owner_changes import OwnerChanges
from ownerserve.gateway.receipts import receipts_of
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
from ownerserve.gateway.workers.rpc import (
    HeldPlace,
    Places,
    Releasing,
    WorkerLines,
    WorkerNames,
    seed_of,
)
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import ExecutionMode, Tier
from ownerserve.kv.wire.headers import TurnLine
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Admit, Reject
from ownerserve.router.admission import AdmissionQueue, Go, SessionAdmission, Ticket, forked_from
from ownerserve.router.decision import DispatchReason, Label, TurnClass
from ownerserve.router.messages import (
    Aborted,
    AskRelease,
    Broken,
    Claimed,
    Dispatch,
    Done,
    Down,
    Failed,
    Failure,
    FirstByte,
    Gone,
    Misjudged,
    Refuse,
    ReleaseEnded,
    Reported,
    SessionEnd,
    Stamped,
    Unpromised,
)
from ownerserve.router.opening import OpeningRule
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage, believed, scan_usage
from ownerserve.router.requests.identity import SessionIdentity
from ownerserve.router.sessions import DEFAULT_BYTES_PER_TOKEN, RoutedSession, Use
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


DOWN_ASKED_MAX = 2
"""How many workers that are down a turn is tried at when nobody is up: who listens again serves it
before the next probe finds that out."""
DECIDED_MAX = 3
"""From this attempt on a turn goes where it was decided, whatever is held there."""

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


class LostDispatch(msgspec.Struct, frozen=True, gc=False):
    """A lost dispatch is one of which nothing came, for the reason `why`."""

    dispatch: Dispatch
    why: Why


class NotLetIn(msgspec.Struct, frozen=True, gc=False):
    """A turn that was not let in has ended; `ticket`: it waited for a seat."""

    ticket: Ticket | None = None


class Route:
    """A route is how a turn that was decided gets to its worker: over which connections, with which
    lines in its head, and with a place where the worker's admission gives one."""

    __slots__ = ("_turns", "dispatch")

    def __init__(self, turns: Turns, dispatch: Dispatch) -> None:
        self._turns = turns
        self.dispatch = dispatch

    @property
    def pool(self) -> WorkerPool:
        """Return the connections to the worker."""
        return self._turns.pools[self.dispatch.worker]

    @property
    def can_ask(self) -> bool:
        """Return whether the worker's admission can be asked of a turn."""
        return self._turns.places.can_ask(self.dispatch.worker)

    @property
    def gives_places(self) -> bool:
        """Return whether the worker's admission can be asked, and holds places as far as is
        known."""
        return self._turns.places.are_held(self.dispatch.worker)

    async def reserve(self, request_id: bytes) -> HeldPlace | Reject | Correction | None:
        """Ask the worker for a place for the turn: the place, or why not; None when it is sent
        without one: nothing was heard in time, or the worker holds none and lets it come."""
        turns, dispatch = self._turns, self.dispatch
        seed = seed_of(dispatch, turns.state.sessions)
        came = await turns.places.reserve(
            dispatch.worker, request_id.decode(), seed=seed, session=dispatch.session
        )
        if isinstance(came, Admit):
            return turns.told_held(dispatch, came)
        if came is None:
            turns.observer.pressed("unasked", "no_word")
        return came

    def line(self, asked: IdentifiedRequest) -> TurnLine:
        """Make the line that tells the worker of the turn, by what is known now."""
        return turn_line_of(self.dispatch, asked, self._turns.session_of(self.dispatch))

    def head_lines(self, line: TurnLine) -> bytes:
        """Return the lines that the turn's head has for the worker alone: its key, and `line`."""
        return self._turns.access.line + order_lines(line)


class Turns:
    """This class joins what turns pass in one gateway. `directory` is the Gateway's."""

    def __init__(self, config: Config, directory: Directory | None) -> None:
        self.now = asyncio.get_running_loop().time
        self._first_byte_timeout_s = config.first_byte_timeout_s
        self._whole_answer_timeout_s = config.whole_answer_timeout_s
        self.policy = make_policy(config.policy, config.settings)
        self.state = RouterState(
            self.policy,
            settings=config.settings,
            down_asked_max=DOWN_ASKED_MAX,
            opening=OpeningRule(self.now() + config.opening_s, behind_ms=config.settings.hot_ms),
        )
        self.access = open_access(config.worker_key, config.worker_ca_file)
        self.share = share_of(descriptor_limit(), len(config.workers))
        self.pools: dict[WorkerId, WorkerPool] = {}
        """Whom turns may run at, also of a worker that leaves while something runs there."""
        self._connect_timeout_s = config.connect_timeout_s
        seats = config.seats
        self.admission = AdmissionQueue(
            None if seats is None else SessionAdmission(self.state.fleet, seats)
        )
        self.asking = Asking(resolve=self.state.sessions.resolve, is_known=self._is_known)
        self.worker_names = WorkerNames()
        self.finder = None
        if directory is not None:
            self.finder = SessionFinder(directory, self.worker_names, tell=self.told)
        self.worker_log = WorkerLog()
        self._access = AccessLog() if config.access_log else None
        self.observer = Observer(self.now, decisions_kept=config.decisions_kept)
        self.lines = WorkerLines(key=config.fleet_key)
        self.places = Places(self.lines)
        self._receipts = receipts_of(config.receipts)
        self.releasing = Releasing(self.lines, self.worker_names, tell=self.told)

    def open_pool(self, address: Address) -> None:
        """Make the pool of connections to a worker; none is opened yet."""
        self.pools[address.worker] = WorkerPool(
            address,
            self.access,
            connect_timeout_s=self._connect_timeout_s,
            idle_max=min(self.share.idle_max, IDLE_MAX),
        )

    def told(self, event: Reported | Gone | ReleaseEnded | Claimed) -> None:
        """Tell the state the news of a worker or the directory."""
        now = self.now()
        if not isinstance(event, Claimed):
            self.state.handle(event, now)
            return
        session = self.state.sessions.resolve(event.session)
        owner = self._owner_of(session)
        self.state.handle(event, now)
        self.observer.owner_changes.look(
            session, owner, self._owner_of(session), how="told", now_s=now
        )
        if self.finder is not None:
            self.finder.heard(event.epoch)

    # A turn, step by step

    def read(self, request: HttpRequest) -> Arrived:
        """Read who asks, and for what. Raises Rejected."""
        at_s = self.now()
        asked = self.asking.read(request)
        return Arrived(asked, at_s, self._look_up(asked))

    def _look_up(self, asked: IdentifiedRequest) -> LookUp | None:
        """Return what asks the directory, if it may know more of the session than this gateway;
        else None.

        One without a place to go to is new here, known by a worker's inventory alone, or its owner
        is lost: another gateway may have sent it elsewhere since.
        """
        name = asked.arrive.session
        if not name or self.finder is None:
            return None
        known = self.state.sessions.get(self.state.sessions.resolve(name))
        if known is not None and known.live_home is not None:
            return None
        return partial(self.finder.look_up, name)

    def enter(self, asked: IdentifiedRequest, go: Go) -> Ticket | None:
        """Call `go` at once and return None, or queue it for a seat and return the ticket to leave
        with."""
        arrive = asked.arrive
        if arrive.session is None or self.admission.admission is None:
            go(self.now())
            return None
        parent = forked_from(
            asked.named_parent,
            arrive.parent,
            shared=arrive.shared_bytes or 0,
            prompt=arrive.prompt_bytes,
        )
        tokens = int(arrive.prompt_bytes / DEFAULT_BYTES_PER_TOKEN)
        return self.admission.enter(arrive.session, tokens, go, parent=parent, now_s=self.now())

    def decide(
        self, asked: IdentifiedRequest, lost: LostDispatch | None = None, *, request_id: bytes
    ) -> Route | Refuse:
        """Decide where the turn runs, for the first time or after a dispatch that was lost, and
        note the decision."""
        event = asked.arrive if lost is None else self._end_of(lost)
        outcome = self.state.handle(event, self.now())
        self.observer.decided(request_id, asked.identity, outcome)
        if lost is not None and not lost.dispatch.decision.worker.up:
            self.worker_log.down(
                lost.dispatch.worker, why=Down.UNREACHABLE, cause="a turn's connection failed"
            )
        if self._access is not None:
            self._access.decided(
                request_id,
                outcome,
                session=asked.arrive.session,
                lost=None if lost is None else lost.dispatch.receipt,
                now_s=self.now(),
            )
        if isinstance(outcome, Refuse):
            return outcome
        if lost is not None and outcome.reason is DispatchReason.RETRY_UNASKED:
            self.observer.pressed("unasked", "all_refused")
        return Route(self, outcome)

    def patience_s(self, asked: IdentifiedRequest) -> float:
        """Return how long a worker that is up may send nothing of the answer, in seconds."""
        if asked.fields.raw("stream") == b"true":
            return self._first_byte_timeout_s
        return self._whole_answer_timeout_s

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

    def _end_of(self, lost: LostDispatch) -> Failed | Unpromised | Misjudged:
        """Count a dispatch that was lost, and return what the state is told of it."""
        receipt, why = lost.dispatch.receipt, lost.why
        if isinstance(why, Correction):
            self.observer.pressed("corrected", why.value)
            return Misjudged(receipt)
        if isinstance(why, Failure):
            self.observer.pressed("failed", why.value)
            return Failed(receipt, why)
        self.observer.pressed("refused", why.value)
        has_no_room = why is WorkerRefusal.NO_ROOM
        return Unpromised(receipt) if has_no_room else Failed(receipt, Failure.REFUSED)

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
        self.state.handle(FirstByte(dispatch.receipt, stamp.status, answer), now)
        if session is not None and owner is not None:
            self.observer.owner_changes.look(
                session, owner, self._owner_of(session), how="answered", now_s=now
            )
        self.observer.first_byte(now - started_s)
        if self._access is not None:
            self._access.began(dispatch.receipt, head.status, now_s=now)
        self._report(dispatch, stamp, now)
        return BegunAnswer(stamp, now - started_s)

    def receipt(self, dispatch: Dispatch, head: ResponseHead, caller: Caller) -> bytes:
        """Return the header lines that tell the client of the decision."""
        return self._receipts.lines(dispatch, head, tenant=caller.tenant)

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
        done = Done(dispatch.receipt, told, alias, prompt=asked.prompt)
        wanted = self.state.handle(done, now)
        if isinstance(wanted, AskRelease) and asked.identity.final:
            self.releasing.end(wanted)
        elif isinstance(wanted, AskRelease):
            self.releasing.ask(wanted)
        self.observer.finished(now - started_s, usage)
        self.observer.ran(came.mode, first_byte_s=begun.first_byte_s, duration_s=now - started_s)
        if self._access is not None:
            self._access.ended(dispatch.receipt, "finished", usage=usage, now_s=now)
        self.observer.compared(dispatch, usage, came)
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
        if isinstance(event, NotLetIn):
            if event.ticket is not None:
                self.admission.leave(event.ticket)
            self.asking.ended(asked.identity)
            return
        if isinstance(event, Broken):
            self.observer.pressed("failed", "broken")
        if event is not None:
            self.state.handle(event, self.now())
            if self._access is not None:
                end = "broken" if isinstance(event, Broken) else "aborted"
                self._access.ended(event.receipt, end, usage=None, now_s=self.now())
        self._over(asked, 0)

    def _over(self, asked: IdentifiedRequest, tokens: int) -> None:
        """Note that nothing of the turn runs any more; its session's context is `tokens` (0: not
        told)."""
        self.asking.ended(asked.identity)
        if self.admission.admission is not None and asked.arrive.session is not None:
            self.admission.ended(asked.arrive.session, tokens, self.now())

    def _report(self, dispatch: Dispatch, stamp: Stamp, now: float) -> None:
        """Tell the state where the worker says that the prompt's state will be once the turn has
        run, and who owns the session."""
        session, extent, owned = dispatch.session, stamp.extent, stamp.owned
        if session is None:
            return
        if extent is not None:
            tip, tokens = extent.prefix_hash, extent.tokens
            report = Reported(stamp.unit, Tier.DEVICE, tip, tokens, session=session)
            self.state.handle(report, now)
        if owned is not None:
            owner = self.worker_names.here(owned.unit)
            self.told(Claimed(session, owner, owned.epoch, owned.version))

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


TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


_SERVER_ERROR = 500
_TOO_MANY = 429
"""From this status on an error is the fleet's or ours, not the client's."""


class Histogram:
    """A histogram counts values by bucket; `counts` has one more entry than `edges` (the rest)."""

    def __init__(self, edges: Sequence[float] = BUCKETS_S) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


class ModeLatency:
    """The latencies of one execution mode's turns whose answers came whole."""

    def __init__(self) -> None:
        self.first_byte_s = Histogram()
        self.duration_s = Histogram()


Decided: TypeAlias = tuple[float, bytes, SessionIdentity | None, Dispatch | Refuse]
"""One decision: when (s), request id, who asked, what was decided."""


class Observer:
    """The observer is the gateway's memory of what it did. `now` stamps decisions."""

    def __init__(self, now: Callable[[], float], *, decisions_kept: int) -> None:
        self.decisions: deque[Decided] = deque(maxlen=decisions_kept)
        self.first_byte_s = Histogram()
        self.duration_s = Histogram()
        self.by_mode: dict[ExecutionMode | None, ModeLatency] = {}
        """None: turns of which nobody says how they were served."""
        self.owner_changes = OwnerChanges()
        self.began_at_s = now()
        self.rejections: Counter[str] = Counter()
        self.pressure: Counter[tuple[str, str]] = Counter()
        """(kind, reason): all that did not go as decided. Errors and fallbacks are one pressure:
        who counts only one of them hides it in the other (seed 003, v5)."""
        self.bad_lines: Counter[str] = Counter()
        """Fields of workers' answer lines that could not be used."""
        self.receipt_error_tokens = Histogram(TOKEN_BUCKETS)
        self.expected_cached_tokens = self.zero_hits = 0
        self.reseeds = self.lost_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._now = now

    def decided(
        self, request_id: bytes, identity: SessionIdentity | None, outcome: Dispatch | Refuse
    ) -> None:
        """Count a decision."""
        self.decisions.append((self._now(), request_id, identity, outcome))
        if isinstance(outcome, Dispatch) and outcome.decision.reason is DispatchReason.NOT_OFFERED:
            self.pressure["fallback", DispatchReason.NOT_OFFERED.value] += 1

    def rejected(self, rejected: Rejected) -> None:
        """Count a turn that was not let in."""
        self.rejections[rejected.code] += 1
        if rejected.status >= _TOO_MANY:
            self.pressure["error", rejected.code] += 1

    def pressed(self, kind: str, reason: str) -> None:
        """Count a turn that could not go as it was decided."""
        self.pressure[kind, reason] += 1

    def compared(self, dispatch: Dispatch, usage: Usage | None, came: PromptOutcome) -> None:
        """Set the receipt against the engine's own count: was what we sent it for really there?"""
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
