"""A node over a store whose medium hangs: its engine never waits for it, nor does its end.

Runtime, store threads and tiers are the real ones; the disk stops answering when it is told to.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ownerserve.cache.effects import MoveBorder
from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Begun, Turn
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, pack
from ownerserve.kv.regions import Region
from ownerserve.node.retention import spills
from ownerserve.node.runtime import node_runtime
from ownerserve.node.runtime.node_runtime import Calibration, NodeRuntime
from ownerserve.node.state import NodeState
from ownerserve.node.storage import backing, journal
from ownerserve.node.storage.backing import Backing
from ownerserve.node.storage.journal import Journal
from ownerserve.node.storage.media import open_remote
from ownerserve.node.vocabulary.engine_port import LayerProgress, LayersTold
from ownerserve.node.vocabulary.events import RestoreOutcome, TurnArrived, TurnEnded
from ownerserve.node.vocabulary.records import RecordNames, Tip
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.events import Waited
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import FULL_ABILITIES, Abilities, Backlog
from ownerserve.plan.restore import Planner
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.model import Listed, Meta, ReadOutcome, Want
from ownerserve.store.service import runtime as store_runtime
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import Reservation
from tests.support.node.node_driver import IDENTITY, LAYOUT, MODEL, PRICES, B

WAIT_S = 60.0


class SilentDisk(DiskTier):
    """A disk that answers until `fall_silent`, and again after `wake`."""

    def __init__(self, path: Path) -> None:
        self._awake = threading.Event()
        self._awake.set()
        self.asked_on: set[int] = set()
        """Threads that called it."""
        self.asked: Counter[str] = Counter()
        super().__init__(path, WallClock())

    def fall_silent(self) -> None:
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def _wait(self, what: str) -> None:
        self.asked[what] += 1
        self.asked_on.add(threading.get_ident())
        self._awake.wait(2 * WAIT_S)

    def find(self, ids: Sequence[bytes]) -> Mapping[bytes, Listed]:
        self._wait("find")
        return super().find(ids)

    def read(self, wants: Sequence[Want], *more: Any) -> ReadOutcome:
        self._wait("read")
        return super().read(wants, *more)

    def reserve(self, meta: Meta, payload_bytes: int) -> Any:
        self._wait("reserve")
        return super().reserve(meta, payload_bytes)

    def commit(self, reservations: Sequence[Reservation]) -> Any:
        self._wait("commit")
        return super().commit(reservations)

    def abort(self, reservation: Reservation) -> None:
        self._wait("abort")
        super().abort(reservation)

    def close(self) -> None:
        self._wait("close")
        super().close()


class _Slots:
    """An engine whose slots are all zeros."""

    abilities: Abilities = FULL_ABILITIES

    def read_slots(self, component: str, slots: Sequence[int]) -> memoryview:
        return memoryview(bytes(32 * len(slots)))

    def write_slots(self, component: str, slots: Sequence[int], data: memoryview) -> None:
        assert len(data) == 32 * len(slots)

    def apply(self, effects: Sequence[MoveBorder]) -> None: ...

    def regions(self) -> tuple[Region, ...]:
        return ()

    def watch_layers(self, turn_id: TurnId, told: LayersTold) -> None: ...

    def unwatch_layers(self, turn_id: TurnId) -> None: ...

    def layers_done(self, turn_id: TurnId) -> LayerProgress | None:
        return None


class Node:
    """A runtime over `SilentDisk` over a shared directory; the test's thread is the engine's."""

    def __init__(self, home: Path) -> None:
        self.disk = SilentDisk(home / "disk")
        self._backing = Backing([self.disk, open_remote(str(home / "far"), WallClock())])
        slots = {c.name: 64 if c.name in LAYOUT.range_names else 16 for c in LAYOUT.components}
        self.cache = HeteroCache(LAYOUT, slots, 4)
        settings = NodeSettings(record_blocks=4, spill_after_s=0.0, restore_deadline_s=0.5)
        self.state = NodeState(
            self.cache,
            RecordNames(IDENTITY, LAYOUT, engine="toy/1", blocks=4),
            planner=Planner(MODEL, FULL_ABILITIES),
            costs=CostModel(PRICES),
            settings=settings,
        )
        self.runtime = NodeRuntime(
            self.state, _Slots(), backing=self._backing, calibration=Calibration(None)
        )
        self._turns = 0

    def turn(self, count: int) -> RestoreOutcome:
        """A turn of one session, from its arrival to its end; what came of its restore."""
        self._turns += 1
        turn_id, session, tokens = TurnId(f"t{self._turns}"), SessionId("a"), pack(range(count))
        started = self.runtime.handle(TurnArrived(turn_id, session, tokens), time.monotonic())
        until_s = time.monotonic() + WAIT_S
        while turn_id not in started:
            assert time.monotonic() < until_s, "the turn waits for the store"
            time.sleep(0.002)
            started += self.runtime.poll(time.monotonic())
        report = self.runtime.report(turn_id)
        assert report is not None
        now = time.monotonic()
        resume = self.runtime.resume(tokens)
        begun = self.cache.begin(Turn(turn_id, session, tokens), now, resume=resume)
        assert isinstance(begun, Begun)
        self.cache.reserve(turn_id, count, now)
        for stop in (count // B * B, count):
            if stop > begun.restored:
                at = max(begun.restored, stop // B * B if stop % B else 0)
                self.cache.advance(turn_id, tokens[at * TOKEN_BYTES : stop * TOKEN_BYTES], now)
                if stop % B == 0:
                    self.cache.snapshot(turn_id, now)
        self.cache.finish(turn_id, now)
        self.runtime.handle(TurnEnded(turn_id, begun.restored, count, count), now)
        return report.outcome

    def until(self, holds: Callable[[], object]) -> None:
        until_s = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < until_s, "waited too long"
            time.sleep(0.002)
            self.runtime.poll(time.monotonic())

    def stored(self) -> None:
        """Until all that is idle is in the store."""
        self.until(lambda: self.state.idle_spills.counts["kept"] and not self.state.is_busy)

    def forget_device(self) -> None:
        self.cache.pressure.evict_blocks(self.cache.occupancy.evictable_blocks())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.disk.wake()


def in_time(work: Callable[[], object]) -> None:
    """Run it on a thread of its own; one that hangs fails the test and not the suite."""
    ended = threading.Event()

    def run() -> None:
        work()
        ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2 * WAIT_S)
    assert not thread.is_alive(), "it waits for the medium"
    assert ended.is_set(), "it failed, as the thread's traceback says"


def test_the_engines_thread_never_asks_a_medium(node: Node) -> None:
    """`nearest` was asked on it: a disk that hangs would have stopped all turns."""
    assert node.turn(10 * B + 1) is RestoreOutcome.NOTHING_STORED
    node.stored()
    node.forget_device()
    assert node.turn(10 * B + 9) is RestoreOutcome.LOADED
    assert node.disk.asked_on
    assert threading.get_ident() not in node.disk.asked_on
    node.runtime.close(time.monotonic(), within_s=WAIT_S)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        *((store_runtime, "DRAIN_S"), (store_runtime, "JOIN_S"), (backing, "CLOSE_S")),
        *((journal, "JOIN_S"), (node_runtime, "SAVE_WITHIN_S")),
    ):
        monkeypatch.setattr(module, name, 0.1)


@pytest.mark.usefixtures("brief")
def test_over_a_hung_store_turns_run_and_the_worker_ends(node: Node) -> None:
    def scenario() -> None:
        node.turn(10 * B + 1)
        node.stored()
        node.forget_device()
        node.disk.fall_silent()
        assert node.turn(10 * B + 9) is RestoreOutcome.LATE
        node.until(lambda: node.state.is_busy)  # it is put away, and nobody says that it was
        for _ in range(3):
            assert node.turn(10 * B + 9) is RestoreOutcome.RESIDENT
        node.state.check()
        node.runtime.close(time.monotonic(), within_s=0.1)

    in_time(scenario)


def test_a_silent_look_up_is_not_taken_for_an_empty_store(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store did not answer in its time was copied, to the store that did not answer."""
    monkeypatch.setattr(spills, "FIND_DEADLINE_S", 0.2)
    monkeypatch.setattr(spills, "ECHO_S", 0.2)

    def scenario() -> None:
        node.disk.fall_silent()
        node.turn(10 * B + 1)
        node.until(lambda: node.state.idle_spills.is_busy)
        node.until(lambda: not node.state.idle_spills.is_busy)
        assert node.state.idle_spills.counts["overdue"] == 1
        assert "reserve" not in node.disk.asked

    in_time(scenario)


@pytest.mark.usefixtures("brief")
def test_a_store_whose_close_alone_is_silent_is_left_behind(node: Node) -> None:
    def scenario() -> None:
        node.turn(10 * B + 1)
        node.stored()
        node.disk.fall_silent()
        node.runtime.close(time.monotonic(), within_s=WAIT_S)

    in_time(scenario)


@pytest.mark.usefixtures("brief")
def test_costs_on_a_silent_drive_are_written_by_nobody_who_serves(tmp_path: Path) -> None:
    """A pipe that nobody reads takes no byte, as a drive that hangs."""
    os.mkfifo(tmp_path / f".costs.json.{os.getpid()}")
    costs = Calibration(tmp_path / "costs.json")

    def scenario() -> None:
        for now in (100.0, 200.0, 300.0):
            costs.observe([Waited(Backlog(100, 1), 5.0)])
            costs.save_if_due(now)
        costs.save()

    in_time(scenario)
    assert not (tmp_path / "costs.json").exists()


@pytest.mark.usefixtures("brief")
def test_a_journal_on_a_silent_drive_holds_up_no_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f".sessions.jsonl.{os.getpid()}")
    kept = Journal(tmp_path / "sessions.jsonl")

    def scenario() -> None:
        for n in range(3):
            kept.write(Tip(SessionId(f"s{n}"), 4))
        kept.close()

    in_time(scenario)
