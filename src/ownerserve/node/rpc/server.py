"""The RPC server is one thread between a ZeroMQ socket and whoever answers.

`RpcServer` owns the socket. It never touches the node and never waits for it: a request is handed
to whoever answers, who gives a future. Many are in flight at once, each answered when it is ready,
under the envelope that it came in (a client's number for it): a quick one overtakes a slow one, and
a `Cancel` all. An offer (a probe, a place) is waited for a bounded time and is then refused as
`engine_busy`; a place that was reserved all the same is given back. A word is carried out, however
late. `Flights` says who hears what.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress

import msgspec
import zmq

from ownerserve.kv.errors import InvalidInput, PeerLost
from ownerserve.kv.listening import LOOPBACK, RPC
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.kv.wire.framed import FramedClient, FramedServer
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    MAX_FRAME_BYTES,
    NEWS_WAIT_MS,
    NO_NONCE,
    Accepted,
    AskLender,
    AskLine,
    AskPrefix,
    AskSession,
    AskTokens,
    Cancel,
    Cancelled,
    DropTurn,
    EndPrefill,
    ListHeld,
    Nonce,
    Prefill,
    Probe,
    Reject,
    Release,
    Reserve,
    Reserved,
    RpcAnswer,
    RpcRequest,
    Said,
    Status,
    TurnKept,
    decode_answer,
    decode_request,
    encode,
)

# ---- what is in flight


REMEMBERED = 4096
NEVER_S = float("inf")


class Flight(msgspec.Struct, eq=False):
    """A `Flight` is a request whose answer is waited for: where the answer goes, and until when."""

    envelope: list[bytes]
    nonce: Nonce
    future: Future[RpcAnswer]
    until_s: float


class Joined(msgspec.Struct, frozen=True):
    """`Joined` says that the request is in flight already; its answer will go to this envelope."""


class Flights:
    """`Flights` keeps the requests in flight on a node's RPC port, and what was said under which
    nonce. Pure.

        asked ── done ──────────> told, to the envelope that asked last
          |`──── given up ──────> told `engine_busy`: an offer only (a probe, a place), which ages
          `───── called off ────> told `Cancelled`, and not begun any more

    A word (commit, release) is never given up: what it undoes would stay done. The last
    `REMEMBERED` nonces keep their answers, for who asks again.
    """

    def __init__(self) -> None:
        self._open: dict[Future[RpcAnswer], Flight] = {}
        self._by_nonce: dict[Nonce, Flight] = {}
        self._told: OrderedDict[Nonce, Said] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def again(self, nonce: Nonce, envelope: list[bytes]) -> Said | Joined | None:
        """Return what was said under this nonce, or `Joined` where the answer is still to come,
        which goes to `envelope` then; None: the nonce is new."""
        told = self._told.get(nonce)
        if told is not None:
            return told
        flight = self._by_nonce.get(nonce)
        if flight is None:
            return None
        flight.envelope = envelope
        return Joined()

    def begin(self, flight: Flight) -> None:
        """Add a request that went to whoever answers."""
        self._open[flight.future] = flight
        if flight.nonce != NO_NONCE:
            self._by_nonce[flight.nonce] = flight

    def end(self, future: Future[RpcAnswer]) -> Flight | None:
        """Remove the flight whose answer is there and return it; None: nobody waits for it any
        more."""
        flight = self._open.pop(future, None)
        if flight is not None:
            self._by_nonce.pop(flight.nonce, None)
        return flight

    def next_ms(self, now: float) -> int | None:
        """Return in how many ms the first flight is overdue, POLL_MS at least; None: none ever."""
        until_s = min((flight.until_s for flight in self._open.values()), default=NEVER_S)
        return None if until_s == NEVER_S else max(POLL_MS, int((until_s - now) * 1e3))

    def overdue(self, now: float) -> list[Flight]:
        """Remove the flights that were waited for long enough and return them."""
        late = [flight for flight in self._open.values() if flight.until_s <= now]
        for flight in late:
            self.end(flight.future)
        return late

    def tell(self, nonce: Nonce, said: Said) -> None:
        """Remember what was said under the nonce, the last `REMEMBERED` ones."""
        if nonce == NO_NONCE:
            return
        self._told[nonce] = said
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)

    def call_off(self, nonce: Nonce) -> Flight | Said | None:
        """Return what is cancelled: a flight, which ends with this, or what was said; None: neither
        yet. Whoever asks under the nonce from now on is told that it was cancelled."""
        found: Flight | Said | None = self._by_nonce.get(nonce)
        if isinstance(found, Flight):
            self.end(found.future)
        else:
            found = self._told.get(nonce)
        self.tell(nonce, Cancelled())
        return found


log = logging.getLogger("ownerserve.node")

ANSWER_S = 2.0
"""So long a probe is waited for."""
RESERVE_MIN_S, RESERVE_MAX_S = 0.05, 0.5
"""Between these, whoever asks for a place waits for two steps of the engine."""
POLL_MS = 10
READ_BYTES_MAX = 4 * MAX_FRAME_BYTES
"""A frame that is too long is refused, and its connection lives on; past this both are dropped."""
IN_FLIGHT_MAX = 1024

Answerer = Callable[[RpcRequest], "Future[RpcAnswer]"]
"""May raise RuntimeError when nobody will answer any more."""


class RpcServer:
    """An `RpcServer` is bound when made and serves from `start` to `stop`: on loopback for all who
    are there; with a key anywhere, for those who have it.

    `counts`: requests `repeated`, `cancelled`, `given_up`; `late`: answers that nobody waited for.
    """

    def __init__(self, *, host: str = LOOPBACK, port: int = 0, key: FleetKey | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._answer: Answerer = _nobody
        self._step_s: Callable[[], float] = lambda: RESERVE_MAX_S
        self._server = FramedServer(RPC, host, port, key=key, read_bytes_max=READ_BYTES_MAX)
        self._socket, self.address = self._server.socket, self._server.address
        self._flights = Flights()
        self._done: deque[Future[RpcAnswer]] = deque()
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.settimeout(0.0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell.fileno(), zmq.POLLIN)

    def start(self, answer: Answerer, *, step_s: Callable[[], float] | None = None) -> None:
        """Begin to answer, on a thread. `step_s` gives the seconds that a step of the engine takes,
        between two of which it answers."""
        self._answer = answer
        self._step_s = step_s or self._step_s
        self._server.start(self._serve, wake=self._wake)

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._server.stop()
        self._bell.close()
        self._ringer.close()

    def _serve(self) -> None:
        """Do one round: take one request, say what was answered, refuse what took too long. It
        waits until there is something to do, or a request in flight is given up."""
        ready = dict(self._poller.poll(self._flights.next_ms(time.monotonic())))
        if self._bell.fileno() in ready:
            self._bell.recv(4096)
        if self._socket in ready:
            *envelope, data = self._socket.recv_multipart()
            try:
                self._take(envelope, data)
            except Exception:  # one bad request must not end the port
                log.exception("an RPC request failed")
                self._send(envelope, Reject(WorkerRefusal.MALFORMED))
        while self._done:
            self._finish(self._done.popleft())
        self._give_up(time.monotonic())

    def _take(self, envelope: list[bytes], data: bytes) -> None:
        try:
            request, nonce = decode_request(data)
        except InvalidInput as error:
            log.warning("%s", error)
            self._send(envelope, Reject(WorkerRefusal.MALFORMED))
            return
        if isinstance(request, Cancel):
            self._cancel(request.nonce)
            self._send(envelope, Cancelled())
            return
        before = self._flights.again(nonce, envelope)
        if before is None:
            self._ask(envelope, request, nonce)
            return
        self.counts["repeated"] += 1
        if not isinstance(before, Joined):
            self._send(envelope, before)

    def _ask(self, envelope: list[bytes], request: RpcRequest, nonce: Nonce) -> None:
        try:
            if len(self._flights) >= IN_FLIGHT_MAX:
                raise RuntimeError("too many requests in flight")
            future = self._answer(request)
        except RuntimeError:
            self._send(envelope, Reject(WorkerRefusal.ENGINE_BUSY))
            return
        until_s = time.monotonic() + self._wait_s(request)
        self._flights.begin(Flight(envelope, nonce, future, until_s))
        future.add_done_callback(self._ring)

    def _wait_s(self, request: RpcRequest) -> float:
        match request:
            case Reserve():
                return min(max(2 * self._step_s(), RESERVE_MIN_S), RESERVE_MAX_S)
            case ListHeld(wait_ms=wait_ms):
                return ANSWER_S + min(wait_ms, NEWS_WAIT_MS) / 1e3
            case Probe() | Status() | AskLine():
                return ANSWER_S
            case AskPrefix() | AskSession() | AskTokens() | AskLender() | Prefill():
                return ANSWER_S
            case _:
                return NEVER_S

    def _cancel(self, nonce: Nonce) -> None:
        """Call the request off: one that nobody has begun on is not begun any more, and what was
        given is given back."""
        match self._flights.call_off(nonce):
            case Flight(future=future):
                self.counts["cancelled"] += 1
                future.cancel()
            case Reserved() | Accepted() | TurnKept() as given:
                self.counts["cancelled"] += 1
                self._give_back(given)

    def _give_back(self, given: Reserved | Accepted | TurnKept) -> None:
        """Undo what was given: a place, a prompt that is computed for another, or a turn that is
        to go on here."""
        with suppress(RuntimeError):  # an engine that has ended holds nothing
            match given:
                case Reserved():
                    self._answer(Release(given.reservation))
                case Accepted():
                    self._answer(EndPrefill(given.turn_id))
                case TurnKept():
                    self._answer(DropTurn(given.turn))

    def _ring(self, future: Future[RpcAnswer]) -> None:
        """Wake the server's thread for an answer; called on the thread of whoever answers."""
        self._done.append(future)
        self._wake()

    def _wake(self) -> None:
        """Ring, so that the server's thread begins a round."""
        with suppress(OSError):  # full: it rings already; closed: nobody listens any more
            self._ringer.send(b"!")

    def _finish(self, future: Future[RpcAnswer]) -> None:
        flight = self._flights.end(future)
        try:
            answer = future.result(0)
        except (CancelledError, RuntimeError):
            answer = Reject(WorkerRefusal.ENGINE_BUSY)
        except Exception:
            log.exception("an RPC request failed")
            answer = Reject(WorkerRefusal.MALFORMED)
        if flight is not None:
            self._tell(flight, answer)
        elif not future.cancelled():
            self.counts["late"] += 1
            if isinstance(
                answer, Reserved | Accepted | TurnKept
            ):  # called off while it was being done
                self._give_back(answer)

    def _give_up(self, now: float) -> None:
        """Refuse what took too long. A request that nobody has begun on is not begun any more."""
        for flight in self._flights.overdue(now):
            self.counts["given_up"] += 1
            flight.future.cancel()
            self._tell(flight, Reject(WorkerRefusal.ENGINE_BUSY))

    def _tell(self, flight: Flight, answer: RpcAnswer) -> None:
        self._flights.tell(flight.nonce, answer)
        self._send(flight.envelope, answer)

    def _send(self, envelope: list[bytes], answer: Said) -> None:
        try:
            data = encode(answer)
        except InvalidInput as error:
            log.warning("an RPC answer is not sent: %s", error)
            data = encode(Reject(WorkerRefusal.MALFORMED))
        try:
            self._socket.send_multipart([*envelope, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("an RPC answer was not sent: %s", error)


def _nobody(request: RpcRequest) -> Future[RpcAnswer]:
    raise RuntimeError("nobody answers yet")


class RpcClient:
    """An `RpcClient` asks one node, one request at a time, and blocks. It must not be shared by
    threads."""

    def __init__(
        self, address: str, *, timeout_s: float = 2 * ANSWER_S, key: FleetKey | None = None
    ) -> None:
        self._client = FramedClient(
            address, timeout_s=timeout_s, key=key, read_bytes_max=READ_BYTES_MAX
        )

    def ask(self, request: RpcRequest) -> Said:
        """Return the node's answer. Raises TimeoutError when there is none in time."""
        try:
            return decode_answer(self._client.ask(encode(request)))
        except PeerLost as error:
            raise TimeoutError(f"the node {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
