"""A request as a policy sees it: plain facts, every token count the router's estimate."""

from __future__ import annotations

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.router.candidates import Candidates
from ownerserve.router.extents import Copy
from ownerserve.router.turns import TurnClass
from ownerserve.router.worker import Worker

_DEVICE = Tier.DEVICE
"""An enum's member costs a look-up in its class each time: not on this path."""


class Request(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A request as a policy sees it. Every token count is the router's estimate."""

    prompt_tokens: int
    session: SessionId | None = None
    turn: TurnClass = TurnClass.SMALL_INCREMENT
    turns: int = 0
    """Earlier requests of the session that were dispatched."""
    home: Worker | None = None
    """Where the session's next turn goes unless there is a better place; None when it is new, or
    that worker is gone or no candidate."""
    owner: Worker | None = None
    """The worker that has the session, and alone can hand it over: its home, but while a turn
    that was sent elsewhere is not answered. None as for `home`."""
    copies: tuple[Copy, ...] = ()
    """Copies of the beginning of the prompt. Only copies that can be used now; the owner's too."""
    spec_digest: str = ""
    """The spec under which the state was computed: only workers of this digest can use `copies`."""
    known_tokens: int = 0
    """How much of the prompt was computed once, wherever it lies now."""
    output_tokens: int = 0
    own_pending_tokens: int = 0
    """Prefill of the session's own other requests that its home has not begun to answer."""
    idle_s: float = 0.0
    """Since the session's last turn ended."""
    since_move_s: float = float("inf")
    """Since the session last changed its owner for load's sake."""
    now_s: float = 0.0

    def cached_on(self, worker: Worker) -> int:
        """Tokens of the prompt that lie on `worker`'s device, so that they cost it nothing."""
        tokens = 0
        for copy in self.copies:
            if copy.worker is worker and copy.tier is _DEVICE and copy.tokens > tokens:
                tokens = copy.tokens
        return tokens if tokens < self.known_tokens else self.known_tokens if tokens else 0

    def holders(self, fleet: Candidates) -> list[Worker]:
        """Candidates that hold the beginning of the prompt, in whatever tier."""
        copies = self.copies
        if len(copies) == 1:  # as for most turns
            worker = copies[0].worker
            return [] if worker is None or worker not in fleet else [worker]
        return [worker for worker in self._holding() if worker in fleet]

    def prefill_holders(self, fleet: Candidates) -> list[Worker]:
        """Those that hold it among the workers that prefill for others."""
        return [worker for worker in self._holding() if fleet.can_prefill(worker)]

    def _holding(self) -> list[Worker]:
        workers = dict.fromkeys(copy.worker for copy in self.copies)
        return [worker for worker in workers if worker is not None]
