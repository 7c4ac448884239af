"""A worker's RPC port, without a worker behind it."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Admit,
    Cancel,
    Cancelled,
    Nonce,
    Probe,
    Reject,
    Release,
    Reserve,
    Reserved,
    RpcAnswer,
    RpcRequest,
    decode_request,
    encode,
)


class Admission:
    """A worker's RPC port: `asked` is what it heard; a Reserve gets a place, or silence."""

    def __init__(self) -> None:
        self.asked: list[RpcRequest] = []
        self.nonces: list[Nonce] = []
        """Of the reserves, with those that were said again."""
        self.cancelled: list[Nonce] = []
        self.is_silent = self.is_full = self.is_slow = False
        """Slow: it answers a Reserve once that was said again, and then each time that it was."""
        self.quote: Admit | Reject | None = None
        """What it says where it holds no places, as vLLM; None: it holds them."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            *envelope, data = await self._socket.recv_multipart()
            request, nonce = decode_request(data)
            if isinstance(request, Cancel):
                self.cancelled.append(request.nonce)
                await self._socket.send_multipart([*envelope, encode(Cancelled())])
                continue
            is_again = nonce in self.nonces
            if isinstance(request, Reserve):
                self.nonces.append(nonce)
            if not is_again:
                self.asked.append(request)
            if isinstance(request, Reserve) and self.is_slow and not is_again:
                continue
            if isinstance(request, Reserve) and not self.is_silent:
                answer: RpcAnswer = Reserved(len(self.reserves))
                if self.is_full:
                    answer = Reject(WorkerRefusal.NO_ROOM)
                if self.quote is not None:
                    answer = Reject(WorkerRefusal.UNKNOWN_RESERVATION)
                for _ in range(1 + self.is_slow):
                    await self._socket.send_multipart([*envelope, encode(answer)])
            elif isinstance(request, Probe) and self.quote is not None:
                await self._socket.send_multipart([*envelope, encode(self.quote)])

    @property
    def reserves(self) -> list[Reserve]:
        return [one for one in self.asked if isinstance(one, Reserve)]

    @property
    def held(self) -> set[int]:
        """Places that are neither released nor came to a turn; the test says what came."""
        released = {one.reservation for one in self.asked if isinstance(one, Release)}
        return set(range(1, len(self.reserves) + 1)) - released

    def close(self) -> None:
        self._reader.cancel()
        self._socket.close()
