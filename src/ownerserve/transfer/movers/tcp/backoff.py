"""When a peer that could not be reached is tried again. Pure: instants and draws come from outside.

reached -> 0        failed -> FIRST_S, twice as long each time, LAST_S at most, times a draw
"""

from __future__ import annotations

from ownerserve.transfer.vocabulary import ReadFailure

FIRST_S, LAST_S = 0.05, 2.0


class Backoff:
    """A `Backoff` knows until when a peer is not tried, and why: reads end so at once meanwhile,
    for who waits for them can do without."""

    def __init__(self) -> None:
        self._wait_s = FIRST_S
        self._until_s = 0.0
        self._reason = ReadFailure.PEER_LOST

    def reached(self) -> None:
        """Note that the peer was reached."""
        self._wait_s, self._until_s = FIRST_S, 0.0

    def failed(self, reason: ReadFailure, now_s: float, *, draw: float) -> None:
        """Note that the peer was not reached. `draw` in [0, 1) spreads the next attempts."""
        self._reason = reason
        self._until_s = now_s + self._wait_s * (0.5 + draw / 2)
        self._wait_s = min(2 * self._wait_s, LAST_S)

    def refusal(self, now_s: float) -> ReadFailure | None:
        """Return as what a read ends now that would need a new connection; None: try."""
        return self._reason if now_s < self._until_s else None
