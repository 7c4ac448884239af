"""The RPC server: one thread between a ZeroMQ socket and whoever answers.

Owns the socket. Never touches the node: a request is handed to `answer`, which runs it where the
cache lives and gives a future. What takes too long is refused as `engine_busy`, and its late
result is dropped.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Event, Thread

import zmq

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Answer,
    Reject,
    Request,
    decode_answer,
    decode_request,
    encode,
)

log = logging.getLogger("ownerserve.node")

ANSWER_S = 2.0
POLL_MS = 50
MAX_FRAME_BYTES = 1 << 20

Answerer = Callable[[Request], "Future[Answer]"]
"""May raise RuntimeError when nobody will answer any more."""


class RpcServer:
    """Bound when made, serving from `start` to `stop`. Loopback only: there are no keys yet."""

    def __init__(self, answer: Answerer, *, host: str = "127.0.0.1", port: int = 0) -> None:
        if not ipaddress.ip_address(host).is_loopback:
            raise InvalidInput("rpc host", f"{host} is reachable from outside", "use 127.0.0.1")
        self._answer = answer
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

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._socket.poll(POLL_MS):
                continue
            *envelope, data = self._socket.recv_multipart()
            try:
                answer = self._answered(data)
            except Exception:  # a thread's root: one bad request must not end the port
                log.exception("an RPC request failed")
                answer = Reject(WorkerRefusal.MALFORMED)
            self._socket.send_multipart([*envelope, encode(answer)])

    def _answered(self, data: bytes) -> Answer:
        try:
            request = decode_request(data)
        except InvalidInput as error:
            log.warning("%s", error)
            return Reject(WorkerRefusal.MALFORMED)
        try:
            future = self._answer(request)
            return future.result(ANSWER_S)
        except (FutureTimeout, CancelledError, RuntimeError):
            return Reject(WorkerRefusal.ENGINE_BUSY)


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
