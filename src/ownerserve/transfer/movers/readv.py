"""The mover that reads by address: `process_vm_readv` copies out of the peer's memory.

It needs no shared memory, only ptrace rights over the peer (rights.py says whether they are there).
Addresses are the peer's own; the kernel refuses one that is not mapped, so a forged one costs its
read and nothing else. Where the peer frees memory while it is read, other bytes come or none: the
digest and the ticket decide, as everywhere. Memory of the peer that a userfaultfd or FUSE serves
could hold the call up for as long as it likes: engines do not lend such memory.
"""

from __future__ import annotations

import ctypes
import errno

from ownerserve.kv.clock import Clock
from ownerserve.transfer.movers.cuts import Cuts
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.one_sided import CHUNK_BYTES, ChunkCopied, OneSidedMover
from ownerserve.transfer.movers.peers import PeerProcess, open_peer
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.vocabulary import ReadFailure, Runs

IOV_MAX = 1024
"""Stretches of a call on each side (<limits.h>)."""
_VECTOR_BYTES = 16

_FAILURES = {
    errno.EPERM: ReadFailure.UNABLE,
    errno.ENOSYS: ReadFailure.UNABLE,
    errno.EFAULT: ReadFailure.REFUSED,
    errno.ESRCH: ReadFailure.PEER_LOST,
}

_libc = ctypes.CDLL(None, use_errno=True)
_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def read_memory(pid: int, cuts: Cuts, first: int, end: int) -> int:
    """Copy stretches [first, end), at most IOV_MAX, from that process's memory into this one's.
    Returns the bytes copied, which may be fewer than asked, or a negative errno."""
    into, out = cuts.goals.ctypes.data, cuts.sources.ctypes.data
    at, count = first * _VECTOR_BYTES, end - first
    done = _process_vm_readv(pid, into + at, count, out + at, count, 0)
    return int(done) if done >= 0 else -ctypes.get_errno()


class ReadvCopier:
    """A `ReadvCopier` copies by `process_vm_readv`. Owns its hold of the peer."""

    def __init__(self, peer: PeerProcess) -> None:
        self._peer = peer

    def locate(self, source: Runs) -> Runs | ReadFailure:
        """Return the source as it is: the peer's addresses are what the kernel takes."""
        return source

    def copy(self, cuts: Cuts, first: int, end: int, /) -> ChunkCopied | ReadFailure:
        """Copy stretches [first, end), in as few calls as their number allows."""
        for begin in range(first, end, IOV_MAX):
            stop = min(begin + IOV_MAX, end)
            asked = int(cuts.goals[begin:stop, 1].sum())
            done = read_memory(self._peer.pid, cuts, begin, stop)
            if done < 0:
                return _FAILURES.get(-done, ReadFailure.UNABLE)
            if done < asked:  # the peer ended, or has not all of it mapped
                return ReadFailure.REFUSED if self._peer.lives() else ReadFailure.PEER_LOST
        return ChunkCopied()

    def lives(self) -> bool:
        """Tell whether the peer has not ended."""
        return self._peer.lives()

    def close(self) -> None:
        """Let go of the peer."""
        self._peer.close()


def readv_mover(
    name: ProcessName,
    digests: Digests,
    *,
    clock: Clock | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> OneSidedMover:
    """Return a mover that reads that process's memory by address. One that is not of this host, has
    ended or may not be read makes each read end so, as UNABLE or PEER_LOST."""
    peer = open_peer(name)
    copier = peer if isinstance(peer, ReadFailure) else ReadvCopier(peer)
    return OneSidedMover("readv", copier, digests=digests, clock=clock, chunk_bytes=chunk_bytes)
