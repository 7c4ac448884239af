"""A part bring is a bring whose parts are read one by one, each by a thread that waits for it.

landed    a part is there, and its reader's. The last one is when the bring has ended, so that its
          peer has been told and what it took is known
ended     what has not landed never will
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress

from ownerserve.kv.ids import TurnId
from ownerserve.node.transfers.landing import Landing
from ownerserve.node.transfers.offers import PeerOffer
from ownerserve.node.transfers.target_side import BringParts
from ownerserve.store.format.model import Want
from ownerserve.transfer.control.events import BringOver

MOST_S = 3600.0
"""Longer than any bring takes: the control ends each by its own deadlines."""


class PartBring:
    """A `PartBring` owns what has landed of `parts` and has not been read. `for_turn` is the turn
    that its peer computes it for; None: the peer has it at hand in `ready_ms`. `over` is what came
    of it, once begun."""

    def __init__(self, parts: tuple[tuple[Want, ...], ...], for_turn: TurnId | None = None) -> None:
        self.parts = parts
        self.for_turn = for_turn
        self.wanted: BringParts = ()
        self.offers: Mapping[bytes, PeerOffer] = {}
        """Which offer each record is brought by, once begun."""
        self.over: Future[BringOver] | None = None
        self.began_s, self.ready_ms = 0.0, 0.0
        self.is_stopped = self.is_given_up = False
        """Whether no more of it is brought, and that because nobody waits for who reads it."""
        self._readers: list[Future[Landing | None]] = [Future() for _ in parts]
        self._last: Landing | None = None

    def landed(self, part: int, landing: Landing) -> None:
        """Take a part that has come. Called on the service's thread."""
        if part == len(self.parts) - 1:
            self._last = landing
            return
        with suppress(InvalidStateError):  # it was stopped
            self._readers[part].set_result(landing)

    def ended(self) -> None:
        """Let nobody wait any more: the bring is over. Any thread may call."""
        last, self._last = self._last, None
        for reader in self._readers:
            with suppress(InvalidStateError):  # it has landed
                reader.set_result(last if reader is self._readers[-1] else None)

    def stop(self) -> None:
        """Bring no more of it."""
        self.is_stopped = True
        if self.over is not None:
            self.over.cancel()

    def landing_of(self, part: tuple[Want, ...]) -> Landing | None:
        """Wait for a part, and return it, which is the caller's alone; None: it does not come."""
        at = self.parts.index(part)
        try:
            landing = self._readers[at].result(MOST_S)
        except NotInTime:
            return None
        self._readers[at] = Future()
        self._readers[at].set_result(None)
        return landing
