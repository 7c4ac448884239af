"""An engine with round numbers: 4 tokens a unit, a step takes 10 ms + 1 a token + 1 a decode."""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import Identity, Numerics, pack
from ownerserve.kv.specs import Coverage
from ownerserve.node.state import NodeState
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.plan.inputs import FULL_ABILITIES, ModelState
from ownerserve.plan.restore import Planner
from ownerserve.plan.swa.checkpoints import Zero
from ownerserve.sim.engine.batch import FOLD_MAX, BatchLimits, NodeHooks
from ownerserve.sim.engine.engine import SimEngine
from ownerserve.sim.engine.pace import Pace
from ownerserve.sim.engine.sequence import SimSequence, sequence_of
from ownerserve.sim.storage.nodeport import SimNode
from ownerserve.sim.storage.store import SimStore
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import linked
from ownerserve.sim.timeline.media import duplex
from ownerserve.sim.timeline.turns import SimTurn
from ownerserve.sim.worker.host import Host
from ownerserve.sim.worker.worker import Machine, SimWorker

U = 4
RANGE = Component("kv", Coverage.RANGE, 64, 64)
STATE = Component("state", Coverage.POINT, 1024, 1024)
PLAIN = Layout(1, (RANGE,), 0)
LIMITS = BatchLimits(64, 8)
HYBRID = Layout(2, (RANGE, STATE), 0)
CHEAP_PREFILL = Coefficients(10.0, 1.0, 0.0)


def pace(**changes: float) -> Pace:
    """10 ms + 1 ms a computed token + 1 ms a decode, unless changed."""
    times = {"a_ms": 10.0, "b_ms": 1.0, "c_ms": 0.0, "d_ms": 0.0, "e_ms": 1.0, **changes}
    return Pace(
        name="round",
        model="round",
        gpu="none",
        gpus=1,
        engine="none",
        config="none",
        fit_error=0.0,
        source="by hand",
        error_note="",
        kv_bytes_total=1,
        **times,
    )


def turn(number: int, ids: list[int], tokens: int, output: int, *, session: str = "") -> SimTurn:
    """A turn of `tokens` prompt tokens whose units are `ids`, those of its answer included."""
    units = -(-tokens // U)
    full = (tokens + output - 1) // U
    assert len(ids) >= max(units, full), "name every unit that becomes full"
    return SimTurn(
        number=number,
        session=number,
        name=SessionId(session or f"s{number}"),
        position=0,
        arrived_s=0.0,
        prompt=pack(ids[:units]),
        prompt_tokens=tokens,
        output_tokens=output,
        output=pack(ids[units:full]),
    )


def own_ids(number: int) -> list[int]:
    """Units that nobody else has."""
    return list(range(1000 * number + 1, 1000 * number + 200))


def make_engine(
    *,
    blocks: int = 100,
    layout: Layout = PLAIN,
    limits: BatchLimits = LIMITS,
    fold: int = FOLD_MAX,
    **times: float,
) -> SimEngine:
    cache = HeteroCache(layout, {c.name: blocks for c in layout.components}, limits.running)
    cache.pressure.watermarks = Watermarks(low=0.0)  # room is made on demand alone
    hooks = NodeHooks(lambda tokens: None, lambda start, end: frozenset())
    return SimEngine(cache, pace(**times), limits, unit_tokens=U, longest_fold=fold, hooks=hooks)


class EngineDriver:
    """Runs one engine to its end. `steps` are the durations of what it did, in ms."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.now = 0.0
        self.steps: list[float] = []
        self.done: list[tuple[str, float]] = []
        self.failed: list[str] = []

    def arrive(self, turn: SimTurn, *, landed: int = 0) -> SimSequence:
        sequence = sequence_of(turn, U)
        sequence.landed_tokens = landed
        self.engine.arrive(sequence)
        return sequence

    def step(self) -> bool:
        took_s = self.engine.start(self.now)
        self.failed += [sequence.turn_id for sequence in self.engine.failed()]
        if took_s is None:
            return False
        self.steps.append(round(took_s * 1000.0, 6))
        self.now += took_s
        ended = self.engine.end(self.now)
        self.done += [(s.turn_id, round(self.now * 1000.0, 6)) for s in ended.done]
        self.engine.check()
        return True

    def run(self) -> None:
        while self.step():
            assert len(self.steps) < 10_000, "it never ends"


def bare_node(
    cache: HeteroCache, worker: SimWorker, prefill: Coefficients = CHEAP_PREFILL
) -> SimNode:
    """The node of a worker that keeps state on its device alone; `prefill` is priced in units."""
    layout = cache.layout
    identity = Identity(
        model_id="round",
        weights="none",
        tokenizer="none",
        spec_digest=bytes(32),
        numerics=Numerics("none"),
        tenant_salt=bytes(32),
    )
    state = NodeState(
        cache,
        RecordNames(identity, layout, engine="round/1", blocks=1),
        planner=Planner(
            ModelState(layers=1, block_tokens=layout.block_tokens, range_bytes_per_token=64.0),
            FULL_ABILITIES,
        ),
        costs=CostModel(Defaults("round", prefill, {})),
        settings=NodeSettings(below=frozenset()),
        policy=Zero(),
    )
    store, pcie = SimStore(()), duplex("pcie", Medium(0.0, 1.0))
    return SimNode(
        state,
        store,
        pcie,
        at=worker.later,
        started=worker.started,
        checkpoint=lambda turns: worker.machine.engine.checkpoint(turns),
    )


class WorkerDriver:
    """One worker on a heap; it hears what its listener would."""

    def __init__(self, make: Callable[[], SimEngine]) -> None:
        self.heap = Heap()
        self.began_s: dict[str, float] = {}
        self.served_s: dict[str, float] = {}
        self.lost_s: dict[str, float] = {}
        self.sequences: dict[str, SimSequence] = {}

        def machine(worker: SimWorker) -> Machine:
            engine = make()
            return Machine(engine.cache, engine, bare_node(engine.cache, worker))

        nic = linked("nic", Medium(1.0, 1000.0), self.heap)
        self.worker = SimWorker(0, self.heap, machine, host=Host(nic), unit_tokens=U, listener=self)

    def began(self, sequence: SimSequence, now: float) -> None:
        self.began_s[sequence.turn_id] = now

    def served(self, sequence: SimSequence, now: float) -> None:
        self.served_s[sequence.turn_id] = now

    def lost(self, sequence: SimSequence, now: float) -> None:
        self.lost_s[sequence.turn_id] = now

    def submit(self, turn: SimTurn, at_s: float) -> None:
        sequence = sequence_of(turn, U)
        self.sequences[sequence.turn_id] = sequence
        self.heap.at(at_s, lambda now: self.worker.submit(sequence, now))
