"""Relief: what a node does when the cache is short of room: copies first, then lets go. Pure.

    watermark crossed ── press: the longest idle sessions are copied to the store at once
                      ── relieve: the cache evicts, and names point state to copy (Spill)
    Spill ── Copy, some bytes a tick ── all Kept ── spilled: cheap to bring back, goes next
                                     `─ a NotKept ── spill_failed: the next run evicts without

The bytes are off the device when a tick's copies are performed: the locks go with the next tick and
wait for no medium. A spill that is not answered by its deadline has failed; what comes later is an
echo.

Blocks go only after the sessions that were pressed are stored, or after `PRESS_WAIT_S`: a turn
that needs slots meanwhile evicts on demand and waits for nobody. Owns the open spills' copies; the
cache owns the slots and holds them until they are reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.pressure import Checkpoint, Spill
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.node.retention.idle_spills import COPY_DEADLINE_S, Spills
from ownerserve.node.retention.record_value import Worth
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.node.vocabulary.events import Copy, Drop, Effect, Errand
from ownerserve.node.vocabulary.records import Cell, RecordNames
from ownerserve.node.vocabulary.settings import NodeSettings

TIER = "store"
"""The cache's name for what lies below: one place, whatever tiers it has."""
PRESSED_SESSIONS = 8
PRESS_WAIT_S = 0.5


class Ticket(msgspec.Struct, eq=False):
    """An open spill: copies that were not asked for yet, and those that nobody has answered."""

    copies: Iterator[Copy]
    waiting: dict[Errand, Copy]
    until_s: float
    is_asked: bool = False
    is_bad: bool = False


class Relief:
    """The pressure engine's hands."""

    def __init__(
        self,
        cache: HeteroCache,
        names: RecordNames,
        chains: Chains,
        *,
        spills: Spills,
        worth: Worth,
        settings: NodeSettings,
    ) -> None:
        pressure = cache.pressure
        if settings.below:
            pressure.watermarks = msgspec.structs.replace(pressure.watermarks, tier=TIER)
        self._cache = cache
        self._names = names
        self._chains = chains
        self._spills = spills
        self._worth = worth
        self._settings = settings
        self._tickets: dict[int, Ticket] = {}
        self._queue: deque[int] = deque()
        self._by_errand: dict[Errand, int] = {}
        self._copied: list[int] = []
        """Tickets all of whose bytes were read by the effects of the last tick."""
        self._pressed: set[SessionId] = set()
        self._pressed_until_s = 0.0

    def tick(self, now: float, next_errand: Callable[[], Errand]) -> list[Effect]:
        """Relieve when it is due, and copy some bytes of what is being spilled."""
        for number in self._copied:
            if number in self._tickets:
                self._cache.pressure.copied(number)
        self._copied.clear()
        effects: list[Effect] = self._give_up(now)
        if self._cache.pressure.is_due and not self._waits(now):
            for directive in self._cache.pressure.relieve(now):
                match directive:
                    case Spill():
                        copies = self._copies(directive, next_errand)
                        until_s = now + COPY_DEADLINE_S
                        self._tickets[directive.ticket] = Ticket(copies, {}, until_s)
                        self._queue.append(directive.ticket)
                    case Checkpoint():
                        effects.append(directive)
        left = self._settings.copy_bytes_a_tick
        while self._queue and left > 0 and len(self._by_errand) < self._settings.copies_in_flight:
            number = self._queue[0]
            ticket = self._tickets[number]
            copy = next(ticket.copies, None)
            if copy is None:
                self._queue.popleft()
                ticket.is_asked = True
                self._copied.append(number)
                self._report(number)
                continue
            left -= self._names.slot_bytes(copy.component)
            ticket.waiting[copy.errand] = copy
            self._by_errand[copy.errand] = number
            effects.append(copy)
        return effects

    def landed(self, errand: Errand, *, is_kept: bool) -> Copy | None:
        """A copy is in the store, or is not; the copy. None for one that is not ours."""
        number = self._by_errand.pop(errand, None)
        if number is None:
            return None
        ticket = self._tickets[number]
        copy = ticket.waiting.pop(errand)
        ticket.is_bad = ticket.is_bad or not is_kept
        self._report(number)
        return copy

    def next_due(self) -> float | None:
        """When `tick` has something to do; 0: now."""
        if self._queue and len(self._by_errand) < self._settings.copies_in_flight:
            return 0.0
        if self._copied:
            return 0.0
        deadline = next((ticket.until_s for ticket in self._tickets.values()), None)
        if self._cache.pressure.is_due:
            due = self._pressed_until_s if self._pressed else 0.0
            return due if deadline is None else min(due, deadline)
        return deadline

    @property
    def is_busy(self) -> bool:
        """Whether copies are being made or waited for."""
        return bool(self._tickets)

    def check(self) -> None:
        """Raise InvariantViolated unless the cache holds just what is being copied."""
        if set(self._cache.pressure.open_spills) != set(self._tickets):
            raise InvariantViolated("invariant 1: a spill is open that nobody copies, or the other")

    # -- parts ---------------------------------------------------------------------------------

    def _give_up(self, now: float) -> list[Effect]:
        """Spills whose medium does not answer have failed."""
        effects: list[Effect] = []
        for number in [n for n, ticket in self._tickets.items() if ticket.until_s <= now]:
            ticket = self._tickets.pop(number)
            for errand in ticket.waiting:
                del self._by_errand[errand]
                effects.append(Drop(errand))
            if number in self._queue:
                self._queue.remove(number)
            self._cache.pressure.spill_failed(number)
        return effects

    def _waits(self, now: float) -> bool:
        """Whether sessions are being copied whose blocks would go; presses them when none are."""
        if not self._cache.pressure.are_blocks_short:
            return False
        if not self._pressed:
            self._pressed = self._spills.press(PRESSED_SESSIONS)
            self._pressed_until_s = now + PRESS_WAIT_S
            return bool(self._pressed)
        if now < self._pressed_until_s and self._spills.is_pending(self._pressed):
            return True
        self._pressed.clear()
        return False

    def _report(self, number: int) -> None:
        """Tell the cache, once nothing of the spill is under way any more."""
        ticket = self._tickets[number]
        if ticket.waiting or not ticket.is_asked:
            return
        del self._tickets[number]
        if ticket.is_bad:
            self._cache.pressure.spill_failed(number)
        else:
            self._cache.pressure.spilled(number)

    def _copies(self, spill: Spill, next_errand: Callable[[], Errand]) -> Iterator[Copy]:
        """Lazily: the slots are held, so each can be read as late as there is budget for it."""
        for point in spill.points:
            digests = self._chains.peek(point.prefix, point.sessions)
            depth = len(digests)
            session = self._worth.session(depth, (depth,))
            for name, slot in point.slots.items():
                cost_ms = self._worth.cost_ms(session, Cell(depth, depth), name)
                meta = self._names.point_meta(name, depth, digests)
                yield Copy(next_errand(), meta, name, (slot,), cost_ms)
