"""Host memory that a GPU reaches directly: locked while used, unlocked before it is unmapped."""

from __future__ import annotations

import numpy as np
import pytest

from ownerserve.node.storage.backing import open_backing
from ownerserve.store.format.model import ReadHit, Want, WriteDone
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.pinned import PinnedMemory
from ownerserve.store.tiers.policy import split


class FakeCuda:
    """Refuses what CUDA refuses: a range twice, an unknown one."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % 4096 == 0
        assert address not in self.registered
        if self.status == 0:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_what_the_pool_lets_go_is_unlocked():
    cuda = FakeCuda()
    pool = BufferPool(idle_limit_bytes=10_000, memory=PinnedMemory(cuda))
    first, second = pool.take(8000), pool.take(8000)
    assert sum(cuda.registered.values()) == 16_384
    del first  # idle: stays locked, ready for the next
    assert sum(cuda.registered.values()) == 16_384
    del second  # beyond what may be idle
    assert sum(cuda.registered.values()) == 8192
    again = pool.take(8000)
    assert sum(cuda.registered.values()) == 8192
    del again


def test_memory_that_can_not_be_locked_is_used_as_it_is(clock, samples, caplog):
    memory = PinnedMemory(FakeCuda(status=2))
    tier = MemoryTier(clock, split(1 << 20), landing=BufferPool(memory=memory))
    for number in range(2):
        put(tier, samples.meta(number), samples.payload(number))
    assert samples.read(tier, 0, 1) == [samples.payload(0), samples.payload(1)]
    assert memory.counters["unpinned_bytes"] > 0
    assert len([r for r in caplog.records if "page-locked" in r.message]) == 1


def test_a_store_without_a_host_cache_lands_in_locked_memory(tmp_path, samples):
    """What goes to the device and comes from it passes the disk's buffers: by default they are
    what a DMA reaches without a bounce."""
    cuda = FakeCuda()
    backing = open_backing(tmp_path, 0, cuda=cuda)
    assert backing is not None
    payload = samples.payload(0)
    reserved = backing.tiers.reserve(samples.meta(0), len(payload))
    assert isinstance(reserved, Reservation)
    address = np.frombuffer(reserved.payload, np.uint8).ctypes.data
    assert any(0 <= address - first < size for first, size in cuda.registered.items())
    reserved.payload[:] = payload
    backing.tiers.commit([reserved])
    outcome = backing.tiers.read([Want(samples.meta(0).id)])
    assert isinstance(outcome, ReadHit)
    address = np.frombuffer(outcome.parts[0].data, np.uint8).ctypes.data
    assert any(0 <= address - first < size for first, size in cuda.registered.items())
    backing.close()


@pytest.mark.engine
@pytest.mark.gpu
def test_a_gpu_copies_straight_from_the_tier(clock, samples):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    memory = PinnedMemory(torch.cuda.cudart())
    pool = BufferPool(memory=memory)
    tier = MemoryTier(clock, split(1 << 24), landing=pool)
    payload = samples.payload(1, 4_000_000)
    assert isinstance(put(tier, samples.meta(1), payload), WriteDone)
    assert memory.counters["unpinned_bytes"] == 0
    outcome = tier.read([Want(samples.meta(1).id)])
    assert isinstance(outcome, ReadHit)
    room = tier.reserve(samples.meta(2), len(payload))
    back = torch.frombuffer(room.payload, dtype=torch.uint8)
    assert back.is_pinned()
    there = torch.frombuffer(bytearray(outcome.parts[0].data), dtype=torch.uint8).cuda()
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    del back  # a buffer that someone still sees can't be committed
    assert isinstance(tier.commit([room])[0], WriteDone)
    assert bytes(tier.read([Want(samples.meta(2).id)]).parts[0].data) == payload
