"""Random operation sequences over one Driver, chosen by whoever passes `pick`.

`pick(k)` gives an integer from 0 to k - 1: a seeded generator's, or Hypothesis's. Few symbols and
short prompts, so that prefixes collide, branch and are computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Begun, CacheRefusal, CacheRefused, Replay, SlotsReserved
from ownerserve.cache.policies import EVICTION_POLICIES
from ownerserve.cache.pressure import Spill, Watermarks
from ownerserve.kv.ids import SessionId, TurnId
from tests.support.cache.cache_driver import DENSE, HYBRID, B, Driver, blocks_of
from tests.support.cache.readers import Readers

Pick = Callable[[int], int]
SESSIONS = ("a", "b", "c", "d")


class Play:
    """A driver, and the operations that may happen to it."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        names = sorted(name for name in EVICTION_POLICIES if name != "pinned-slot")
        self.driver = Driver(
            (HYBRID, HYBRID, DENSE)[pick(3)],
            blocks=8 + pick(16),
            points=2 + pick(8),
            states=1 + pick(4),
            policy=EVICTION_POLICIES[names[pick(len(names))]](),
            least_points=(None, 1, 2)[pick(3)],
        )
        self.readers = Readers(self.driver)
        self.turns = 0
        self.spills: list[Spill] = []
        self.said: list[bytes] = [b""]

    @property
    def cache(self) -> HeteroCache:
        return self.driver.cache

    WEIGHTS: ClassVar[dict[str, int]] = {
        "turn": 6,
        "begin": 4,
        "append": 4,
        "prefill": 4,
        "decode": 4,
        "finish": 3,
        "abort": 1,
        "fork": 1,
        "install": 1,
        "retry": 1,
        "replay": 2,
        "match": 1,
        "evict": 2,
        "release": 1,
        "wait": 1,
        "arrive": 1,
        "land": 1,
        "give_up": 1,
        "write_late": 2,
        "relieve": 1,
        "end_spill": 1,
        "divide": 3,
        "lend": 2,
        "lend_turn": 3,
        "read": 1,
        "end_lend": 1,
    }
    OPERATIONS: ClassVar[list[str]] = [name for name, n in WEIGHTS.items() for _ in range(n)]

    def step(self) -> None:
        """One operation."""
        self.do(self.OPERATIONS[self.pick(len(self.OPERATIONS))])

    def do(self, name: str) -> None:
        """The operation of this name, after which every reader looks at what it was lent."""
        getattr(self, name)()
        self.readers.look()

    def wind_up(self) -> None:
        """End everything: then all that is left is evictable, and evicting it empties the pools."""
        for name in list(self.driver.live):
            (self.driver.finish if self.pick(2) else self.driver.abort)(name)
        for ticket in list(self.driver.tickets):
            self.driver.give_up(ticket)
        for ticket in list(self.driver.held):
            self.driver.quiet(ticket)
        while self.spills:
            self.end_spill()
        self.readers.look()
        while self.readers.lent and self.pick(4):
            self.end_lend()
        self.driver.now += 1e6
        self.cache.lends.expire(self.driver.now)
        assert not len(self.cache.lends)
        self.driver.check()
        self.driver.evict(10**6)
        rooms = self.cache.occupancy
        assert rooms.blocks.used == 0 and rooms.states.used == 0
        assert all(pool.used == 0 for pool in rooms.points)

    # -- turns ---------------------------------------------------------------------------------

    def _running(self) -> str | None:
        names = sorted(self.driver.live)
        return names[self.pick(len(names))] if names else None

    def _name(self) -> str:
        self.turns += 1
        return f"t{self.turns:03}"

    def _prompt(self) -> bytes:
        """Often something said before, cut anywhere, with a little added."""
        said = self.said[self.pick(len(self.said))]
        kept = said[: self.pick(len(said) // 4 + 1) * 4] if self.pick(2) else said
        fresh = blocks_of(*(self.pick(3) for _ in range(self.pick(4))), tail=self.pick(B))
        return (kept + fresh) or blocks_of(0)

    def begin(self) -> None:
        name, tokens = self._name(), self._prompt()
        session = (*SESSIONS, "")[self.pick(5)]
        restored = self.driver.check_match(tokens).points
        begun = self.driver.begin(
            name,
            tokens,
            session=session,
            priority=self.pick(3),
            ttl_s=(0.0, 5.0, 300.0)[self.pick(3)],
        )
        if isinstance(begun, Begun):
            complete = [point.position for point in restored if not point.lacks]
            if self.driver.layout.point_names:
                assert begun.restored == max(complete, default=0)
        else:
            assert begun.reason in (CacheRefusal.NO_STATE_BLOCK, CacheRefusal.TOO_LONG)

    def turn(self) -> None:
        """A whole turn of a session that goes on where it was, if the room suffices."""
        session = SESSIONS[self.pick(len(SESSIONS))]
        done = self.driver.finished.get(SessionId(session))
        tokens = (done[1] if done is not None else b"") + blocks_of(self.pick(3), tail=self.pick(B))
        name = self._name()
        if isinstance(self.driver.begin(name, tokens, session=session), CacheRefused):
            self.driver.finished.pop(SessionId(session), None)
            return
        if not self.driver.prefill(name) or not self.driver.decode(name, blocks_of(self.pick(3))):
            self.driver.abort(name)
            return
        self.driver.finish(name)
        self.driver.now += 1.0

    def append(self) -> None:
        known = sorted(self.driver.finished)
        if not known:
            return
        session = known[self.pick(len(known))]
        suffix = blocks_of(self.pick(3), tail=self.pick(B))[4 * self.pick(3) :]
        begun = self.driver.append(self._name(), session, suffix)
        if isinstance(begun, CacheRefused) and begun.reason is CacheRefusal.POINT_GONE:
            record = self.cache.sessions.get(SessionId(session))
            assert record is not None and record.depth < record.sealed

    def install(self) -> None:
        """A session was counted elsewhere, and stands somewhere in what was said, or beyond."""
        session, tokens = SESSIONS[self.pick(len(SESSIONS))], self._prompt()
        whole = len(tokens) // (4 * B) * 4 * B
        cut = whole if self.pick(3) else self.pick(whole // (4 * B) + 1) * 4 * B
        open_tokens = tokens[cut : cut + 4 * self.pick(B)]
        self.driver.install(session, 1 + self.pick(9), tokens[:cut], open_tokens)

    def prefill(self) -> None:
        name = self._running()
        if name is not None:
            live = self.driver.live[TurnId(name)]
            whole = self.driver.prefill(name, upto=live.position + 1 + self.pick(4 * B))
            if not whole and self.pick(2):
                self.driver.abort(name)

    def decode(self) -> None:
        name = self._running()
        if name is None:
            return
        live = self.driver.live[TurnId(name)]
        if live.position < live.prompt_end:
            return
        output = blocks_of(self.pick(3), self.pick(3))[: 4 * (1 + self.pick(2 * B))]
        if not self.driver.decode(name, output):
            self.driver.abort(name)

    def finish(self) -> None:
        name = self._running()
        if name is not None:
            live = self.driver.live[TurnId(name)]
            self.said = [*self.said[-20:], live.tokens[: live.position * 4]]
            self.driver.finish(name)

    def abort(self) -> None:
        name = self._running()
        if name is not None:
            self.driver.abort(name)

    def fork(self) -> None:
        name = self._running()
        if name is not None:
            self.driver.fork(name, self._name())

    def retry(self) -> None:
        """A chunked prefill starts over: what was sealed under lock is matched again."""
        name = self._running()
        if name is None:
            return
        live = self.driver.live[TurnId(name)]
        tokens, position = live.tokens, live.position
        if position < live.prompt_end:
            self.driver.abort(name)
            cap = min(position // B * B, (len(tokens) // 4 - 1) // B * B)
            assert self.driver.check_match(tokens).range_tokens >= cap
            self.driver.begin(name, tokens)

    def replay(self) -> None:
        tokens = self._prompt()
        found = self.driver.check_match(tokens)
        if found.points:
            floor = found.points[0].position
            start = self.pick(floor // B + 1) * B
            session = (*SESSIONS, "")[self.pick(5)]
            self.driver.begin(self._name(), tokens, session=session, resume=Replay(start, floor))

    # -- everything else -----------------------------------------------------------------------

    def match(self) -> None:
        self.driver.check_match(self._prompt())

    def evict(self) -> None:
        self.driver.evict(1 + self.pick(6))

    def divide(self) -> None:
        self.driver.divide()

    def release(self) -> None:
        session = SessionId(SESSIONS[self.pick(len(SESSIONS))])
        if self.cache.sessions.get(session) is not None:
            self.cache.sessions.release(session)
            self.driver.finished.pop(session, None)
            self.driver.check()

    def wait(self) -> None:
        self.driver.now += (0.5, 7.0, 400.0, 2000.0)[self.pick(4)]
        self.cache.sessions.expire(self.driver.now)
        self.driver.check()
        for session in list(self.driver.finished):
            if self.cache.sessions.get(session) is None:
                del self.driver.finished[session]

    def arrive(self) -> None:
        tokens = self._prompt()
        whole = len(tokens) // (4 * B)
        if whole:
            points = (whole * B,) if self.driver.layout.point_names and self.pick(2) else ()
            got = self.driver.arrive(tokens[: whole * B * 4], points)
            assert isinstance(got, SlotsReserved) or got
            self.said.append(tokens[: whole * B * 4])

    def land(self) -> None:
        for ticket in sorted(self.driver.tickets)[:1]:
            self.driver.land(ticket, (b"digest", b"digest", b"wrong")[self.pick(3)])

    def give_up(self) -> None:
        for ticket in sorted(self.driver.tickets)[:1]:
            self.driver.give_up(ticket)

    def write_late(self) -> None:
        """What was given up is written all the same, and now and then it is the last write."""
        if self.driver.held:
            ticket = sorted(self.driver.held)[self.pick(len(self.driver.held))]
            self.driver.write_late(ticket)
            if self.pick(2):
                self.driver.quiet(ticket)

    def relieve(self) -> None:
        tier = ("", "host")[self.pick(2)]
        self.cache.pressure.watermarks = Watermarks(low=0.3, high=0.5, idle_s=1.0, tier=tier)
        for directive in self.cache.pressure.relieve(self.driver.now):
            if isinstance(directive, Spill):
                self.spills.append(directive)
        self.driver.check()

    def end_spill(self) -> None:
        """The copy is done just now: until here the slots must have held what was asked for."""
        if not self.spills:
            return
        spill = self.spills.pop(0)
        for point in (
            spill.points if self.cache.pressure.reads(spill.ticket, self.driver.now) else ()
        ):
            for name, slot in point.slots.items():
                assert self.driver.memory[name, slot] == point.prefix, "spilled wrong bytes"
        ends = (self.cache.pressure.spilled, self.cache.pressure.spill_failed)
        ends[self.pick(2)](spill.ticket)
        self.driver.check()

    # -- readers -------------------------------------------------------------------------------

    def lend(self) -> None:
        self.readers.lend(self._prompt(), idle_s=(0.5, 20.0, 1e4)[self.pick(3)])

    def lend_turn(self) -> None:
        name = self._running()
        if name is not None:
            self.readers.lend_turn(name, idle_s=(0.5, 20.0, 1e4)[self.pick(3)])

    def read(self) -> None:
        if self.readers.lent:
            self.readers.read(self._lent())

    def end_lend(self) -> None:
        if self.readers.lent:
            self.readers.end(self._lent())

    def _lent(self) -> int:
        tickets = sorted(self.readers.lent)
        return tickets[self.pick(len(tickets))]
