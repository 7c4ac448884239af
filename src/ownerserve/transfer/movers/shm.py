"""The mover that maps the peer's memory: shared memory of one host, copied out by this process.

    lender   memfd, MFD_ALLOW_SEALING, sealed F_SEAL_SHRINK; named /proc/PID/fd/N (kv.regions)
    reader   opens it, checks seal and size, maps it read-only, copies, unmaps at close

A mapping whose object shrinks kills who touches it (SIGBUS). So only an object that is sealed
against it is mapped; any other, a POSIX shared memory object too (it can't be sealed), is UNABLE.
The mapping holds the memory: a peer that ends takes no byte away, and its reads end PEER_LOST.
To open it takes the peer's uid, and no ptrace rights.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re

import msgspec
import numpy as np

from ownerserve.kv.clock import Clock
from ownerserve.kv.regions import SharedMemory
from ownerserve.kv.units import KIB
from ownerserve.transfer.movers.cuts import Cuts
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.one_sided import CHUNK_BYTES, ChunkCopied, OneSidedMover
from ownerserve.transfer.movers.peers import PeerProcess, open_peer
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.vocabulary import ReadFailure, Runs

_NAME = re.compile(r"/proc/([1-9][0-9]{0,9})/fd/([0-9]{1,9})")
_LONG_BYTES = 64 * KIB
"""Copies from here on let other threads run meanwhile; shorter ones are over before that pays."""

_arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_long = ctypes.CDLL(None).memmove
_copy_long.argtypes, _copy_long.restype = _arguments, None
_copy_short = ctypes.PyDLL(None).memmove
_copy_short.argtypes, _copy_short.restype = _arguments, None


class ShmCopier:
    """A `ShmCopier` copies out of a mapping of the peer's memory. Owns the mapping and its hold of
    the peer."""

    def __init__(self, peer: PeerProcess, shared: SharedMemory, *, mapping: mmap.mmap) -> None:
        self._peer = peer
        self._shared = shared
        self._mapping = mapping
        self._address = int(np.frombuffer(mapping, np.uint8).ctypes.data)

    def locate(self, source: Runs) -> Runs | ReadFailure:
        """Return where the peer's runs lie in the mapping; REFUSED if one leaves it."""
        lengths = source.lengths
        if source.addresses.shape != lengths.shape:
            return ReadFailure.REFUSED
        offsets = source.addresses - self._shared.address
        rooms = self._shared.bytes - offsets
        if np.any(offsets < 0) or np.any(lengths < 0) or np.any(lengths > rooms):
            return ReadFailure.REFUSED
        return msgspec.structs.replace(source, addresses=offsets + self._address)

    def copy(self, cuts: Cuts, first: int, end: int, /) -> ChunkCopied | ReadFailure:
        """Copy stretches [first, end), each by itself."""
        lengths = cuts.goals[first:end, 1]
        move = _copy_long if lengths.mean() >= _LONG_BYTES else _copy_short
        goals, sources = cuts.goals[first:end, 0].tolist(), cuts.sources[first:end, 0].tolist()
        for goal, source, length in zip(goals, sources, lengths.tolist(), strict=True):
            move(goal, source, length)
        return ChunkCopied()

    def lives(self) -> bool:
        """Tell whether the peer has not ended."""
        return self._peer.lives()

    def close(self) -> None:
        """Unmap, and let go of the peer."""
        self._mapping.close()
        self._peer.close()


def _map(shared: SharedMemory, pid: int) -> mmap.mmap | ReadFailure:
    """Return the object mapped read-only, if it is the peer's own memfd, sealed, and that long."""
    named = _NAME.fullmatch(shared.name)
    if named is None or int(named[1]) != pid or shared.bytes < 1:
        return ReadFailure.UNABLE
    try:
        opened = os.open(shared.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # another uid, another root, or closed meanwhile
        return ReadFailure.UNABLE
    try:
        seals = fcntl.fcntl(opened, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(opened).st_size < shared.bytes:
            return ReadFailure.UNABLE
        return mmap.mmap(opened, shared.bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError):  # no file that has seals, or no room for a mapping
        return ReadFailure.UNABLE
    finally:
        os.close(opened)


def _open(name: ProcessName, shared: SharedMemory) -> ShmCopier | ReadFailure:
    peer = open_peer(name)
    if isinstance(peer, ReadFailure):
        return peer
    mapping = _map(shared, peer.pid)
    if isinstance(mapping, ReadFailure):
        lost = not peer.lives()
        peer.close()
        return ReadFailure.PEER_LOST if lost else mapping
    return ShmCopier(peer, shared, mapping=mapping)


def shm_mover(
    name: ProcessName,
    shared: SharedMemory,
    *,
    digests: Digests,
    clock: Clock | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> OneSidedMover:
    """Return a mover that copies out of the memory which that process shares. Where it can't be
    mapped safely each read ends UNABLE, or PEER_LOST where the process has ended."""
    copier = _open(name, shared)
    return OneSidedMover("shm", copier, digests=digests, clock=clock, chunk_bytes=chunk_bytes)
