"""The journal is a file beside a store that says whose state lies in it, for the next life of the
worker.

Owns one file of JSON lines, the last one of a session stands; written on a thread of its own. What
can't be read is passed over and counted, what can't be written is logged: the store has the truth,
and what is found here is looked for there before it is told to anybody.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import msgspec

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.ids import SessionId
from ownerserve.node.vocabulary.records import TIPS_KEPT, Tip

log = logging.getLogger("ownerserve.node")

LINES_MAX = 4 * TIPS_KEPT
JOIN_S = 5.0

_DECODER = msgspec.json.Decoder(Tip)


class Journal:
    """A `Journal` is a file of sessions' tips, written on a thread. `write` never waits; `close`
    does, for what was written."""

    def __init__(self, path: Path) -> None:
        self.unreadable = 0
        """Lines that were passed over when it was opened."""
        self._path = path
        self._tips = self._read()
        self._lines = 0
        self._queue: SimpleQueue[Tip | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="node-journal", daemon=True)
        self.found = tuple(self._tips.values())
        """What the former life left, the longest unchanged first."""
        self._thread.start()

    def write(self, tip: Tip) -> None:
        """Queue a session's tip as it stands now; depth 0 strikes it out."""
        self._queue.put(tip)

    def close(self) -> None:
        """Write what waits, for JOIN_S at most; called once."""
        self._queue.put(None)
        self._thread.join(JOIN_S)

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        is_rewritten = False  # at the first line: what stands is written once, without what is old
        while (tip := self._queue.get()) is not None:
            self._tips.pop(tip.session_id, None)
            if tip.depth:
                self._tips[tip.session_id] = tip
            while len(self._tips) > TIPS_KEPT:
                del self._tips[next(iter(self._tips))]
            try:
                if is_rewritten and self._lines < LINES_MAX:
                    self._append(tip)
                else:
                    self._rewrite()
                    is_rewritten = True
            except OSError as error:
                log.warning("%s: a later life will not know of %s: %s", self._path, tip.session_id,
                            error)  # fmt: skip

    def _append(self, tip: Tip) -> None:
        with self._path.open("ab") as file:
            file.write(_line(tip))
        self._lines += 1

    def _rewrite(self) -> None:
        write_tips(self._path, self._tips)
        self._lines = len(self._tips)

    def _read(self) -> dict[SessionId, Tip]:
        try:
            tips, self.unreadable = tips_in(self._path)
        except OSError as error:
            log.warning("%s: sessions of a former life are not known: %s", self._path, error)
            return {}
        if self.unreadable:
            log.warning("%s: %d lines can't be read", self._path, self.unreadable)
        return tips


def tips_in(path: Path) -> tuple[dict[SessionId, Tip], int]:
    """Return the tips in a journal's file, the longest unchanged first, and how many lines can't be
    read; none where there is no file. Raises OSError.
    """
    try:
        lines: Iterable[bytes] = path.read_bytes().splitlines()
    except FileNotFoundError:
        return {}, 0
    tips: dict[SessionId, Tip] = {}
    unreadable = 0
    for line in lines:
        try:
            tip = _DECODER.decode(line)
        except UNREADABLE:
            unreadable += 1
            continue
        tips.pop(tip.session_id, None)
        if tip.depth > 0:
            tips[tip.session_id] = tip
    return dict(list(tips.items())[-TIPS_KEPT:]), unreadable


def write_tips(path: Path, tips: Mapping[SessionId, Tip]) -> None:
    """Make `tips` the whole of a journal's file; a process that dies leaves it as it was. Raises
    OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "wb", opener=_private) as file:
        file.writelines(map(_line, tips.values()))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _line(tip: Tip) -> bytes:
    return msgspec.json.encode(tip) + b"\n"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
