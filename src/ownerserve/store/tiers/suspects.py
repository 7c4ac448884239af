"""Suspects are shared blobs that read badly here, and the rule by which one is moved away for all.

    suspects/ID/DIGEST    body: the machine that found the blob of ID bad; digest of what it read

One machine's word moves nothing: its memory, network card or page cache may be at fault. Bytes that
fail are read again into other memory. What fails twice is hidden here for a while, and its whole
blob's digest is left on the medium; only a second machine that reads the very same bad bytes moves
it to `quarantine/ID`. A machine that alone finds many blobs bad suspects itself: it goes on serving
what verifies, and neither accuses nor confirms until its reads are good again.
"""

from __future__ import annotations

import logging
import socket
import zlib
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from xxhash import xxh3_128

from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import CapacityExceeded
from ownerserve.kv.units import MIB
from ownerserve.store.tiers.blobs import Backpressure, Blobs
from ownerserve.store.tiers.buffers import BufferPool

log = logging.getLogger("ownerserve.store")

HIDDEN_S = 300.0
"""How long a blob that failed twice is not found here."""
KEPT_S = 7 * 24 * 3600.0
"""How long accusations and what is in quarantine stay on the medium."""
READS_JUDGED_BY = 64
BAD_BLOBS_OF_THESE = 4
"""With so many blobs bad among its last reads, and nobody else to say so, a machine suspects
itself."""
STEP_BYTES = 16 * MIB
MACHINE_BYTES = 64
_CRC_BYTES = 4
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_GOOD = b""


def this_machine() -> bytes:
    """Return a name of this machine that all its processes and containers share, until it boots
    anew.
    """
    try:
        return _BOOT.read_bytes().strip()[:MACHINE_BYTES]
    except OSError:
        return socket.gethostname().encode()[:MACHINE_BYTES]


def quarantine_key(id_: bytes) -> str:
    """Return the name of the blob that was `id_`'s record and was found bad."""
    return f"quarantine/{id_.hex()}"


def accusations(id_: bytes) -> str:
    """Return the prefix of the names of what is left on the medium against `id_`'s record."""
    return f"suspects/{id_.hex()}/"


class Suspects:
    """Suspects remembers the reads of one tier in one process. Thread-safe. `machine` names who
    reads.
    """

    def __init__(
        self, blobs: Blobs, clock: Clock, *, name: str, machine: bytes, counters: Counter[str]
    ) -> None:
        self._blobs = blobs
        self._clock = clock
        self._name = name
        self._machine = machine
        self._counters = counters
        self._reads: deque[bytes] = deque(maxlen=READS_JUDGED_BY)
        self._hidden_s: dict[bytes, float] = {}
        self._lock = Lock()
        self.itself = False
        """Whether this machine suspects itself."""

    def verified(self) -> None:
        """Note that a read was good."""
        self._note(_GOOD)

    def slipped(self, id_: bytes) -> None:
        """Note that a read was bad and the next one of the same bytes good: the blob is sound."""
        self._counters["reread"] += 1
        self._note(id_)

    def _note(self, id_: bytes) -> None:
        with self._lock:
            self._reads.append(id_)
            bad = len(set(self._reads) - {_GOOD})
            before, self.itself = self.itself, bad >= BAD_BLOBS_OF_THESE
        if self.itself and not before:
            self._counters["self_suspected"] += 1
            log.warning(
                "%s: %d blobs read badly here and nobody else says so; this machine suspects itself"
                " and judges no blob: check its memory and its way to the medium",
                self._name,
                bad,
            )
        elif before and not self.itself:
            log.warning("%s: reads are good again; blobs are judged", self._name)

    def hides(self, id_: bytes) -> bool:
        """Tell whether the blob failed here a short while ago."""
        with self._lock:
            since_s = self._hidden_s.get(id_)
            if since_s is None:
                return False
            if 0 <= self._clock.now() - since_s < HIDDEN_S:
                return True
            del self._hidden_s[id_]
            return False

    def hide(self, id_: bytes) -> None:
        """Let the blob not be found here for `HIDDEN_S`."""
        with self._lock:
            self._hidden_s[id_] = self._clock.now()

    def clear(self, id_: bytes) -> None:
        """Note that the blob was removed or written anew: it is not hidden any more."""
        with self._lock:
            self._hidden_s.pop(id_, None)

    def accuse(self, id_: bytes, key: str) -> None:
        """Note that the blob at `key` failed twice; move it away if another machine has read the
        same bad bytes. What the medium refuses is left for the next read.
        """
        self._counters["accused"] += 1
        moved = False
        if not self.itself:
            with suppress(OSError, CapacityExceeded):
                moved = self._judge(id_, key)
        if moved:
            self._counters["quarantined"] += 1
            log.warning(
                "%s: record %s quarantined: two machines read it badly", self._name, id_.hex()[:16]
            )
            return
        self.hide(id_)
        self._note(id_)

    def _judge(self, id_: bytes, key: str) -> bool:
        marker = accusations(id_) + _digest(self._blobs.get_into, key)
        try:
            self._blobs.put_new(marker, memoryview(_signed(marker, self._machine)))
        except FileExistsError:
            said = bytearray(_CRC_BYTES + MACHINE_BYTES)
            said = said[: self._blobs.get_into(marker, 0, memoryview(said))]
            who = bytes(said[_CRC_BYTES:])
            if who != self._machine and said == _signed(marker, who):
                self._blobs.move(key, quarantine_key(id_))
                self._blobs.delete(marker)
                return True
        return False

    def forget(self, id_: bytes) -> None:
        """Remove what the medium has of a record that failed. Raises what the medium raises."""
        self._blobs.delete(quarantine_key(id_))
        for blob in self._blobs.list(accusations(id_)):
            self._blobs.delete(blob.key)

    def expire(self) -> None:
        """Remove accusations and quarantined blobs older than `KEPT_S`."""
        before_s = self._clock.now() - KEPT_S
        with suppress(OSError, Backpressure):
            for prefix in ("suspects/", "quarantine/"):
                for blob in self._blobs.list(prefix):
                    if blob.modified_s < before_s:
                        self._blobs.delete(blob.key)


def _signed(marker: str, machine: bytes) -> bytes:
    """Return an accusation's body, bound to its name: another blob's bytes are nobody's word."""
    return zlib.crc32(marker.encode() + machine).to_bytes(_CRC_BYTES, "little") + machine


def _digest(get_into: Callable[[str, int, memoryview], int], key: str) -> str:
    """Return the digest of a whole blob, read anew into memory of its own."""
    digest, offset = xxh3_128(), 0
    step = BufferPool(idle_limit_bytes=0).take(STEP_BYTES)
    while True:
        count = get_into(key, offset, step)
        digest.update(step[:count])
        offset += count
        if count < len(step):
            return digest.hexdigest()
