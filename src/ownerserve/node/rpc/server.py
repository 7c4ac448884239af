"""The RPC server: one thread between a ZeroMQ socket and whoever answers.

Owns the socket and what is in flight. Never touches the node: a request is handed to `answer`,
which runs it where the cache lives and gives a future. Many are in flight at once, each answered
when it is ready, under the envelope that it came in (a client's number for it): a quick one
overtakes a slow one. Each waits for a bounded time and is then refused as `engine_busy`; a place
that was reserved all the same is given back.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from threading import Event, Thread

import msgspec
import zmq

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Answer,
    Reject,
    Release,
    Request,
    Reserve,
    Reserved,
    decode_answer,
    decode_request,
    encode,
)

log = logging.getLogger("ownerserve.node")

ANSWER_S = 2.0
RESERVE_MIN_S, RESERVE_MAX_S = 0.05, 0.5
"""Between these, whoever asks for a place waits for two steps of the engine."""
POLL_MS = 50
MAX_FRAME_BYTES = 1 << 20
IN_FLIGHT_MAX = 1024

Answerer = Callable[[Request], "Future[Answer]"]
"""May raise RuntimeError when nobody will answer any more."""


class _Asked(msgspec.Struct, eq=False):
    """A request in flight: to whom its answer goes, and until when it is waited for."""

    envelope: list[bytes]
    future: Future[Answer]
    until_s: float


class RpcServer:
    """Bound when made, serving from `start` to `stop`. Loopback only: there are no keys yet.

    `step_s`: what a step of the engine takes now; it answers between two.
    """

    def __init__(
        self,
        answer: Answerer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        step_s: Callable[[], float] = lambda: RESERVE_MAX_S,
    ) -> None:
        if not ipaddress.ip_address(host).is_loopback:
            raise InvalidInput("rpc host", f"{host} is reachable from outside", "use 127.0.0.1")
        self._answer = answer
        self._step_s = step_s
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            if port:
                self._socket.bind(f"tcp://{host}:{port}")
            else:
                port = self._socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise InvalidInput("rpc port", f"{host}:{port}: {error}", "use a free one") from error
        self.address = f"tcp://{host}:{port}"
        self._asked: dict[Future[Answer], _Asked] = {}
        self._done: deque[Future[Answer]] = deque()
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.settimeout(0.0)
        self._stopping = Event()
        self._thread = Thread(target=self._serve, name="rpc", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()
        self._bell.close()
        self._ringer.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.fileno(), zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(POLL_MS if not self._asked else POLL_MS // 5))
            if self._bell.fileno() in ready:
                self._bell.recv(4096)
            if self._socket in ready:
                *envelope, data = self._socket.recv_multipart()
                try:
                    self._take(envelope, data)
                except Exception:  # a thread's root: one bad request must not end the port
                    log.exception("an RPC request failed")
                    self._send(envelope, Reject(WorkerRefusal.MALFORMED))
            while self._done:
                self._finish(self._done.popleft())
            self._give_up(time.monotonic())

    def _take(self, envelope: list[bytes], data: bytes) -> None:
        try:
            request = decode_request(data)
        except InvalidInput as error:
            log.warning("%s", error)
            self._send(envelope, Reject(WorkerRefusal.MALFORMED))
            return
        wait_s = ANSWER_S
        if isinstance(request, Reserve):
            wait_s = min(max(2 * self._step_s(), RESERVE_MIN_S), RESERVE_MAX_S)
        try:
            if len(self._asked) >= IN_FLIGHT_MAX:
                raise RuntimeError("too many requests in flight")
            future = self._answer(request)
        except RuntimeError:
            self._send(envelope, Reject(WorkerRefusal.ENGINE_BUSY))
            return
        self._asked[future] = _Asked(envelope, future, time.monotonic() + wait_s)
        future.add_done_callback(self._ring)

    def _ring(self, future: Future[Answer]) -> None:
        """Called by whoever answers, on its thread."""
        self._done.append(future)
        with suppress(OSError):  # full: it rings already; closed: nobody listens any more
            self._ringer.send(b"!")

    def _finish(self, future: Future[Answer]) -> None:
        asked = self._asked.pop(future, None)
        try:
            answer = future.result(0)
        except (CancelledError, RuntimeError):
            answer = Reject(WorkerRefusal.ENGINE_BUSY)
        except Exception:
            log.exception("an RPC request failed")
            answer = Reject(WorkerRefusal.MALFORMED)
        if asked is not None:
            self._send(asked.envelope, answer)
        elif isinstance(answer, Reserved):  # it has been told `engine_busy`
            self._answer(Release(answer.reservation))

    def _give_up(self, now: float) -> None:
        """Refuse what took too long. A request that nobody has begun on is not begun any more."""
        for asked in [one for one in self._asked.values() if one.until_s <= now]:
            del self._asked[asked.future]
            asked.future.cancel()
            self._send(asked.envelope, Reject(WorkerRefusal.ENGINE_BUSY))

    def _send(self, envelope: list[bytes], answer: Answer) -> None:
        try:
            self._socket.send_multipart([*envelope, encode(answer)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("an RPC answer was not sent: %s", error)


class RpcClient:
    """Asks one node, one request at a time. Not for several threads."""

    def __init__(self, address: str, *, timeout_s: float = 2 * ANSWER_S) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        # A lost answer must not block the next request.
        self._socket.setsockopt(zmq.REQ_RELAXED, 1)
        self._socket.setsockopt(zmq.REQ_CORRELATE, 1)
        self._socket.connect(address)

    def ask(self, request: Request) -> Answer:
        """The node's answer. Raises TimeoutError when there is none in time."""
        self._socket.send(encode(request))
        try:
            return decode_answer(self._socket.recv())
        except zmq.Again as error:
            raise TimeoutError("the node does not answer") from error

    def close(self) -> None:
        self._socket.close()
