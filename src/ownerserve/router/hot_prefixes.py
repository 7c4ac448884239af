"""HotPrefixes decides which prefixes are copied, read-only, to one more worker: forks that would
have been better elsewhere in, replicas to be made now out; no clock, socket or randomness.

A fork runs where its prefix lies, although that worker is busy, as long as bringing the prefix
would take the fork longer than its wait (`Decision.wanted`). One fork does not pay for the way;
many do, and of a copy that is made beside them none waits for it.

    a fork is sent that wants a replica ──> counted of its parent
        look: a fork that came now would want it still, and all that came in the last minute would
        be spared more by it than the way takes; room ──> granted ──> made, missed

| what is counted of a parent | when |
|---|---|
| waits | no fork would want a replica now; it pays not yet; no room; two under way there |
| is granted | it spares most for each byte |
| is dropped | the parent is forgotten; no fork wanted one for a minute; a replica was made |
| rests | a replica could not be made: for a minute nobody is asked |

Beside them is what operators wish (`ask_for`): it is granted whatever it gains.

That as many forks come in the next minute as came in the last is all that is foretold. A fork that
is better elsewhere at once brings the prefix with its turn (artifact_fetch) and leaves a replica
there by itself: such a turn wants none.

Owns what is counted and which replicas are under way; neither sessions nor prefixes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.router.decision import Replica
from ownerserve.router.fleet import room_tokens
from ownerserve.router.gap_moves import ASKED_MAX, AT_ONCE, KEPT_S
from ownerserve.router.idle import ForkShape
from ownerserve.router.messages import Dispatch
from ownerserve.router.pricing import shares_state
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Worker

PARENTS_MAX = 1024
"""Beyond, the parent whose last fork came longest ago is dropped."""
MORE_SHARE, MORE_TOKENS = 8, 256
"""What forks share is estimated from whole pieces of their bodies: an eighth more is copied, and so
many tokens."""
FORKS_MAX = 64
"""Forks of one parent that are counted; a replica that pays for so many pays."""


class PrefixCopy(msgspec.Struct, frozen=True, gc=False):
    """Effect: the first `tokens` tokens of the session are to be copied from `source` to `target`
    now. `made` or `missed` tells how that ended."""

    session: SessionId
    source: Worker
    target: Worker
    tokens: int


class _Hot(msgspec.Struct):
    """A hot prefix is one of which forks, like the last one's `shape`, wanted a replica at the
    instants `at_s`."""

    shape: ForkShape
    at_s: deque[float]


class HotPrefixes:
    """This class counts what forks of one gateway want. `counts`: replicas that were wanted and
    granted, and how each ended; metric labels. `moved_bytes`: of those that were made."""

    def __init__(self, state: RouterState) -> None:
        self.counts: Counter[str] = Counter()
        self.moved_bytes = 0
        self._state = state
        self._hot: OrderedDict[SessionId, _Hot] = OrderedDict()
        self._under_way: dict[SessionId, PrefixCopy] = {}
        self._wished: dict[SessionId, Worker] = {}
        self._rests: dict[SessionId, float] = {}

    def __len__(self) -> int:
        return len(self._hot)

    def sent(self, dispatch: Dispatch, now: float) -> None:
        """Take in the replica that a fork was sent with, if it wants one."""
        wanted, parent = dispatch.decision.wanted, dispatch.parent
        if not isinstance(wanted, Replica) or parent is None or dispatch.attempt > 1:
            return
        self.counts["wanted"] += 1
        new_tokens = max(dispatch.prompt_tokens - wanted.tokens, 1)
        shape = ForkShape(wanted.tokens, new_tokens, dispatch.arm)
        hot = self._hot.setdefault(parent, _Hot(shape, deque(maxlen=FORKS_MAX)))
        hot.shape = shape
        hot.at_s.append(now)
        self._hot.move_to_end(parent)
        if len(self._hot) > PARENTS_MAX:
            self._drop(next(iter(self._hot)), "crowded_out")

    def ask_for(self, session: SessionId, target: Worker) -> None:
        """Hear that somebody wishes that the worker hold a replica of what the session has,
        whatever that gains. It is granted at the next look, or not: who wishes asks again."""
        self._wished[session] = target

    def look(self, now: float) -> list[PrefixCopy]:
        """Return the replicas that are granted now: those that are wished, and those that pay."""
        self._settle(now)
        wished, self._wished = self._wished, {}
        copies = [self._wished_copy(session, target) for session, target in wished.items()]
        priced = sorted(self._due(now), key=lambda one: one[0], reverse=True)
        granted = []
        for copy in (*copies, *(one[1] for one in priced)):
            if copy is None or copy.session in self._under_way or copy.session in self._rests:
                continue
            if self._busy(copy.source) or self._busy(copy.target):
                continue
            self._under_way[copy.session] = copy
            self.counts["granted"] += 1
            granted.append(copy)
        return granted

    def made(self, session: SessionId, moved_bytes: int) -> None:
        """Hear that a replica is there, for which so many bytes were moved."""
        self.counts["made"] += 1
        self.moved_bytes += moved_bytes
        self._under_way.pop(session, None)
        self._hot.pop(session, None)

    def missed(self, session: SessionId, reason: str, now: float) -> None:
        """Hear that a granted replica was not made, and why."""
        self.counts[reason] += 1
        self._under_way.pop(session, None)
        self._rests[session] = now + KEPT_S

    def _drop(self, parent: SessionId, why: str) -> None:
        del self._hot[parent]
        self.counts[why] += 1

    def _settle(self, now: float) -> None:
        """Forget what is stale."""
        self._rests = {name: until_s for name, until_s in self._rests.items() if until_s > now}
        for parent, hot in list(self._hot.items()):
            while hot.at_s and hot.at_s[0] < now - KEPT_S:
                hot.at_s.popleft()
            if not hot.at_s:
                self._drop(parent, "cooled")
            elif self._state.sessions.get(parent) is None:
                self._drop(parent, "ended")

    def _due(self, now: float) -> Iterator[tuple[float, PrefixCopy]]:
        """Price anew what is wanted, those of which most forks came first; give what pays now, with
        the ms spared for each byte."""
        busiest = sorted(self._hot, key=lambda parent: -len(self._hot[parent].at_s))
        for parent in busiest[:ASKED_MAX]:
            hot = self._hot[parent]
            wanted = self._state.idle.replica(parent, hot.shape, now)
            if wanted is None or room_tokens(wanted.target) < wanted.tokens:
                continue
            speed = wanted.target.speed
            moved_bytes = speed.sequence_bytes(wanted.tokens)
            gain_ms = wanted.gain_ms * len(hot.at_s)
            if gain_ms > speed.media[Tier.PEER].ms(moved_bytes):
                yield gain_ms / max(moved_bytes, 1.0), self._copy_of(parent, wanted)

    def _wished_copy(self, name: SessionId, target: Worker) -> PrefixCopy | None:
        """Return the copy of all that its owner has of the session; None: it has nothing that the
        target lacks and can take."""
        owner = self._owner(name)
        if owner is None or owner is target or not target.up:
            return None
        if not all(Tier.DEVICE in one.profile.lends for one in (owner, target)):
            return None  # who lends reads too
        held, there = self._held(name, owner), self._held(name, target)
        if not shares_state(owner, target) or there >= held or room_tokens(target) < held:
            return None
        return PrefixCopy(name, owner, target, held)

    def _copy_of(self, parent: SessionId, wanted: Replica) -> PrefixCopy:
        """Return the copy that makes the replica, of a little more than is known to be shared. The
        parent's owner is read, if it has as much: a worker where only forks ran does not know the
        parent by name."""
        owner, source = self._owner(parent), wanted.source
        if owner is not None and owner is not wanted.target:
            source = owner if self._held(parent, owner) >= wanted.tokens else source
        more = wanted.tokens + wanted.tokens // MORE_SHARE + MORE_TOKENS
        tokens = max(min(more, self._held(parent, source)), wanted.tokens)
        return PrefixCopy(parent, source, wanted.target, tokens)

    def _owner(self, name: SessionId) -> Worker | None:
        session = self._state.sessions.get(name)
        return None if session is None else session.live_owner

    def _held(self, name: SessionId, worker: Worker) -> int:
        """Return how much of the session lies on the worker's device, as far as is known here."""
        session = self._state.sessions.get(name)
        copies = () if session is None else session.copies()
        here = (one for one in copies if one.worker is worker and one.tier is Tier.DEVICE)
        return max((one.tokens for one in here), default=0)

    def _busy(self, worker: Worker) -> bool:
        """Return whether as many replicas as may be are under way from the worker, or to it."""
        under_way = self._under_way.values()
        return sum(worker in (one.source, one.target) for one in under_way) >= AT_ONCE
