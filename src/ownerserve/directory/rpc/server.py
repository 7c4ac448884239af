"""DirectoryServer is one thread, one socket, one directory behind it.

Owns the socket and calls the directory from its own thread only. What has arrived together is
decided together: under load a shared backend then takes one trip for many clients' requests.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from ownerserve.directory.messages import DirectoryRefusal, Outcome, Published, Refused, Request
from ownerserve.directory.port import Directory
from ownerserve.directory.rpc.frames import (
    MAX_FRAME_BYTES,
    Answer,
    ForgetAll,
    FrameFailed,
    Outcomes,
    Question,
    RequestBatch,
    StatusAnswer,
    StatusQuestion,
    decode_question,
    encode,
)
from ownerserve.kv.errors import InvalidInput, InvariantViolated, OwnerServeError
from ownerserve.kv.listening import DIRECTORY, LOOPBACK
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.kv.wire.framed import FramedServer

log = logging.getLogger("ownerserve.directory")

POLL_MS = 50
TOGETHER = 256
"""Frames that are decided in one go, at most."""

SWEEP_EVERY_S = 1.0
SWEEP_RECORDS = 1000


class DirectoryServer:
    """A directory's server is the service: its port is bound when it is made, and served from
    `start` to `stop`. On loopback it is open to all; with a key it may be anywhere, and is open to
    holders of that.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        key: FleetKey | None = None,
    ) -> None:
        self._directory = directory
        self._server = FramedServer(DIRECTORY, host, port, key=key, read_bytes_max=MAX_FRAME_BYTES)
        self._socket, self.address = self._server.socket, self._server.address
        self._swept_s = time.monotonic()
        self._lost_copies = 0
        self._asked: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to answer."""
        self._server.start(self._serve)

    def stop(self) -> None:
        """Stop answering, free the port, let go of the backend."""
        self._server.stop()
        self._directory.close()

    def _serve(self) -> None:
        """Serve one round: answer what has arrived, and look at some records from time to time."""
        if self._socket.poll(POLL_MS):
            self._answer_all(self._arrived())
        if time.monotonic() - self._swept_s > SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            self._directory.sweep(SWEEP_RECORDS)

    def _arrived(self) -> list[list[bytes]]:
        frames: list[list[bytes]] = []
        while len(frames) < TOGETHER and self._socket.poll(0):
            frames.append(self._socket.recv_multipart())
        return frames

    def _answer_all(self, frames: list[list[bytes]]) -> None:
        questions: list[tuple[list[bytes], Question | FrameFailed]] = []
        for *envelope, data in frames:
            try:
                questions.append((envelope, decode_question(data)))
            except InvalidInput as error:
                log.warning("%s", error)
                questions.append((envelope, FrameFailed(str(error))))
        batches = [one.requests for _, one in questions if isinstance(one, RequestBatch)]
        self._asked.update(tag_of(request) for batch in batches for request in batch)
        outcomes = iter(self._executed(batches))
        for envelope, question in questions:
            answer: Answer
            if isinstance(question, RequestBatch):
                answer = Outcomes(tuple(next(outcomes) for _ in question.requests))
            else:
                answer = self._other(question)
            self._socket.send_multipart([*envelope, encode(answer)])

    def _executed(self, batches: Sequence[Sequence[Request]]) -> list[Outcome]:
        """Return the outcomes of all requests in order. Where the backend fails, each frame's are
        asked alone, which is as good as asking once: only the one at fault is refused."""
        requests = [request for batch in batches for request in batch]
        try:
            outcomes = [*self._directory.execute(requests)] if requests else []
            if len(outcomes) != len(requests):
                raise InvariantViolated(f"{len(outcomes)} answers to {len(requests)} requests")
            self._count_lost(outcomes)
            return outcomes
        except Exception:  # a thread's root: one bad request must not end the service
            if len(batches) > 1:
                return [outcome for batch in batches for outcome in self._executed([batch])]
            log.exception("the directory failed")
            return [Refused(DirectoryRefusal.MALFORMED) for _ in requests]

    def _count_lost(self, outcomes: list[Outcome]) -> None:
        """Count prefixes whose last copy went with what workers have let go."""
        lost = sum(len(one.lost) for one in outcomes if isinstance(one, Published))
        if lost:
            self._lost_copies += lost
            log.warning("last copies lost: %d; sessions that stand on them compute them", lost)

    def _other(self, question: StatusQuestion | ForgetAll | FrameFailed) -> Answer:
        if isinstance(question, FrameFailed):
            return question
        try:
            if isinstance(question, ForgetAll):
                status = self._directory.forget()
            else:
                status = self._directory.status()
            return StatusAnswer(
                replace(status, lost_copies=self._lost_copies, asked=dict(self._asked))
            )
        except OwnerServeError as error:
            return FrameFailed(str(error))
        except Exception:  # as of requests
            log.exception("the directory failed")
            return FrameFailed("the directory failed: see its log")


def tag_of(request: Request) -> str:
    """Return the name of the request's type on the wire."""
    return str(request.__struct_config__.tag)
