"""One connection of the reading side and its thread, the only writer into the goals of its reads.

    asker   start, cancel ──> WaitingReads (under a lock) <── thread: take, verdict, finished
    thread  connect, show the key ── ask ── PartHead: bytes into the goal, digested ── Over ──> end

The thread waits for the socket and for `wake` in one poll. Whatever ends a read amid its bytes
closes the connection: what still comes of it comes nowhere. A connection that stood idle may have
been closed meanwhile by the other side: where no byte of an answer came, it is asked once more on a
new one.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import random
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

import msgspec

from ownerserve.kv.errors import Corrupt, SpecMismatch
from ownerserve.transfer.movers.digests import Digests, Hasher, Xxh3, matches
from ownerserve.transfer.movers.tcp.backoff import Backoff
from ownerserve.transfer.movers.tcp.gather import SLICE_BYTES, Gather
from ownerserve.transfer.movers.tcp.handshake import (
    NONCE_BYTES,
    WELCOME_BYTES,
    ConnectionKeys,
    ReaderHandshake,
)
from ownerserve.transfer.movers.tcp.serving import hasher_of
from ownerserve.transfer.movers.tcp.settings import Peer, ReaderSettings, be_patient, keep_to, tune
from ownerserve.transfer.movers.tcp.wire import (
    ANSWER_BYTES,
    DIGEST_BYTES,
    AnswerOutcome,
    Bring,
    Checking,
    DigestKind,
    Over,
    PartHead,
    Signing,
    decode_answer,
)
from ownerserve.transfer.movers.waiting import WaitingReads
from ownerserve.transfer.vocabulary import Ended, Read, ReadFailed, ReadFailure, ReadLanded

log = logging.getLogger("ownerserve.transfer")

TICK_S = 0.05
"""How often the deadlines of reads that wait are looked at while one that runs is silent."""
PATIENCE_S = 0.02
"""How long the kernel waits for the rest of a slice before this side looks at what has changed."""
SEND_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
UNABLE = (errno.ENODEV, errno.EADDRNOTAVAIL, errno.EPERM, errno.EACCES, errno.EFAULT)


class PeerReading(msgspec.Struct, frozen=True):
    """What the connections of a mover share: the peer, how it is read, and when it is tried."""

    peer: Peer
    settings: ReaderSettings
    digests: Digests
    backoff: Backoff


class _Over(Exception):
    """The read under way ends so, and its connection with it."""

    def __init__(self, reason: ReadFailure) -> None:
        super().__init__(reason)
        self.reason = reason


class ReaderConnection:
    """A `ReaderConnection` makes one read after another. Owns its socket, its thread and its
    reads; `tell` is called with each end, from any thread, when no byte is written any more."""

    def __init__(self, reading: PeerReading, tell: Callable[[Ended], None]) -> None:
        self._reading, self._tell = reading, tell
        self._reads = WaitingReads()
        self._lock = Lock()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket: socket.socket | None = None
        self._signing, self._checking = Signing(bytes(32)), Checking(bytes(32))
        self._keys: ConnectionKeys | None = None
        self._thread: Thread | None = None

    def __len__(self) -> int:
        return len(self._reads)

    def start(self, read: Read) -> None:
        """Take a read; the thread begins with the first."""
        with self._lock:
            if self._closing:
                self._tell(ReadFailed(read.number, ReadFailure.CANCELLED))
                return
            self._reads.start(read)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="move-tcp", daemon=True)
                self._thread.start()
        os.eventfd_write(self._wake, 1)

    def cancel(self, number: int) -> None:
        """Have the read end soon."""
        with self._lock:
            if self._closing:
                return
            for end in self._reads.cancel(number):
                self._tell(end)
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Have all reads end as CANCELLED, and the thread; `join` waits for it."""
        with self._lock:
            self._closing = True
            for end in self._reads.cancel_all():
                self._tell(end)
            os.eventfd_write(self._wake, 1)

    def join(self) -> None:
        """Return when the thread has ended."""
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while (read := self._next()) is not None:
            end = self._bring(read)
            with self._lock:
                self._reads.finished()
            self._tell(end)
        self._drop()

    def _next(self) -> Read | None:
        """Wait for a read to make; None: the mover is closed."""
        while True:
            with self._lock:
                for end in self._reads.expired(time.monotonic()):
                    self._tell(end)
                if self._closing:
                    return None
                read = self._reads.take()
            if read is not None:
                return read
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            if self._socket is not None:
                poll.register(self._socket, select.POLLIN)
            if any(ready != self._wake for ready, _ in poll.poll()):
                self._drop()  # closed by the other side; nothing else is due
            self._hush()

    def _hush(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _bring(self, read: Read) -> ReadLanded | ReadFailed:
        try:
            return self._read(read)
        except _Over as over:
            reason = over.reason
        except Corrupt as error:
            log.warning("a read from %s: %s", self._reading.peer.host, error)
            reason = ReadFailure.CORRUPT
        except OSError as error:
            reason = ReadFailure.UNABLE if error.errno in UNABLE else ReadFailure.PEER_LOST
        except ValueError:  # the goal, or the piece, is none
            reason = ReadFailure.REFUSED
        except Exception:  # the thread's root: a read that fails must not end the others
            log.exception("a read by tcp failed")
            reason = ReadFailure.UNABLE
        self._drop()
        return ReadFailed(read.number, reason)

    def _read(self, read: Read) -> ReadLanded | ReadFailed:
        gather = Gather(read.goal)
        kind = self._reading.settings.digest
        if not read.digest and kind is DigestKind.NONE:
            kind = DigestKind.XXH3
        body = Bring(read.number, read.ticket, read.piece, gather.bytes, kind).body()
        self._look()
        try:
            stood = self._socket is not None
            answer = self._asked(body)
        except OSError:
            if not stood:
                raise
            self._drop()
            answer = self._asked(body)
        return self._fill(read, gather, answer=answer, kind=kind)

    def _asked(self, body: bytes) -> PartHead | Over:
        sock = self._socket or self._connected()
        self._send(sock, self._signing.frame(body))
        return self._answer(sock)

    def _answer(self, sock: socket.socket) -> PartHead | Over:
        return decode_answer(self._checking.body(self._exactly(sock, ANSWER_BYTES)))

    def _fill(
        self, read: Read, gather: Gather, *, answer: PartHead | Over, kind: DigestKind
    ) -> ReadLanded | ReadFailed:
        """Write what comes into the goal, and check it."""
        assert self._socket is not None and self._keys is not None
        signed = hasher_of(kind, self._keys.bytes)
        told = self._reading.digests.begin() if read.digest else None
        if kind is DigestKind.XXH3 and isinstance(self._reading.digests, Xxh3):
            told = signed if read.digest else None
        hashers = list({id(one): one for one in (signed, told) if one is not None}.values())
        while isinstance(answer, PartHead):
            end = gather.moved + answer.size_bytes
            is_cut = end % SLICE_BYTES and end != gather.bytes
            if answer.number != read.number or end > gather.bytes or is_cut:
                raise Corrupt("a part that was not asked for")
            self._receive(gather, end, hashers)
            answer = self._answer(self._socket)
        if answer.number != read.number:
            raise Corrupt("the end of what was not asked for")
        if answer.outcome is not AnswerOutcome.BROUGHT:
            gone = answer.outcome is AnswerOutcome.GONE
            return ReadFailed(read.number, ReadFailure.GONE if gone else ReadFailure.REFUSED)
        if answer.size_bytes != gather.bytes or gather.moved != gather.bytes:
            raise Corrupt("an answer of another length")
        if signed is not None and not matches(answer.digest, _padded(signed.digest())):
            raise Corrupt("bytes that do not match their digest")
        if told is not None and not matches(read.digest, told.digest()):
            raise Corrupt("bytes that do not match the digest that the source told")
        return ReadLanded(read.number, gather.bytes)

    def _receive(self, gather: Gather, end: int, hashers: list[Hasher]) -> None:
        assert self._socket is not None
        descriptor = self._socket.fileno()
        while gather.moved < end:
            start, stop = gather.moved, gather.slice_end(gather.moved)
            while gather.moved < stop:
                if not gather.receive(descriptor, stop):
                    self._wait(self._socket, select.POLLIN)
                elif gather.moved < stop:
                    self._look()
            for hasher in hashers:
                gather.digest(hasher, start, stop)
            self._look()

    def _look(self) -> None:
        """Raise _Over where the read under way is to end."""
        with self._lock:
            now_s = time.monotonic()
            for end in self._reads.expired(now_s):
                self._tell(end)
            verdict = self._reads.verdict(now_s)
        if isinstance(verdict, ReadFailed):
            raise _Over(verdict.reason)

    def _wait(self, sock: socket.socket, event: int) -> None:
        """Wait for the socket. Raises _Over where the read ends, or nothing comes for too long."""
        until_s = time.monotonic() + self._reading.settings.quiet_s
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(sock, event)
        while True:
            self._look()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise _Over(ReadFailure.PEER_LOST)
            ready = poll.poll(1000 * min(left_s, TICK_S))
            if any(found == sock.fileno() for found, _ in ready):
                return
            if ready:
                self._hush()

    def _connected(self) -> socket.socket:
        """Connect and show the key. Raises OSError, or _Over; the peer rests for a while then."""
        backoff = self._reading.backoff
        refusal = backoff.refusal(time.monotonic())
        if refusal is not None:
            raise _Over(refusal)
        try:
            sock = self._connect()
            self._greet(sock)
        except (Corrupt, SpecMismatch) as error:
            log.warning("%s is not read from: %s", self._reading.peer.host, error)
            backoff.failed(ReadFailure.UNABLE, time.monotonic(), draw=random.random())
            raise _Over(ReadFailure.UNABLE) from error
        except OSError as error:
            reason = ReadFailure.UNABLE if error.errno in UNABLE else ReadFailure.PEER_LOST
            backoff.failed(reason, time.monotonic(), draw=random.random())
            raise
        except _Over as over:
            if over.reason is ReadFailure.PEER_LOST:
                backoff.failed(over.reason, time.monotonic(), draw=random.random())
            raise
        backoff.reached()
        return sock

    def _connect(self) -> socket.socket:
        peer, settings = self._reading.peer, self._reading.settings
        is_v6 = ipaddress.ip_address(peer.host).version == 6
        sock = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
        self._socket = sock  # whatever happens, `_drop` closes it
        tune(sock)
        keep_to(sock, settings.interface)
        if settings.source:
            sock.bind((settings.source, 0))
        begun = sock.connect_ex((peer.host, peer.port))
        if begun == errno.EINPROGRESS:
            self._wait(sock, select.POLLOUT)
            begun = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if begun:
            raise OSError(begun, os.strerror(begun))
        be_patient(sock, PATIENCE_S)
        return sock

    def _greet(self, sock: socket.socket) -> None:
        handshake = ReaderHandshake(self._reading.peer.key, os.urandom(NONCE_BYTES))
        self._send(sock, handshake.hello)
        proof, keys = handshake.welcomed(self._exactly(sock, WELCOME_BYTES))
        self._send(sock, proof)
        self._keys = keys
        self._signing, self._checking = Signing(keys.asks), Checking(keys.answers)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        while data:
            try:
                data = data[sock.send(data, SEND_NOW) :]
            except BlockingIOError:
                self._wait(sock, select.POLLOUT)

    def _exactly(self, sock: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                more = sock.recv(count - len(data), socket.MSG_WAITALL)
            except BlockingIOError:
                self._wait(sock, select.POLLIN)
                continue
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "the lender has closed")
            data += more
        return data

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _padded(digest: bytes) -> bytes:
    return digest.ljust(DIGEST_BYTES, b"\0")
