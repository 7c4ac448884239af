"""A random life of a store on disk against a dict: every operation, crashes and harm."""

from __future__ import annotations

import os
import shutil

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ownerserve.kv.clock import ManualClock
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.recover import discard_index
from ownerserve.store.disk.scan import records
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.model import (
    AlreadyStored,
    ArtifactKind,
    Meta,
    ReadHit,
    Want,
    WriteDone,
)
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from tests.support.store.flipper import scratch

TTL_S = {ArtifactKind.RANGE: 1000.0, ArtifactKind.POINT: 100.0}
OPTIONS = DiskOptions(
    limits=TierLimits(
        KindLimits(1 << 30, TTL_S[ArtifactKind.RANGE]),
        KindLimits(1 << 30, TTL_S[ArtifactKind.POINT]),
    ),
    segment_bytes=16 * BLOCK,
)
NUMBERS = st.integers(0, 15)
TENANTS = (b"", b"a" * 32, b"b" * 32)


def meta(number: int) -> Meta:
    id_ = bytes([number]) * 32
    kind = ArtifactKind.POINT if number % 2 else ArtifactKind.RANGE
    return Meta(id_, kind, "swa", id_, 0, 128, tenant=TENANTS[number % 3], units=2)


class Life(RuleBasedStateMachine):
    """`truth` holds what was acknowledged and not taken away since: all of it must read back."""

    @initialize()
    def begin(self) -> None:
        self.root = scratch()
        self.clock = ManualClock(1e9)
        self.truth: dict[int, bytes] = {}
        self.touched: dict[int, float] = {}
        self.tier = self.open()

    def open(self) -> DiskTier:
        return DiskTier(self.root, self.clock, options=OPTIONS)

    def read(self, number: int) -> bytes | None:
        outcome = self.tier.read([Want(meta(number).id)])
        return bytes(outcome.parts[0].data) if isinstance(outcome, ReadHit) else None

    @rule(numbers=st.lists(NUMBERS, unique=True, max_size=5), size=st.integers(1, 9000))
    def put(self, numbers: list[int], size: int) -> None:
        reserved = []
        for number in numbers:
            item = self.tier.reserve(meta(number), 2 * size)
            assert isinstance(item, AlreadyStored) == (number in self.truth)
            if isinstance(item, Reservation):
                item.payload[:] = os.urandom(2 * size)
                reserved.append((number, item, bytes(item.payload)))
        outcomes = self.tier.commit([item for _, item, _ in reserved])
        for (number, _, payload), outcome in zip(reserved, outcomes, strict=True):
            assert isinstance(outcome, WriteDone)
            self.truth[number] = payload
            self.touched[number] = self.clock.now()

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        assert self.read(number) == self.truth.get(number)
        self.touched[number] = self.clock.now()

    @rule(number=NUMBERS)
    def get_half(self, number: int) -> None:
        outcome = self.tier.read([Want(meta(number).id, 1, 2)])
        if number in self.truth:
            assert isinstance(outcome, ReadHit)
            half = self.truth[number][len(self.truth[number]) // 2 :]
            assert outcome.parts[0].data == half
            self.touched[number] = self.clock.now()
        else:
            assert not isinstance(outcome, ReadHit)

    @rule(numbers=st.lists(NUMBERS, unique=True, max_size=6))
    def evict(self, numbers: list[int]) -> None:
        there = [number for number in numbers if number in self.truth]
        assert self.tier.remove([meta(number).id for number in numbers]) == len(there)
        for number in there:
            del self.truth[number]

    @rule(tenant=st.sampled_from(TENANTS[1:]))
    def purge(self, tenant: bytes) -> None:
        self.tier.purge(tenant)
        self.truth = {n: data for n, data in self.truth.items() if meta(n).tenant != tenant}

    @rule(by_s=st.floats(1, 200))
    def time_passes(self, by_s: float) -> None:
        self.clock.advance(by_s)

    @rule()
    def expire(self) -> None:
        self.tier.expire()
        now = self.clock.now()
        for number in list(self.truth):
            age_s = now - self.touched[number]
            if age_s > TTL_S[meta(number).kind] + 0.01:
                assert self.read(number) is None
                del self.truth[number]
            elif age_s > TTL_S[meta(number).kind] - 0.01 and self.read(number) is None:
                del self.truth[number]

    @rule()
    def compact(self) -> None:
        collect(self.tier.core, BufferPool(), share=0.95, kept_s=-1)

    @rule()
    def crash(self) -> None:
        """The process is gone: nothing flushed, nothing closed in order."""
        self.tier.core.index.close()
        self.tier.core.home.unlock()
        self.tier = self.open()
        # Recency since the last flush is lost; it only makes records look older than they are.
        self.touched = {
            number: record.touched_s
            for number in self.truth
            for record in self.tier.find([meta(number).id]).values()
        }

    @rule()
    def lose_the_index(self) -> None:
        self.tier.close()
        discard_index(self.tier.core.home)
        self.tier = self.open()
        self.touched = {
            number: record.touched_s
            for number in self.truth
            for record in self.tier.find([meta(number).id]).values()
        }

    @rule(number=NUMBERS, at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
    def damage(self, number: int, at: float, flip: int) -> None:
        if number not in self.truth:
            return
        entry = self.tier.core.index.get(meta(number).id)
        assert entry is not None
        # Header fields, tags or payload; not the version, whose change is another format.
        places = [*range(12, 360), *range(entry.header_bytes, entry.header_bytes + 200)]
        offset = entry.offset + places[int(at * len(places))]
        if entry.payload_bytes < 200:
            offset = entry.offset + 64
        with segment_path(self.root, entry.segment).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ flip]))
        assert self.read(number) is None
        assert self.tier.find([meta(number).id]) == {}
        del self.truth[number]
        assert isinstance(put(self.tier, meta(number), b"again" * 2), WriteDone)
        self.truth[number] = b"again" * 2
        self.touched[number] = self.clock.now()

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "tier"):
            return
        index = self.tier.core.index
        assert {entry.meta.id[0] for entry in index.walk()} == set(self.truth)
        assert index.usage() == dict(self.tier.usage())
        live: dict[int, int] = {}
        for entry in index.walk():
            live[entry.segment] = live.get(entry.segment, 0) + entry.stored_bytes
        rows = index.segments()
        assert {row.number: row.live_bytes for row in rows if row.live_bytes} == live
        assert {row.number for row in rows} == set(self.tier.core.home.segment_numbers())
        assert index.doomed() == []

    @invariant()
    def segments_hold_what_the_index_says(self) -> None:
        if not hasattr(self, "tier"):
            return
        home, index = self.tier.core.home, self.tier.core.index
        standing = {
            (number, header.place.offset)
            for number in home.segment_numbers()
            for header in records(
                Segment(segment_path(home.directory, number), os.O_RDONLY), BLOCK, home.store_id
            )
        }
        indexed = {(entry.segment, entry.offset) for entry in index.walk()}
        bad = {(q.span.segment, q.span.offset) for q in index.quarantined()}
        assert indexed <= standing <= indexed | bad

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.root)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=int(os.environ.get("OWNERSERVE_EXAMPLES", "12")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
