"""A turn moves between nodes amid its answer.

    gateway ── Take(turn) ──> T <══ lends, reads ══ S   what it has sealed; it runs on
                              T ── StopTurn ──> S     between two steps: its tokens, sampler, text
                              T <── MoveTurn ── S     sent once; S holds the turn meanwhile
                              T ── TurnKept ──> S     S ends its leg, and says how much that had
    gateway <── TurnSent ──── T <── TurnSent ── S
    gateway ── the turn's leg, behind so many tokens ──> T      which goes on, and not before

| S | leaves by | the turn |
|---|---|---|
| stopping | between two steps; none such writes an answer: refused | runs |
| sending | `TurnKept`; a refusal, or nothing in `KEPT_S`: `Cancel`, and it goes on | is held |
| sent | at once: the leg ends | is T's |

| T | leaves by | holds |
|---|---|---|
| expecting | `MoveTurn`; what S says of it, or silence | state that came ahead, as cache |
| keeping | the turn's leg; `Cancel`; nobody in `UNCLAIMED_S` | the turn as it was sent |

T computes nothing until the leg comes, which the gateway sends because S has ended its own. So who
hears nothing of a turn that it sent may go on with it, whatever became of what it sent: nobody
else does. State is not sent: T brings it from S, most of it before S stops (turn_states.py), the
rest as for any turn, and computes the open tail.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple, Protocol, cast

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    DropTurn,
    MoveTurn,
    Nonce,
    Reject,
    Released,
    RpcAnswer,
    RpcRequest,
    Said,
    StopTurn,
    Take,
    TurnKept,
    TurnSent,
    new_nonce,
)
from ownerserve.node.transfers.lenders import OnEngine

KEPT_S = 2.0
"""So long T may take to say that it has a turn, which nobody writes on meanwhile."""
STOPPED_S = 10.0
"""So long S may take for a step, and for sending."""
UNCLAIMED_S = 30.0
"""A turn whose leg does not come is kept so long: its gateway has died, or its client left."""
KEPT_MAX = 64


class StoppedTurn(NamedTuple):
    """A `StoppedTurn` is what an engine gives of a turn: its own name of the request, how many
    tokens of its answer the client is told, and all that is needed to go on."""

    request_id: str
    tokens: int
    state: bytes


class StoppingEngine(Protocol):
    """A `StoppingEngine` stops turns; called on its thread."""

    def stop(self, turn: str) -> StoppedTurn | WorkerRefusal:
        """Stop the turn of the request that its gateway calls so, or say why not."""
        ...

    def go_on(self, stopped: StoppedTurn) -> None:
        """Let a stopped turn go on here; one that was aborted meanwhile is no error."""
        ...

    def moved(self, stopped: StoppedTurn) -> None:
        """End a stopped turn, which is another's; one that was aborted meanwhile is no error."""
        ...


class BringsState(Protocol):
    """A `BringsState` brings the state of turns that are to come (turn_states.py)."""

    async def bring(
        self, session_id: SessionId, source: LenderAddress, peer: AskedTarget, /
    ) -> None:
        """Bring what the session's running turns have sealed at `source`, as far as it comes in
        time. Raises RuntimeError once this node's engine has ended."""
        ...


class AskedTarget(Protocol):
    """An `AskedTarget` is asked over its RPC port (target_side.py)."""

    async def ask(
        self, peer: LenderAddress, request: RpcRequest, *, within_s: float, nonce: Nonce
    ) -> Said | None:
        """Return its answer; None: no answer in time."""
        ...

    def call_off(self, worker: LenderAddress, nonce: Nonce) -> None:
        """Tell it that what was asked under the nonce is not wanted any more."""
        ...


class LeavingTurns:
    """`LeavingTurns` send turns to the workers that ask for them; called on the service's thread.
    `counts` says what came of it: metric labels."""

    def __init__(self, engine: StoppingEngine, on_engine: OnEngine) -> None:
        self.counts: Counter[str] = Counter()
        self._engine = engine
        self._on_engine = on_engine
        self._sending: set[asyncio.Task[RpcAnswer]] = set()

    async def send(self, asked: StopTurn, peers: AskedTarget) -> RpcAnswer:
        """Stop the turn and send it, or say why it stays. One that is begun is seen to its end,
        whoever waits for it."""
        sending = asyncio.get_running_loop().create_task(self._send(asked, peers))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return await asyncio.shield(sending)

    async def _send(self, asked: StopTurn, peers: AskedTarget) -> RpcAnswer:
        try:
            said = await self._sent(asked, peers)
        except RuntimeError:  # the engine has ended
            return Reject(WorkerRefusal.ENGINE_DEAD)
        self.counts["moved" if isinstance(said, TurnSent) else said.reason.value] += 1
        return said

    async def _sent(self, asked: StopTurn, peers: AskedTarget) -> TurnSent | Reject:
        engine = self._engine
        done = await asyncio.wrap_future(self._on_engine(lambda: engine.stop(asked.turn)))
        stopped = cast("StoppedTurn | WorkerRefusal", done)
        if isinstance(stopped, WorkerRefusal):
            return Reject(stopped)
        refused = await self._kept(asked, stopped, peers)
        if refused is None:
            self._on_engine(lambda: engine.moved(stopped))
            return TurnSent()
        self._on_engine(lambda: engine.go_on(stopped))
        return Reject(refused)

    async def _kept(
        self, asked: StopTurn, stopped: StoppedTurn, peers: AskedTarget
    ) -> WorkerRefusal | None:
        """Send the turn; return why the target does not have it."""
        nonce, turn = new_nonce(), MoveTurn(asked.turn, stopped.tokens, stopped.state)
        try:
            said = await peers.ask(asked.target, turn, within_s=KEPT_S, nonce=nonce)
        except InvalidInput:  # longer than a frame may be
            return WorkerRefusal.TOO_LONG
        if isinstance(said, TurnKept):
            return None
        peers.call_off(asked.target, nonce)
        return said.reason if isinstance(said, Reject) else WorkerRefusal.NO_ANSWER


class KeptTurn(NamedTuple):
    """A `KeptTurn` is a turn that goes on here once its leg comes, and who has its state."""

    tokens: int
    state: bytes
    source: LenderAddress
    until_s: float


class ComingTurns:
    """`ComingTurns` own the turns that were sent here and have not gone on; any thread may call.
    `check` says why an engine could not go on from such a state; `states` brings what they go on
    from. `counts` says what came of them: metric labels."""

    def __init__(self, check: Callable[[bytes], WorkerRefusal | None], states: BringsState) -> None:
        self.counts: Counter[str] = Counter()
        self._check = check
        self._states = states
        self._expected: dict[str, LenderAddress] = {}
        self._kept: dict[str, KeptTurn] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    async def take(self, asked: Take, peers: AskedTarget) -> RpcAnswer:
        """Have the turn sent here, or say why it stays; called on the service's thread."""
        try:
            said = await self._taken(asked, peers)
        except RuntimeError:  # the engine has ended
            said = Reject(WorkerRefusal.ENGINE_DEAD)
        end = "kept" if isinstance(said, TurnSent) else said.reason.value
        self.counts[end] += 1
        return said

    async def _taken(self, asked: Take, peers: AskedTarget) -> TurnSent | Reject:
        turn = asked.turn
        if asked.target is None:
            return Reject(WorkerRefusal.MALFORMED)
        with self._lock:
            if turn in self._expected or turn in self._kept:
                return Reject(WorkerRefusal.SESSION_IS_MOVING)
            if len(self._expected) + len(self._kept) >= KEPT_MAX:
                return Reject(WorkerRefusal.QUEUE_FULL)
            self._expected[turn] = asked.source
        try:
            if asked.session_id:
                await self._states.bring(asked.session_id, asked.source, peers)
            asyncio.get_running_loop().call_later(STOPPED_S + UNCLAIMED_S, self.poll)
            stop = StopTurn(turn, asked.target)
            said = await peers.ask(asked.source, stop, within_s=STOPPED_S, nonce=new_nonce())
        finally:
            with self._lock:  # what comes from now on is refused, and goes on where it was
                self._expected.pop(turn, None)
                kept = self._kept.get(turn)
        if isinstance(said, Reject):
            return said
        is_here = kept is not None or isinstance(said, TurnSent)  # its leg may have come by now
        return TurnSent() if is_here else Reject(WorkerRefusal.NO_ANSWER)

    def keep(self, sent: MoveTurn) -> RpcAnswer:
        """Keep a turn that was asked for, or say why not."""
        refused = self._check(sent.state)
        with self._lock:
            source = self._expected.get(sent.turn)
            if source is None:
                refused = WorkerRefusal.UNKNOWN_TURN
            if source is None or refused is not None:
                return Reject(refused or WorkerRefusal.UNKNOWN_TURN)
            until_s = time.monotonic() + UNCLAIMED_S
            self._kept[sent.turn] = KeptTurn(sent.tokens, sent.state, source, until_s)
        return TurnKept(sent.turn)

    def drop(self, asked: DropTurn) -> RpcAnswer:
        """Give the turn up, which goes on where it was; one that is not here is no error."""
        with self._lock:
            if self._kept.pop(asked.turn, None) is not None:
                self.counts["called_off"] += 1
        return Released()

    def claim(self, turn: str, tokens: int) -> KeptTurn | None:
        """Give the turn to its leg, whose client has so many tokens of the answer; None: no such
        turn is here."""
        with self._lock:
            kept = self._kept.get(turn)
            if kept is None or kept.tokens != tokens:
                self.counts["unknown"] += 1
                return None
            self.counts["went_on"] += 1
            return self._kept.pop(turn)

    def poll(self) -> None:
        """Give up what nobody has claimed in time."""
        now = time.monotonic()
        with self._lock:
            for turn, kept in list(self._kept.items()):
                if kept.until_s <= now:
                    del self._kept[turn]
                    self.counts["unclaimed"] += 1
