"""The supervisor starts the processes of a gateway, watches them, and starts them again.

    supervisor ─ fork ─> front      the admin port, an embedded directory
               ├ fork ─> relay 0    the data port, a part of the sessions
               ├ fork ─> relay 1 .. at most 63
               └ line to each: it says when it is ready; told: drain, end now. Its end: drain

Owns which processes there are, and the order of start (the front, relay 0, the others) and end
(the relays, the front). It has no event loop and no thread, so that it may fork at any time: what
it was before it forked is what a process begins with, and nothing is read or imported again.

| what ends | then |
|---|---|
| a process before it was ready for the first time | all end, with its exit code: it has said why |
| a process later | it is started again, at once; after a second short life in a row, later |
| SIGTERM or SIGINT to the supervisor | nobody is let in; relays drain, then the front ends |
| a second one | relays end now |
| the supervisor | each process sees its line end, and drains |

SIGHUP is told to the front, which has all relays reload; one that comes amid the start, or while
the front is started again, waits for that. The others ignore the three signals: a
terminal and a service manager send them to all processes, and a second SIGTERM means "now".
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec

from ownerserve.gateway.logs import tell

DRAIN, END, RELOAD = b"d", b"e", b"r"
"""What a process is told on its line."""
SHORT_LIFE_S = 2.0
PAUSE_S, PAUSE_MAX_S = 0.25, 8.0
"""How long a process that dies young is not started again: doubled with each young death."""
_OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

FRONT = -1
"""The role of the front; relays' are their numbers."""


class Ready(msgspec.Struct, frozen=True):
    """A process is ready. `workers_up` of `workers`: a relay's; `directory`: where the front serves
    one."""

    workers_up: int = 0
    workers: int = 0
    directory: str | None = None


class Became(msgspec.Struct, frozen=True):
    """This process was forked: it is `role` now, for the `life`-th time, and has a line to the
    supervisor."""

    role: int
    life: int
    line: socket.socket
    front: Ready
    """What the front said."""


class AllEnded(msgspec.Struct, frozen=True):
    """All processes have ended; `code` is the supervisor's exit code."""

    code: int


Outcome: TypeAlias = Became | AllEnded


class _Child(msgspec.Struct):
    pid: int
    line: socket.socket
    began_s: float
    said: bytes = b""
    ready: Ready | None = None
    is_silent: bool = False
    """Whether its line has ended: it ends itself."""


class Supervisor:
    """A supervisor runs one front and `relays` relays. `started` is called once all are ready, with
    what front and relay 0 said; `close_listeners` as the end begins."""

    def __init__(
        self,
        relays: int,
        *,
        started: Callable[[Ready, Ready], None],
        close_listeners: Callable[[], None],
    ) -> None:
        self._relays = relays
        self._started = started
        self._close_listeners = close_listeners
        self._children: dict[int, _Child] = {}
        self._due_s: dict[int, float] = {}
        self._lives = dict.fromkeys((FRONT, *range(relays)), 0)
        self._young_deaths = dict.fromkeys((FRONT, *range(relays)), 0)
        self._front = Ready()
        self._has_started = False
        self._reload_is_due = False
        self._signals = 0
        self._code = 0

    def run(self) -> Outcome:
        """Run until all has ended, or this is a forked process that has its role to play."""
        wakeup, woken = os.pipe()
        for end in (wakeup, woken):
            os.set_blocking(end, False)
        before = {number: signal.signal(number, _noted) for number in _OURS}
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # what is here now is shared by all processes as long as nobody touches it
        self._due_s[FRONT] = 0.0
        became = None
        try:
            while became is None and (self._children or self._due_s):
                became = self._start_what_is_due()
                if became is None:
                    self._wait(wakeup)
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for end in (wakeup, woken):
                os.close(end)
        if became is None:
            return AllEnded(self._code)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        return became

    # Starting

    def _start_what_is_due(self) -> Became | None:
        now_s = time.monotonic()
        for role in [role for role, due_s in self._due_s.items() if due_s <= now_s]:
            became = self._fork(role)
            if became is not None:
                return became
        return None

    def _fork(self, role: int) -> Became | None:
        del self._due_s[role]
        self._lives[role] += 1
        here, there = socket.socketpair()
        pid = os.fork()
        if pid:
            there.close()
            here.settimeout(0)
            self._children[role] = _Child(pid, here, time.monotonic())
            return None
        here.close()
        for child in self._children.values():
            child.line.close()
        return Became(role, self._lives[role], there, self._front)

    def _heard(self, role: int, ready: Ready) -> None:
        """Hear that a process is ready, and start those that waited for that."""
        child = self._children[role]
        child.ready = ready
        if role == FRONT:
            self._front = ready
        if self._has_started:
            tell(logging.INFO, "process_back", process=_named(role), pid=child.pid)
            return
        if role == FRONT:
            self._due_s[0] = 0.0
        elif role == 0:
            self._due_s |= dict.fromkeys(range(1, self._relays), 0.0)
        relays = [self._children.get(number) for number in range(self._relays)]
        if all(one is not None and one.ready is not None for one in relays) and relays[0]:
            self._has_started = True
            self._started(self._front, relays[0].ready or ready)

    # Watching

    def _wait(self, wakeup: int) -> None:
        """Wait until something is said, signalled or due."""
        speaking = ((role, one) for role, one in self._children.items() if not one.is_silent)
        lines = {child.line.fileno(): role for role, child in speaking}
        wait_s = None
        if self._due_s:
            wait_s = max(min(self._due_s.values()) - time.monotonic(), 0.0)
        readable, _, _ = select.select([wakeup, *lines], [], [], wait_s)
        for descriptor in readable:
            if descriptor == wakeup:
                for number in os.read(wakeup, 1024):
                    if number == signal.SIGHUP:
                        self._reload_is_due = True
                    elif number != signal.SIGCHLD:
                        self._told_to_end()
            else:
                self._read(lines[descriptor])
        self._bury()
        front = self._children.get(FRONT)
        if self._reload_is_due and self._has_started and front is not None and front.ready:
            self._reload_is_due = False
            self._tell(FRONT, RELOAD)

    def _read(self, role: int) -> None:
        child = self._children[role]
        said = b""
        with suppress(OSError):
            said = child.line.recv(4096)
        child.said += said
        child.is_silent = not said
        if child.ready is None and child.said.endswith(b"\n"):
            self._heard(role, msgspec.json.decode(child.said, type=Ready))

    def _bury(self) -> None:
        """Take notice of processes that have ended."""
        for role, child in list(self._children.items()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.line.close()
                del self._children[role]
                self._died(role, child, os.waitstatus_to_exitcode(status))
        if self._is_ending and not self._relays_live:
            self._tell(FRONT, DRAIN)

    def _died(self, role: int, child: _Child, code: int) -> None:
        if self._is_ending:
            return
        if not self._has_started:
            self._code = code if code > 0 else 70
            self._end(END)
            return
        lived_s = time.monotonic() - child.began_s
        self._young_deaths[role] = self._young_deaths[role] + 1 if lived_s < SHORT_LIFE_S else 0
        deaths = self._young_deaths[role]
        pause_s = min(PAUSE_S * 2 ** (deaths - 1), PAUSE_MAX_S) if deaths > 1 else 0.0
        self._due_s[role] = time.monotonic() + pause_s
        cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        tell(
            logging.WARNING, "process_lost", process=_named(role), pid=child.pid, cause=cause,
            again_in_s=round(pause_s, 3),
        )  # fmt: skip

    # Ending

    @property
    def _is_ending(self) -> bool:
        return self._signals > 0

    @property
    def _relays_live(self) -> bool:
        return any(role != FRONT for role in self._children)

    def _told_to_end(self) -> None:
        self._end(DRAIN if not self._signals else END)

    def _end(self, word: bytes) -> None:
        """Have the relays end, as `word` says; the front ends after them."""
        self._signals += 1
        self._due_s.clear()
        self._close_listeners()
        for role in range(self._relays):
            self._tell(role, word)

    def _tell(self, role: int, word: bytes) -> None:
        child = self._children.get(role)
        if child is not None:
            with suppress(OSError):  # it ends already
                child.line.send(word)


def _named(role: int) -> str:
    return "front" if role == FRONT else str(role)


def _noted(number: int, frame: object) -> None:
    """Do nothing: the number is in the pipe that wakes the supervisor."""
