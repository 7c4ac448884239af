"""An hf worker in a process of its own, but for its model, its HTTP and its directory.

    real    the step loop, scheduler and cache; the node with its restores, its host cache and its
            store's threads; orders, prefills, lends and brings; the RPC port, movers, their roads
    not     the model: a toy whose answers tell of every byte (toy.py), in arrays of bytes

Forked off multiprocessing's forkserver, which has imported torch. A test tells it by a pipe what to
do, and hears how each turn ended.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock, Thread

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.engines.hf.engine.commands import Abort, AsyncEngine, EngineDead, Submit
from ownerserve.engines.hf.engine.loop import StepLoop
from ownerserve.engines.hf.metrics.prometheus import RestoreMetrics, WorkerMetrics
from ownerserve.engines.hf.metrics.status import WorkerIdentity
from ownerserve.engines.hf.node.restoring import WithNode
from ownerserve.engines.hf.scheduling.requests import (
    Admitted,
    Delta,
    EngineRequest,
    RequestFailed,
    RequestFinished,
    Sampling,
    Stopping,
    StreamEvent,
)
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import SchedulerLimits
from ownerserve.kv.ids import TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.units import MIB
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import EndPrefill
from ownerserve.node.restore import restores
from ownerserve.node.rpc.server import RpcClient, RpcServer
from ownerserve.node.runtime.node_runtime import Calibration, NodeRuntime
from ownerserve.node.state import NodeState
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.transfers import turn_lends
from ownerserve.node.transfers.opening import NodeTransfers, TransferPlace
from ownerserve.node.transfers.turn_lends import TurnLends
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.prices import Coefficients
from ownerserve.plan.inputs import ModelState
from ownerserve.plan.restore import Planner
from tests.support.hf.aborts.runner import ToyRunner
from tests.support.hf.aborts.traps import TrappedLending, Traps
from tests.support.hf.assumed import DEAR, assume_prices
from tests.support.node.lending_nodes import LAYOUT, NAMES, SECTIONS, B
from tests.support.node.retired import RetiredMemory

SLOTS = 64
RUNNING, WAITING = 4, 32
HOST_BYTES = 8 * MIB
REST_S = 0.3
"""So long nothing is to happen to slots that nobody has."""
MODEL = ModelState(
    layers=3,
    block_tokens=B,
    range_bytes_per_token=float(SECTIONS["dense"].unit_bytes / B),
    point_bytes=SECTIONS["swa"].unit_bytes,
)


class WorkerSetting(msgspec.Struct, frozen=True):
    """What a process is started with. `patience_s` None: the deadlines that ship; else a turn waits
    for its state so long at most, an order included."""

    name: str
    seed: int
    roads: tuple[str, ...]
    patience_s: float | None = None
    token_ms: float = 100.0
    """What computing a token is said to take: nothing is measured."""
    piece_bytes: int = turn_lends.PIECE_BYTES
    """Of a layer that is worth a piece."""


class RunTurn(msgspec.Struct, tag=True, frozen=True):
    """Take a turn: its prompt is to be computed at `decode_from`, or is held at `bring_from`."""

    number: int
    prompt: list[int]
    session_id: str
    tokens: int
    decode_from: LenderAddress | None = None
    bring_from: LenderAddress | None = None


class HangUp(msgspec.Struct, tag=True, frozen=True):
    """The client of the turn is gone."""

    number: int


class CallOff(msgspec.Struct, tag=True, frozen=True):
    """A peer says `EndPrefill` of one of the last prompts that were accepted: `back` before the
    last one."""

    back: int


class DropPrompt(msgspec.Struct, tag=True, frozen=True):
    """The engine gives such a prompt up by itself."""

    back: int


class Arm(msgspec.Struct, tag=True, frozen=True):
    """Stop at that step when it comes (traps.py), so many times, and say so."""

    step: str
    times: int = 1


class GoOn(msgspec.Struct, tag=True, frozen=True):
    """Go on from the step."""


class Know(msgspec.Struct, tag=True, frozen=True):
    """From now on, order all that is longer than a block of that peer."""

    address: str


class AskBooks(msgspec.Struct, tag=True, frozen=True):
    """Say what is held."""


class Rest(msgspec.Struct, tag=True, frozen=True):
    """Evict all that may be, and look whether anything is left, or anybody writes."""


Told = RunTurn | HangUp | CallOff | DropPrompt | Arm | GoOn | Know | AskBooks | Rest


class Serves(msgspec.Struct, tag=True, frozen=True):
    """The worker serves at that address."""

    address: LenderAddress


class Reached(msgspec.Struct, tag=True, frozen=True):
    """The step that was armed has come, and waits for `GoOn`."""

    step: str


class TurnOver(msgspec.Struct, tag=True, frozen=True):
    """The turn ended, by itself: with an answer, or `failed` why not."""

    number: int
    tokens: list[int]
    mode: str
    failed: str = ""


class BooksAre(msgspec.Struct, tag=True, frozen=True):
    """What somebody has, or waits for; all is 0 at rest. `counts` are what came of it so far."""

    open: dict[str, int]
    counts: dict[str, dict[str, int]]


class Rested(msgspec.Struct, tag=True, frozen=True):
    """What was left; all is 0."""

    left: dict[str, int]


Said = Serves | Reached | TurnOver | BooksAre | Rested


class _Text:
    def decode(self, tokens: Sequence[int]) -> str:
        return ""


class ToyWorker:
    """See the module."""

    def __init__(self, setting: WorkerSetting, pipe: Connection) -> None:
        if setting.patience_s is not None:
            restores.ORDER_S = 0.0
        turn_lends.PIECE_BYTES = setting.piece_bytes
        self.retired = RetiredMemory()
        self.retired.watch()
        assume_prices(msgspec.structs.replace(DEAR, prefill=Coefficients(5.0, setting.token_ms, 0)))
        self._pipe, self._sending = pipe, Lock()
        self.traps = Traps(lambda step: self._say(Reached(step)))
        self.cache = HeteroCache(LAYOUT, {"dense": SLOTS, "swa": SLOTS}, RUNNING)
        self.runner = ToyRunner(SLOTS, setting.seed, self.traps)
        self.node = self._node(setting)
        limits = SchedulerLimits(
            chunk_tokens=3 * B,
            prefill_tokens_a_step=4 * B,
            max_running=RUNNING,
            max_waiting=WAITING,
            sequence_tokens=SLOTS * B,
        )
        self.scheduler = Scheduler(
            self.cache,
            limits,
            resume_of=self.node.resume,
            checkpoints_of=self.node.state.checkpoints.during,
        )
        worker = WorkerId(setting.name)
        identity = WorkerIdentity("toy", time.time_ns(), limits.sequence_tokens, worker=worker)
        metrics = WorkerMetrics()
        self.steps = StepLoop(
            self.runner,
            self.scheduler,
            cache=self.cache,
            decoder=_Text(),
            identity=identity,
            metrics=metrics,
        )
        self.steps.attach(WithNode(self.node, self.scheduler, RestoreMetrics(metrics.registry)))
        chains = self.node.state.chains
        lending = TrappedLending(self.traps, self.cache, NAMES, chains, regions=self.runner.regions)
        place = TransferPlace(roads=setting.roads)
        self.transfers = NodeTransfers(
            identity.unit, lending, SECTIONS, block_tokens=B, place=place
        )
        self.node.add_peers(self.transfers.peers)
        self.prefills = self.transfers.compute_for_others(
            self.cache, NAMES, self.steps, layers=self.runner
        )
        self.steps.serve_peers(self.prefills)
        self._lent = lending.turns
        self._answers: dict[str, TurnOver] = {}
        self._serve(identity.unit)

    def _node(self, setting: WorkerSetting) -> NodeRuntime:
        calibration = Calibration(None)
        settings = NodeSettings(record_blocks=NAMES.blocks)
        if setting.patience_s is not None:
            settings = msgspec.structs.replace(settings, restore_deadline_s=setting.patience_s)
        state = NodeState(
            self.cache,
            NAMES,
            planner=Planner(MODEL, self.runner.abilities),
            costs=calibration.model,
            settings=settings,
        )
        backing = open_backing(None, HOST_BYTES)
        assert backing is not None
        return NodeRuntime(state, self.runner, backing=backing, calibration=calibration)

    def _serve(self, unit: RoutingUnit) -> None:
        self.engine = AsyncEngine(self.steps)
        self.rpc = RpcServer()
        answer = self.traps.answering(self.transfers.answering(self.engine.call))
        self.rpc.start(answer, step_s=self.engine.step_s)
        self.transfers.start(self.engine.between_steps, rpc=self.rpc.address)
        Thread(target=self.steps.run, args=(self._deliver,), name="engine", daemon=True).start()
        self._client = RpcClient(self.rpc.address)
        self._say(Serves(LenderAddress(unit, self.rpc.address)))

    # -- what a test says ----------------------------------------------------------------------

    def do(self, told: Told) -> None:
        match told:
            case RunTurn():
                self._answers[str(told.number)] = TurnOver(told.number, [], "")
                self.steps.inbox.put(Submit(_request(told), time.monotonic()))
            case HangUp(number):
                self.steps.inbox.put(Abort(str(number)))
            case CallOff(back):
                with suppress(TimeoutError):
                    self._client.ask(EndPrefill(TurnId(f"prefill-{self._accepted() - back}.0")))
            case DropPrompt(back):
                self.steps.inbox.put(Abort(f"prefill-{self._accepted() - back}"))
            case Arm(step, times):
                self.traps.arm(step, times)
            case GoOn():
                self.traps.go_on()
            case Know(address):
                self.transfers.peers.orders.known = (address,)
                self.node.state.order_tokens = B
            case AskBooks():
                self._say(self._between(self._books))
            case Rest():
                self._say(Rested(self._rest()))

    def _accepted(self) -> int:
        return self.prefills.counts["accepted"]

    def _between(self, work: object) -> BooksAre:
        asked: Future[object] = self.engine.between_steps(work)  # type: ignore[arg-type]
        books = asked.result()
        assert isinstance(books, BooksAre)
        return books

    def _books(self) -> BooksAre:
        gc.collect()
        load, service = self.scheduler.load(), self.transfers.service
        source = service.source.state.counts()
        target = service.target.state.counts(time.monotonic())
        counts = self.transfers.counts()
        assert isinstance(self._lent, TurnLends)
        self.scheduler.check()
        self.node.state.check()
        return BooksAre(
            {
                "lends": len(self.cache.lends),
                "turns": load.running + load.waiting + len(self.cache.running),
                "restores": len(self.node.state.restores),
                "unquiet": len(self.node.state.restores.unquiet),
                "arriving blocks": sum(self.cache.ingest.counts()),
                "prompts": len(self._lent),
                "orders": len(self.transfers.peers.orders),
                "landings": self.retired.standing,
                **{f"source {name}": source[name] for name in ("opening", "lends", "held")},
                **{f"target {n}": int(target[n]) for n in ("brings", "rooms", "held", "reads")},
            },
            {
                "brings": counts.brings,
                "lends": counts.lends,
                "orders": counts.orders,
                "told": counts.told_bytes,
                "prefills": counts.prefills,
                "looks": counts.looks,
                "preempted": {"": self.scheduler.counts.preemptions},
            },
        )

    def _rest(self) -> dict[str, int]:
        """Nobody has anything: evict all, poison it, and see whether anybody writes there."""

        def evict() -> dict[str, int]:
            left = {"wrong slots": self.runner.wrong_slots(self.cache)}
            for session in list(self.cache.sessions):
                self.cache.sessions.let_go(session.session_id)
            levels = self.cache.occupancy
            if levels.evictable_blocks():
                self.cache.pressure.evict_blocks(levels.evictable_blocks())
            left["blocks"] = levels.blocks.used
            left["points"] = sum(pool.used for pool in levels.points)
            left["states"] = levels.states.used
            self.cache.check()
            self.runner.poison()
            return left

        left = self.engine.between_steps(evict).result()
        time.sleep(REST_S)
        assert isinstance(left, dict)
        left["late writes"] = int(not self.runner.is_poisoned)
        left["late bytes in landings"] = self.retired.late_bytes()
        return left

    # -- what it says --------------------------------------------------------------------------

    def _say(self, said: Said) -> None:
        with self._sending:
            self._pipe.send_bytes(msgspec.msgpack.encode(said))

    def _deliver(self, events: Sequence[tuple[str, StreamEvent]]) -> None:
        for request_id, event in events:
            answer = self._answers.get(request_id)
            if answer is None:
                continue  # a prompt for another worker
            match event:
                case Admitted():
                    answer = msgspec.structs.replace(answer, mode=str(event.mode))
                    self._answers[request_id] = answer
                case Delta():
                    answer.tokens.extend(one.token for one in event.sampled)
                case RequestFinished():
                    self._say(self._answers.pop(request_id))
                case RequestFailed(reason, message):
                    failed = f"{reason}: {message}"
                    answer = self._answers.pop(request_id)
                    self._say(msgspec.structs.replace(answer, failed=failed))


def _request(told: RunTurn) -> EngineRequest:
    return EngineRequest(
        request_id=str(told.number),
        prompt=told.prompt,
        stopping=Stopping(max_tokens=told.tokens),
        sampling=Sampling(temperature=0),
        session_id=told.session_id,
        decode_from=told.decode_from,
        bring_from=told.bring_from,
    )


def serve(pipe: Connection, setting: WorkerSetting) -> None:
    """Serve until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker, decoder = ToyWorker(setting, pipe), msgspec.msgpack.Decoder(Told)
    while True:
        try:
            worker.do(decoder.decode(pipe.recv_bytes()))
        except (EOFError, EngineDead):
            os._exit(0)
