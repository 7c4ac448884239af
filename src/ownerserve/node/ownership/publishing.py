"""Publishing tells the directory what a node's inventory says. Pure.

    inventory ── words above the number read last ──> extents by name and tier ──> Publish
    a finished turn ── Advanced: its tip is told with that already ─┘    ^
    the directory has forgotten ── all that is held, 1,000 a message ────┘

Owns what the directory was told of this unit's copies, and what it is to be told. An inventory
speaks of sessions, the directory of prefixes: two sessions that stand on one prefix are one copy.
Where a session has gone on, its former extent is the first part of the new one: the directory
forgets it, unless forks stand on it; then it is gone when the new one is (`trail`).

A name is a digest over the chain's and what the state is computed with, tenant included: equal
tokens of two models are two prefixes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import TypeVar

import msgspec

from ownerserve.directory.messages import Advance, Drop, HeldExtent, Outcome, Publish, Published
from ownerserve.directory.rules import MAIN_KINDS, Kinds, TierCode, as_replica
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.kv.wire.inventory import Lost
from ownerserve.node.ownership.inventory import Held, Inventory, Word, WordsAbove

PART = 1000
"""Extents in one message, at most."""
TRAIL_KEPT = 64
"""Forked extents that are remembered of one session and tier; beyond, the directory is asked again
whether it still needs the oldest."""

ALL_WORDS = 1 << 62
DOMAIN = b"ownerserve/extent/1"

DigestAt = Callable[[SessionId, int], PrefixHash | None]
"""The chain digest of a session's first so many tokens, where it is known."""

_Key = tuple[str, str]
_Copy = tuple[PrefixHash, TierCode]


def extent_name(scope: bytes, digest: PrefixHash, tenant: bytes = b"") -> PrefixHash:
    """Return the name by which the directory knows the prefix with this chain digest. `scope` is a
    digest of all else that the state follows from (model, weights, numerics), `tenant` the salt of
    the tenant that it belongs to; empty: all may share it."""
    return PrefixHash(hashlib.sha256(DOMAIN + scope + tenant + digest).digest())


class PublishedPart(msgspec.Struct, frozen=True, gc=False):
    """A `PublishedPart` is the first `tokens` tokens of a session, under their name."""

    name: PrefixHash
    tokens: int


class _Holds(msgspec.Struct, eq=False):
    """A `_Holds` is what one session holds in one tier. `said` is what the inventory's last word
    told, `claim` the tip that a finished turn has told, `trail` the shorter parts that others were
    forked from."""

    said: PublishedPart | None = None
    claim: PublishedPart | None = None
    trail: list[PublishedPart] = []


class _Known(msgspec.Struct, eq=False):
    """A `_Known` is a copy that is published, with how many sessions hold it here."""

    tokens: int
    kinds: Kinds
    group: str
    holders: int = 0


class Publishing:
    """A `Publishing` decides what one life of a routing unit publishes. `digest_at` may know more
    digests than the inventory's words do."""

    def __init__(
        self, unit: RoutingUnit, inventory: Inventory, *, scope: bytes, digest_at: DigestAt
    ) -> None:
        self.lost_copies = 0
        """Last copies of what sessions stand on that went here, as the directory has said."""
        self._unit = unit
        self._inventory = inventory
        self._scope = scope
        self._digest_at = digest_at
        self._read = 0
        self._words: OrderedDict[_Key, Word] = OrderedDict()
        """Read and not acted on."""
        self._nameless: dict[_Key, Word] = {}
        """Acted on while nobody knew the digest: tried once more, for a turn's end tells it too."""
        self._holds: dict[_Key, _Holds] = {}
        self._copies: dict[_Copy, _Known] = {}
        self._duties: dict[PrefixHash, Epoch] = {}
        self._groups: dict[SessionId, str] = {}
        self._tenants: dict[SessionId, bytes] = {}
        self._new: dict[_Copy, None] = {}
        self._gone: dict[_Copy, None] = {}
        self._left: dict[_Copy, tuple[_Key, int]] = {}
        self._under_way: Publish | None = None
        self._asked_to_leave: dict[_Copy, tuple[_Key, int]] = {}
        self._is_refilling = False
        """Whether all is being told again."""
        self._is_refused = False
        """Whether the directory did not take what went last; it goes with a later frame."""

    def name(self, digest: PrefixHash, session_id: SessionId) -> PrefixHash:
        """Return the name by which the directory knows the session's prefix of this digest."""
        return extent_name(self._scope, digest, self._tenants.get(session_id, b""))

    @property
    def has_backlog(self) -> bool:
        """`has_backlog` tells whether more is to be told than one message takes, so that the next
        one need not wait."""
        if self._is_refused:
            return False
        waits = len(self._new) + len(self._gone) + len(self._left)
        unread = self._inventory.last - self._read
        return self._is_refilling or waits > PART or unread > PART

    def __len__(self) -> int:
        """Return how many copies are held."""
        return len(self._copies)

    # -- told ----------------------------------------------------------------------------------

    def belongs(self, session_id: SessionId, *, group: str = "", tenant: bytes = b"") -> None:
        """Note the session's group and tenant, those of them that are given."""
        if group:
            self._groups[session_id] = group
        if tenant:
            self._tenants[session_id] = tenant

    def claimed(self, told: Advance, duty: Epoch | None) -> None:
        """Note that a finished turn has told its session's tip. `duty` is the epoch of its
        last-copy duty for it; None: it has none."""
        name, tokens = told.prefix_hash, told.tokens
        key = told.session_id, word_of(told.tier)
        holds = self._holds.setdefault(key, _Holds())
        former, holds.claim = holds.claim, PublishedPart(name, tokens)
        if duty is not None:
            self._duties[name] = duty
        is_new = (name, told.tier) not in self._copies
        self._take(key, holds.claim, told.kinds)
        if is_new:
            self._new.pop((name, told.tier), None)
        if former is not None:
            self._give(key, former, goes_on=self._goes_on(key, former, tokens))

    def forgotten(self) -> None:
        """Tell all again, since the directory has lost its memory. What is gone is told too, for
        the new memory may have been told that it is here before that was known: a `Register` that
        was stuck on its way is enough for it to take reports."""
        gone = () if self._under_way is None else self._under_way.gone
        self._gone = {copy: None for copy in (*gone, *self._gone) if copy not in self._copies}
        left = self._asked_to_leave | self._left
        self._left = {copy: whose for copy, whose in left.items() if copy not in self._copies}
        self._new = dict.fromkeys(self._copies)
        self._under_way = None
        self._asked_to_leave = {}
        self._is_refilling, self._is_refused = bool(self._new), False

    # -- asked ---------------------------------------------------------------------------------

    def next(
        self, *, seen: Epoch | None, ours: Collection[SessionId], busy: Collection[SessionId]
    ) -> Publish | None:
        """Return what goes with the next frame; None: nothing. `ours` are the sessions that this
        unit owns; for those in `busy` a turn is being told, and with it what they hold on the
        device."""
        if self._under_way is not None:
            return self._under_way
        self._take_words(ours, busy)
        new = _taken(self._new, PART)
        gone = _taken(self._gone, PART - len(new))
        self._asked_to_leave = _taken(self._left, PART - len(new) - len(gone))
        self._is_refilling = self._is_refilling and bool(self._new)
        if not (new or gone or self._asked_to_leave):
            return None
        extents = tuple(self._extent(copy) for copy in new)
        left = tuple(self._asked_to_leave)
        self._under_way = Publish(self._unit, extents, tuple(gone), seen=seen, left=left)
        return self._under_way

    def leaving(self) -> Iterator[tuple[Drop, ...]]:
        """Yield, a message at a time, the drops that ask for all that goes with this life. Copies
        on a medium that units share stay."""
        copies = iter([copy for copy in self._copies if copy[1] is not TierCode.REMOTE])
        while part := tuple(islice(copies, PART)):
            yield tuple(Drop(name, self._unit, tier) for name, tier in part)

    def answered(self, outcome: Outcome) -> None:
        """Take the directory's answer to what went last. What it has not taken goes again."""
        self._is_refused = not isinstance(outcome, Published)
        if not isinstance(outcome, Published):
            return
        self._under_way = None
        self.lost_copies += len(outcome.lost)
        asked, self._asked_to_leave = self._asked_to_leave, {}
        for copy in outcome.forked:
            if copy not in asked:
                continue
            key, tokens = asked[copy]
            holds = self._holds.get(key)
            part = PublishedPart(copy[0], tokens)
            if holds is None or _reach(holds) < tokens:
                self._gone[copy] = None  # it went meanwhile
                continue
            self._take(key, part, MAIN_KINDS)
            self._new.pop(copy, None)
            holds.trail.append(part)
            if len(holds.trail) > TRAIL_KEPT:
                self._give(key, holds.trail.pop(0), goes_on=True)

    # -- words ---------------------------------------------------------------------------------

    def _take_words(self, ours: Collection[SessionId], busy: Collection[SessionId]) -> None:
        """Act on what the inventory has said, as much as a message may hold."""
        page = self._inventory.words(self._read, most=PART)
        if page.floor > self._read > 0:
            page = self._begin_anew()
        for word in page.words:
            key = word.session, word.tier
            self._words.pop(key, None)
            self._words[key] = word
            self._read = word.number
        device = word_of(TierCode.DEVICE)
        before, self._nameless = self._nameless, {}
        for key, word in before.items():
            self._words.setdefault(key, word)
        for key in list(self._words):
            if key[1] == device and key[0] in busy:
                continue
            word = self._words.pop(key)
            if not self._act_on(key, word, ours) and before.get(key) is not word:
                self._nameless[key] = word

    def _begin_anew(self) -> WordsAbove:
        """Return all words of the inventory, since some that tell of losses were missed: what is
        not said again counts as gone."""
        self._words.clear()
        for session, tier in self._holds:
            self._words[session, tier] = Lost(0, session, tier)
        return self._inventory.words(0, most=ALL_WORDS)

    def _act_on(self, key: _Key, word: Word, ours: Collection[SessionId]) -> bool:
        """Act on a word; False: the digest of what it tells of is not known yet."""
        holds = self._holds.get(key)
        if isinstance(word, Lost):
            if holds is not None:
                self._shrink(key, holds, 0)
            return True
        if holds is None:
            holds = self._holds[key] = _Holds()
        # Who does not own a session may hold some of its state, not all, beside its owner.
        kinds = word.kinds if key[0] in ours else as_replica(word.kinds, _tier_of(key[1]))
        said = self._part_of(word) if kinds else None
        former, holds.said = holds.said, said
        if said is not None:
            self._take(key, said, kinds)
        if former is not None:
            self._give(key, former, goes_on=self._goes_on(key, former, word.tokens))
            if word.tokens < former.tokens:
                self._shrink(key, holds, word.tokens)
        return said is not None or not kinds

    def _part_of(self, word: Held) -> PublishedPart | None:
        session = SessionId(word.session)
        self.belongs(session, tenant=bytes.fromhex(word.tenant))
        digest = PrefixHash(bytes.fromhex(word.prefix_hash))
        known = digest or self._digest_at(session, word.tokens)
        return PublishedPart(self.name(known, session), word.tokens) if known else None

    def _shrink(self, key: _Key, holds: _Holds, tokens: int) -> None:
        """Give up the parts of the session that are longer than `tokens`."""
        if holds.said is not None and holds.said.tokens > tokens:
            self._give(key, holds.said, goes_on=False)
            holds.said = None
        if holds.claim is not None and holds.claim.tokens > tokens:
            self._give(key, holds.claim, goes_on=False)
            holds.claim = None
        for part in [part for part in holds.trail if part.tokens > tokens]:
            holds.trail.remove(part)
            self._give(key, part, goes_on=False)
        if not tokens:
            del self._holds[key]
            session = SessionId(key[0])
            if not any((session, word_of(tier)) in self._holds for tier in TierCode):
                self._groups.pop(session, None)
                self._tenants.pop(session, None)

    def _goes_on(self, key: _Key, part: PublishedPart, tokens: int) -> bool:
        """Return whether a session's [0, `tokens`) begins with `part`, as far as is known here."""
        if part.tokens > tokens:
            return False
        session = SessionId(key[0])
        digest = self._digest_at(session, part.tokens)
        return digest is None or self.name(digest, session) == part.name

    # -- copies --------------------------------------------------------------------------------

    def _take(self, key: _Key, part: PublishedPart, kinds: Kinds) -> None:
        """Count one session more as holding the part; a part that is new is told."""
        copy = part.name, _tier_of(key[1])
        known = self._copies.get(copy)
        group = self._groups.get(SessionId(key[0]), "")
        if known is None:
            known = self._copies[copy] = _Known(part.tokens, kinds, group)
            self._left.pop(copy, None)
            self._gone.pop(copy, None)
            self._new[copy] = None
        elif kinds & ~known.kinds or (group and not known.group):
            known.kinds |= kinds
            known.group = known.group or group
            self._new[copy] = None
        known.holders += 1

    def _give(self, key: _Key, part: PublishedPart, *, goes_on: bool) -> None:
        """Count one session less as holding the part; the last one's loss is told. `goes_on`: a
        longer part begins with it, so the directory is asked whether it still needs it."""
        copy = part.name, _tier_of(key[1])
        known = self._copies[copy]
        known.holders -= 1
        if known.holders:
            return
        del self._copies[copy]
        if not any((part.name, tier) in self._copies for tier in TierCode):
            self._duties.pop(part.name, None)
        self._new.pop(copy, None)
        if goes_on:
            self._left[copy] = key, part.tokens
        else:
            self._gone[copy] = None

    def _extent(self, copy: _Copy) -> HeldExtent:
        name, tier = copy
        known = self._copies[copy]
        duty = self._duties.get(name)
        return HeldExtent(name, known.tokens, tier, known.kinds, known.group, duty)


def _reach(holds: _Holds) -> int:
    """Return how many of the session's first tokens are known to be there."""
    parts = (holds.said, holds.claim)
    return max((part.tokens for part in parts if part is not None), default=0)


V = TypeVar("V")


def _taken(waiting: dict[_Copy, V], most: int) -> dict[_Copy, V]:
    """Remove the first `most` entries of what waits and return them."""
    taken = dict(islice(waiting.items(), most))
    for copy in taken:
        del waiting[copy]
    return taken


def word_of(tier: TierCode) -> str:
    """Return the inventory's word for a tier."""
    return tier.name.lower()


def _tier_of(word: str) -> TierCode:
    return TierCode[word.upper()]
