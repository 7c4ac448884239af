"""The embedded directory is the default: its memory is this process. Workers have what rebuilds it.

Not for several threads: the service calls it from one, an embedding router from its loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.directory.decisions.decide import seen_of
from ownerserve.directory.decisions.records import Key
from ownerserve.directory.decisions.state import DirectoryState
from ownerserve.directory.messages import Outcome, Request
from ownerserve.directory.port import LEASE_S, DirectoryStatus
from ownerserve.directory.terms import TermFile
from ownerserve.kv.clock import Clock
from ownerserve.kv.messages import Term


class EmbeddedDirectory:
    """An embedded directory runs a `DirectoryState` against a clock and a source of terms.

    `opens_in_s`: how long no new owner is made. 0 only where no lease of before can still run;
    None: one lease.
    """

    def __init__(
        self,
        clock: Clock,
        terms: TermFile,
        *,
        lease_s: float = LEASE_S,
        opens_in_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._terms = terms
        self._lease_s = lease_s
        self._to_sweep: list[Key] = []
        self._state = self._empty(lease_s if opens_in_s is None else opens_in_s)

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        """Decide on the requests one after another, at one instant."""
        now_s = self._clock.now()
        return [self._handle(request, now_s) for request in requests]

    def status(self) -> DirectoryStatus:
        state = self._state
        return DirectoryStatus(
            backend="embedded",
            term=state.term,
            issued=state.issued().counter,
            opens_in_s=max(0.0, state.open_at_s - self._clock.now()),
            lease_s=state.lease_s,
            records=state.counts(),
        )

    def sweep(self, limit: int) -> int:
        """Look at the next `limit` records of all, in rounds; says how many changed."""
        if not self._to_sweep:
            self._to_sweep = self._state.keys()
        part, self._to_sweep = self._to_sweep[:limit], self._to_sweep[limit:]
        return self._state.sweep(part, self._clock.now())

    def forget(self) -> DirectoryStatus:
        self._state = self._empty(self._lease_s)
        self._to_sweep = []
        return self.status()

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""

    def _handle(self, request: Request, now_s: float) -> Outcome:
        state = self._state
        if state.is_behind(request):
            seen = seen_of(request)
            above: Term | None = seen.term if seen is not None else None
            state.start_term(self._terms.start(above), open_at_s=now_s + self._lease_s)
        return state.handle(request, now_s)

    def _empty(self, opens_in_s: float) -> DirectoryState:
        open_at_s = self._clock.now() + opens_in_s
        return DirectoryState(self._terms.start(), lease_s=self._lease_s, open_at_s=open_at_s)
