"""The journal has what an operator asked to be changed while a gateway of several processes runs: a
process that is started again is asked the same before it lets anybody in.

Owns the entries, in memory that all processes share; the front alone writes. An entry that is asked
again counts from its last time, so that draining a worker every night does not fill it.

Of all reloads there is one entry, the first: who starts again reads the files as they are now, and
then has done to it what was asked for since. What a reload took from the files overrules what was
asked for before: those entries say it no more.

    drain B, mode shadow, arm C ── reload: the file has a new mode ──> reload, drain B, arm C
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec
from msgspec.structs import replace

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.ids import WorkerId

KEPT_MAX = 1000
_WORKER = re.compile(r"/workers/([^/]+:\d+)(?:/[a-z]+)?")
RELOAD = "/reload"
_OPTIONS = {
    "/mode": {"mode": "mode"},
    "/shadow": {"policy": "shadow"},
    "/canary": {"share": "canary-share", "policy": "canary-policy"},
    "/log-level": {"level": "log-level"},
}
"""What is asked for by path, and the option of each field: a reload may change it too."""


class AdminQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question is a request to the admin port, as one process hands it to another; without the
    key, which was looked at before."""

    method: str
    target: str
    headers: list[tuple[str, str]] = []
    body: bytes = b""

    @property
    def changes(self) -> bool:
        """Whether it asks to change something."""
        return self.method not in ("GET", "HEAD", "OPTIONS")

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def worker(self) -> WorkerId | None:
        """The worker with a host and a port that the path names, as discovery finds them; None
        where it names none."""
        named = _WORKER.fullmatch(self.path)
        return None if named is None else WorkerId(named[1])


def overruled(question: AdminQuestion, changed: Collection[str]) -> AdminQuestion | None:
    """Return what is left to be asked for once the files have `changed` these options; None:
    nothing."""
    options = _OPTIONS.get(question.path, {})
    if not any(option in changed for option in options.values()):
        return question
    try:
        said = msgspec.json.decode(question.body, type=dict[str, msgspec.Raw])
    except UNREADABLE:  # nobody has done it
        return None
    left = {field: raw for field, raw in said.items() if options.get(field) not in changed}
    return replace(question, body=msgspec.json.encode(left)) if left else None


_DECODER = msgspec.json.Decoder(list[AdminQuestion])


class ChangeJournal:
    """A journal is made before the processes that share it are forked."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("ownerserve-journal")

    def entries(self) -> list[AdminQuestion]:
        """Return all entries, in the order in which they are to be asked."""
        with self._locked():
            length = os.fstat(self._memory).st_size
            data = os.pread(self._memory, length, 0)
        return _DECODER.decode(data) if data else []

    def add(self, question: AdminQuestion) -> None:
        """Add an entry, before its question is asked."""
        others = [one for one in self.entries() if one != question]
        first = [one for one in others[:1] if one.path == RELOAD]
        self.set([*first, *others[len(first) :][1 - KEPT_MAX :], question])

    def reloaded(self, question: AdminQuestion, changed: Collection[str]) -> None:
        """Note that the files were read again, and which options have `changed` by them."""
        others = [one for one in self.entries() if one.path != RELOAD]
        left = [overruled(one, changed) for one in others]
        self.set([question, *(one for one in left if one is not None)])

    def set(self, entries: list[AdminQuestion]) -> None:
        """Have these entries, as before one to which every process that answers said no."""
        data = msgspec.json.encode(entries)
        with self._locked():
            os.ftruncate(self._memory, 0)
            os.pwrite(self._memory, data, 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._memory, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._memory, fcntl.LOCK_UN)
