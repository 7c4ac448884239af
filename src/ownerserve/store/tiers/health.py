"""Health deals with a medium that fails: say so once, back off, come back. Pure: `now` in, verdict
out.

The engine never sees an error of the store. It sees refusals and misses; the operator sees one
warning when trouble begins and one line when it ends.
"""

from __future__ import annotations

import logging

log = logging.getLogger("ownerserve.store")

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


class Health:
    """A tier's health says whether a write is worth a try now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._resume_at_s = 0.0

    def writable(self, now_s: float) -> bool:
        """Tell whether no failure stands, or the pause after it is over and one more try may be
        made.
        """
        left_s = self._resume_at_s - now_s
        return self.failures == 0 or left_s <= 0 or left_s > self._pause_s  # the clock was set back

    def failed(self, problem: object, now_s: float) -> None:
        """Note that a write did not work: log the first, and pause longer after each."""
        if self.failures == 0:
            log.warning(
                "%s: writes stop, %s. Serving goes on; what is not kept is computed again",
                self.name,
                problem,
            )
        else:
            self._pause_s = min(MAX_PAUSE_S, self._pause_s * 2)
        self.failures += 1
        self._resume_at_s = now_s + self._pause_s

    def worked(self) -> None:
        """Note that a write worked: no failure stands any more."""
        if self.failures:
            log.warning("%s: writes work again after %d failures", self.name, self.failures)
        self.failures = 0
        self._pause_s = FIRST_PAUSE_S
