"""What a client has of a stream of chunks (OpenAI's chat and completions), and how another worker's
stream is joined to it. Pure.

Two workers that compute the same text need not cut it into the same events. So a stream is told by
the texts of each choice, field by field in their order; another's is compared with them character
by character, and goes on where they end, also amid an event:

    the client has   "The cat "  "sat on "
    the other says   "The "  "cat sat "  "on the mat"  ".", finished
    passed on                            "the mat"     ".", finished        under the first one's id

`Told` can be continued by what is texts alone. One in which something else was said (a call of a
tool, logprobs, token ids) is not: nobody could say where it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from ownerserve.kv.errors import UNREADABLE

_TEXTS = ("role", "content", "reasoning", "reasoning_content", "refusal", "text")
"""The fields of a delta, or of a choice, that are texts: each event adds to them."""
_BESIDE = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs")
"""Fields of a choice that say of each token what nobody can cut in two."""
_ENVELOPE = ("id", "created")
_NOTHING: tuple[object, ...] = (None, "", [])
_DONE = b"[DONE]"

Json = dict[str, Any]


class NotTheSame(Exception):
    """The other worker's stream is not the one that the client has a part of."""


def data_of(event: bytes) -> bytes:
    """Return the data of a server-sent event; empty where it is a comment."""
    lines = (line for line in event.splitlines() if line.startswith(b"data:"))
    return b"\n".join(line[5:].lstrip(b" ") for line in lines)


def texts_of(choice: Json) -> Iterator[tuple[str, str]]:
    """Yield the texts that a choice of a chunk adds, by field, in their order. Raises NotTheSame
    where it says something else."""
    if any(choice.get(name) not in _NOTHING for name in _BESIDE):
        raise NotTheSame
    delta = choice.get("delta")
    for name, value in (choice if delta is None else delta).items():
        if name in _TEXTS and isinstance(value, str):
            yield name, value
        elif value not in _NOTHING and delta is not None:
            raise NotTheSame


class Told:
    """What a client was told of one stream."""

    def __init__(self) -> None:
        self.envelope: dict[str, msgspec.Raw] = {}
        """The id and the time under which its chunks came."""
        self.is_over = False
        """Whether it has said its last word."""
        self.can_be_continued = True
        """Whether all of it is text."""
        self.finished: set[int] = set()
        """The choices that have said why they end."""
        self.has_usage = False
        self._texts: dict[int, list[tuple[str, list[str]]]] = {}

    def hear(self, event: bytes) -> None:
        """Take in an event that the client has got."""
        data = data_of(event)
        if not data:
            return
        if data == _DONE:
            self.is_over = True
            return
        try:
            said = msgspec.json.decode(data)
            if not self.envelope:
                top = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
                self.envelope = {name: top[name] for name in _ENVELOPE if name in top}
            if not said["choices"]:
                self.has_usage = self.has_usage or said.get("usage") not in _NOTHING
            for choice in said["choices"]:
                self._hear(choice)
        except (NotTheSame, *UNREADABLE, KeyError, TypeError, AttributeError):
            self.can_be_continued = False

    def _hear(self, choice: Json) -> None:
        texts = self._texts.setdefault(choice["index"], [])
        for name, text in texts_of(choice):
            if not text:
                continue
            if not texts or texts[-1][0] != name:
                texts.append((name, []))
            texts[-1][1].append(text)
        if choice.get("finish_reason") is not None:
            self.finished.add(choice["index"])

    def texts(self) -> dict[int, deque[tuple[str, str]]]:
        """Return the texts of each choice, in their order."""
        return {
            index: deque((name, "".join(parts)) for name, parts in texts)
            for index, texts in self._texts.items()
        }


class Joining:
    """A joining takes another worker's stream, told from its beginning, and gives what of it the
    client does not have. A stream that begins where the client's ends is joined with nothing
    `left`."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._left = {index: texts for index, texts in told.texts().items() if texts}
        self._finished = set(told.finished)
        self._has_usage = told.has_usage

    @property
    def is_joined(self) -> bool:
        """Whether the other has said all that the client has."""
        return not self._left

    def take(self, event: bytes) -> bytes:
        """Return what the client gets for an event of the other's: all, a part, or nothing of it.
        Raises NotTheSame."""
        data = data_of(event)
        if not data:
            return event if self.is_joined else b""
        if data == _DONE:
            self.end()
            return event
        try:
            top = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            choices = msgspec.json.decode(top["choices"])
            kept = [one for one in map(self._rest, choices) if one is not None]
        except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
            if self.is_joined:  # an error that the other tells goes on as it is
                return event
            raise NotTheSame from error
        if not kept and not self._is_news(choices, top):
            return b""
        if kept != choices:
            top["choices"] = msgspec.Raw(msgspec.json.encode(kept))
        top.update(self._told.envelope)
        return b"data: %b\n\n" % msgspec.json.encode(top)

    def end(self) -> None:
        """Hear that the other has said all. Raises NotTheSame where the client has more."""
        if not self.is_joined:
            raise NotTheSame

    def _is_news(self, choices: list[Json], top: dict[str, msgspec.Raw]) -> bool:
        """Return whether a chunk without a choice for the client has something else for it: the
        stream's usage."""
        if choices:
            return False
        self.end()
        is_usage = bytes(top.get("usage", msgspec.Raw(b"null"))) != b"null"
        return not (is_usage and self._has_usage)

    def _rest(self, choice: Json) -> Json | None:
        """Return what of a choice the client does not have; None: nothing."""
        index = choice["index"]
        if index not in self._left:
            if index not in self._finished:
                return choice
            if any(text for _, text in texts_of(choice)):
                raise NotTheSame  # it goes on where the first one ended
            return None
        where = choice if choice.get("delta") is None else choice["delta"]
        rest, has_more = dict(where), False
        for name, text in texts_of(choice):
            rest[name] = self._beyond(index, name, text)
            if rest[name]:
                has_more = True
            elif text and where is not choice:
                del rest[name]
        if has_more and index in self._finished:
            raise NotTheSame  # as there
        if choice.get("finish_reason") is not None:
            if index in self._left:
                raise NotTheSame
            has_more = index not in self._finished
        if not has_more:
            return None
        return rest if where is choice else {**choice, "delta": rest}

    def _beyond(self, index: int, name: str, text: str) -> str:
        """Return what of the text is beyond what the client has. Raises NotTheSame where the two
        differ."""
        while text and index in self._left:
            texts = self._left[index]
            said, wanted = texts.popleft()
            length = min(len(wanted), len(text))
            if said != name or wanted[:length] != text[:length]:
                raise NotTheSame
            if length < len(wanted):
                texts.appendleft((said, wanted[length:]))
            elif not texts:
                del self._left[index]
            text = text[length:]
        return text
