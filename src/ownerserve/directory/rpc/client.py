"""Asking a directory elsewhere: a client that blocks.

It answers `unreachable` for what was not answered in time, or by nothing that can be read: it may
or may not be done, and every request may be asked again (docs/directory.md). A late answer is
dropped by its number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import zmq

from ownerserve.directory.messages import Outcome, Refusal, Refused, Request
from ownerserve.directory.port import DirectoryStatus
from ownerserve.directory.rpc.frames import (
    MAX_FRAME_BYTES,
    Answer,
    Batch,
    Forget,
    Outcomes,
    Question,
    Status,
    StatusIs,
    decode_answer,
    encode,
)
from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput, PeerLost

TIMEOUT_S = 3.0
NUMBER_BYTES = 8


class DirectoryClient:
    """A `Directory` behind a socket. Not for several threads."""

    def __init__(self, address: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._numbers = count()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _set_up(self._socket, address)

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        """All of them in one frame."""
        try:
            return _outcomes(self._asked(Batch(tuple(requests))), requests)
        except PeerLost:
            return [Refused(Refusal.UNREACHABLE) for _ in requests]

    def status(self) -> DirectoryStatus:
        """Raises PeerLost when there is no answer."""
        return _status(self._asked(Status()))

    def forget(self) -> DirectoryStatus:
        """Raises PeerLost when there is no answer."""
        return _status(self._asked(Forget()))

    def sweep(self, limit: int) -> int:
        """The service does that itself."""
        return 0

    def close(self) -> None:
        self._socket.close()

    def _asked(self, question: Question) -> Answer:
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "little")
        deadline_s = time.monotonic() + self._timeout_s
        try:
            self._socket.send_multipart([number, encode(question)], zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerLost("the directory takes no more requests") from error
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._socket.poll(int(left_s * 1000) + 1):
                back, *parts = self._socket.recv_multipart()
                if back == number:
                    return _answer(parts)
        raise PeerLost("the directory does not answer")


def _set_up(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.connect(address)


def check_address(address: str, *, field: str) -> None:
    """Raises InvalidInput naming `field` when no directory can have this address."""
    mend = "write it like tcp://127.0.0.1:7700"
    if not address.startswith("tcp://"):
        raise InvalidInput(field, f"{address[:80]!r} is no address", mend)
    parse_address(address.removeprefix("tcp://"), field=field, mend=mend)


def _answer(parts: Sequence[bytes]) -> Answer:
    """What came beside the number. Raises PeerLost when it is no answer: whether the directory has
    done what it was asked is as unknown as when it is silent."""
    try:
        (data,) = parts
        return decode_answer(data)
    except (InvalidInput, ValueError) as error:
        raise PeerLost(f"the directory's answer can't be read: {error}") from error


def _outcomes(answer: Answer, requests: Sequence[Request]) -> list[Outcome]:
    if isinstance(answer, Outcomes) and len(answer.outcomes) == len(requests):
        return list(answer.outcomes)
    return [Refused(Refusal.MALFORMED) for _ in requests]


def _status(answer: Answer) -> DirectoryStatus:
    if not isinstance(answer, StatusIs):
        raise PeerLost(f"the directory answers {answer}")
    return answer.status
