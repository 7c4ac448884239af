"""This module turns what one worker says that it holds, page by page, into news for the router.
Pure.

    page of another life ─────────────> begin anew at 0
    page with a higher floor than read ─> begin anew at 0: a word that something is gone was missed
    read to `last` ───────────────────> what was told before and was not said again is gone

Owns the words told so far, one for each (session, tier), so that a worker's later life, and one
that forgot, are told as what they are: the difference. A page is asked for with `after`.
"""

from __future__ import annotations

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.wire.inventory import Has, Lost, Page
from ownerserve.router.messages import Gone, Reported

TOLD_MAX = 65_536
"""Words of one worker that are remembered; beyond, it is not believed."""

News = Reported | Gone
_Key = tuple[str, Tier]
_TIERS = {tier.value: tier for tier in Tier if tier is not Tier.PEER}


class Residents:
    """The residents are one worker's words on what it holds; `worker` is its name with the
    router."""

    def __init__(self, worker: WorkerId) -> None:
        self.after = 0
        """The number to ask for the next page with."""
        self.ignored = 0
        """Words that were passed over: of a tier that is not known here, or one too many."""
        self.is_caught_up = False
        """Whether the last page went up to the last word."""
        self._worker = worker
        self._life: int | None = None
        self._rank = 0
        self._floor = 0
        self._told: dict[_Key, Has] = {}
        self._unconfirmed: set[_Key] = set()
        """Told before the present reading began, and not said again since."""
        self._is_reading = True
        """Until all that was said before the reading began is read."""

    def __len__(self) -> int:
        """How many extents the worker was last said to hold."""
        return len(self._told)

    def take(self, page: Page, *, asked: int) -> list[News]:
        """Take in the answer to a question for the words after `asked`, and return what is new in
        it."""
        if page.incarnation != self._life:
            self._life, self._rank = page.incarnation, page.rank
            self._begin(page)
        elif page.floor > max(self._floor, self.after):
            self._begin(page)
        if asked != self.after:
            return []  # the answer to another question: `after` is asked for next
        news: list[News] = []
        for word in page.words:
            self.after = word.number
            self._hear(word, news)
        self.is_caught_up = self.after >= page.last or not page.words
        if self.is_caught_up:
            self._floor = page.floor
            if self._is_reading:
                self._is_reading = False
                news += [self._gone(key) for key in sorted(self._unconfirmed)]
                self._unconfirmed = set()
        return news

    def silent(self, incarnation: Incarnation) -> list[News]:
        """Return the news that all that the worker said is gone: it makes no such statements in
        this life."""
        self._life = incarnation
        news: list[News] = [self._gone(key) for key in tuple(self._told)]
        self.after, self._life, self._is_reading = 0, None, True
        return news

    def _begin(self, page: Page) -> None:
        self.after, self._floor, self._is_reading = 0, page.floor, True
        self.is_caught_up = False
        self._unconfirmed = set(self._told)

    def _hear(self, word: Has | Lost, news: list[News]) -> None:
        tier = _TIERS.get(word.tier)
        if tier is None:
            self.ignored += 1
            return
        key = word.session, tier
        if isinstance(word, Has) and len(self._told) >= TOLD_MAX and key not in self._told:
            self.ignored += 1
            return
        self._unconfirmed.discard(key)
        if isinstance(word, Lost):
            news.append(self._gone(key))  # also of what a turn left and no word was read of
            return
        self._told[key] = word
        digest = PrefixHash(bytes.fromhex(word.prefix_hash)) if word.prefix_hash else None
        news.append(Reported(self._unit(tier), tier, digest, word.tokens, SessionId(word.session)))

    def _gone(self, key: _Key) -> Gone:
        self._told.pop(key, None)
        session, tier = key
        return Gone(self._unit(tier), tier, None, SessionId(session))

    def _unit(self, tier: Tier) -> RoutingUnit | None:
        """Return the unit that holds what lies in `tier`; None for a shared medium, which is
        nobody's."""
        if tier is Tier.REMOTE:
            return None
        if self._life is None:
            raise InvariantViolated("residents: a word without a life")
        return RoutingUnit(self._worker, self._rank, Incarnation(self._life))
