"""Tiers as one: the three write policies, what goes down and up, and a random life of all of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.units import MIB
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import (
    AlreadyStored,
    ArtifactKind,
    Meta,
    ReadHit,
    RefusalReason,
    Want,
    WriteDone,
    WriteRefused,
)
from ownerserve.store.format.seal import Keys
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.moves import MoveQueue, TierMove
from ownerserve.store.tiers.placement import (
    OnEviction,
    Placement,
    WriteBack,
    WritePolicy,
    WriteThrough,
)
from ownerserve.store.tiers.policy import (
    ExpectedUse,
    KindLimits,
    TierLimits,
    WriteBudget,
    by_utility,
)
from ownerserve.store.tiers.remote import RemoteTier
from ownerserve.store.tiers.tiered import TieredStore
from tests.support.store.samples import Samples, bytes_held

SMALL = TierLimits(KindLimits(MIB), KindLimits(MIB))
LARGE = TierLimits(KindLimits(64 * MIB), KindLimits(64 * MIB))


class Rig:
    """Memory over disk over a shared directory."""

    def __init__(self, root: Path, clock: ManualClock, policy: WritePolicy, **disk: object) -> None:
        options = DiskOptions(**{"limits": LARGE, "segment_bytes": MIB} | disk)  # type: ignore[arg-type]
        self.memory = MemoryTier(clock, SMALL)
        self.disk = DiskTier(root / "disk", clock, options=options)
        blobs = DirectoryBlobs(root / "shared")
        self.remote = RemoteTier("remote", blobs, clock=clock, keys=Keys(b"k" * 32), limits=LARGE)
        placement = Placement(write=policy)
        self.store = TieredStore([self.memory, self.disk, self.remote], placement)


@pytest.fixture
def rig(tmp_path, clock):
    made: list[Rig] = []

    def make(policy: WritePolicy, **disk: object) -> Rig:
        made.append(Rig(tmp_path, clock, policy, **disk))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


def size(number: int) -> bytes:
    return Samples.payload(number, 300_000)


def test_written_through_is_durable_and_on_top(rig, samples):
    r = rig(WriteThrough())
    assert isinstance(put(r.store, samples.meta(1), size(1)), WriteDone)
    assert samples.read(r.memory, 1) == [size(1)]
    assert samples.read(r.disk, 1) == [size(1)]
    assert r.store.settle() == 0


def test_written_through_is_refused_when_it_can_not_be_durable(rig, samples):
    r = rig(WriteThrough(), write_budget=WriteBudget(1.0, 1.0))
    assert put(r.store, samples.meta(1), size(1)) == WriteRefused(
        RefusalReason.WRITE_BUDGET, samples.meta(1).id
    )
    assert samples.read(r.store, 1) == "absent"  # nothing is shown as kept


def test_a_top_without_room_does_not_harm_a_write_through(rig, samples):
    r = rig(WriteThrough())
    held = [r.memory.reserve(samples.meta(n), 300_000) for n in range(10, 13)]
    assert isinstance(put(r.store, samples.meta(1), size(1)), WriteDone)
    assert samples.read(r.memory, 1) == "absent"
    assert samples.read(r.store, 1) == [size(1)]
    assert r.store.counters["copies_refused"] == 1
    for reservation in held:
        assert isinstance(reservation, Reservation)
        r.memory.abort(reservation)


def test_written_back_follows_in_settle(rig, samples):
    r = rig(WriteBack())
    put(r.store, samples.meta(1), size(1))
    assert r.store.moves.dirty == (samples.meta(1).id,)
    assert samples.read(r.disk, 1) == "absent"
    assert r.store.settle() == 1
    assert samples.read(r.disk, 1) == [size(1)]
    assert r.store.moves.dirty == ()
    assert r.store.settle() == 0


def test_what_is_owed_goes_down_when_it_must_make_room(rig, samples, clock):
    r = rig(WriteBack())
    for number in range(5):
        clock.advance(1)
        put(r.store, samples.meta(number), size(number))
    r.store.moves.check()
    assert r.store.settle() == 5
    assert samples.read(r.disk, 0, 1, 2, 3, 4) == [size(n) for n in range(5)]


def test_a_write_back_waits_for_the_budget(rig, samples, clock):
    r = rig(WriteBack(), write_budget=WriteBudget(86_400 * 1000.0, 350_000))
    store = TieredStore([r.memory, r.disk], Placement(write=WriteBack()))
    for number in range(2):
        put(store, samples.meta(number), size(number))
    assert store.settle() == 1
    assert store.moves.dirty == (samples.meta(1).id,)
    assert store.settle() == 0
    clock.advance(400)  # 1,000 bytes a second grow back
    assert store.settle() == 1
    assert samples.read(r.disk, 0, 1) == [size(0), size(1)]


def test_disk_passes_on_to_remote_what_it_evicts(rig, samples, clock):
    r = rig(WriteThrough(), limits=SMALL)
    for number in range(5):
        clock.advance(1)
        put(r.store, samples.meta(number), size(number))
        r.store.price({samples.meta(number).id: 100.0})
    r.store.settle()
    assert samples.read(r.disk, 0) == "absent"
    assert samples.read(r.remote, 0) == [size(0)]
    assert samples.read(r.store, 0, 1, 2, 3, 4) == [size(n) for n in range(5)]


def test_with_the_budget_spent_demotion_goes_past_the_disk(rig, samples, clock):
    r = rig(OnEviction(), write_budget=WriteBudget(1.0, 1.0))
    for number in range(4):
        clock.advance(1)
        put(r.store, samples.meta(number), size(number))
    assert r.store.settle() == 1
    assert samples.read(r.remote, 0) == [size(0)]
    assert r.disk.core.counters["refused_write_budget"] == 1


def test_read_often_far_down_comes_up(rig, samples):
    r = rig(OnEviction())
    put(r.disk, samples.meta(1), size(1))
    samples.read(r.store, 1)
    assert r.store.settle() == 0  # once is no habit
    samples.read(r.store, 1)
    assert r.store.settle() == 1
    assert samples.read(r.memory, 1) == [size(1)]


def test_removed_while_its_copy_waits_stays_gone(rig, samples, clock):
    r = rig(WriteBack())
    for number in range(4):
        clock.advance(1)
        put(r.store, samples.meta(number), size(number))
    ids = [samples.meta(n).id for n in range(4)]
    r.store.remove(ids)
    assert r.store.settle() == 0
    assert r.store.find(ids) == {}


def test_removed_while_it_is_read_stays_gone(rig, samples, monkeypatch):
    """The read's bytes are from before; its copy to the top comes after."""
    r = rig(OnEviction())
    meta = samples.meta(1)
    put(r.disk, meta, size(1))
    samples.read(r.store, 1)  # once is no habit
    real = r.disk.read

    def read(*arguments: object) -> object:
        outcome = real(*arguments)
        r.store.remove([meta.id])
        return outcome

    monkeypatch.setattr(r.disk, "read", read)
    assert samples.read(r.store, 1) == [size(1)]
    assert r.store.settle() == 0
    assert r.store.find([meta.id]) == {}


def test_a_copy_on_top_is_not_seen_before_the_record_is_durable(rig, samples, monkeypatch):
    r = rig(WriteThrough(1))
    seen: list[object] = []
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        seen.append(samples.read(r.store, 1))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    assert isinstance(put(r.store, samples.meta(1), size(1)), WriteDone)
    assert seen == ["absent"]
    assert samples.read(r.memory, 1) == [size(1)]


def test_purged_while_its_copy_waits_stays_gone(rig, samples, clock):
    r, tenant = rig(WriteBack()), b"a" * 32
    for number in range(4):  # the first has left the top and waits, the others are owed
        clock.advance(1)
        put(r.store, samples.meta(number, tenant=tenant), size(number))
    assert len(r.store.moves) == 1
    r.store.purge(tenant)
    assert r.store.settle() == 0
    assert r.store.find([samples.meta(n).id for n in range(4)]) == {}


def test_quota_is_each_tenants_own(rig, samples, clock):
    quota = TierLimits(KindLimits(64 * MIB), KindLimits(64 * MIB), tenant_quota_bytes=700_000)
    r = rig(WriteThrough(), limits=quota)
    for number in range(4):
        clock.advance(1)
        tenant = (b"a" if number < 3 else b"b") * 32
        assert isinstance(
            put(r.store, samples.meta(number, tenant=tenant), size(number)), WriteDone
        )
    standing = {owner: used.stored_bytes for (owner, _), used in r.disk.usage().items()}
    assert standing[b"a" * 32] <= 700_000
    assert standing[b"b" * 32] >= 300_000
    assert samples.read(r.disk, 3) == [size(3)]  # the other tenant paid nothing


def test_a_bad_copy_is_not_passed_down(rig, samples, clock):
    r = rig(OnEviction())
    put(r.store, samples.meta(0), size(0))
    bytes_held(r.memory, samples.meta(0).id)[500] ^= 1
    for number in range(1, 4):
        clock.advance(1)
        put(r.store, samples.meta(number), size(number))
    assert r.store.settle() == 0
    assert samples.read(r.store, 0) == "absent"


def test_promotions_are_shed_before_demotions(samples, clock):
    tier = MemoryTier(clock, LARGE)
    put(tier, samples.meta(1), bytes(60))
    record = tier.find([samples.meta(1).id])[samples.meta(1).id]
    queue = MoveQueue(limit_bytes=100)
    queue.add(TierMove(record, memoryview(bytes(60)), 0))
    queue.add(TierMove(record, memoryview(bytes(60)), 1))
    queue.check()
    move = queue.take()
    assert move is not None
    assert move.level == 1
    assert queue.take() is None
    assert queue.counters["promotions_shed"] == 1


def test_expected_use_halves_with_each_half_life(samples, clock):
    tier = MemoryTier(clock, LARGE)
    put(tier, samples.meta(1), bytes(1000))
    tier.price({samples.meta(1).id: 40.0})
    record = tier.find([samples.meta(1).id])[samples.meta(1).id]
    expected = ExpectedUse(range_half_life_s=100.0)
    now_s = clock.now()
    assert expected.order(now_s)(record) == pytest.approx(by_utility(record))
    assert expected.order(now_s + 200)(record) == pytest.approx(by_utility(record) / 4)


NUMBERS = st.integers(0, 11)
TENANTS = (b"", b"a" * 32)
POLICIES = (OnEviction(), WriteBack(), WriteThrough())


def meta(number: int) -> Meta:
    id_ = bytes([number + 1]) * 32
    kind = ArtifactKind.POINT if number % 3 == 0 else ArtifactKind.RANGE
    return Meta(id_, kind, "swa", id_, 0, 128, tenant=TENANTS[number % 2], units=2)


class Life(RuleBasedStateMachine):
    """`truth`: what was acknowledged and neither removed nor purged. The lowest tier has room for
    all of it and every record is worth its move, so nothing of it may be lost, wherever it lies.
    """

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: WritePolicy) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="tiered-"))
        self.clock = ManualClock(1e9)
        self.truth: dict[int, bytes] = {}
        self.gone: set[int] = set()
        self.policy = policy
        tight = TierLimits(KindLimits(40_000), KindLimits(40_000))
        top = TierLimits(KindLimits(12_000), KindLimits(12_000))
        options = DiskOptions(limits=tight, segment_bytes=64 * 4096)
        blobs = DirectoryBlobs(self.root / "shared")
        self.limits = {"memory": top, "disk": tight}
        self.store = TieredStore(
            [
                MemoryTier(self.clock, top),
                DiskTier(self.root / "disk", self.clock, options=options),
                RemoteTier("remote", blobs, clock=self.clock, keys=Keys(b"k" * 32), limits=LARGE),
            ],
            Placement(write=policy),
        )

    def read(self, number: int) -> bytes | None:
        outcome = self.store.read([Want(meta(number).id)])
        return bytes(outcome.parts[0].data) if isinstance(outcome, ReadHit) else None

    @rule(number=NUMBERS, half=st.integers(1, 4000))
    def put(self, number: int, half: int) -> None:
        self.clock.advance(1)
        payload = os.urandom(2 * half)
        outcome = put(self.store, meta(number), payload)
        if isinstance(outcome, WriteDone):
            if number in self.truth:
                # A copy stood further down than the level that answers: ids are sealed, and the
                # first bytes may be served or these. A caller never has two for one id.
                self.store.remove([meta(number).id])
                del self.truth[number]
                self.gone.add(number)
            else:
                self.truth[number] = payload
                self.gone.discard(number)
        else:
            assert isinstance(outcome, AlreadyStored)
            assert number in self.truth or self.waits(number)

    def waits(self, number: int) -> bool:
        return meta(number).id in self.store.moves.dirty

    @rule(number=NUMBERS, half=st.integers(1, 4000))
    def abort(self, number: int, half: int) -> None:
        reserved = self.store.reserve(meta(number), 2 * half)
        if isinstance(reserved, Reservation):
            self.store.abort(reserved)

    @rule()
    def settle(self) -> None:
        for _ in self.store.tiers:  # what is owed may push others down, who then wait themselves
            self.store.settle()
        assert len(self.store.moves) == 0
        for number, payload in self.truth.items():  # all that waited lies somewhere now
            assert self.read(number) == payload

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        got = self.read(number)
        if got is None:
            moving = self.store.moves.moving
            assert number not in self.truth or meta(number).id in moving
        else:
            assert got == self.truth[number]

    @rule(numbers=st.lists(NUMBERS, unique=True, max_size=4))
    def remove(self, numbers: list[int]) -> None:
        self.store.remove([meta(number).id for number in numbers])
        for number in numbers:
            self.truth.pop(number, None)
            self.gone.add(number)

    @rule()
    def purge(self) -> None:
        self.store.purge(TENANTS[1])
        for number in [n for n in self.truth if meta(n).tenant == TENANTS[1]]:
            del self.truth[number]
            self.gone.add(number)

    @rule(number=NUMBERS, cost_ms=st.floats(0.1, 1000))
    def price(self, number: int, cost_ms: float) -> None:
        self.store.price({meta(number).id: cost_ms})

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.moves.check()
        for tier in self.store.tiers[:2]:
            for kind in ArtifactKind:
                used = sum(u.stored_bytes for (_, k), u in tier.usage().items() if k is kind)
                assert used <= self.limits[tier.name].of(kind).capacity_bytes
        top = self.store.tiers[0].find(list(self.store.moves.dirty))
        assert set(top) == set(self.store.moves.dirty), "owed, and not on top"

    @invariant()
    def what_is_gone_stays_gone(self) -> None:
        if hasattr(self, "store"):
            assert self.store.find([meta(number).id for number in self.gone]) == {}

    @invariant()
    def written_through_is_below_at_once(self) -> None:
        if hasattr(self, "store") and isinstance(self.policy, WriteThrough):
            moving = self.store.moves.moving
            for number in self.truth:
                id_ = meta(number).id
                below = [tier.find([id_]) for tier in self.store.tiers[1:]]
                assert any(below) or id_ in moving

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.root)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=int(os.environ.get("OWNERSERVE_EXAMPLES", "12")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
