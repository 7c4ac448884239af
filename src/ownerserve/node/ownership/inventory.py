"""Inventory: what a node holds, session by session and tier by tier, in numbered words. Pure.

The one owner of that fact. `residency` and `on_device` say what is there; whoever wants to know
(gateways, and `publishing` for the directory) asks for the words above a number. One word for each
(session, tier), the last one said: a reader that was away catches up with the present, not with
history. Any thread may read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Reversible
from heapq import merge
from itertools import islice
from operator import attrgetter
from threading import RLock

from msgspec.structs import replace

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.inventory import Has, Lost, Page, Word

HAS_KEPT = 16_384
"""Extents that are told; beyond, the one said longest ago is told as gone."""
GONE_KEPT = 4096
PAGE_WORDS = 1000

_Key = tuple[str, str]
_number = attrgetter("number")


def _above(words: Reversible[Word], after: int) -> list[Word]:
    """The words with a higher number than `after`; all stand in the order of their numbers."""
    newest: list[Word] = []
    for word in reversed(words):
        if word.number <= after:
            break
        newest.append(word)
    newest.reverse()
    return newest


class Inventory:
    """See the module."""

    def __init__(self, *, has_kept: int = HAS_KEPT, gone_kept: int = GONE_KEPT) -> None:
        self.last = 0
        """The number of the newest word."""
        self._lock = RLock()
        self._floor = 0
        self._has_kept, self._gone_kept = has_kept, gone_kept
        self._has: OrderedDict[_Key, Has] = OrderedDict()
        self._gone: OrderedDict[_Key, Lost] = OrderedDict()

    def __len__(self) -> int:
        """Extents that are held."""
        return len(self._has)

    def tokens(self, session_id: SessionId, tier: Tier) -> int:
        """How much of the session is told to be in `tier`."""
        word = self._has.get((session_id, tier.value))
        return 0 if word is None else word.tokens

    def has(
        self,
        session_id: SessionId,
        tier: Tier,
        tokens: int,
        *,
        digest: PrefixHash | None,
        kinds: int = 0,
        tenant: bytes = b"",
    ) -> None:
        """`tier` holds `kinds` of [0, tokens) of the session, which is `tenant`'s; 0 tokens:
        nothing."""
        key = session_id, tier.value
        told = "" if digest is None else digest.hex()
        with self._lock:
            if tokens > 0:
                self._say(key, Has(0, *key, tokens, told, kinds, tenant.hex()))
            else:
                self.gone(session_id, tier)

    def _say(self, key: _Key, word: Has) -> None:
        """Unless it says what was said, but for a digest that it lacks."""
        known = self._has.get(key)
        if (
            known is not None
            and word.prefix_hash in ("", known.prefix_hash)
            and replace(word, number=known.number, prefix_hash=known.prefix_hash) == known
        ):
            return
        self.last += 1
        self._has[key] = replace(word, number=self.last)
        self._has.move_to_end(key)
        self._gone.pop(key, None)
        if len(self._has) > self._has_kept:
            name, place = next(iter(self._has))
            self.gone(SessionId(name), Tier(place))

    def gone(self, session_id: SessionId, tier: Tier) -> None:
        """Nothing of the session is in `tier`; not news when nothing was."""
        key = session_id, tier.value
        with self._lock:
            if self._has.pop(key, None) is None:
                return
            self.last += 1
            self._gone[key] = Lost(self.last, session_id, tier.value)
            if len(self._gone) > self._gone_kept:
                _, oldest = self._gone.popitem(last=False)
                self._floor = oldest.number

    def forget(self, session_id: SessionId) -> None:
        """The session is over, or nobody will ask for it."""
        for tier in Tier:
            self.gone(session_id, tier)

    def page(self, after: int, *, incarnation: int, words: int = PAGE_WORDS) -> Page:
        """The first `words` words above `after`."""
        with self._lock:
            has, gone = _above(self._has.values(), after), _above(self._gone.values(), after)
            floor, last = self._floor, self.last
        found = merge(has, gone, key=_number)
        return Page(incarnation, 0, floor, last, tuple(islice(found, words)))

    def check(self) -> None:
        """Raise InvariantViolated unless words are in order, single and bounded."""
        for said in (self._has, self._gone):
            numbers = [word.number for word in said.values()]
            if numbers != sorted(set(numbers)) or (numbers and numbers[-1] > self.last):
                raise InvariantViolated("inventory: the words are out of order")
        if self._has.keys() & self._gone.keys():
            raise InvariantViolated("inventory: an extent is held and gone")
        if len(self._has) > self._has_kept or len(self._gone) > self._gone_kept:
            raise InvariantViolated("inventory: more words than are kept")

    def __iter__(self) -> Iterator[Has]:
        """What is held, the oldest word first."""
        return iter(self._has.values())
