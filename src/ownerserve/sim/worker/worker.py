"""A modelled worker is an engine, its cache and its node on the heap.

Owns one routing unit's life: what has arrived at it, the step in flight, its next life after a
crash. Decides nothing: the cache, the node and the engine's own rules do.

    submit -> (node: restore) -> engine's queue -> steps -> Served | Lost, to the listener
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Resume
from ownerserve.kv.ids import Incarnation, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.kv.specs import Coverage
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.runtime.busy import BusyMeter
from ownerserve.node.runtime.refill import RefillGauge
from ownerserve.node.vocabulary.events import Event, RestoreReport, TurnArrived, TurnEnded, TurnGone
from ownerserve.plan.inputs import Backlog
from ownerserve.sim.engine.engine import SimEngine
from ownerserve.sim.engine.sequence import SimSequence
from ownerserve.sim.timeline.heap import Call, Heap, TimedCall
from ownerserve.sim.worker.host import Host


class WorkerNode(Protocol):
    """A worker's node brings a turn's state and keeps it when it goes: see sim.storage.nodeport."""

    inventory: Inventory
    refill: RefillGauge

    def handle(self, event: Event, now: float) -> None:
        """Take an event in and perform what follows."""
        ...

    def look(self, now: float) -> None:
        """Note that the cache has taken or given room."""

    def resume(self, tokens: Packed) -> Resume | None:
        """Return how the engine should begin a turn of `tokens`."""

    def checkpoints(self, start: int, prompt_end: int) -> frozenset[int]:
        """Return the positions of a prefill at which state is to be kept."""

    def report(self, turn_id: TurnId) -> RestoreReport | None:
        """Return what came of a turn's restore, once."""

    def stored_units(self, prompt: Packed) -> int:
        """Return how much of a prompt, in units, lies in host memory, ready to be sent."""

    def compute_ms(self, units: int, known: int) -> float:
        """Return what computing so many units behind `known` ones takes here, as priced now."""

    def die(self) -> None:
        """End this life: the process is gone, and what it had in memory."""

    def check(self) -> None:
        """Raise InvariantViolated unless its own books and those of its tiers agree."""


class Listener(Protocol):
    """A listener is told what came of a turn, never from within `submit`."""

    def began(self, sequence: SimSequence, now: float) -> None:
        """Hear that the turn's first token is there."""

    def served(self, sequence: SimSequence, now: float) -> None:
        """Hear that the turn is complete."""

    def lost(self, sequence: SimSequence, now: float) -> None:
        """Hear that the turn can never run here, or that the worker is not up."""


class Machine:
    """A machine is what one life of a worker is made of: state goes with it, links stay."""

    __slots__ = ("cache", "engine", "node")

    def __init__(self, cache: HeteroCache, engine: SimEngine, node: WorkerNode) -> None:
        self.cache = cache
        self.engine = engine
        self.node = node


class SimWorker:
    """A worker is one routing unit over all its lives. `make` builds the machine of each life; it
    is told how a turn may start.

    `restoring` are turns whose state is being brought; `lives` the machines of all its lives, the
    present one last. In its present life `watched` hear of each step's beginning and end, by turn,
    and `mourners` of the life's.
    """

    def __init__(
        self,
        index: int,
        heap: Heap,
        make: Callable[[SimWorker], Machine],
        *,
        host: Host,
        unit_tokens: int,
        listener: Listener,
    ) -> None:
        self.index = index
        self.alone = frozenset((index,))
        self.name = WorkerId(f"w{index}")
        self.incarnation = Incarnation(1)
        self.unit = RoutingUnit(self.name, 0, self.incarnation)
        self.host = host
        self.unit_tokens = unit_tokens
        self.is_up = True
        self.heap = heap
        self._make = make
        self._listener = listener
        self.restoring: dict[TurnId, SimSequence] = {}
        self.watched: dict[TurnId, Call] = {}
        self.mourners: list[Call] = []
        self._between: list[Call] = []
        """Calls that wait for the end of the step under way."""
        self._leaving: dict[TurnId, SimSequence] = {}
        """Turns that are given up when the step under way ends."""
        self._began_s = 0.0
        self._step: TimedCall | None = None
        self.machine = make(self)
        self.lives = [self.machine]
        self.busy = BusyMeter(heap.now)
        layout = self.cache.layout
        per_block = sum(c.payload_bytes for c in layout.components if c.coverage is Coverage.RANGE)
        self.unit_bytes = per_block / layout.block_tokens
        self.point_bytes = sum(
            c.payload_bytes for c in layout.components if c.coverage is Coverage.POINT
        )
        slot_bytes = sum(c.slot_bytes for c in layout.components if c.coverage is Coverage.RANGE)
        self.block_bytes = slot_bytes
        self._block_units = layout.block_tokens
        self._most_units = self.cache.occupancy.most_blocks * layout.block_tokens
        self.kv_bytes_total = self.cache.occupancy.most_blocks * slot_bytes

    # -- what others see ------------------------------------------------------------------------

    @property
    def cache(self) -> HeteroCache:
        """`cache` is the worker's own cache."""
        return self.machine.cache

    def resident_units(self, prompt: Packed) -> int:
        """Return how many of a prompt's full units lie on the device."""
        return self.machine.cache.residents.blocks(prompt) * self._block_units

    # -- events ---------------------------------------------------------------------------------

    def submit(self, sequence: SimSequence, now: float) -> None:
        """Take in a turn. One that the device can't ever hold is turned away at once."""
        if not self.is_up or len(sequence.units) // TOKEN_BYTES > self._most_units:
            self.heap.at(now, partial(self._listener.lost, sequence))
            return
        self.settle(now)
        self.restoring[sequence.turn_id] = sequence
        node, engine = self.machine.node, self.machine.engine
        backlog = Backlog(engine.pending_tokens // self.unit_tokens, engine.waiting)
        turn = sequence.turn
        arrived = TurnArrived(
            sequence.turn_id, turn.name, sequence.prompt, backlog, parent=turn.parent
        )
        node.handle(arrived, now)
        if sequence.turn_id in self.restoring:  # else it is in the queue, and counted there
            sequence.pending_tokens = self._uncached(sequence)

    def give_up(self, sequence: SimSequence, now: float) -> None:
        """End a turn that nobody waits for: at once where it waits, at the end of the step that is
        under way where it runs. Its listener hears no more of it."""
        self.settle(now)
        engine = self.machine.engine
        if self._step is not None and sequence in (*engine.prefilling, *engine.decoding):
            self._leaving[sequence.turn_id] = sequence
            return
        if self.restoring.pop(sequence.turn_id, None) is None:
            engine.withdraw(sequence, now)
        self.machine.node.handle(TurnGone(sequence.turn_id), now)
        self.look(now)

    def started(self, turn_id: TurnId, now: float) -> None:
        """Let the turn run: the node has nothing more to bring."""
        sequence = self.restoring.pop(turn_id, None)
        if sequence is None:
            return
        report = self.machine.node.report(turn_id)
        if report is not None and report.loaded_bytes:
            sequence.loaded_bytes, sequence.load_s = report.loaded_bytes, report.waited_s
        self._queue(sequence, now)

    def _queue(self, sequence: SimSequence, now: float) -> None:
        """Put the turn into the engine's queue; an idle engine begins behind this instant's other
        calls."""
        sequence.pending_tokens = self._uncached(sequence)
        self.machine.engine.arrive(sequence)
        self._kick(now)

    def _kick(self, now: float) -> None:
        """Begin to step, or end a fold with the step under way, as something has changed."""
        if self._step is None and self.is_up:
            self._step = self.heap.at(now, self._start)
        else:
            self.settle(now)

    def settle(self, now: float) -> None:
        """End a fold with the step that is under way, as room is about to be taken by others.

        What its steps so far have filled is counted as taken.
        """
        if self._step is not None and self.machine.engine.folds:
            took_s = self.machine.engine.shorten(now - self._began_s, now)
            if took_s is not None:
                self._step.cancel()
                self._step = self.heap.at(max(now, self._began_s + took_s), self._over)

    def between_steps(self, call: Call, now: float) -> None:
        """Have `call` made on the engine's thread: when the step under way ends, or at once."""
        if self._step is None:
            call(now)
        else:
            self._between.append(call)
            self.settle(now)

    def look(self, now: float) -> None:
        """Try an idle engine's queue again, as room may have come free."""
        if self._step is None and self.machine.engine.waiting:
            self._kick(now)

    def later(self, when_s: float, call: Call) -> TimedCall:
        """Ask for a call on the node's behalf, after which the queue may go on."""
        return self.heap.at(when_s, partial(self._then_look, call))

    def _then_look(self, call: Call, now: float) -> None:
        call(now)
        self.look(now)

    def crash(self, now: float) -> None:
        """Let the process die: what it ran is lost, and what its device and host memory held.

        What its disk holds stays for its next life, which begins with `rise`.
        """
        if self._step is not None:
            self._step.cancel()
            self._step = None
        self.is_up = False
        self.watched.clear()
        self._between.clear()
        mourners, self.mourners = self.mourners, []
        for told in mourners:
            told(now)
        engine, waiting = self.machine.engine, self.restoring
        self.machine.node.die()
        lost, self.restoring = [*waiting.values(), *engine.everyone()], {}
        self.machine = self._make(self)
        self.lives.append(self.machine)
        self.incarnation = Incarnation(self.incarnation + 1)
        self.unit = RoutingUnit(self.name, 0, self.incarnation)
        leaving, self._leaving = self._leaving, {}
        for sequence in lost:
            if sequence.turn_id not in leaving:
                self._listener.lost(sequence, now)

    def rise(self) -> None:
        """Begin the next life, with an empty device."""
        self.is_up = True

    # -- steps ----------------------------------------------------------------------------------

    def _uncached(self, sequence: SimSequence) -> int:
        tokens = self.resident_units(sequence.prompt) * self.unit_tokens
        if tokens < sequence.landed_tokens:
            tokens = sequence.landed_tokens
        left = sequence.target - tokens
        return left if left > 1 else 1

    def _start(self, now: float) -> None:
        engine = self.machine.engine
        if self._between:
            calls, self._between = self._between, []
            for call in calls:
                call(now)
        self.machine.node.look(now)  # as a serving loop does: between two steps
        took_s = engine.start(now)
        self._began_s = now
        for told in tuple(self.watched.values()):
            told(now)
        self._step = None if took_s is None else self.heap.at(now + took_s, self._over)
        for sequence in engine.failed():  # now that others may be submitted
            self.machine.node.handle(TurnGone(sequence.turn_id), now)
            self._listener.lost(sequence, now)

    def _over(self, now: float) -> None:
        machine = self.machine  # the same to the end: nobody is killed by what it says
        ended = machine.engine.end(now)
        for told in tuple(self.watched.values()):
            told(now)
        for sequence in ended.began:
            if sequence.turn_id not in self._leaving:
                self._listener.began(sequence, now)
        for sequence in ended.done:
            machine.node.handle(_ended(sequence), now)
            if self._leaving.pop(sequence.turn_id, None) is None:
                self._listener.served(sequence, now)
        leaving, self._leaving = self._leaving, {}
        for sequence in leaving.values():
            machine.engine.withdraw(sequence, now)
            machine.node.handle(TurnGone(sequence.turn_id), now)
        self._start(now)

    def check(self) -> None:
        """Raise InvariantViolated unless the machine's books are whole."""
        self.machine.engine.check()
        self.machine.node.check()


def _ended(sequence: SimSequence) -> TurnEnded:
    """Return what the node is told of a turn's end, in units."""
    unit, turn = sequence.unit_tokens, sequence.turn
    computed = turn.prompt_tokens + turn.output_tokens - 1
    return TurnEnded(
        sequence.turn_id,
        sequence.restored_tokens // unit,
        turn.prompt_tokens // unit,
        computed // unit,
    )
