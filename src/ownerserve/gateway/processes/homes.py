"""Homes says which process of a gateway a session is at: its home. All its turns are answered
there, whichever process their connections come to.

| a session | is at |
|---|---|
| that is known | where it was, as the shared table has it |
| with a parent, by its client's word (a sub-agent, a fork) | its parent's home |
| else, with a name | the process that its digest names |
| without a name, whose body goes on from where a known turn's ended | that turn's home |
| else, without a name | the process that the digest of its whole first body names |

Owns the rule; the table owns the memory. A home once given stays, also when a parent is told of
later, and when the process is killed: the one that takes its place has its number.

Why not a hash of what an unnamed session's body begins with: that is a system prompt, the same for
all sessions of an agent, which would all be at one process. So each turn's end is put into the
table (`note`), as the content chain keeps it for its own process: at which chunk of the content it
was, and how many bytes past it. Sessions that only begin alike are at homes of their own, and what
each process knows of a shared head's place is its own.
"""

from __future__ import annotations

import msgspec

from ownerserve.gateway.http.handing import Elsewhere
from ownerserve.gateway.processes.table import HomeEntry, HomeTable
from ownerserve.kv.ids import SessionId
from ownerserve.router.requests.identity import ContentTurn, SessionIdentity

ENDS_MAX = 16
"""Turns' ends remembered past one chunk, as the content chain has it."""
_KEY = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15


class HomesCount(msgspec.Struct):
    """The counts say of requests of sessions whose home was looked for: how many were at home, and
    how many were not."""

    here: int = 0
    elsewhere: int = 0


class Homes:
    """The homes as one process sees them: `process` of `processes`."""

    def __init__(self, table: HomeTable, process: int, processes: int) -> None:
        self.process = process
        self.processes = processes
        self.counts = HomesCount()
        self.keeps_all = False
        """Whether whatever is read here is answered here: others may be gone."""
        self._table = table

    def of_named(self, session: SessionId, parent: SessionId | None) -> int:
        """Return the home of a session, which it has from now on."""
        key = _key(session)
        known = self._table.get(key)
        if known is not None:
            return known.process
        home = self._named(key) if parent is None else self.of_named(parent, None)
        return self._claim(key, home)

    def of_content(self, turn: ContentTurn) -> int:
        """Return the home of the session that a body without a name goes on with, or begins."""
        found = self._longest_end(turn)
        return self._named(turn.key) if found is None else found.process

    def check_named(self, identity: SessionIdentity) -> None:
        """Raise Elsewhere unless the session that a client named is at home here."""
        assert identity.session is not None
        self._check(self.of_named(identity.session, identity.parent))

    def check_content(self, turn: ContentTurn) -> None:
        """Raise Elsewhere unless the session of a body without a name is at home here."""
        self._check(self.of_content(turn))

    def note(self, turn: ContentTurn) -> None:
        """Note where a body without a name ends that is answered here, for whoever reads its
        session's next one."""
        last = turn.hashes[-1]
        with self._table.locked():
            self._table.put(turn.key, HomeEntry(self.process, 0))
            free = turn.key % ENDS_MAX  # with so many ends known another one's place is taken
            for number in range(ENDS_MAX):
                end = self._table.get(_end_key(last, number))
                if end is None or end.says == turn.offset:
                    free = number
                    break
            self._table.put(_end_key(last, free), HomeEntry(self.process, turn.offset))

    def note_alias(self, alias: SessionId) -> None:
        """Note that an answer was given here, whose name the session's next turn may ask by."""
        self._claim(_key(alias), self.process)

    def _check(self, home: int) -> None:
        if home == self.process or self.keeps_all:
            self.counts.here += 1
            return
        self.counts.elsewhere += 1
        raise Elsewhere(home)

    def _named(self, key: int) -> int:
        """Return the process that a digest names, by bits that the table's buckets do not use."""
        return (key >> 40) % self.processes

    def _claim(self, key: int, home: int) -> int:
        """Write that what the key stands for is at `home`, unless somebody wrote a home before."""
        with self._table.locked():
            known = self._table.get(key)
            if known is not None:
                return known.process
            self._table.put(key, HomeEntry(home, 0))
        return home

    def _longest_end(self, turn: ContentTurn) -> HomeEntry | None:
        """Return what is known of the end of a turn that lies furthest in the body."""
        for chunk in range(len(turn.hashes) - 1, -1, -1):
            offsets = []
            for number in range(ENDS_MAX):
                end = self._table.get(_end_key(turn.hashes[chunk], number))
                if end is None:
                    break
                offsets.append(end.says)
            for offset in sorted(offsets, reverse=True):
                tip = turn.tip(chunk, offset)
                found = None if tip is None else self._table.get(tip)
                if found is not None:
                    return found
        return None


def _key(session: SessionId) -> int:
    """Return 64 bits of a session's name, which is a digest in hex."""
    return int(session[:16], 16)


def _end_key(chunk: int, number: int) -> int:
    """Return the key of a turn's end past a chunk, one of several."""
    return ((chunk ^ _SPREAD) * (2 * number + 3)) & _KEY
