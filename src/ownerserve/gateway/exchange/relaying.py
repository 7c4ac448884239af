"""The phases in which an answer goes to its client: as it comes, or in whole lines of events."""

from __future__ import annotations

from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.phases import OVER, Sent
from ownerserve.gateway.exchange.usage import USAGE, without_usage
from ownerserve.gateway.http.events import (
    chunk,
    error_event,
    has_said_all,
    unframed,
    whole_events,
    whole_frames,
)
from ownerserve.gateway.http.replies import CutShort, cut_short
from ownerserve.gateway.http.upstream import UpstreamConnection
from ownerserve.gateway.turns import BegunAnswer
from ownerserve.kv.units import MIB
from ownerserve.router.messages import Broken, Failure


class Relaying(Sent):
    """In this phase the answer goes to the client as it comes (upstream.BodySink)."""

    __slots__ = ("_client", "begun", "response_id")

    def __init__(
        self,
        attempt: Attempt,
        upstream: UpstreamConnection,
        begun: BegunAnswer,
        response_id: str | None,
    ) -> None:
        self.attempt = attempt
        self._client = attempt.exchange.client
        self.upstream = upstream
        self.begun = begun
        self.response_id = response_id

    def passed(self, data: bytes) -> bytes:
        """Return what the client gets now, as a part of the body has come."""
        return data

    def answer_bytes(self, data: bytes) -> None:
        """Pass a part of the body on to the client."""
        self._client.write(data)

    def answer_end(self, tail: bytes) -> None:
        """Close the books of an answer that is whole; `tail` are its last bytes."""
        self.attempt.exchange.phase = OVER
        self.finished(tail)
        self._client.answer_complete()

    def finished(self, tail: bytes) -> None:
        """Close the books of an answer that its client has; `tail` are its last bytes."""
        attempt = self.attempt
        exchange, asked = attempt.exchange, attempt.asked
        alias = asked.alias(self.response_id) if self.response_id else None
        try:
            exchange.turns.finished(
                asked, attempt.dispatch, self.begun, tail, alias=alias, started_s=exchange.started_s
            )
        except Exception as error:  # noqa: BLE001 - the answer is whole: only our books are not
            exchange.log_fault(error)
            attempt.close_books()

    def answer_broken(self, failure: Failure) -> None:
        """Cut the client off, as the answer stops in its middle."""
        attempt = self.attempt
        attempt.exchange.phase = OVER
        attempt.exchange.turns.ended(attempt.asked, Broken(attempt.dispatch.receipt))
        self.cut_short(cut_short(failure))

    def cut_short(self, why: CutShort) -> None:
        """Cut the client off in the middle of its answer: nothing can be said in it."""
        self._client.answer_cut_off()


LAST_CHUNK = b"0\r\n\r\n"
HELD_MAX_BYTES = MIB
"""A line that is longer is passed on in parts; a stream that stops then is cut off."""
_LINE_AND_FRAME = b"\n\r\n"


class Streaming(Relaying):
    """In this phase events go to the client, as they come and in whole lines: so that an event of
    the gateway's own can tell the client why its stream stops in its middle."""

    __slots__ = ("_held", "_is_torn")

    def __init__(
        self,
        attempt: Attempt,
        upstream: UpstreamConnection,
        begun: BegunAnswer,
        response_id: str | None,
    ) -> None:
        super().__init__(attempt, upstream, begun, response_id)
        self._held = b""
        """Chunks from a frame's begin, of which the last is not whole or ends amid a line."""
        self._is_torn = False
        """Whether the client has a part of a line, or of a frame, of which the rest was not
        sent."""

    def passed(self, data: bytes) -> bytes:
        """Return what the client gets now: all that has come, but for what ends amid a line."""
        piece = self._piece(data)
        if self._held:
            piece, self._held = self._held + piece, b""
        if self._is_whole(piece):
            self._is_torn = False
            return piece
        if self._is_torn:
            return piece
        whole = self._whole_bytes(piece)
        if len(piece) - whole > HELD_MAX_BYTES:
            self._is_torn = True
            return piece
        self._held = piece[whole:]
        return piece[:whole]

    def answer_bytes(self, data: bytes) -> None:
        """Pass a part of the body on to the client, in whole lines."""
        if data.endswith(_LINE_AND_FRAME) and not (self._held or self.upstream.reader.in_chunk):
            self._is_torn = False  # an event, as most come
            self._client.write(data)
        else:
            self._answer_lines(data)

    def _answer_lines(self, data: bytes) -> None:
        piece = self.passed(data)
        if piece:
            self._client.write(piece)

    def answer_end(self, tail: bytes) -> None:
        """Pass on what is held, and close the books of an answer that is whole."""
        if self._held:
            self._client.write(self._held)
        super().answer_end(tail)

    def left_off(self) -> bytes | None:
        """Return the payload that has come and that its client does not have, where another phase
        is to go on with the answer; None: the client has a part of a line."""
        return None if self._is_torn else self._payload(self._held)

    def abort(self) -> None:
        """Hang up on the worker; a client that has read the last event has its answer, and many
        wait for no body's end."""
        tail = self.upstream.reader.payload.tail
        if self._held or not has_said_all(tail):
            super().abort()
            return
        self.upstream.abort()
        self.finished(tail)

    def cut_short(self, why: CutShort) -> None:
        """Tell the client in its stream why it stops, and close."""
        exchange = self.attempt.exchange
        if self._is_torn:
            exchange.client.answer_cut_off()
            return
        held = self._payload(self._held)
        rest, tail = whole_events(held), self.upstream.reader.payload.tail
        tail = tail[: max(len(tail) - len(held) + len(rest), 0)]
        last = error_event(exchange.request.head.target, tail, code=why.code, message=why.message)
        exchange.client.answer_cut_off(self._framed(rest + last))

    # What the frames of chunks make of it

    def _piece(self, data: bytes) -> bytes:
        """Return what came as the client gets it."""
        return data

    def _is_whole(self, piece: bytes) -> bool:
        """Return whether `piece` ends with a line, and with its frame."""
        return piece.endswith(_LINE_AND_FRAME) and not self.upstream.reader.in_chunk

    def _whole_bytes(self, pieces: bytes) -> int:
        """Return how much of pieces ends with a line, and with its frame."""
        return whole_frames(pieces)

    def _payload(self, pieces: bytes) -> bytes:
        """Return the payload of pieces as the client gets them."""
        return unframed(pieces)

    def _framed(self, payload: bytes) -> bytes:
        """Return payload as the client gets it."""
        return chunk(payload)


class StreamingQuietly(Streaming):
    """In this phase events go to a client that did not ask for the usage, which the gateway did:
    the event that says it is kept back."""

    __slots__ = ()

    def passed(self, data: bytes) -> bytes:
        """Return what the client gets now, without the usage."""
        piece = super().passed(data)
        if USAGE not in piece or self._is_torn:
            return piece
        last = LAST_CHUNK if self.upstream.reader.complete else b""
        return chunk(without_usage(unframed(piece))) + last

    def answer_bytes(self, data: bytes) -> None:
        """Pass a part of the body on to the client, in whole lines."""
        if USAGE in data:
            self._answer_lines(data)
        else:
            super().answer_bytes(data)


class StreamingDechunked(Streaming):
    """In this phase events go to a client too old for chunks (nginx is one by default), without
    their frames."""

    __slots__ = ()

    def answer_bytes(self, data: bytes) -> None:
        """Pass a part of the body on to the client, in whole lines."""
        self._answer_lines(data)

    def _piece(self, data: bytes) -> bytes:
        return self.upstream.reader.payload.now

    def _is_whole(self, piece: bytes) -> bool:
        return not piece or piece.endswith(b"\n")

    def _whole_bytes(self, pieces: bytes) -> int:
        return pieces.rfind(b"\n") + 1

    def _payload(self, pieces: bytes) -> bytes:
        return pieces

    def _framed(self, payload: bytes) -> bytes:
        return payload


class StreamingDechunkedQuietly(StreamingDechunked):
    """In this phase events go to such a client, which did not ask for the usage either."""

    __slots__ = ()

    def passed(self, data: bytes) -> bytes:
        """Return what the client gets now, without the usage."""
        piece = super().passed(data)
        return piece if USAGE not in piece or self._is_torn else without_usage(piece)


class StreamingRechunked(StreamingDechunked):
    """In this phase events go to a client that was told chunks before it was known how its worker
    frames them."""

    __slots__ = ()

    def passed(self, data: bytes) -> bytes:
        """Return what the client gets now; without the usage, where the gateway asked for it."""
        piece = super().passed(data)
        if self.attempt.exchange.asks_usage and USAGE in piece and not self._is_torn:
            piece = without_usage(piece)
        return chunk(piece)

    def answer_end(self, tail: bytes) -> None:
        """Pass on what is held, and the body's end."""
        self._held = chunk(self._held) + LAST_CHUNK
        super().answer_end(tail)

    def _framed(self, payload: bytes) -> bytes:
        return chunk(payload)


class Dechunking(Relaying):
    """In this phase the answer goes to a client too old for chunks, without their frames."""

    __slots__ = ()

    def passed(self, data: bytes) -> bytes:
        """Return the payload of what has come."""
        return self.upstream.reader.payload.now

    def answer_bytes(self, data: bytes) -> None:
        """Pass the payload of a part of the body on to the client."""
        self._client.write(self.upstream.reader.payload.now)
