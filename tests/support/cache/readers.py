"""Readers of what a cache lends: they know what every slot that they may read must hold.

A reader of a prefix knows the bytes from the start. One that follows a turn reads its blocks as
they are written, so it notes them after each step while the turn runs; an unfinished one may grow.
What was noted stays as it is, and out of the free slots, for as long as the ticket stands.
"""

from __future__ import annotations

from ownerserve.cache.hetero import parts_of
from ownerserve.kv.ids import TurnId
from tests.support.cache.cache_driver import BLOCK_BYTES, B, Driver, Live

Slot = tuple[str, int]


class Reader:
    """What one ticket covers."""

    def __init__(self, live: Live | None = None, tokens: bytes = b"") -> None:
        self.live = live  # the turn that it follows, if any
        self.turn = live
        self.tokens = tokens  # what it was lent, if it follows none
        self.seen = set() if live is None else set(live.kept)
        self.noted: dict[Slot, bytes] = {}


class Readers:
    """All readers of one driver's cache, by ticket."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.lent: dict[int, Reader] = {}

    def lend(self, tokens: bytes, *, idle_s: float) -> int:
        driver = self.driver
        resident = driver.cache.residents.prefix(tokens)
        ticket = driver.cache.lends.lend((tokens,), driver.now, idle_s=idle_s)
        reader = self.lent[ticket] = Reader(tokens=tokens[: resident.blocks * BLOCK_BYTES])
        for number, slot in enumerate(resident.range_slots(0, resident.blocks)):
            for name in driver.layout.range_names:
                reader.noted[name, slot] = tokens[: (number + 1) * BLOCK_BYTES]
        self._note_point(reader, tokens, max(driver.restorable(tokens), default=0))
        driver.check()
        return ticket

    def lend_turn(self, name: str, *, idle_s: float) -> int:
        driver, turn_id = self.driver, TurnId(name)
        ticket = driver.cache.lends.lend((), driver.now, idle_s=idle_s)
        driver.cache.lends.follow(ticket, turn_id)
        self.lent[ticket] = Reader(driver.live[turn_id])
        self.look()
        driver.check()
        return ticket

    def read(self, ticket: int) -> bool:
        """The slots are read, and then the ticket is asked for."""
        driver = self.driver
        seen = {slot: driver.memory.get(slot) for slot in self.lent[ticket].noted}
        stands = driver.cache.lends.read(ticket, driver.now)
        if stands:
            assert seen == self.lent[ticket].noted, "signed wrong bytes"
        driver.check()
        return stands

    def end(self, ticket: int) -> None:
        self.driver.cache.lends.end(ticket)
        del self.lent[ticket]
        self.driver.check()

    def look(self) -> None:
        """Compare what each standing ticket covers with what it was, and note what is new."""
        driver, parts = self.driver, parts_of(self.driver.cache)
        standing = {one.number for one in parts.lends if one.until_s > driver.now}
        pools = (parts.pools.blocks, *parts.pools.points)
        free = {pool.name: set(pool.free_slots()) for pool in pools}
        for name in driver.layout.range_names:
            free[name] = free[parts.pools.blocks.name]
        for ticket, reader in self.lent.items():
            if ticket not in standing:
                continue
            for (name, slot), noted in reader.noted.items():
                assert slot not in free[name], f"{name} {slot} is lent and free"
                now = driver.memory[name, slot]
                missing = -len(noted) % BLOCK_BYTES  # of a block that its turn still fills
                grows = now.startswith(noted) and len(now) <= len(noted) + missing
                assert grows, f"{name} {slot} is lent and was written"
                reader.noted[name, slot] = now
            self._note_turn(reader)
            self._look_up(ticket, reader)

    def _look_up(self, ticket: int, reader: Reader) -> None:
        """Where the ticket says that its blocks and points lie is just what its reader reads."""
        driver, lends, turn = self.driver, self.driver.cache.lends, reader.turn
        tokens = reader.tokens
        if turn is not None:  # in a replay it has range state of more than it has computed
            tokens = turn.tokens[: max(turn.position, turn.write_floor) * 4]
        whole = len(tokens) // BLOCK_BYTES
        assert lends.stands(ticket)
        for first, end in ((0, whole), (whole // 2, whole)):
            slots = lends.places.blocks_of(ticket, first, end)
            assert len(slots) == end - first, "a block that is lent has no place"
            for number, slot in enumerate(slots, first):
                for name in driver.layout.range_names:
                    prefix = tokens[: (number + 1) * BLOCK_BYTES]
                    assert driver.memory[name, slot] == prefix, "the place of another block"
        for depth, point in lends.places.points_of(ticket).items():
            for name, slot in point.items():
                assert driver.memory[name, slot] == tokens[: depth * BLOCK_BYTES]

    def _note_turn(self, reader: Reader) -> None:
        driver = self.driver
        names = [name for name, live in driver.live.items() if live is reader.live]
        if reader.live is None or not names:
            reader.live = None  # it has ended
            return
        live, table = reader.live, driver.cache.table(names[0])
        for name in driver.layout.range_names:
            for slot in table.range[name][: -(-live.position // B)]:
                reader.noted[name, slot] = driver.memory[name, slot]
        for position in live.kept - reader.seen:
            reader.seen.add(position)
            self._note_point(reader, live.tokens, position)

    def _note_point(self, reader: Reader, tokens: bytes, position: int) -> None:
        slots = self.driver.cache.residents.prefix(tokens).point_slots(position // B)
        for name, slot in (slots or {}).items():
            reader.noted[name, slot] = tokens[: position * 4]
