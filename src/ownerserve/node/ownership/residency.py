"""Residency: which sessions could come back from below the device, and up to where. Pure.

    copied (spills) ─┐
    found in a file ─┼─> look (Locate) ─> the store answers (Located) ─> inventory: has | gone
    a record is lost ┘        ^ never by listing: it is asked for the records of one tip

Owns the tips: of each session the last that was copied, the longest unseen forgotten first. What
is told is what the store answered; who reads it is told less when a record went, and nothing more
than was looked for. A look that is never answered changes nothing and is made again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.specs import Coverage
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.kinds import kinds_of
from ownerserve.node.vocabulary.events import (
    Effect,
    Errand,
    Forget,
    Locate,
    Located,
    Remember,
    RestoreOutcome,
)
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.node.vocabulary.tips import NOTHING, Tip, ids_of, is_sound, standing

TIPS_KEPT = 4096
LOOKS_IN_FLIGHT = 8
LOOK_DEADLINE_S = 5.0
CALM_S = 0.2
"""After a loss, before a look: records go in rows."""
FOUND_LESS = (RestoreOutcome.MISS, RestoreOutcome.NOTHING_STORED)
"""Outcomes that are news of a session whose state was told to be in the store."""
BELOW = (Tier.HOST, Tier.DISK, Tier.REMOTE)
"""Fastest first."""


class Residency:
    """One node's tips. `can_replay`: the engine goes on from range state alone."""

    def __init__(self, names: RecordNames, inventory: Inventory, *, can_replay: bool) -> None:
        self._names = names
        self._inventory = inventory
        self._can_replay = can_replay
        self._range_kinds = kinds_of(names.layout, Coverage.RANGE)
        self._point_kinds = kinds_of(names.layout, Coverage.POINT)
        self._tips: OrderedDict[SessionId, Tip] = OrderedDict()
        self._by_end: dict[PrefixHash, set[SessionId]] = {}
        self._due: OrderedDict[SessionId, float] = OrderedDict()  # in the order of their instants
        self._looking: dict[Errand, tuple[Tip, float]] = {}
        self._in_file: dict[SessionId, int] = {}
        self._to_file: list[Effect] = []

    def __len__(self) -> int:
        return len(self._tips)

    # -- events --------------------------------------------------------------------------------

    def copied(self, tip: Tip, now: float) -> None:
        """All of a tip was offered to the store, and answered for."""
        self._keep(tip)
        self._look_at(tip.session_id, now)
        if len(self._tips) > TIPS_KEPT:
            self.forget(next(iter(self._tips)))

    def remembered(self, tips: Iterable[Tip], now: float) -> None:
        """Tips that a former life of this worker left: looked for, each, before they are told."""
        for tip in tips:
            if tip.depth and is_sound(self._names, tip):
                self._in_file[tip.session_id] = tip.depth
                self.copied(tip, now)

    def lost(self, ends: Iterable[PrefixHash], now: float) -> None:
        """Records that end there are gone from a tier."""
        for end in ends:
            for session_id in self._by_end.get(end, ()):
                self._look_at(session_id, now + CALM_S)

    def all_lost(self, now: float) -> None:
        """More went than was noted: any record may be gone."""
        for session_id in self._tips:
            self._look_at(session_id, now + CALM_S)

    def missed(self, session_id: SessionId, now: float) -> None:
        """A restore of the session found less than was there."""
        self._inventory.gone(session_id, Tier.REMOTE)  # nobody tells what goes from a shared medium
        if session_id in self._tips:
            self._look_at(session_id, now)

    def forget(self, session_id: SessionId) -> None:
        """Nobody will ask for the session."""
        tip = self._tips.pop(session_id, None)
        if tip is not None:
            self._unindex(tip)
        self._due.pop(session_id, None)
        for tier in BELOW:
            self._inventory.gone(session_id, tier)
        self._unfile(session_id)

    def located(self, event: Located, now: float) -> bool:
        """The store's answer; whether the errand was one of ours."""
        looked = self._looking.pop(event.errand, None)
        if looked is None:
            return False
        tip, _ = looked
        if self._tips.get(tip.session_id) is not tip:
            return True  # another one was copied meanwhile, and is looked for
        if not event.held:
            self._look_at(tip.session_id, now + LOOK_DEADLINE_S)  # it does not answer now
        elif not self._tell(tip, event.held):
            self.forget(tip.session_id)
        return True

    def tick(self, now: float, next_errand: Callable[[], Errand]) -> list[Effect]:
        """What is to be looked for now."""
        effects: list[Effect] = []
        for errand, (tip, until_s) in list(self._looking.items()):
            if until_s <= now:
                del self._looking[errand]
                self._look_at(tip.session_id, now)
        while self._due and len(self._looking) < LOOKS_IN_FLIGHT:
            session_id, at_s = next(iter(self._due.items()))
            if at_s > now:
                break
            del self._due[session_id]
            tip, errand = self._tips[session_id], next_errand()
            deadline_s = now + LOOK_DEADLINE_S
            self._looking[errand] = tip, deadline_s
            effects.append(Locate(errand, ids_of(self._names, tip), deadline_s))
        return effects

    def to_file(self) -> list[Effect]:
        """What is to be written down for the next life, once."""
        effects, self._to_file = self._to_file, []
        return effects

    def next_due(self) -> float | None:
        """When `tick` has something to do; 0: now."""
        if self._due and len(self._looking) < LOOKS_IN_FLIGHT:
            return next(iter(self._due.values()))
        return min((until_s for _, until_s in self._looking.values()), default=None)

    @property
    def is_busy(self) -> bool:
        """Whether anything is looked for, or is to be."""
        return bool(self._looking or self._due)

    # -- parts ---------------------------------------------------------------------------------

    def _look_at(self, session_id: SessionId, at_s: float) -> None:
        known = self._due.get(session_id)
        if session_id not in self._tips or (known is not None and known <= at_s):
            return
        self._due[session_id] = at_s
        last_s = next(reversed(self._due.values()))
        self._due.move_to_end(session_id, last=at_s >= last_s)

    def _tell(self, tip: Tip, held: Mapping[Tier, frozenset[bytes]]) -> bool:
        """Say of each tier what can be had from it and those above; whether any has something."""
        any_there, so_far = False, frozenset[bytes]()
        for tier in BELOW:
            here = held.get(tier, frozenset())
            so_far |= here
            there = NOTHING
            if here:
                there = standing(self._names, tip, so_far, can_replay=self._can_replay)
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
            any_there = any_there or there.depth > 0
            if tier is Tier.DISK:
                self._file(tip, there.depth)
        return any_there

    def _file(self, tip: Tip, depth: int) -> None:
        """Have a tip that a drive holds written down, once; and struck out when it does not."""
        if not depth:
            self._unfile(tip.session_id)
        elif self._in_file.get(tip.session_id) != tip.depth:
            self._in_file[tip.session_id] = tip.depth
            self._to_file.append(Remember(tip))

    def _unfile(self, session_id: SessionId) -> None:
        if self._in_file.pop(session_id, None) is not None:
            self._to_file.append(Forget(session_id))

    def _keep(self, tip: Tip) -> None:
        former = self._tips.pop(tip.session_id, None)
        if former is not None:
            self._unindex(former)
        self._tips[tip.session_id] = tip
        for end in tip.ends.values():
            self._by_end.setdefault(end, set()).add(tip.session_id)

    def _unindex(self, tip: Tip) -> None:
        for end in tip.ends.values():
            sessions = self._by_end[end]
            sessions.discard(tip.session_id)
            if not sessions:
                del self._by_end[end]
