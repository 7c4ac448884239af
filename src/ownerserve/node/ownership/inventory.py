"""The inventory says what a node holds of each session, tier by tier, on the device and looked for
below it. Pure.

OnDevice      says what the cache could go on from; the tree says which frontiers slid
Residency     says what could come back from below, after it was looked for
Inventory     the one owner of what was said, in numbered words; gateways and `publishing` for
              the directory ask it for the words above a number
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Reversible
from heapq import merge
from itertools import islice
from operator import attrgetter
from threading import RLock
from typing import TypeAlias

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Layout
from ownerserve.cache.sessions import restorable_tokens
from ownerserve.directory.rules import Kinds, StateKind, kind_of
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.specs import Coverage, Role
from ownerserve.kv.wire.inventory import Has, Lost, Page
from ownerserve.node.vocabulary.events import (
    Completion,
    Effect,
    Forget,
    Locate,
    Located,
    OperationId,
    RecordsLost,
    Remember,
    RestoreOutcome,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import (
    NOTHING,
    TIPS_KEPT,
    RecordNames,
    Tip,
    TipRecords,
    is_sound,
    records_of,
)

HAS_KEPT = 16_384
"""Extents that are told; beyond, the one said longest ago is told as gone."""
GONE_KEPT = 4096
PAGE_WORDS = 1000

_Key = tuple[str, str]
_PLACES = {tier: tier.value for tier in Tier}
_number = attrgetter("number")


class Held(msgspec.Struct, frozen=True, gc=False):
    """A `Held` is a `Has` as the node keeps it: what gateways are told, and beside it what the
    directory is. `kinds`: bits of the kinds of state that are there (directory.rules). `tenant`:
    the salt of whom it belongs to, in hex; empty: all may share it."""

    number: int
    session: str
    tier: str
    tokens: int
    prefix_hash: str = ""
    kinds: int = 0
    tenant: str = ""

    def said(self) -> Has:
        """Return the word as gateways are told it."""
        return Has(self.number, self.session, self.tier, self.tokens, self.prefix_hash)


Word: TypeAlias = Held | Lost


class WordsAbove(msgspec.Struct, frozen=True):
    """These are the words above a number, in order; of those that something is gone, the ones up to
    `floor` are forgotten. `last` is the highest number given so far."""

    floor: int
    last: int
    words: tuple[Word, ...]


def _above(words: Reversible[Word], after: int) -> list[Word]:
    """Return the words with a higher number than `after`; `words` stand in the order of their
    numbers."""
    newest: list[Word] = []
    for word in reversed(words):
        if word.number <= after:
            break
        newest.append(word)
    newest.reverse()
    return newest


class Inventory:
    """An `Inventory` keeps the words that say what this node holds: for each session and tier the
    last one said.

    A reader that was away catches up with the present, not with history. Any thread may read.
    """

    def __init__(self, *, has_kept: int = HAS_KEPT, gone_kept: int = GONE_KEPT) -> None:
        self.last = 0
        """The number of the newest word."""
        self._lock = RLock()
        self._floor = 0
        self._has_kept, self._gone_kept = has_kept, gone_kept
        self._has: OrderedDict[_Key, Held] = OrderedDict()
        self._gone: OrderedDict[_Key, Lost] = OrderedDict()
        self._watchers: list[Callable[[Word], object]] = []

    def __len__(self) -> int:
        """Return how many extents are held."""
        return len(self._has)

    def watch(self, watcher: Callable[[Word], object]) -> None:
        """Call `watcher` with each word from now on, as it is said and on the thread that says it:
        it must neither wait nor raise."""
        with self._lock:
            self._watchers.append(watcher)

    def tokens(self, session_id: SessionId, tier: Tier) -> int:
        """Return how many of the session's first tokens are told to be in `tier`; 0: nothing."""
        word = self._has.get((session_id, _PLACES[tier]))
        return 0 if word is None else word.tokens

    def holds(self, sessions: Iterable[SessionId], tier: Tier, tokens: int) -> bool:
        """Tell whether `tier` is told to have so many of the first tokens of one of the
        sessions."""
        has, place = self._has, _PLACES[tier]
        for session_id in sessions:
            word = has.get((session_id, place))
            if word is not None and word.tokens >= tokens:
                return True
        return False

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
        """Say that `tier` holds `kinds` of [0, tokens) of the session, which is `tenant`'s; 0
        tokens: nothing. A word that says nothing new is not said."""
        if tokens <= 0:
            self.gone(session_id, tier)
            return
        key = session_id, _PLACES[tier]
        told = "" if digest is None else digest.hex()
        with self._lock:
            self._say(key, tokens, told, kinds, tenant.hex())

    def _say(self, key: _Key, tokens: int, digest: str, kinds: int, tenant: str) -> None:
        """Add the word, unless it says what was said; one that only lacks the digest says nothing
        new."""
        known = self._has.get(key)
        if (
            known is not None
            and digest in ("", known.prefix_hash)
            and (tokens, kinds, tenant) == (known.tokens, known.kinds, known.tenant)
        ):
            return
        self.last += 1
        self._has[key] = word = Held(self.last, *key, tokens, digest, kinds, tenant)
        self._has.move_to_end(key)
        self._gone.pop(key, None)
        self._tell(word)
        if len(self._has) > self._has_kept:
            name, place = next(iter(self._has))
            self.gone(SessionId(name), Tier(place))

    def _tell(self, word: Word) -> None:
        for watcher in self._watchers:
            watcher(word)

    def gone(self, session_id: SessionId, tier: Tier) -> None:
        """Say that nothing of the session is in `tier`; not news when nothing was."""
        key = session_id, _PLACES[tier]
        with self._lock:
            if self._has.pop(key, None) is None:
                return
            self.last += 1
            self._gone[key] = word = Lost(self.last, *key)
            self._tell(word)
            if len(self._gone) > self._gone_kept:
                _, oldest = self._gone.popitem(last=False)
                self._floor = oldest.number

    def forget(self, session_id: SessionId) -> None:
        """Say that nothing of the session is in any tier: it is over, or nobody will ask for it."""
        for tier in Tier:
            self.gone(session_id, tier)

    def words(self, after: int, *, most: int) -> WordsAbove:
        """Return the first `most` words with a number above `after`."""
        with self._lock:
            has, gone = _above(self._has.values(), after), _above(self._gone.values(), after)
            floor, last = self._floor, self.last
        return WordsAbove(floor, last, tuple(islice(merge(has, gone, key=_number), most)))

    def page(self, after: int, *, incarnation: int, words: int = PAGE_WORDS) -> Page:
        """Return the first `words` words with a number above `after`, as gateways are told them."""
        found = self.words(after, most=words)
        told = (word.said() if isinstance(word, Held) else word for word in found.words)
        return Page(incarnation, 0, found.floor, found.last, tuple(told))

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

    def __iter__(self) -> Iterator[Held]:
        """Iterate over what is held, the oldest word first."""
        return iter(self._has.values())


_ROLES = {role.value: role for role in Role}


def kinds_of(layout: Layout, coverage: Coverage) -> Kinds:
    """Return the kinds of state, as the directory has them, of the layout's components with
    `coverage`."""
    kinds = 0
    for component in layout.components:
        if component.coverage is not coverage:
            continue
        if coverage is Coverage.POINT:
            kinds |= StateKind.CHECKPOINT
        else:
            role = _ROLES.get(component.name)
            kinds |= StateKind.DENSE if role is None else kind_of(role)
    return int(kinds)


# ---- below the device


LOOKS_IN_FLIGHT = 8
LOOK_DEADLINE_S = 5.0
TIPS_NAMED = 256
"""Tips whose records' names are kept: those that were looked for last, and will be again as their
records go."""
CALM_S = 0.2
"""After a loss, before a look: records go in rows."""
FOUND_LESS = (RestoreOutcome.MISS, RestoreOutcome.NOTHING_STORED)
"""Outcomes that are news of a session whose state was told to be in the store."""
BELOW = (Tier.HOST, Tier.DISK, Tier.REMOTE)
"""Fastest first."""


class Residency:
    """`Residency` says which sessions could come back from below the device, and up to where.

        copied (spills) ─┐
        found in a file ─┼─> look (Locate) ─> the store answers (Located) ─> inventory: has | gone
        a record is lost ┘        ^ never by listing: it is asked for the records of one tip

    The class owns the tips: for each session the last that was copied, the longest unseen forgotten
    first. What is told is what the store answered; who reads it is told less when a record went,
    and nothing more than was looked for. A look that is never answered changes nothing and is made
    again. `can_replay`: the engine goes on from range state alone. `told`, where there
    is one, hears how many of a session's tokens can be brought, whenever that is known anew.
    """

    def __init__(
        self,
        names: RecordNames,
        inventory: Inventory,
        operations: Operations,
        *,
        can_replay: bool,
    ) -> None:
        self.told: Callable[[SessionId, int], None] | None = None
        self._names = names
        self._inventory = inventory
        self._operations = operations
        self._can_replay = can_replay
        self._range_kinds = kinds_of(names.layout, Coverage.RANGE)
        self._point_kinds = kinds_of(names.layout, Coverage.POINT)
        self._tips: OrderedDict[SessionId, Tip] = OrderedDict()
        self._by_end: dict[PrefixHash, set[SessionId]] = {}
        self._due: OrderedDict[SessionId, float] = OrderedDict()  # in the order of their instants
        self._looking: dict[OperationId, tuple[TipRecords, float]] = {}
        self._named: OrderedDict[SessionId, TipRecords] = OrderedDict()
        self._in_file: dict[SessionId, int] = {}
        self.writes: list[Effect] = []
        """What is to be written down or struck out; `to_file` takes it."""

    def __len__(self) -> int:
        return len(self._tips)

    # -- events --------------------------------------------------------------------------------

    def copied(self, tip: Tip, now: float) -> None:
        """Keep the tip, all of which was offered to the store and answered for, and look for it."""
        self._keep(tip)
        self._look_at(tip.session_id, now)
        if len(self._tips) > TIPS_KEPT:
            self.forget(next(iter(self._tips)))

    def remembered(self, tips: Iterable[Tip], now: float) -> None:
        """Keep the sound ones of the tips that a former life of this worker left; each is looked
        for before it is told."""
        for tip in tips:
            if tip.depth and is_sound(self._names, tip):
                self._in_file[tip.session_id] = tip.depth
                self.copied(tip, now)

    def lost(self, lost: RecordsLost, now: float) -> None:
        """Look again for the sessions whose records are gone from a tier; for every one where more
        went than were noted."""
        for end in lost.ends:
            for session_id in sorted(self._by_end.get(end, ())):  # the same whatever the hashes
                self._look_at(session_id, now + CALM_S)
        for session_id in self._tips if lost.unnoted else ():
            self._look_at(session_id, now + CALM_S)

    def missed(self, session_id: SessionId, now: float) -> None:
        """Look again for the session, of which a restore found less than was told; nothing of it
        counts as on a shared medium until then."""
        self._inventory.gone(session_id, Tier.REMOTE)  # nobody tells what goes from a shared medium
        if session_id in self._tips:
            self._look_at(session_id, now)

    def forget(self, session_id: SessionId) -> None:
        """Forget a session that nobody will ask for, and tell that nothing of it is below the
        device."""
        tip = self._tips.pop(session_id, None)
        if tip is not None:
            self._unindex(session_id, set(tip.ends.values()))
        self._named.pop(session_id, None)
        self._due.pop(session_id, None)
        for tier in BELOW:
            self._inventory.gone(session_id, tier)
        if self.told is not None:
            self.told(session_id, 0)
        self._unfile(session_id)

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        """Take the store's answer to a look, and tell it; no effect follows at once."""
        if isinstance(event, Located) and (looked := self._looking.pop(event.operation_id, None)):
            self._operations.end(event.operation_id)
            records, _ = looked
            session_id = records.tip.session_id
            if self._tips.get(session_id) is not records.tip:
                return ()  # another one was copied meanwhile, and is looked for
            if not event.held:
                self._look_at(session_id, now + LOOK_DEADLINE_S)  # it does not answer now
            elif not self._tell(records, event.held):
                self.forget(session_id)
        return ()

    def records(self, session_id: SessionId) -> TipRecords | None:
        """Return the records of the session as it was last copied, whether or not they still stand;
        None: it was not, or is forgotten."""
        return self._records(session_id) if session_id in self._tips else None

    def restorable(self, session_id: SessionId) -> int | None:
        """Return how many of the session's first tokens can be brought from below the device, by
        what was told; None: nothing was, and it is looked for."""
        tokens = max(self._inventory.tokens(session_id, tier) for tier in BELOW)
        if tokens or session_id not in self._tips:
            return tokens
        looked_for = {records.tip.session_id for records, _ in self._looking.values()}
        return None if session_id in looked_for or session_id in self._due else 0

    def tick(self, now: float) -> list[Effect]:
        """Return the looks that are due, LOOKS_IN_FLIGHT at most, and repeat those without an
        answer."""
        effects: list[Effect] = []
        if self._looking:
            self._repeat(now)
        while self._due and len(self._looking) < LOOKS_IN_FLIGHT:
            session_id, at_s = next(iter(self._due.items()))
            if at_s > now:
                break
            del self._due[session_id]
            records, operation_id = self._records(session_id), self._operations.begin(self)
            deadline_s = now + LOOK_DEADLINE_S
            self._looking[operation_id] = records, deadline_s
            effects.append(Locate(operation_id, records.ids, deadline_s))
        return effects

    def _repeat(self, now: float) -> None:
        """Have the looks without an answer made again."""
        for operation_id, (records, until_s) in list(self._looking.items()):
            if until_s <= now:
                del self._looking[operation_id]
                self._operations.end(operation_id)
                self._look_at(records.tip.session_id, now)

    def to_file(self) -> list[Effect]:
        """Take the effects that write tips down for the next life, or strike them out; each is
        given once."""
        effects, self.writes = self.writes, []
        return effects

    def next_due(self) -> float | None:
        """Return the instant at which `tick` has something to do; None: only an event can bring
        work."""
        if self._due and len(self._looking) < LOOKS_IN_FLIGHT:
            return next(iter(self._due.values()))
        if not self._looking:
            return None
        return min([until_s for _, until_s in self._looking.values()])

    @property
    def is_busy(self) -> bool:
        """`is_busy` tells whether anything is looked for, or is to be."""
        return bool(self._looking or self._due)

    # -- parts ---------------------------------------------------------------------------------

    def _look_at(self, session_id: SessionId, at_s: float) -> None:
        known = self._due.get(session_id)
        if session_id not in self._tips or (known is not None and known <= at_s):
            return
        self._due[session_id] = at_s
        last_s = next(reversed(self._due.values()))
        self._due.move_to_end(session_id, last=at_s >= last_s)

    def _records(self, session_id: SessionId) -> TipRecords:
        """Return the records of the session's tip, whose names are made once while it is looked for
        now and then."""
        tip, records = self._tips[session_id], self._named.pop(session_id, None)
        if records is None or records.tip is not tip:
            records = records_of(self._names, tip)
        self._named[session_id] = records
        if len(self._named) > TIPS_NAMED:
            self._named.popitem(last=False)
        return records

    def _tell(self, records: TipRecords, held: Mapping[Tier, frozenset[bytes]]) -> bool:
        """Say of each tier what can be had from it and the tiers above; return whether any has
        something."""
        most, so_far, tip = 0, frozenset[bytes](), records.tip
        for tier in BELOW:
            there = NOTHING
            if here := held.get(tier):
                so_far = so_far | here if so_far else here
                there = records.depth(so_far, can_replay=self._can_replay)
            tokens = there.depth * self._names.layout.block_tokens
            kinds = self._point_kinds if there.has_point else 0
            self._inventory.has(
                tip.session_id,
                tier,
                tokens,
                digest=there.digest,
                kinds=kinds | self._range_kinds,
                tenant=tip.tenant,
            )
            most = max(most, tokens)
            if tier is Tier.DISK:
                self._file(tip, there.depth)
        if self.told is not None:
            self.told(tip.session_id, most)
        return most > 0

    def _file(self, tip: Tip, depth: int) -> None:
        """Have the tip written down, once, when the drive holds something of it, and struck out
        when it does not."""
        if not depth:
            self._unfile(tip.session_id)
        elif self._in_file.get(tip.session_id) != tip.depth:
            self._in_file[tip.session_id] = tip.depth
            self.writes.append(Remember(tip))

    def _unfile(self, session_id: SessionId) -> None:
        if self._in_file.pop(session_id, None) is not None:
            self.writes.append(Forget(session_id))

    def _keep(self, tip: Tip) -> None:
        former = self._tips.pop(tip.session_id, None)
        ends, former_ends = set(tip.ends.values()), set(former.ends.values() if former else ())
        self._tips[tip.session_id] = tip
        self._unindex(tip.session_id, former_ends - ends)
        for end in ends - former_ends:
            self._by_end.setdefault(end, set()).add(tip.session_id)

    def _unindex(self, session_id: SessionId, ends: Iterable[PrefixHash]) -> None:
        for end in ends:
            sessions = self._by_end[end]
            sessions.discard(session_id)
            if not sessions:
                del self._by_end[end]


# ---- on the device


DigestAt = Callable[[SessionId, int], PrefixHash | None]
"""The digest of a session's first n blocks, where it is known."""


class OnDevice:
    """`OnDevice` says what of each session one cache could go on from, as it comes and goes.

    The cache owns what is resident and says whose was evicted; this class looks at those alone.
    `digest_at` None: nobody hashes here.
    """

    def __init__(
        self, cache: HeteroCache, inventory: Inventory, *, digest_at: DigestAt | None = None
    ) -> None:
        self._cache = cache
        self._inventory = inventory
        self._digest_at = digest_at
        self._kinds = kinds_of(cache.layout, Coverage.RANGE) | kinds_of(
            cache.layout, Coverage.POINT
        )
        cache.residents.watch()

    def ended(self, session_id: SessionId) -> None:
        """Say what the session has on the device, now that a turn of it has ended."""
        tokens = restorable_tokens(self._cache.sessions.get(session_id), self._cache.layout)
        digest = None
        if tokens and self._digest_at is not None:
            digest = self._digest_at(session_id, tokens // self._cache.layout.block_tokens)
        self._inventory.has(session_id, Tier.DEVICE, tokens, digest=digest, kinds=self._kinds)

    @property
    def is_due(self) -> bool:
        """`is_due` tells whether a session lost blocks since the last `tick`."""
        return self._cache.residents.has_lost

    def tick(self) -> None:
        """Say anew what the sessions have that lost blocks since the last call."""
        for session_id in self._cache.residents.take_lost():
            if self._inventory.tokens(session_id, Tier.DEVICE):
                self.ended(session_id)
