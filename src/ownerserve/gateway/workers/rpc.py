"""This module asks over workers' RPC ports for places for turns and for hand-overs of sessions.

**Lines** own the sockets: one for each worker, many requests in flight on it. Each wait has a
deadline; until then a request that may be lost is said again, under its nonce. A place that comes
later is given back.

WorkerNames own which life of a worker has which names: the gateway's, the address where it reaches
it, and its own, known to the directory and to its peers.

**Places.** A direct append goes where its state is, at once: the worker judges it as it arrives,
before any work. Every other turn asks for its place first. One that all refused for want of room is
sent without a promise and waits in the best worker's queue. Each wait has a deadline: who hears
nothing sends the turn unasked. A worker that holds no places (vLLM) is asked what it would say, and
what it has of the turn's session: where that is less than was counted on, the turn is decided anew.

    turn ── ask ── Reserved ── sent with its number, Commit behind it
                |─ Reject(reason) ── the next candidate
                |─ engine_busy ── sent unasked, counted
                |─ nothing in time ── Cancel, sent unasked, counted
                `─ the client hangs up ── Cancel

A worker that does not know Cancel may answer after it: that place is given back at once.

**Releases.** Owners are asked to hand sessions over to where their turns are done now, or to end
one whose last turn was done elsewhere: off the request path. router/knowledge.py decides which are
asked, and how many at once.

    AskRelease ── ReleaseSession over the node's RPC ──> the owner ── Transfer ──> directory
    ReleaseEnded <── Released, Reject(reason), or nothing in RELEASE_S ──┘
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from enum import StrEnum

import zmq

from ownerserve.gateway.http.heads import RequestHead
from ownerserve.kv.addresses import is_loopback, parse_endpoint
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, SessionId, TurnId, WorkerId
from ownerserve.kv.messages import PlacementAction, RoutingUnit, Tier
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.kv.wire.framed import AsyncFramedClient
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    MAX_FRAME_BYTES,
    Admit,
    Cancel,
    Cancelled,
    Commit,
    Probe,
    Reject,
    Release,
    Released,
    ReleaseSession,
    Reserve,
    Reserved,
    RpcRequest,
    Said,
    Seed,
    decode_answer,
    encode,
    new_nonce,
)
from ownerserve.router.decision import Decision, TurnClass
from ownerserve.router.knowledge import end_of
from ownerserve.router.messages import AskRelease, Dispatch, LetGo, ReleaseEnd, ReleaseEnded
from ownerserve.router.sessions import SessionTable
from ownerserve.router.worker import Worker

log = logging.getLogger("ownerserve.gateway")

REPEAT_S = 0.25
"""Unanswered for so long, a request is said again; a lost connection comes back sooner."""
READ_BYTES_MAX = 4 * MAX_FRAME_BYTES
"""A longer frame ends the connection, as at a worker."""
EVERYWHERE = ("0.0.0.0", "[::]")


class WorkerLines:
    """The lines are one to each worker that tells where its RPC port is, and that can be reached
    there.

    `counts`: `late`, places that came when nobody waited any more; `cancelled`, workers' answers to
    a Cancel. `asked`: requests by type, each once however often it was said.
    """

    def __init__(self, *, key: FleetKey | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self._key = key
        self._lines: dict[WorkerId, WorkerLine] = {}

    def learn(self, worker: WorkerId, host: str, address: str | None) -> None:
        """Open the line to `worker`, which serves at `host` and answers at `address`; close it when
        that is None.

        An address on loopback is the worker's own: of use to who reaches the worker there too. One
        that stands for all of the worker's is reached where the worker serves.
        """
        line = self._lines.get(worker)
        if line is not None and line.stated == address:
            return
        if line is not None:
            self._lines.pop(worker).close()
        if address is None:
            return
        try:
            rpc_host, _ = parse_endpoint(address, field="rpc", mend="")
            if is_loopback(host) or not is_loopback(rpc_host):
                place = host if rpc_host in EVERYWHERE else rpc_host
                self._lines[worker] = WorkerLine(
                    address,
                    address.replace(rpc_host, place, 1),
                    key=self._key,
                    counts=self.counts,
                    asked=self.asked,
                )
        except (zmq.ZMQError, InvalidInput) as error:
            log.warning("worker %s: its RPC address %s: %s", worker, address, error)

    def of(self, worker: WorkerId) -> WorkerLine | None:
        """Return the line to a worker; None when there is none."""
        return self._lines.get(worker)

    def lender_of(self, decision: Decision, names: WorkerNames) -> LenderAddress | None:
        """Return the worker that holds what the decision wants brought; None where that is nobody,
        or it can't be reached from the target: an address on loopback is of use to who is there."""
        source = None if decision.source is None else decision.source.worker
        return None if source is None else self.read_by(decision.worker, source, names)

    def prefiller_of(self, decision: Decision, names: WorkerNames) -> LenderAddress | None:
        """Return the worker that the target itself asks to compute the prompt: it and the target
        lend and read state by our protocol, and it can be reached from there. None where nobody is
        to compute it apart, or where the gateway asks itself, as of engines whose role their
        operator vouches for."""
        prefill = decision.prefill
        if prefill is None or not (_lends(prefill) and _lends(decision.worker)):
            return None
        return self.read_by(decision.worker, prefill, names)

    def read_by(self, reader: Worker, holder: Worker, names: WorkerNames) -> LenderAddress | None:
        """Return where `reader` reaches `holder`; None where it does not, or they are one."""
        unit = None if holder.unit is None else names.to_workers(holder.unit)
        lending, reading = self.of(holder.id), self.of(reader.id)
        if holder is reader or unit is None or lending is None or reading is None:
            return None
        if lending.is_on_loopback != reading.is_on_loopback:
            return None
        return LenderAddress(unit, lending.address)

    def close(self) -> None:
        """Close all lines and ask nobody any more."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()


def _lends(worker: Worker) -> bool:
    """Return whether others read state from the worker's device; who lends reads too."""
    return Tier.DEVICE in worker.profile.lends


class WorkerLine:
    """A line is one connection to a worker, on which many requests may be in flight."""

    def __init__(
        self,
        stated: str,
        address: str,
        *,
        key: FleetKey | None,
        counts: Counter[str],
        asked: Counter[str],
    ) -> None:
        self.stated, self.address = stated, address
        host, _ = parse_endpoint(address, field="rpc", mend="")
        self.is_on_loopback = is_loopback(host)
        self._counts = counts
        self._asked = asked
        self.holds_places = True
        """False once the worker has said that it holds none (vLLM): it is asked no more."""
        self._client = AsyncFramedClient(
            address, key=key, read_bytes_max=READ_BYTES_MAX, unclaimed=self._late
        )

    async def ask(self, request: RpcRequest, within_s: float) -> Said | None:
        """Return the answer; None when none that can be read comes in time, or the line is closed.
        Whoever stops waiting, also by being cancelled, calls the request off."""
        nonce = new_nonce()
        self._count(request)
        try:
            data = await self._client.ask(
                encode(request, nonce), within_s=within_s, repeat_s=REPEAT_S
            )
        except asyncio.CancelledError:
            self.tell(Cancel(nonce))  # also where the answer has come: nobody takes it
            raise
        answer = None if data is None else self._decoded(data)
        if answer is None and not self._client.is_closed:
            self.tell(Cancel(nonce))
        return answer

    def tell(self, request: RpcRequest | Cancel) -> None:
        """Send a request whose answer changes nothing."""
        self._count(request)
        self._client.tell(encode(request))

    def close(self) -> None:
        """Hang up: who waits for an answer gets none, and goes on."""
        self._client.close()

    def _count(self, request: RpcRequest | Cancel) -> None:
        self._asked[str(request.__struct_config__.tag)] += 1

    def _decoded(self, data: bytes) -> Said | None:
        try:
            return decode_answer(data)
        except InvalidInput as error:
            log.warning("worker at %s: an answer that can't be read: %s", self.address, error)
            return None

    def _late(self, data: bytes) -> None:
        """Give a place back that comes when nobody waits for it any more."""
        answer = self._decoded(data)
        if isinstance(answer, Reserved):
            self._counts["late"] += 1
            self.tell(Release(answer.reservation))
        elif isinstance(answer, Cancelled):
            self._counts["cancelled"] += 1


Life = tuple[Incarnation, int]


class WorkerNames:
    """This table translates the names of routing units that answer: this gateway's and the workers'
    own.

    When a unit began, to the nanosecond, and its rank say which one it is, under whatever name.
    """

    def __init__(self) -> None:
        self._here: dict[Life, RoutingUnit] = {}
        self._own_names: dict[Life, WorkerId] = {}

    def up(self, unit: RoutingUnit, own_name: str | None) -> None:
        """Note a worker that answers; `own_name` is what it calls itself, where it says so."""
        life = unit.incarnation, unit.dp_rank
        self._here[life] = unit
        if own_name is not None:
            self._own_names[life] = WorkerId(own_name)

    def down(self, worker: str) -> None:
        """Forget the names of a worker that is silent."""
        for life in [life for life, unit in self._here.items() if unit.worker == worker]:
            del self._here[life]
            self._own_names.pop(life, None)

    def here(self, unit: RoutingUnit) -> RoutingUnit:
        """Return the unit under this gateway's name of it, or as it is when it has none."""
        return self._here.get((unit.incarnation, unit.dp_rank), unit)

    def to_workers(self, unit: RoutingUnit) -> RoutingUnit | None:
        """Return the unit as the directory and its peers name it; None when it never said."""
        name = self._own_names.get((unit.incarnation, unit.dp_rank))
        return None if name is None else RoutingUnit(name, unit.dp_rank, unit.incarnation)


TURNS = (b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages")
MARGIN = 1.25
"""A prompt's tokens are estimated from its bytes; one that is longer than its place is judged anew
as it arrives."""
OUTPUT_TOKENS = 1024
"""Asked for the answer of a session that has not answered yet."""

_APPENDS = (TurnClass.DECODE_CONTINUATION, TurnClass.SMALL_INCREMENT, TurnClass.LONG_TOOL_OUTPUT)
_ON_THE_SPOT = (PlacementAction.COLOCATED_PREFILL, PlacementAction.DECODE_CONTINUATION)


class Manner(StrEnum):
    """A manner says how a request deals with workers' admission."""

    ASKING = "asking"
    """The request asks first; a direct append is judged on its arrival."""
    UNASKED = "unasked"
    """The request takes its chance in a queue."""


def is_turn(head: RequestHead) -> bool:
    """Return whether a request is a session's turn: a listing needs no place."""
    return head.method == b"POST" and head.target.startswith(TURNS)


def is_direct_append(dispatch: Dispatch) -> bool:
    """Return whether the worker should have the session's state on its device, so that the turn
    goes there unasked."""
    decision = dispatch.decision
    return (
        decision.cached_tokens > 0
        and dispatch.turn in _APPENDS
        and decision.action in _ON_THE_SPOT
        and not decision.moved_tokens
        and not _could_load_more(decision)
    )


def _could_load_more(decision: Decision) -> bool:
    """Return whether the worker has more below its device than on it, as far as ways were priced:
    it may load that."""
    return any(
        way.worker is decision.worker and way.cached_tokens > decision.cached_tokens
        for way in decision.alternatives
    )


def seed_of(dispatch: Dispatch, sessions: SessionTable) -> Seed:
    """Return the place that a turn needs, in tokens, by the router's estimates and a margin."""
    known = None if dispatch.session is None else sessions.get(dispatch.session)
    output = known.output_tokens if known is not None else 0.0
    return Seed(
        int(dispatch.prompt_tokens * MARGIN) + 1,
        output_tokens=int(output * MARGIN) + 1 if output else OUTPUT_TOKENS,
    )


ASK_S = 0.6
"""A little over what a worker takes at most to say that it is busy."""

_NO_WORD = (
    WorkerRefusal.ENGINE_BUSY,
    WorkerRefusal.TOO_LONG,  # by an estimate: the worker counts the tokens of the turn itself
    WorkerRefusal.UNKNOWN_RESERVATION,  # it holds no places
    WorkerRefusal.MALFORMED,
)
"""Refusals that say nothing of the turn: it is sent unasked."""


class HeldPlace:
    """A held place is one at a worker for one turn: until the worker begins to answer, or it is
    given back."""

    def __init__(self, line: WorkerLine, number: int) -> None:
        self.number = number
        self._line = line

    def use(self) -> None:
        """Tell the worker that the turn is on its way."""
        self._line.tell(Commit(self.number))

    def give_back(self) -> None:
        """Tell the worker that the turn won't come, or not to its answer. A place that was used up
        knows no release."""
        self._line.tell(Release(self.number))


class Places:
    """The places are what all workers' admission is asked for.

    `counts`: what came of asking, by outcome; `late`: places that came when nobody waited any more;
    `cancelled`: workers' answers to a Cancel.
    """

    def __init__(self, lines: WorkerLines, *, ask_s: float = ASK_S) -> None:
        self.counts = lines.counts
        self._ask_s = ask_s
        self._lines = lines

    def can_ask(self, worker: WorkerId) -> bool:
        """Return whether the worker told where its admission answers."""
        return self._lines.of(worker) is not None

    def are_held(self, worker: WorkerId) -> bool:
        """Return whether the worker can be asked, and has not said that it holds no places."""
        line = self._lines.of(worker)
        return line is not None and line.holds_places

    async def reserve(
        self, worker: WorkerId, turn: str, *, seed: Seed, session: SessionId | None
    ) -> HeldPlace | Admit | Reject | None:
        """Ask for a place for the turn of `session`: the place, what is said where none are held,
        or why not; None when nothing was heard in time."""
        line = self._lines.of(worker)
        answer = None
        if line is not None and line.holds_places:
            answer = await line.ask(Reserve(TurnId(turn), seed), self._ask_s)
            if answer == Reject(WorkerRefusal.UNKNOWN_RESERVATION):
                self.counts[WorkerRefusal.UNKNOWN_RESERVATION.value] += 1
                line.holds_places = False
        if line is not None and not line.holds_places:
            answer = await line.ask(Probe(seed, session), self._ask_s)
        match answer:
            case Reserved():
                self.counts["reserved"] += 1
                assert line is not None
                return HeldPlace(line, answer.reservation)
            case Admit():
                self.counts["admitted"] += 1
                return answer
            case Reject(reason):
                self.counts[reason.value] += 1
                return None if reason in _NO_WORD else answer
            case _:
                self.counts["no_answer"] += 1
        return None


RELEASE_S = 2.0
"""An owner that says nothing for so long may still have handed over: the next answer tells."""


class Releasing:
    """This class asks owners to hand sessions over. `tell` hears how each question ended. `counts`:
    the same by outcome, refusals by reason."""

    def __init__(
        self, lines: WorkerLines, names: WorkerNames, *, tell: Callable[[ReleaseEnded], None]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._lines = lines
        self._names = names
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, wanted: AskRelease) -> None:
        """Begin to ask the owner to hand the session over; nothing waits for the answer."""
        target = self._names.to_workers(wanted.target)
        known = None if target is None else ReleaseSession(wanted.session, wanted.epoch, target)
        self._begin(wanted, known)

    def let_go(self, wanted: LetGo) -> None:
        """Begin to ask the session's former worker to let its cached state go first; how that ends
        is counted."""
        self._keep(self._let_go(wanted))

    def end(self, wanted: AskRelease) -> None:
        """Begin to ask the owner to end the session, whose last turn was done at the target."""
        self._begin(wanted, ReleaseSession(wanted.session, wanted.epoch))

    def _begin(self, wanted: AskRelease, request: ReleaseSession | None) -> None:
        self._keep(self._ask(wanted, request))

    def _keep(self, asking: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(asking)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop asking: what is under way is cancelled."""
        for task in self._tasks:
            task.cancel()

    async def _ask(self, wanted: AskRelease, request: ReleaseSession | None) -> None:
        end = ReleaseEnd.KEPT
        try:
            end = self._end_of(await self._answer(wanted.source, request))
        finally:
            self._tell(ReleaseEnded(wanted.session, wanted.epoch, end))

    async def _let_go(self, wanted: LetGo) -> None:
        answer = await self._answer(wanted.source, ReleaseSession(wanted.session))
        self.counts["let_go"] += isinstance(answer, Released)

    async def _answer(self, source: RoutingUnit, request: ReleaseSession | None) -> Said | str:
        line = self._lines.of(source.worker)
        if line is None or request is None:
            return "unreachable"
        answer = await line.ask(request, RELEASE_S)
        return "no_answer" if answer is None else answer

    def _end_of(self, answer: Said | str) -> ReleaseEnd:
        match answer:
            case Released():
                self.counts["released"] += 1
                return ReleaseEnd.RELEASED
            case Reject(reason):
                self.counts[reason.value] += 1
                return end_of(reason)
            case str():
                self.counts[answer] += 1
            case _:
                self.counts["malformed"] += 1
        return ReleaseEnd.KEPT
