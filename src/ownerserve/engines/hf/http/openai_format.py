"""Deltas to OpenAI response objects. Shapes only; knows neither HTTP nor the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ownerserve.engines.hf.model.chat_codec import Codec
from ownerserve.engines.hf.scheduling.requests import (
    Delta,
    Finished,
    Request,
    Sampled,
    TokenLogprob,
)

Json = dict[str, Any]


class Envelope(msgspec.Struct, frozen=True):
    """What every object of one answer repeats."""

    id: str
    created_s: int
    model: str


class Wishes(msgspec.Struct, frozen=True):
    """What the caller wants to see beside the text."""

    token_ids: bool
    stream_usage: bool


class Format(ABC):
    """One answer: chunks as they come, or the whole at the end."""

    whole_object: str
    chunk_object: str

    def __init__(self, envelope: Envelope, request: Request, codec: Codec, wishes: Wishes) -> None:
        self._envelope = envelope
        self.request = request
        self._codec = codec
        self._wishes = wishes
        # Characters of choice i so far, as its tokens are shown (completions' text_offset).
        self._shown = [0] * request.choices

    # ---- what the two endpoints differ in

    @abstractmethod
    def opening(self) -> Iterator[Json]:
        """Chunks before the first delta."""

    @abstractmethod
    def _delta_body(self, text: str) -> Json: ...

    @abstractmethod
    def _whole_body(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs(self, index: int, sampled: Sequence[Sampled]) -> Json: ...

    # ---- what they share

    def chunk(self, delta: Delta) -> Json | None:
        """A stream chunk; None when there is nothing to show yet."""
        has_details = self.request.sampling.logprobs is not None or self._wishes.token_ids
        if not (delta.text or delta.finish or has_details):
            return None
        choice = self._choice(delta, self._delta_body(delta.text))
        return self._object(self.chunk_object, [choice])

    def closing(self, finished: Finished) -> Json | None:
        """The usage chunk, if it was asked for."""
        if not self._wishes.stream_usage:
            return None
        return {**self._object(self.chunk_object, []), "usage": usage(finished)}

    def whole(self, deltas: Sequence[Delta], finished: Finished) -> Json:
        """The answer at once, from all its deltas in order."""
        choices = []
        for i in range(self.request.choices):
            own = [delta for delta in deltas if delta.index == i]
            text = "".join(delta.text for delta in own)
            sampled = tuple(token for delta in own for token in delta.sampled)
            joined = Delta(i, text, sampled, own[-1].finish)
            choices.append(self._choice(joined, self._whole_body(text)))
        answer = {**self._object(self.whole_object, choices), "usage": usage(finished)}
        if self._wishes.token_ids:
            answer["prompt_token_ids"] = list(self.request.prompt)
        return answer

    def _object(self, kind: str, choices: list[Json]) -> Json:
        envelope = self._envelope
        body: Json = {
            "id": envelope.id,
            "object": kind,
            "created": envelope.created_s,
            "model": envelope.model,
            "choices": choices,
        }
        if kind == self.chunk_object and self._wishes.stream_usage:
            body["usage"] = None
        return body

    def _choice(self, delta: Delta, body: Json) -> Json:
        choice: Json = {
            "index": delta.index,
            **body,
            "logprobs": None,
            "finish_reason": delta.finish.value if delta.finish else None,
        }
        if self.request.sampling.logprobs is not None:
            choice["logprobs"] = self._logprobs(delta.index, delta.sampled)
        if self._wishes.token_ids:
            choice["token_ids"] = [sampled.token for sampled in delta.sampled]
        return choice


class ChatFormat(Format):
    """/v1/chat/completions"""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Iterator[Json]:
        for i in range(self.request.choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self._object(self.chunk_object, [choice])

    def _delta_body(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _whole_body(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, index: int, sampled: Sequence[Sampled]) -> Json:
        return {
            "content": [
                {
                    **self._token(token.chosen),
                    "top_logprobs": [self._token(other) for other in token.top],
                }
                for token in sampled
                if token.chosen is not None
            ],
            "refusal": None,
        }

    def _token(self, token: TokenLogprob) -> Json:
        return {
            "token": self._codec.show(token.token),
            "logprob": token.logprob,
            "bytes": list(self._codec.token_bytes(token.token)),
        }


class CompletionFormat(Format):
    """/v1/completions"""

    whole_object = chunk_object = "text_completion"

    def opening(self) -> Iterator[Json]:
        return iter(())

    def _delta_body(self, text: str) -> Json:
        return {"text": text}

    _whole_body = _delta_body

    def _logprobs(self, index: int, sampled: Sequence[Sampled]) -> Json:
        tokens = [self._codec.show(token.token) for token in sampled]
        offsets = []
        for text in tokens:
            offsets.append(self._shown[index])
            self._shown[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [t.chosen.logprob for t in sampled if t.chosen is not None],
            "top_logprobs": [
                {self._codec.show(other.token): other.logprob for other in token.top}
                for token in sampled
            ],
            "text_offset": offsets,
        }


def usage(finished: Finished) -> Json:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }
