"""Framed requests go over ZeroMQ: here are a port that answers, the thread that serves it, and who
asks it, one at a time or many at once.

    request   [number, data]        `number` is the client's, eight bytes, and comes back as it was:
    answer    [number, data]        a late answer is dropped by it

`data` is msgpack `[version, body, ...]`; what bodies there are is each protocol's own (rpc.py for
workers, directory/rpc/frames.py). Unknown fields are ignored and new ones have defaults, so that
version N reads N - 1. A port on loopback answers whoever is there, elsewhere who has the fleet's
keys.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from itertools import count
from threading import Event, Thread
from typing import Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio

from ownerserve.kv.addresses import KEYED, PLAIN
from ownerserve.kv.errors import UNREADABLE, InvalidInput, PeerLost
from ownerserve.kv.listening import Protection, ServicePort, check_reach
from ownerserve.kv.wire.curve import FleetKey, Guard, connect

log = logging.getLogger("ownerserve.wire")

NUMBER_BYTES = 8
FAULT_PAUSE_S = 0.05
ANSWERED_KEPT = 1024
"""How many numbers of requests that were answered an asyncio client remembers."""


class Versioned(Protocol):
    """A decoded frame names the version that it is written in."""

    @property
    def version(self) -> int:
        """Return the protocol version that the frame speaks."""


F = TypeVar("F", bound=Versioned)


def open_frame(data: bytes, decoder: msgspec.msgpack.Decoder[F], *, oldest: int, newest: int) -> F:
    """Return the frame in `data`. Raises InvalidInput for what is none of a version that is read
    here.
    """
    try:
        frame = decoder.decode(data)
    except (*UNREADABLE, InvalidInput) as error:
        raise InvalidInput("rpc", str(error), f"send [version, message] of {newest}") from error
    if not oldest <= frame.version <= newest:
        problem = f"version {frame.version}"
        raise InvalidInput("rpc", problem, f"speak version {oldest} to {newest}")
    return frame


class Port:
    """A port is a bound ROUTER socket; it is one thread's, as all of ZeroMQ's are. `listener` says
    which one it is.

    `address` says whether it wants keys (curve.py).
    """

    def __init__(
        self,
        listener: ServicePort,
        host: str,
        port: int,
        *,
        key: FleetKey | None,
        read_bytes_max: int,
    ) -> None:
        check_reach(listener, host, Protection.OPEN if key is None else Protection.KEYED)
        what = listener.name
        self._guard = None if key is None else Guard(key)
        context = zmq.Context.instance() if self._guard is None else self._guard.context
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, read_bytes_max)
        if self._guard is not None:
            self._guard.secure(self.socket)
        place = f"[{host}]" if ":" in host else host
        self.socket.setsockopt(zmq.IPV6, ":" in host)
        try:
            bound = self._bound(place, port)
        except zmq.ZMQError as error:
            self.close()
            if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
                mend = "use an address of this machine"
                raise InvalidInput(f"{what} host", f"{host}: {error}", mend) from error
            problem = f"{place}:{port}: {error}"
            raise InvalidInput(f"{what} port", problem, "use a free one") from error
        self.address = f"{PLAIN if key is None else KEYED}{place}:{bound}"

    def _bound(self, place: str, port: int) -> int:
        if not port:
            return self.socket.bind_to_random_port(PLAIN + place)
        self.socket.bind(f"{PLAIN}{place}:{port}")
        return port

    def close(self) -> None:
        """Free the port."""
        self.socket.close()
        if self._guard is not None:
            self._guard.close()


class FramedServer:
    """A framed server is a bound port and the thread that serves it from `start` to `stop`. The
    `listener` names both.

    What is raised in a round is logged and costs that round, never the service.
    """

    def __init__(
        self,
        listener: ServicePort,
        host: str,
        port: int,
        *,
        key: FleetKey | None,
        read_bytes_max: int,
    ) -> None:
        self._port = Port(listener, host, port, key=key, read_bytes_max=read_bytes_max)
        self.socket, self.address = self._port.socket, self._port.address
        self._what = listener.name
        self._stopping = Event()
        self._wake: Callable[[], None] | None = None
        self._thread: Thread | None = None

    def start(self, serve: Callable[[], None], *, wake: Callable[[], None] | None = None) -> None:
        """Call `serve` again and again, on a thread of its own: one round, waiting a moment at
        most, or until `wake` is called, which `stop` does."""
        self._wake = wake
        self._thread = Thread(target=self._run, args=(serve,), name=self._what, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End with the round under way, and free the port."""
        self._stopping.set()
        if self._wake is not None:
            self._wake()
        if self._thread is not None:
            self._thread.join()
        self._port.close()

    def _run(self, serve: Callable[[], None]) -> None:
        log = logging.getLogger(f"ownerserve.{self._what}")
        while not self._stopping.is_set():
            try:
                serve()
            except Exception:  # a thread's root
                log.exception("the %s failed", self._what)
                self._stopping.wait(FAULT_PAUSE_S)


class FramedClient:
    """A framed client asks one port, one request at a time, and blocks. It is not for several
    threads: ZeroMQ's sockets are not.
    """

    def __init__(
        self, address: str, *, timeout_s: float, key: FleetKey | None, read_bytes_max: int
    ) -> None:
        self._timeout_s = timeout_s
        self._numbers = count()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, read_bytes_max)
        connect(self._socket, address, key)

    def ask(self, data: bytes) -> bytes:
        """Send `data` and return the data of the answer. Raises PeerLost when there is none in
        time, or it is no frame.
        """
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "little")
        deadline_s = time.monotonic() + self._timeout_s
        try:
            self._socket.send_multipart([number, data], zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerLost("takes no more requests") from error
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._socket.poll(int(left_s * 1000) + 1):
                back, *parts = self._socket.recv_multipart()
                if back == number:
                    if len(parts) != 1:
                        raise PeerLost(f"answers {len(parts)} parts, not one")
                    return parts[0]
        raise PeerLost("does not answer")

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class AsyncFramedClient:
    """An asyncio framed client asks one port, many requests in flight at once: requests and answers
    meet by number. `unclaimed` gets the data of each answer that nobody waits for any more. Of a
    request that was sent again the first answer counts: others say the same, and are dropped.
    """

    def __init__(
        self,
        address: str,
        *,
        key: FleetKey | None,
        read_bytes_max: int,
        unclaimed: Callable[[bytes], None],
    ) -> None:
        self._address = address
        self._unclaimed = unclaimed
        self._numbers = count()
        self._waiting: dict[bytes, asyncio.Future[bytes | None]] = {}
        self._answered: dict[bytes, None] = {}
        self._sending: set[asyncio.Future[zmq.MessageTracker | None]] = set()
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, read_bytes_max)
        connect(self._socket, address, key)
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, data: bytes, *, within_s: float, repeat_s: float) -> bytes | None:
        """Return the data of the answer; None when there is none in time, or the client is closed.
        `data` may be lost, and is sent again every `repeat_s`.
        """
        answered: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        number = self._number()
        self._waiting[number] = answered
        left_s = within_s
        try:
            while left_s > 0 and not answered.done():
                self._send(number, data)
                await asyncio.wait((answered,), timeout=min(left_s, repeat_s))
                left_s -= repeat_s
        finally:
            self._waiting.pop(number, None)
        return answered.result() if answered.done() else None

    def tell(self, data: bytes) -> None:
        """Send a request whose answer nobody waits for."""
        self._send(self._number(), data)

    @property
    def is_closed(self) -> bool:
        """Tell whether nothing is sent any more."""
        return bool(self._socket.closed)

    def close(self) -> None:
        """Close the connection: who waits for an answer gets none."""
        self._reader.cancel()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_result(None)
        for sending in self._sending:
            sending.cancel()
        self._socket.close()

    def _number(self) -> bytes:
        return next(self._numbers).to_bytes(NUMBER_BYTES, "little")

    def _send(self, number: bytes, data: bytes) -> None:
        if self._socket.closed:
            return
        sending = asyncio.ensure_future(self._socket.send_multipart([number, data]))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _read(self) -> None:
        while True:
            number, *parts = await self._socket.recv_multipart()
            if len(parts) != 1:
                log.warning("%s answers %d parts, not one", self._address, len(parts))
                continue
            if number in self._answered:
                continue
            self._answered[number] = None
            if len(self._answered) > ANSWERED_KEPT:
                del self._answered[next(iter(self._answered))]
            answered = self._waiting.pop(number, None)
            if answered is not None and not answered.done():
                answered.set_result(parts[0])
            else:
                self._unclaimed(parts[0])
