"""Request bodies take memory of one budget over all clients, which this module owns: how much of it
is taken, and by whom. A body is kept from its first byte until the answer's, since another worker
may be asked until then.

    head ── open, grow(length) ──> [ HeldBody ] ── let_go ──> at the answer's first byte, at the
    chunks ──── grow(chunk) ────────────┘                     request's end, when the client is gone

What would not fit is refused before it is read. The budget never waits: clients that wait for one
another with half a body each would wait for ever.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from ownerserve.gateway.http.replies import Rejected
from ownerserve.kv.units import MIB

TIDY_BYTES = 32 * MIB


KEPT_BYTES = 4 * MIB
"""What the C library keeps of free pages, and the size from which it asks for fresh ones each time.
By its own rule it gives a body's pages back with each body, and has the kernel clear as many for
the next: 0.3 ms for 400 KB."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names, of malloc.h."""


def _of_libc(name: str) -> Callable[..., object] | None:
    """Return the C library's function `name`; None where it has none."""
    try:
        return cast(Callable[..., object], getattr(ctypes.CDLL(None), name))
    except (AttributeError, OSError):
        return None


_TRIM, _OPTION = _of_libc("malloc_trim"), _of_libc("mallopt")


def keep_pages() -> None:
    """Have the C library keep the pages of a body or two for the next ones, where it can."""
    if _OPTION is not None:
        _OPTION(_TRIM_THRESHOLD, KEPT_BYTES)
        _OPTION(_MMAP_THRESHOLD, KEPT_BYTES)


def give_pages_back() -> None:
    """Have the C library give free pages back to the system, where it can."""
    if _TRIM is not None:
        _TRIM(0)


class BodyBudget:
    """The body budget is the memory that all clients' bodies may take together, in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._freed_bytes = 0

    def let_go(self, held_bytes: int) -> None:
        """Take back what one body held."""
        self.held_bytes -= held_bytes
        self._freed_bytes += held_bytes

    def tidy(self) -> None:
        """Give the pages of bodies that are gone back to the system, once there are many: they came
        in small pieces, which the C library keeps.
        """
        if self._freed_bytes >= TIDY_BYTES:
            self._freed_bytes = 0
            give_pages_back()

    def open(self) -> HeldBody:
        """Return the account of one request's body, which holds nothing yet."""
        return HeldBody(self)


class HeldBody:
    """A held body is what one request's body takes of the budget, in bytes; `let_go` gives all of
    it back, once."""

    __slots__ = ("_budget", "held_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def grow(self, held_bytes: int) -> None:
        """Hold `held_bytes` in all. Raises Rejected when there is no room for more."""
        more_bytes = held_bytes - self.held_bytes
        if more_bytes <= 0:
            return
        budget = self._budget
        if budget.held_bytes + more_bytes > budget.max_bytes:
            raise Rejected(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "bodies_full",
                "body: the bodies of all requests that wait for an answer fill this gateway's"
                " memory for them; retry soon",
            )
        budget.held_bytes += more_bytes
        self.held_bytes = held_bytes

    def let_go(self) -> None:
        """Give everything back; a second time nothing is left."""
        self._budget.let_go(self.held_bytes)
        self.held_bytes = 0
