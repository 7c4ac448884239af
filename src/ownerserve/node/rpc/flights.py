"""What is in flight on a node's RPC port, and what was said under which nonce. Pure.

    asked ── done ──────────> told, to the envelope that asked last
      |`──── given up ──────> told `engine_busy`: an offer only (a probe, a place), which ages
      `───── called off ────> told `Cancelled`, and not begun any more

A word (commit, release) is never given up: what it undoes would stay done. The last `REMEMBERED`
nonces keep their answers, for who asks again.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

import msgspec

from ownerserve.kv.wire.rpc import NO_NONCE, Cancelled, Nonce, RpcAnswer, Said

REMEMBERED = 4096
NEVER_S = float("inf")


class Flight(msgspec.Struct, eq=False):
    """A request in flight: to whom its answer goes, and until when it is waited for."""

    envelope: list[bytes]
    nonce: Nonce
    future: Future[RpcAnswer]
    until_s: float


class Joined(msgspec.Struct, frozen=True):
    """The wish is in flight already; its answer will come here."""


class Flights:
    """See the module."""

    def __init__(self) -> None:
        self._open: dict[Future[RpcAnswer], Flight] = {}
        self._by_nonce: dict[Nonce, Flight] = {}
        self._told: OrderedDict[Nonce, Said] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def again(self, nonce: Nonce, envelope: list[bytes]) -> Said | Joined | None:
        """What was said, or will be, to who asks under this nonce once more; None: it is new."""
        told = self._told.get(nonce)
        if told is not None:
            return told
        flight = self._by_nonce.get(nonce)
        if flight is None:
            return None
        flight.envelope = envelope
        return Joined()

    def begin(self, flight: Flight) -> None:
        """The request went to whoever answers."""
        self._open[flight.future] = flight
        if flight.nonce != NO_NONCE:
            self._by_nonce[flight.nonce] = flight

    def end(self, future: Future[RpcAnswer]) -> Flight | None:
        """Its answer is there; None: nobody waits for it any more."""
        flight = self._open.pop(future, None)
        if flight is not None:
            self._by_nonce.pop(flight.nonce, None)
        return flight

    def overdue(self, now: float) -> list[Flight]:
        """Those that were waited for long enough; they have ended."""
        late = [flight for flight in self._open.values() if flight.until_s <= now]
        for flight in late:
            self.end(flight.future)
        return late

    def tell(self, nonce: Nonce, said: Said) -> None:
        """Keep what was said under a nonce."""
        if nonce == NO_NONCE:
            return
        self._told[nonce] = said
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)

    def call_off(self, nonce: Nonce) -> Flight | Said | None:
        """What is cancelled: a flight, which has ended with this, or what was said; None: neither
        yet. Whoever asks for it now is told that it was."""
        found: Flight | Said | None = self._by_nonce.get(nonce)
        if isinstance(found, Flight):
            self.end(found.future)
        else:
            found = self._told.get(nonce)
        self.tell(nonce, Cancelled())
        return found
