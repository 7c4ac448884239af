"""This module says what every reader is, and has the helpers most of them need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

import msgspec

from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Runs, Trace, TraceRequest, TraceSession
from ownerserve.trace.runs import blocks, encode

Row = TypeVar("Row")


class FirstRecord(msgspec.Struct, frozen=True):
    """The first usable record of a file serves for sniffing: its JSON keys, or its text when it is
    no JSON."""

    keys: frozenset[str]
    text: str


class Reader(Protocol):
    """A reader reads one format. `name` is what `--format` takes, `about` one line for its help."""

    name: str
    about: str

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format; no two readers may
        agree."""
        ...

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        ...


def decode_each(
    decoder: msgspec.json.Decoder[Row], lines: Iterable[TraceLine], problems: Problems
) -> Iterator[tuple[TraceLine, Row]]:
    """Yield every line that is what the decoder expects; the others are reported."""
    for line in lines:
        try:
            row = decoder.decode(line.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            problems.report(line, str(error))
        else:
            yield line, row


def head_of(line: TraceLine) -> FirstRecord | None:
    """Return what a record looks like, or None when it is broken."""
    text = line.data[:4096].decode("utf-8", "replace")
    if not text.lstrip().startswith(("{", "[")):
        return FirstRecord(frozenset(), text)
    try:
        record = msgspec.json.decode(line.data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return FirstRecord(frozenset(record), text)


class Chainer:
    """A chainer makes ids chained: the same key after a different prefix becomes another id.

    New ids count up in order of first sight, so keys that were chained and so numbered already
    come out as they went in, and blocks first seen together become one run.
    """

    def __init__(self) -> None:
        self._node_of: dict[tuple[int, object], int] = {}

    def runs(self, keys: Iterable[object]) -> Runs:
        """Return the chained ids of a prompt's blocks."""
        return encode(self._nodes(keys))

    def _nodes(self, keys: Iterable[object]) -> Iterator[int]:
        node_of, node = self._node_of, -1
        for key in keys:
            node = node_of.setdefault((node, key), len(node_of))
            yield node


def in_order(requests: Mapping[str, list[TraceRequest]]) -> tuple[TraceSession, ...]:
    """Make sessions of requests whose `start_s` is absolute, in order of their first request."""
    sessions = []
    for session_id, members in requests.items():
        members.sort(key=lambda request: request.start_s)
        start_s = members[0].start_s
        relative = tuple(
            msgspec.structs.replace(member, start_s=member.start_s - start_s) for member in members
        )
        sessions.append(TraceSession(session_id, relative, start_s))
    sessions.sort(key=lambda session: session.start_s)
    return tuple(sessions)


def blocks_fit(runs_blocks: int, block_tokens: int, input_tokens: int) -> str | None:
    """Return why a number of blocks does not fit a prompt's length, or None.

    A prompt has floor(input / block) full blocks and may list its last, partial one.
    """
    full = input_tokens // block_tokens
    if full <= runs_blocks <= full + 1:
        return None
    return f"{runs_blocks} blocks of {block_tokens} tokens do not cover an input of {input_tokens}"


def misfit(session: TraceSession, block_tokens: int) -> str | None:
    """Say which request is the first whose blocks do not fit its length, or None. No blocks: not
    recorded."""
    for position, request in enumerate(session.requests):
        if not request.runs:
            continue
        reason = blocks_fit(blocks(request.runs), block_tokens, request.input_tokens)
        if reason is not None:
            return f"requests[{position}]: {reason}"
    return None
