"""This module reads Qwen-Bailian usage traces: one request a line, conversations by parent links.

`chat_id`, `parent_chat_id` (-1 for a root), `turn`, `type`, `timestamp` in s, `hash_ids` of
16-token blocks. A conversation is the tree under a root; a parent that is not in the file (the
trace is a window in time) makes its child the first known turn of a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Trace, TraceRequest, TraceSession
from ownerserve.trace.readers.base import Chainer, FirstRecord, blocks_fit, decode_each

BLOCK_TOKENS = 16
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Row(msgspec.Struct, gc=False):
    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[int]
    turn: int = 1
    type: str = ""


class BailianReader:
    """This reader reads Qwen-Bailian usage traces."""

    name = "bailian"
    about = "Qwen-Bailian: a request a line, chat_id and parent_chat_id, 16-token block ids"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return {"chat_id", "parent_chat_id", "hash_ids"} <= head.keys

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        chainer = Chainer()
        rows: dict[int, tuple[_Row, TraceRequest]] = {}
        for line, row in decode_each(msgspec.json.Decoder(_Row), lines, problems):
            reason = blocks_fit(len(row.hash_ids), BLOCK_TOKENS, row.input_length)
            if row.chat_id in rows:
                reason = f"chat_id {row.chat_id} appeared before"
            if reason is not None:
                problems.report(line, reason)
                continue
            runs = chainer.runs(row.hash_ids)
            request = TraceRequest(
                row.timestamp, row.input_length, row.output_length, runs, kind=row.type
            )
            rows[row.chat_id] = (row, request)
        return Trace("", self.name, BLOCK_TOKENS, "trace", "recorded", "recorded", _sessions(rows))


def _sessions(rows: Mapping[int, tuple[_Row, TraceRequest]]) -> tuple[TraceSession, ...]:
    members: dict[int, list[int]] = {}
    root_of: dict[int, int] = {}
    for chat in sorted(rows, key=lambda chat: (rows[chat][0].timestamp, rows[chat][0].turn)):
        parent = rows[chat][0].parent_chat_id
        # A parent that is absent, or that the file dates after its child, can't be waited for.
        root_of[chat] = root_of.get(parent, chat)
        members.setdefault(root_of[chat], []).append(chat)
    return tuple(_session(root, chats, rows) for root, chats in members.items())


def _session(
    root: int, chats: list[int], rows: Mapping[int, tuple[_Row, TraceRequest]]
) -> TraceSession:
    start_s = rows[root][0].timestamp
    position = {chat: place for place, chat in enumerate(chats)}
    requests = []
    for place, chat in enumerate(chats):
        row, request = rows[chat]
        parent = position.get(row.parent_chat_id)
        after = None if place == 0 or parent == place - 1 or parent is None else (parent,)
        requests.append(
            msgspec.structs.replace(request, start_s=request.start_s - start_s, after=after)
        )
    return TraceSession(f"chat{root}", tuple(requests), start_s)
