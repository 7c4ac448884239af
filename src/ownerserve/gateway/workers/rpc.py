"""The gateway's connections to its workers' RPC ports, and workers' two names.

Owns the sockets: one for each worker, many requests in flight on it. Each wait has a deadline;
until then a request that may be lost is said again, under its nonce. A place that comes later is
given back.

Owns too which life of a worker has which names: the gateway's, the address where it reaches it, and
its own, known to the directory and to its peers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from itertools import count

import zmq
import zmq.asyncio

from ownerserve.kv.addresses import is_loopback, parse_endpoint
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.curve import FleetKey, connect
from ownerserve.kv.wire.rpc import (
    Cancel,
    Cancelled,
    Release,
    Reserved,
    RpcRequest,
    Said,
    decode_answer,
    encode,
    new_nonce,
)

log = logging.getLogger("ownerserve.gateway")

REPEAT_S = 0.25
"""Unanswered for so long, a request is said again; a lost connection comes back sooner."""
NUMBER_BYTES = 8
EVERYWHERE = ("0.0.0.0", "[::]")


class WorkerLines:
    """A line to each worker that tells where its RPC port is, and that can be reached there.

    `counts`: `late`, places that came when nobody waited any more; `cancelled`, workers' answers to
    a Cancel. `asked`: requests by type, each once however often it was said.
    """

    def __init__(self, *, key: FleetKey | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self._key = key
        self._lines: dict[WorkerId, WorkerLine] = {}

    def learn(self, worker: WorkerId, host: str, address: str | None) -> None:
        """`worker`, which serves at `host`, answers at `address`; None: it does not.

        An address on loopback is the worker's own: of use to who reaches the worker there too. One
        that stands for all of the worker's is reached where the worker serves.
        """
        line = self._lines.get(worker)
        if line is not None and line.stated == address:
            return
        if line is not None:
            self._lines.pop(worker).close()
        if address is None:
            return
        try:
            rpc_host, _ = parse_endpoint(address, field="rpc", mend="")
            if is_loopback(host) or not is_loopback(rpc_host):
                place = host if rpc_host in EVERYWHERE else rpc_host
                self._lines[worker] = WorkerLine(
                    address,
                    address.replace(rpc_host, place, 1),
                    key=self._key,
                    counts=self.counts,
                    asked=self.asked,
                )
        except (zmq.ZMQError, InvalidInput) as error:
            log.warning("worker %s: its RPC address %s: %s", worker, address, error)

    def of(self, worker: WorkerId) -> WorkerLine | None:
        """The line to a worker; None: there is none."""
        return self._lines.get(worker)

    def close(self) -> None:
        """Ask nobody any more."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()


class WorkerLine:
    """One connection; requests and answers by number."""

    def __init__(
        self,
        stated: str,
        address: str,
        *,
        key: FleetKey | None,
        counts: Counter[str],
        asked: Counter[str],
    ) -> None:
        self.stated, self.address = stated, address
        self._counts = counts
        self._asked = asked
        self.holds_places = True
        """False once the worker has said that it holds none (vLLM): it is asked no more."""
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        connect(self._socket, address, key)
        self._numbers = count(1)
        self._waiting: dict[bytes, asyncio.Future[Said | None]] = {}
        self._tasks: set[asyncio.Future[zmq.MessageTracker | None]] = set()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, request: RpcRequest, within_s: float) -> Said | None:
        """The answer; None when there is none in time, or the line is closed. Whoever stops
        waiting, also by being cancelled, calls the request off."""
        future: asyncio.Future[Said | None] = asyncio.get_running_loop().create_future()
        number, nonce = self._number(request), new_nonce()
        self._waiting[number] = future
        left_s = within_s
        try:
            while left_s > 0 and not future.done():
                self._send(number, encode(request, nonce))
                await asyncio.wait((future,), timeout=min(left_s, REPEAT_S))
                left_s -= REPEAT_S
        except asyncio.CancelledError:
            self.tell(Cancel(nonce))  # also where the answer has come: nobody takes it
            raise
        finally:
            self._waiting.pop(number, None)
        if future.done():
            return future.result()
        self.tell(Cancel(nonce))
        return None

    def tell(self, request: RpcRequest | Cancel) -> None:
        """Say something whose answer changes nothing."""
        self._send(self._number(request), encode(request))

    def _number(self, request: RpcRequest | Cancel) -> bytes:
        """Count the request; its number here."""
        self._asked[str(request.__struct_config__.tag)] += 1
        return next(self._numbers).to_bytes(NUMBER_BYTES, "big")

    def close(self) -> None:
        """Hang up: who waits for an answer gets none, and goes on."""
        self._reader.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        for task in self._tasks:
            task.cancel()
        self._socket.close()

    def _send(self, number: bytes, data: bytes) -> None:
        if self._socket.closed:
            return
        sent = asyncio.ensure_future(self._socket.send_multipart([number, data]))
        self._tasks.add(sent)
        sent.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                number, data = frames
                answer = decode_answer(data)
            except (ValueError, InvalidInput) as error:
                log.warning("worker at %s: an answer that can't be read: %s", self.address, error)
                continue
            future = self._waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_result(answer)
            elif isinstance(answer, Reserved):  # too late: nobody will come
                self._counts["late"] += 1
                self.tell(Release(answer.reservation))
            elif isinstance(answer, Cancelled):
                self._counts["cancelled"] += 1


Life = tuple[Incarnation, int]


class WorkerNames:
    """WorkerNames of routing units that answer: when one began, to the nanosecond, and its rank say
    which one it is, under whatever name."""

    def __init__(self) -> None:
        self._here: dict[Life, RoutingUnit] = {}
        self._own_names: dict[Life, WorkerId] = {}

    def up(self, unit: RoutingUnit, own_name: str | None) -> None:
        """A worker answers; `own_name`: what it calls itself, where it says so."""
        life = unit.incarnation, unit.dp_rank
        self._here[life] = unit
        if own_name is not None:
            self._own_names[life] = WorkerId(own_name)

    def down(self, worker: str) -> None:
        """A worker is silent."""
        for life in [life for life, unit in self._here.items() if unit.worker == worker]:
            del self._here[life]
            self._own_names.pop(life, None)

    def here(self, unit: RoutingUnit) -> RoutingUnit:
        """The unit as this gateway names it."""
        return self._here.get((unit.incarnation, unit.dp_rank), unit)

    def to_workers(self, unit: RoutingUnit) -> RoutingUnit | None:
        """The unit as the directory and its peers name it; None: it never said."""
        name = self._own_names.get((unit.incarnation, unit.dp_rank))
        return None if name is None else RoutingUnit(name, unit.dp_rank, unit.incarnation)
