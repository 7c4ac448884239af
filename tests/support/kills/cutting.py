"""One wire cut: what passes between two processes is read, and one kind of thing is taken out.

    directory bind    requests of a type in a batch: answered `unreachable`, as if it was lost
    node reserve      a message on a worker's RPC port: lost
    turn version      a field of the line down with each turn
    answer tip        a field of the line up with each answer
    status rpc        a field of a worker's statement
    inventory         the question what a worker holds: its connection ends
    page words        all words of its answers
    has tokens        what its words of one kind say: nothing of it (no tokens, nobody's, nowhere)
    outcome leased.memory     a field of what the directory answers, by the answer's type
    said reserved.reservation a field of what a node's port answers

A field is cut by renaming it: readers pass over those that they do not know. One of an answer in
msgpack is left out, or says nothing (NOTHING) where its reader needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
UNREACHABLE = {"type": "refused", "reason": "unreachable"}

NOTHING: dict[str, Any] = {
    "adopted": [],
    "epoch": [[0, 0], 0],
    "lease_s": 0.0,
    "locations": [],
    "members": [],
    "owner_live": False,
    "prefix_hash": None,
    "reason": "other",
    "refs": 0,
    "reservation": 0,
    "tokens": 0,
    "version": 0,
    "wanted": [],
}
"""What a field says that is cut, by its name, where it can't be left out. An `owner` is another
life then."""

Parts: TypeAlias = list[bytes]
_DOWN = re.compile(rb"(?i)x-ownerserve-session: (\{[^\r]*\})\r\n")
_SAID: dict[str, tuple[re.Pattern[bytes], Callable[[bytes], bytes]]] = {
    "session": (re.compile(rb'("session":")([^"]*)'), lambda said: b"0" * len(said)),
    "tier": (re.compile(rb'("tier":")([^"]*)'), lambda said: b"-" * len(said)),
    "tokens": (re.compile(rb'("tokens":)(\d+)'), lambda said: b"0".ljust(len(said))),
}
"""A word's fields, and what they say that are cut: a page that can't be read would not be asked for
again."""
_UP = re.compile(rb"(?i)x-ownerserve-answer: (\{[^\r]*\})\r\n")


class Cuts:
    """The wire that is cut now, on all proxies of a fleet; "": none."""

    def __init__(self) -> None:
        self.wire = ""
        self.taken: set[str] = set()
        """Wires of which something was taken out."""
        self.lines: dict[str, dict[str, Any]] = {}
        """The line of each session's newest turn, as its gateway said it."""

    def takes(self, wire: str) -> bool:
        if wire != self.wire:
            return False
        self.taken.add(wire)
        return True

    def strip(self, kind: str, answer: dict[str, Any]) -> None:
        """Take the field out of an answer, where one of this kind is cut."""
        found, _, field = self.wire.partition(" ")
        tag, _, name = field.partition(".")
        if found != kind or answer["type"] != tag or name not in answer:
            return
        self.taken.add(self.wire)
        if field == "found.owner":
            answer[name] = None
        elif name == "owner":
            worker, rank, life = answer[name]
            answer[name] = [worker, rank, life + 1]
        elif name in NOTHING:
            answer[name] = NOTHING[name]
        else:
            del answer[name]

    def without(self, kind: str, text: bytes) -> bytes:
        """JSON, a field less where one of this kind is cut; as long as it was."""
        found, _, name = self.wire.partition(" ")
        key = f'"{name}":'.encode()
        if found != kind or key not in text:
            return text
        self.taken.add(self.wire)
        return text.replace(key, b'"-' + key[2:])

    def without_said(self, data: bytes) -> bytes:
        """An answer with a page of an inventory, where that or its words of one kind are cut; as
        long as it was."""
        if self.wire == "page words":
            return self.without("page", data)
        kind, _, field = self.wire.partition(" ")
        if kind not in ("has", "gone") or field not in _SAID:
            return data
        value, instead = _SAID[field]

        def cut(word: re.Match[bytes]) -> bytes:
            self.taken.add(self.wire)
            return value.sub(lambda said: said[1] + instead(said[2]), word[0])

        return re.sub(rb'\{"is":"' + kind.encode() + rb'",[^{}]*\}', cut, data)

    def without_words(self, kind: str, text: bytes) -> bytes:
        """A page of an inventory, a field of its words of one kind less where such a one is cut."""
        found, _, name = self.wire.partition(" ")
        if found != kind:
            return text
        page = msgspec.json.decode(text)
        for word in page["words"]:
            if word["is"] == kind:
                self.taken.add(self.wire)
                word.pop(name, None)
        return msgspec.json.encode(page)


class Between:
    """What stands between two ends of one connection: each way bytes in, bytes out."""

    def down(self, data: bytes) -> bytes:
        return data

    def up(self, data: bytes) -> bytes:
        return data


class Zmtp:
    """One way of a ZeroMQ connection. `change` gets each message's parts; None: it is lost."""

    def __init__(self, change: Callable[[Parts], Parts | None]) -> None:
        self._change = change
        self._greeting = GREETING_BYTES
        self._data = b""
        self._parts: Parts = []

    def feed(self, data: bytes) -> bytes:
        out, self._data = data[: self._greeting], self._data + data[self._greeting :]
        self._greeting -= len(out)
        while (frame := self._frame()) is not None:
            raw, flags, body = frame
            self._data = self._data[len(raw) :]
            if flags & COMMAND:
                out += raw
                continue
            self._parts.append(body)
            if not flags & MORE:
                changed, self._parts = self._change(self._parts), []
                out += b"" if changed is None else _framed(changed)
        return out

    def _frame(self) -> tuple[bytes, int, bytes] | None:
        """The first whole one: all of it, its flags, its body."""
        if len(self._data) < 2:
            return None
        flags = self._data[0]
        head = 9 if flags & LONG else 2
        size = int.from_bytes(self._data[1:head], "big")
        if len(self._data) < head + size:
            return None
        raw = self._data[: head + size]
        return raw, flags, raw[head:]


def _framed(parts: Parts) -> bytes:
    last = len(parts) - 1
    return b"".join(
        bytes([LONG | (MORE if at < last else 0)]) + len(part).to_bytes(8, "big") + part
        for at, part in enumerate(parts)
    )


class DirectoryWire(Between):
    """Batches to a directory, and what it answers."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._lost: dict[bytes, list[int]] = {}
        self.down, self.up = Zmtp(self._asked).feed, Zmtp(self._answered).feed  # type: ignore[method-assign]

    def _asked(self, parts: Parts) -> Parts:
        version, body = msgspec.msgpack.decode(parts[-1])
        requests = body.get("requests", [])
        lost = [
            at for at, one in enumerate(requests) if self._cuts.takes(f"directory {one['type']}")
        ]
        if not lost:
            return parts
        self._lost[parts[0]] = lost
        body["requests"] = [one for at, one in enumerate(requests) if at not in lost]
        return [parts[0], msgspec.msgpack.encode([version, body])]

    def _answered(self, parts: Parts) -> Parts:
        lost = self._lost.pop(parts[0], None)
        if lost is None and not self._cuts.wire.startswith("outcome "):
            return parts
        version, body = msgspec.msgpack.decode(parts[-1])
        for outcome in body.get("outcomes", ()):
            self._cuts.strip("outcome", outcome)
        for at in lost or ():
            body["outcomes"].insert(at, UNREACHABLE)
        return [parts[0], msgspec.msgpack.encode([version, body])]


class NodeWire(Between):
    """Messages to a worker's RPC port."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self.down, self.up = Zmtp(self._asked).feed, Zmtp(self._answered).feed  # type: ignore[method-assign]

    def _asked(self, parts: Parts) -> Parts | None:
        _, body, *_ = msgspec.msgpack.decode(parts[-1])
        return None if self._cuts.takes(f"node {body['type']}") else parts

    def _answered(self, parts: Parts) -> Parts:
        if not self._cuts.wire.startswith("said "):
            return parts
        version, body, *nonce = msgspec.msgpack.decode(parts[-1])
        self._cuts.strip("said", body)
        return [*parts[:-1], msgspec.msgpack.encode([version, body, *nonce])]


class WorkerWire(Between):
    """HTTP to a worker."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts

    def down(self, data: bytes) -> bytes:
        if b"GET /ownerserve/inventory" in data and self._cuts.takes("inventory"):
            raise ConnectionResetError("the question is lost")
        found = _DOWN.search(data)
        if found is None:
            return data
        line = msgspec.json.decode(found[1])
        if "name" in line:
            self._cuts.lines[line["name"]] = line
        return data[: found.start(1)] + self._cuts.without("turn", found[1]) + data[found.end(1) :]

    def up(self, data: bytes) -> bytes:
        found = _UP.search(data)
        if found is not None:
            line = self._cuts.without("answer", found[1])
            return data[: found.start(1)] + line + data[found.end(1) :]
        if b'"words":' in data:
            if self._cuts.takes("inventory"):  # a question that was held when the wire was cut
                raise ConnectionResetError("the answer is lost")
            return self._cuts.without_said(data)
        return self._cuts.without("status", data) if b'"profile":' in data else data
