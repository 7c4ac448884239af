"""One reader's connection, as the lender serves it: a state machine that a selector drives.

    HELLO ── 48 bytes ──> PROOF ── 32 bytes ──> ASKED ── 136 bytes ──> SENDING ── Over ──> ASKED
      │                     │                     │                       │
      └─────────────────────┴── Corrupt, closed, too slow: dropped ───────┘

One question at a time is read; what comes meanwhile waits in the kernel. In SENDING memory is read:
parts, each sent from where it lies and then digested. The ticket is asked for before each part,
and after the kernel has taken the last byte: only then is `Over` written.
"""

from __future__ import annotations

import math
import selectors
import socket
from collections.abc import Callable

from blake3 import blake3
from xxhash import xxh3_128

from ownerserve.kv.units import MIB
from ownerserve.transfer.movers.digests import Hasher
from ownerserve.transfer.movers.port import Lender
from ownerserve.transfer.movers.tcp.gather import SLICE_BYTES, Gather
from ownerserve.transfer.movers.tcp.handshake import (
    HELLO_BYTES,
    PROOF_BYTES,
    ConnectionKeys,
    LenderHandshake,
)
from ownerserve.transfer.movers.tcp.settings import LenderSettings
from ownerserve.transfer.movers.tcp.wire import (
    ASK_BYTES,
    AnswerOutcome,
    Bring,
    Checking,
    DigestKind,
    Over,
    PartHead,
    Signing,
    decode_ask,
)

PART_BYTES = 8 * MIB
"""What is sent between two looks at the ticket, and before another connection has its turn."""
_FRAME_MORE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL | socket.MSG_MORE
_FRAME_LAST = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def hasher_of(kind: DigestKind, key: bytes) -> Hasher | None:
    """Return what makes a digest of that kind; `key` is the connection's for bytes."""
    match kind:
        case DigestKind.NONE:
            return None
        case DigestKind.XXH3:
            return xxh3_128()
        case DigestKind.BLAKE3:
            return blake3(key=key)


class _Answer:
    """What is being sent: the piece where it lies, and how far the digest and the part go."""

    def __init__(self, bring: Bring, gather: Gather, hasher: Hasher | None) -> None:
        self.bring, self.gather, self.hasher = bring, gather, hasher
        self.part_end = self.digested = 0

    def next_part(self) -> PartHead:
        """Begin a part."""
        start = self.part_end
        self.part_end = min(start + PART_BYTES, self.gather.bytes)
        return PartHead(self.bring.number, self.part_end - start)

    def send(self, descriptor: int) -> bool:
        """Send what the socket takes of the part; False: it takes no more now."""
        gather = self.gather
        while gather.moved < self.part_end:
            sent = gather.send(descriptor, self.part_end)
            self._digest(gather.moved // SLICE_BYTES * SLICE_BYTES)
            if not sent:
                return False
        self._digest(self.part_end)
        return True

    def _digest(self, end: int) -> None:
        """Digest what was sent before `end`, as long as a cache has it."""
        if self.hasher is not None and self.digested < end:
            self.gather.digest(self.hasher, self.digested, end)
            self.digested = end

    def over(self, outcome: AnswerOutcome) -> Over:
        """End the answer."""
        brought = outcome is AnswerOutcome.BROUGHT and self.hasher is not None
        digest = self.hasher.digest() if brought and self.hasher is not None else b""
        return Over(self.bring.number, outcome, self.gather.moved, digest)


class ServedReader:
    """A `ServedReader` is one connection. Owns its socket's turns and what it may still read of
    memory. By `deadline_s` it has to have got on; infinity: nothing is awaited of it."""

    def __init__(
        self, sock: socket.socket, lender: Lender, *, handshake: LenderHandshake, now_s: float,
        settings: LenderSettings,
    ) -> None:  # fmt: skip
        self.socket = sock
        self.is_known = False
        self.deadline_s = now_s + settings.handshake_s
        self._lender, self._handshake, self._settings = lender, handshake, settings
        self._buffer = bytearray(ASK_BYTES)
        self._filled = 0
        self._awaited: tuple[int, Callable[[bytes], None]] = (HELLO_BYTES, self._hello)
        self._out = b""
        self._keys: ConnectionKeys | None = None
        self._signing, self._checking = Signing(bytes(32)), Checking(bytes(32))
        self._answer: _Answer | None = None

    @property
    def events(self) -> int:
        """Return what the selector is to wait for."""
        waits_to_send = self._out or self._answer is not None
        return selectors.EVENT_WRITE if waits_to_send else selectors.EVENT_READ

    def advance(self, now_s: float) -> None:
        """Do what the socket is ready for. Raises OSError or Corrupt where it is over."""
        if self.events == selectors.EVENT_READ:
            self._pull(now_s)
        if self.events == selectors.EVENT_WRITE:
            self._push(now_s)

    def _pull(self, now_s: float) -> None:
        need, then = self._awaited
        room = memoryview(self._buffer)[self._filled : need]
        try:
            got = self.socket.recv_into(room)
        except BlockingIOError:
            return
        if not got:
            raise ConnectionResetError("the reader has closed")
        if self.is_known and not self._filled:
            self.deadline_s = now_s + self._settings.handshake_s
        self._filled += got
        if self._filled == need:
            self._filled = 0
            then(bytes(self._buffer[:need]))
            if self._out:
                self.deadline_s = now_s + self._settings.stall_s

    def _hello(self, data: bytes) -> None:
        self._out = self._handshake.welcome(data)
        self._awaited = (PROOF_BYTES, self._proof)

    def _proof(self, data: bytes) -> None:
        self._keys = self._handshake.proved(data)
        self._signing, self._checking = Signing(self._keys.answers), Checking(self._keys.asks)
        self._awaited = (ASK_BYTES, self._ask)
        self.is_known, self.deadline_s = True, math.inf

    def _ask(self, data: bytes) -> None:
        assert self._keys is not None
        bring = decode_ask(self._checking.body(data))
        runs = self._lender.runs(bring.ticket, bring.piece)
        if runs is None or runs.bytes != bring.size_bytes:
            self._out = self._signing.frame(
                Over(bring.number, AnswerOutcome.REFUSED, 0, b"").body()
            )
            return
        self._answer = _Answer(bring, Gather(runs), hasher_of(bring.digest, self._keys.bytes))
        self._next_frame()

    def _next_frame(self) -> None:
        """Write the next part's head, or the answer's end; memory was read to where it stands."""
        answer = self._answer
        assert answer is not None
        stands = self._lender.stands(answer.bring.ticket)
        if stands and answer.gather.moved < answer.gather.bytes:
            self._out = self._signing.frame(answer.next_part().body())
            return
        over = answer.over(AnswerOutcome.BROUGHT if stands else AnswerOutcome.GONE)
        self._out = self._signing.frame(over.body())
        self._answer = None

    def _push(self, now_s: float) -> None:
        while self._out:
            more = _FRAME_LAST if self._answer is None else _FRAME_MORE
            try:
                sent = self.socket.send(self._out, more)
            except BlockingIOError:
                return
            self._out = self._out[sent:]
        answer = self._answer
        if answer is None:
            awaits_proof = not self.is_known
            self.deadline_s = now_s + self._settings.handshake_s if awaits_proof else math.inf
            return
        before = answer.gather.moved
        is_whole = answer.send(self.socket.fileno())
        if answer.gather.moved > before:
            self.deadline_s = now_s + self._settings.stall_s
        if is_whole:
            self._next_frame()
            if self._answer is None:
                self._push(now_s)
