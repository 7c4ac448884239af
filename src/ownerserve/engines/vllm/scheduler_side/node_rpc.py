"""The engine core's RPC handler answers what the worker says of itself, on the node's RPC port
(loopback).

vLLM's scheduler thread sleeps while there is no request, so nothing is asked of it: the handler
keeps what the hooks told last, and answers from that on its own thread. What must happen on the
scheduler's thread (a session's release) waits for the next hook; nothing is taken before that.

The address is written to STORE/rpc.address, where the API server's process looks (plugin.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, Protocol

import msgspec

from ownerserve.engines.vllm.scheduler_side.holding import Holding
from ownerserve.engines.vllm.scheduler_side.owning import SessionsHere
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import PlacementAction, RoutingUnit, Tier
from ownerserve.kv.wire.headers import AnswerLine, brought_text
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Admit,
    AskLine,
    LineIs,
    ListHeld,
    Probe,
    Reject,
    Released,
    ReleaseSession,
    RpcAnswer,
    RpcRequest,
    Seed,
    Status,
    StatusIs,
)
from ownerserve.kv.wire.status import (
    ProfileStatement,
    SpeedStatement,
    TierStatement,
    WorkerLoad,
    load_statement,
)
from ownerserve.node.rpc.server import RpcServer
from ownerserve.node.runtime.busy import BusyMeter
from ownerserve.node.runtime.stating import actions_of
from ownerserve.node.transfers.lenders import OnEngine
from ownerserve.node.transfers.opening import Answerer

ADDRESS_FILE = "rpc.address"


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`EngineLimits` are the facts about an engine that do not change in its life."""

    unit: RoutingUnit
    model: str
    sequence_tokens: int
    max_waiting: int
    token_bytes: int
    """KV bytes of one more token, over all groups."""
    sequence_bytes: int = 0
    """KV bytes that a sequence keeps beside those of its tokens."""
    spec_digest: str = ""


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """An `EngineLoad` is the load that the hooks told last; `as_of` in seconds since 1970."""

    as_of: float
    pending_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_tokens: int = 0
    total_tokens: int = 0
    evictable_tokens: int = 0


class EngineTransfers(Protocol):
    """`EngineTransfers` are how an engine core tells peers what it lends (node.transfers.opening,
    and lending.py where its ranks do)."""

    def start(self, on_engine: OnEngine, *, rpc: str = "") -> None:
        """Begin; `on_engine` runs calls where the sessions are known, `rpc` is this port."""
        ...

    def answering(self, others: Answerer) -> Answerer:
        """Return what answers peers, and leaves everything else to `others`."""
        ...

    def stop(self) -> None:
        """End all of it."""
        ...


class NodeRpcHandler:
    """A `NodeRpcHandler` answers on the engine core's RPC port.

    `arrived`, `stepped` and `gone` are called on the scheduler's thread, the rest on any.
    """

    def __init__(
        self,
        limits: EngineLimits,
        holding: Holding,
        sessions: SessionsHere,
        transfers: EngineTransfers | None = None,
    ) -> None:
        """Make it, closed. `transfers` None: it neither lends nor brings."""
        self._limits = limits
        self._transfers = transfers
        self._holding = holding
        self._sessions = sessions
        self._unit = limits.unit
        self._waiting: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._pending_tokens = 0
        self._told = EngineLoad(time.time())
        self._speed: SpeedStatement | None = None
        self._tiers: tuple[TierStatement, ...] = ()
        self._busy_lock = Lock()
        self._busy, self._computed_s = BusyMeter(time.monotonic()), 0.0
        self._released: SimpleQueue[SessionId] = SimpleQueue()
        self._servers: list[RpcServer] = []
        self._address_file: Path | None = None

    def open(self, store: Path, outside: RpcServer | None = None) -> None:
        """Answer from now on: the API server's process and this host's gateways on loopback, those
        of other hosts at `outside`. Raises OSError where the address can't be left in the store."""
        here = RpcServer()
        self._servers = [here] if outside is None else [here, outside]
        try:
            store.mkdir(parents=True, exist_ok=True)
            (store / ADDRESS_FILE).write_text(here.address)
        except OSError:
            self.close()
            raise
        self._address_file = store / ADDRESS_FILE
        answer: Answerer = self.answer
        transfers = self._transfers
        if transfers is not None:
            transfers.start(self._holding.run, rpc=self._servers[-1].address)
            answer = transfers.answering(answer)
        for server in self._servers:
            server.start(answer)

    def close(self) -> None:
        """Stop answering and remove the address from the store."""
        if self._address_file is not None:
            self._address_file.unlink(missing_ok=True)
        for server in self._servers:
            server.stop()
        if self._transfers is not None:
            self._transfers.stop()
        self._servers, self._address_file = [], None

    # -- told by the hooks ---------------------------------------------------------------------

    def arrived(self, request_id: str, tokens: int) -> None:
        """Note a request that is here and waits, with so many tokens to compute."""
        self.gone(request_id)
        self._waiting[request_id] = tokens
        self._pending_tokens += tokens

    def stepped(
        self,
        left: dict[str, int],
        *,
        free_tokens: int,
        total_tokens: int,
        evictable_tokens: int = 0,
    ) -> None:
        """Note that a step runs these requests, and leaves so many prompt tokens of each to
        compute; of the pool so much is unused, and so much held by what nobody uses."""
        running, waiting = self._running, self._waiting
        for request_id, tokens in left.items():
            before = running.get(request_id)
            if before is None:
                before = waiting.pop(request_id, 0)
            running[request_id] = tokens
            self._pending_tokens += tokens - before
        self._told = EngineLoad(
            time.time(),
            self._pending_tokens,
            len(running),
            len(waiting),
            free_tokens,
            total_tokens,
            evictable_tokens,
        )

    def measured(self, speed: SpeedStatement, tiers: Sequence[TierStatement]) -> None:
        """Note what prompts, steps and loads take now."""
        self._speed, self._tiers = speed, tuple(tiers)

    def computed(self, computed_s: float) -> None:
        """Note for how long steps have computed in all."""
        self._read_busy(computed_s)

    def _read_busy(self, computed_s: float | None) -> float:
        """Return the busy share now; `computed_s` None: nothing was computed since the last
        time."""
        with self._busy_lock:
            if computed_s is not None:
                self._computed_s = computed_s
            return self._busy.read(self._computed_s, time.monotonic())

    def gone(self, request_id: str) -> None:
        """Forget a request that ended, however. After the last one no step follows that would tell
        so."""
        self._pending_tokens -= self._waiting.pop(request_id, 0) + self._running.pop(request_id, 0)
        if not self._running and not self._waiting:
            told = self._told
            self._told = EngineLoad(
                time.time(),
                free_tokens=told.free_tokens,
                total_tokens=told.total_tokens,
                evictable_tokens=told.evictable_tokens,
            )

    def released(self) -> list[SessionId]:
        """Return the sessions that went elsewhere since the last call."""
        sessions: list[SessionId] = []
        while not self._released.empty():  # nobody else takes from it
            sessions.append(self._released.get_nowait())
        return sessions

    # -- asked from outside --------------------------------------------------------------------

    def answer(self, request: RpcRequest) -> Future[RpcAnswer]:
        """Answer a request at once, but for what is held: there is nobody else to wait for."""
        if isinstance(request, ListHeld):
            return self._holding.page(request.after, self._unit, wait_s=request.wait_ms / 1e3)
        answer = self._answer(request)
        if isinstance(answer, Admit) and isinstance(request, Probe) and request.session_id:
            return self._holding.admitted(answer, request)
        future: Future[RpcAnswer] = Future()
        future.set_result(answer)
        return future

    def _answer(self, request: RpcRequest) -> RpcAnswer:
        match request:
            case Status():
                return StatusIs(self._status(), self._profile())
            case Probe(wanted):
                return self._probe(wanted)
            case ReleaseSession(session_id=session_id):
                answer = self._sessions.release(request)
                if isinstance(answer, Released):
                    self._released.put(session_id)
                return answer
            case AskLine():
                return self._line(request)
            case _:  # vLLM holds no places: its own queue does
                return Reject(WorkerRefusal.UNKNOWN_RESERVATION)

    def _probe(self, wanted: Seed) -> Admit | Reject:
        """Admit what fits the length of vLLM's queue. Its memory holds a sequence of the greatest
        length, or vLLM does not start: what each of them takes of it only vLLM knows."""
        status, limits = self._status(), self._limits
        if wanted.tokens > limits.sequence_tokens:
            return Reject(WorkerRefusal.TOO_LONG)
        if status.waiting_sequences >= limits.max_waiting:
            return Reject(WorkerRefusal.QUEUE_FULL)
        return Admit(ahead_prefill_tokens=status.pending_prefill_tokens)

    def _line(self, asked: AskLine) -> LineIs:
        """Return the worker's line: its name, its load, whose the session is, and what came of the
        prompt of the answer that is asked about."""
        owner, came = self._sessions.heard(asked), self._sessions.came_of(asked)
        line = AnswerLine(
            unit=self._unit,
            load=load_statement(self._status()),
            owner=None if owner is None else owner.unit,
            epoch=None if owner is None else owner.epoch,
            version=None if owner is None else owner.version,
            tip=None if came is None or came.tip is None else came.tip.hex(),
            tokens=0 if came is None else came.tokens,
            mode=None if came is None else came.mode,
            lost_tokens=0 if came is None else came.lost_tokens,
        )
        return LineIs(line, "" if came is None else brought_text(came.brought))

    def _status(self) -> WorkerLoad:
        """Return the load after the last step. Made here and not in the step: steps are many,
        questions few. The refill share is not said: nobody works out here what vLLM's pool would
        take next, and for how long that was idle.

        Where nothing runs or waits, what was in use is cached now, or held for a last copy.
        """
        told, limits = self._told, self._limits
        is_idle = not told.running and not told.waiting
        evictable = told.total_tokens - told.free_tokens if is_idle else told.evictable_tokens
        return WorkerLoad(
            unit=self._unit,
            as_of=told.as_of,
            pending_prefill_tokens=told.pending_tokens,
            running_sequences=told.running,
            waiting_sequences=told.waiting,
            kv_bytes_free=told.free_tokens * limits.token_bytes,
            kv_bytes_total=told.total_tokens * limits.token_bytes,
            kv_bytes_evictable=evictable * limits.token_bytes,
            busy_share=self._read_busy(None),
        )

    def _profile(self) -> ProfileStatement:
        """Return what the worker can do. A handler stands beside a store, so the disk tier is
        there."""
        limits, servers = self._limits, self._servers
        return ProfileStatement(
            models=(limits.model,),
            actions=_actions(self._transfers),
            lends=() if self._transfers is None else (str(Tier.DISK),),
            spec_digest=limits.spec_digest,
            kv_bytes_per_token=float(limits.token_bytes),
            kv_bytes_per_sequence=float(limits.sequence_bytes),
            speed=self._speed,
            tiers=self._tiers,
            rpc=servers[-1].address if servers else None,
            sequence_tokens=limits.sequence_tokens,
            owns_sessions=self._sessions.owns,
        )


def _actions(transfers: EngineTransfers | None) -> tuple[str, ...]:
    """Return what the worker can do as the one that runs the turn: it brings with a turn what a
    peer holds, and neither takes idle sessions over nor has prompts computed elsewhere."""
    fetches = () if transfers is None else (str(PlacementAction.ARTIFACT_FETCH),)
    return tuple(sorted((*actions_of((Tier.DISK,)), *fetches)))


def limits_of(
    vllm_config: Any,
    *,
    unit: RoutingUnit,
    token_bytes: int,
    sequence_bytes: int,
    spec_digest: str,
) -> EngineLimits:
    """Read what does not change from vLLM's configuration."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    return EngineLimits(
        unit=unit,
        model=str(model.served_model_name or model.model),
        sequence_tokens=int(model.max_model_len),
        max_waiting=4 * int(scheduler.max_num_seqs),
        token_bytes=token_bytes,
        sequence_bytes=sequence_bytes,
        spec_digest=spec_digest,
    )
