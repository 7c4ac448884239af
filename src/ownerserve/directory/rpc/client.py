"""DirectoryClient asks a directory in another process, and blocks until it answers.

The client answers `unreachable` for what was not answered in time, or by nothing that can be read:
it may or may not be done, and every request may be asked again (docs/directory.md). A late answer
is dropped by its number.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from ownerserve.directory.messages import DirectoryRefusal, Outcome, Refused, Request
from ownerserve.directory.port import DirectoryStatus
from ownerserve.directory.rpc.frames import (
    MAX_FRAME_BYTES,
    Answer,
    ForgetAll,
    Outcomes,
    RequestBatch,
    StatusAnswer,
    StatusQuestion,
    decode_answer,
    encode,
)
from ownerserve.kv.addresses import KEYED, parse_endpoint
from ownerserve.kv.errors import InvalidInput, PeerLost
from ownerserve.kv.wire.curve import OPTION, FleetKey, connect
from ownerserve.kv.wire.framed import FramedClient

TIMEOUT_S = 3.0
REQUESTS_MAX = 16_384
"""Requests in one frame, at most: its answer stays far below a frame's limit too."""

log = logging.getLogger("ownerserve.directory")


class DirectoryClient:
    """A directory client is a `Directory` behind a socket. Not for several threads: ZeroMQ's
    sockets are not.
    """

    def __init__(
        self, address: str, *, timeout_s: float = TIMEOUT_S, key: FleetKey | None = None
    ) -> None:
        self._client = FramedClient(
            address, timeout_s=timeout_s, key=key, read_bytes_max=MAX_FRAME_BYTES
        )

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        """Ask all of them in order: in one frame, or in several where they are too many for one."""
        outcomes: list[Outcome] = []
        for at in range(0, len(requests), REQUESTS_MAX):
            outcomes += self._executed(requests[at : at + REQUESTS_MAX])
        return outcomes

    def _executed(self, requests: Sequence[Request]) -> list[Outcome]:
        data = encode(RequestBatch(tuple(requests)))
        if len(data) > MAX_FRAME_BYTES:
            if len(requests) == 1:
                log.warning("a request of %d bytes is never sent", len(data))
                return [Refused(DirectoryRefusal.MALFORMED)]
            half = len(requests) // 2
            return self._executed(requests[:half]) + self._executed(requests[half:])
        try:
            return _outcomes(self._asked(data), requests)
        except PeerLost:
            return [Refused(DirectoryRefusal.UNREACHABLE) for _ in requests]

    def status(self) -> DirectoryStatus:
        """Ask how the directory is. Raises PeerLost when there is no answer."""
        return _status(self._asked(encode(StatusQuestion())))

    def forget(self) -> DirectoryStatus:
        """Have the directory lose its memory. Raises PeerLost when there is no answer."""
        return _status(self._asked(encode(ForgetAll())))

    def sweep(self, limit: int) -> int:
        """Look at no record: the service sweeps by itself."""
        return 0

    def close(self) -> None:
        self._client.close()

    def _asked(self, question: bytes) -> Answer:
        """Ask, and return the answer. Raises PeerLost for silence, and for what is no answer:
        whether the directory has done what it was asked is as unknown then.
        """
        try:
            return decode_answer(self._client.ask(question))
        except PeerLost as error:
            raise PeerLost(f"the directory {error}") from error
        except InvalidInput as error:
            raise PeerLost(f"the directory's answer can't be read: {error}") from error


def check_address(address: str, key: FleetKey | None, *, field: str) -> None:
    """Raise InvalidInput that names `field` when no directory can have this address, or none that
    can be asked without keys."""
    mend = "write it like tcp://127.0.0.1:7700, or curve://10.0.0.5:7700 where it wants keys"
    parse_endpoint(address, field=field, mend=mend)
    if address.startswith(KEYED) and key is None:
        raise InvalidInput(field, f"{address} wants the fleet's keys", f"give {OPTION}")


def why_silent(address: str, key: FleetKey | None, *, within_s: float = 1.0) -> str:
    """Say in a sentence what a connection to `address` comes to, after it gave no answer."""
    failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    failed |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
    probe: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with probe:
        probe.setsockopt(zmq.LINGER, 0)
        with probe.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_SUCCEEDED) as events:
            connect(probe, address, key)
            if not events.poll(int(within_s * 1000)):
                return "nobody is there"
            event = recv_monitor_message(events)["event"]
            probe.disable_monitor()
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return "somebody is there, and silent"
    if key is None or not address.startswith(KEYED):
        return "it wants keys (curve://...), or is no directory"
    return "it has other keys, or none (tcp://...)"


def _outcomes(answer: Answer, requests: Sequence[Request]) -> list[Outcome]:
    if isinstance(answer, Outcomes) and len(answer.outcomes) == len(requests):
        return list(answer.outcomes)
    return [Refused(DirectoryRefusal.MALFORMED) for _ in requests]


def _status(answer: Answer) -> DirectoryStatus:
    if not isinstance(answer, StatusAnswer):
        raise PeerLost(f"the directory answers {answer}")
    return answer.status
