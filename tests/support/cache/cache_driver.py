"""A fake engine and a brute-force oracle around one HeteroCache.

The engine's memory holds, in every slot, the very tokens whose state would be there: a range slot
the whole prefix up to its block's end, a point slot or state block the whole prefix it stands for,
a tail the tokens that wait in it. Nobody clears a tail: what is not its turn's must not be read.
Whatever a turn is given to build on is compared with its own tokens, so a slot that was re-used,
shared or moved wrongly shows as wrong bytes.

The oracle knows each resident prefix as plain bytes, and answers a match by trying them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from ownerserve.cache.effects import (
    CopyBlock,
    CopyState,
    Effect,
    LoadPoint,
    MoveBorder,
    ResetState,
    SavePoint,
)
from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.cache.layout import Component, Layout, Tail
from ownerserve.cache.metrics import snapshot
from ownerserve.cache.outcomes import (
    Append,
    Arrival,
    Begun,
    CacheRefused,
    Finished,
    Inserted,
    Install,
    Match,
    NoRoom,
    Resume,
    SlotsReserved,
    Turn,
    Verified,
    Writer,
    WriterKind,
)
from ownerserve.cache.policies.base import EvictionPolicy
from ownerserve.cache.tree import prefix_tree
from ownerserve.kv.descriptor import TailForm
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.kv.specs import Coverage

B = 16
BLOCK_BYTES = B * 4
GARBAGE = b"garbage"
PEER = Writer(WriterKind.PEER, "w2")

HYBRID = Layout(
    B,
    (
        Component("main", Coverage.RANGE, 100 * B, 90 * B),
        Component("index", Coverage.RANGE, 20 * B, 20 * B),
        Component("swa", Coverage.POINT, 1000, 1000),
        Component("overlap", Coverage.POINT, 200, 190),
    ),
    state_bytes=2000,
    tails=(
        Tail("main_tail", 4, overlap=4, row_bytes=30, slot_bytes=100),
        Tail("index_tail", 8, form=TailForm.ONLINE, row_bytes=50, slot_bytes=60),
    ),
)
DENSE = Layout(B, (Component("kv", Coverage.RANGE, 64 * B, 64 * B),))


def blocks_of(*symbols: int, tail: int = 0) -> bytes:
    """One block a symbol, the symbol repeated; `tail` more tokens of symbol 9."""
    return b"".join(pack([symbol] * B) for symbol in symbols) + pack([9] * tail)


class Live:
    """What the engine knows of a running turn."""

    def __init__(self, tokens: bytes, prompt_end: int, write_floor: int) -> None:
        self.tokens = tokens  # computed so far, then the rest of the prompt
        self.prompt_end = prompt_end
        self.write_floor = write_floor
        self.position = 0
        self.session: SessionId | None = None
        self.kept: set[int] = set()  # positions of its prompt whose point state it left here


class Driver:
    """Calls the cache as an engine would, and checks everything after every step."""

    def __init__(
        self,
        layout: Layout = HYBRID,
        *,
        blocks: int = 24,
        points: int = 6,
        states: int = 3,
        policy: EvictionPolicy | None = None,
        least_points: int | None = None,
    ) -> None:
        slots = dict.fromkeys(layout.range_names, blocks)
        slots |= dict.fromkeys(layout.point_names, points)
        self.cache = HeteroCache(layout, slots, states, policy, least_points=least_points)
        self.layout = layout
        self.now = 0.0
        self.memory: dict[tuple[str, int], bytes] = {}
        self.waiting: dict[tuple[str, int], bytes] = {}
        self.live: dict[TurnId, Live] = {}
        self.finished: dict[SessionId, tuple[Finished, bytes]] = {}
        self.tickets: dict[int, tuple[Arrival, SlotsReserved]] = {}
        self.held: dict[int, SlotsReserved] = {}
        self.resident: set[bytes] = set()
        self.sealed: set[bytes] = set()
        self.evicted_before = 0
        self.is_filling = False

    # -- the engine ----------------------------------------------------------------------------

    def perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case LoadPoint(slots=slots, state=state):
                    held = {self.memory[name, slot] for name, slot in slots.items()}
                    assert len(held) == 1, "components of a point are of different prefixes"
                    assert set(slots) == set(self.layout.point_names)
                    self.memory["state", state] = held.pop()
                case SavePoint(state=state, slots=slots):
                    for name, slot in slots.items():
                        self.memory[name, slot] = self.memory["state", state]
                case CopyBlock(slots=slots):
                    for name, (source, target) in slots.items():
                        self.memory[name, target] = self.memory.get((name, source), GARBAGE)
                case CopyState(source=source, target=target):
                    self.memory["state", target] = self.memory["state", source]
                    for tail in self.layout.tails:
                        rows = self.waiting.get((tail.name, source), GARBAGE)
                        self.waiting[tail.name, target] = rows
                case ResetState(state=state):
                    self.memory["state", state] = b""
                case MoveBorder():
                    self.move_border(effect)

    def move_border(self, effect: MoveBorder) -> None:
        """Bytes go with their slots; what lies beyond the border then is the other side's."""
        moves = dict.fromkeys(self.layout.range_names, effect.block_moves)
        limits = dict.fromkeys(self.layout.range_names, effect.blocks)
        for name, pairs in (moves | effect.point_moves).items():
            assert not {to for _, to in pairs} & {source for source, _ in pairs}
            for source, target in pairs:
                self.memory[name, target] = self.memory.pop((name, source), GARBAGE)
        limits |= dict.fromkeys(self.layout.point_names, effect.points)
        for name, slot in list(self.memory):
            if slot >= limits.get(name, slot + 1):
                del self.memory[name, slot]

    def divide(self) -> None:
        """The engine is between two steps."""
        self.perform(self.cache.border.move(self.now))
        self.check()

    def opened(self, turn_id: TurnId, begun: Begun, tokens: bytes) -> None:
        """Check what a turn was given to build on, before it computes."""
        self.perform(begun.effects)
        live = Live(tokens, len(tokens) // 4, begun.write_floor)
        live.position = begun.restored
        self.live[turn_id] = live
        known = len(tokens) // 4
        assert begun.restored % B == 0 and begun.restored <= begun.write_floor <= known - 1
        assert begun.pending == tokens[begun.restored * 4 :]
        self.check_row(turn_id, begun.write_floor)
        if self.layout.point_names:
            state = self.memory["state", self.cache.table(turn_id).state]
            if state or not begun.restored:
                assert state == tokens[: begun.restored * 4], "the state of another prefix"
            else:
                self.memory["state", self.cache.table(turn_id).state] = GARBAGE

    def check_row(self, turn_id: TurnId, upto: int) -> None:
        """Every slot before `upto` holds this turn's own prefix."""
        live, table = self.live[turn_id], self.cache.table(turn_id)
        for name in self.layout.range_names:
            for number, slot in enumerate(table.range[name][: upto // B]):
                expected = live.tokens[: (number + 1) * BLOCK_BYTES]
                assert self.memory[name, slot] == expected, f"wrong bytes in block {number}"

    def compute(self, turn_id: TurnId, tokens: bytes) -> bool:
        """Reserve, write, advance; False when there was no room (and nothing changed)."""
        live = self.live[turn_id]
        end = live.position + len(tokens) // 4
        got = self.cache.reserve(turn_id, end, self.now)
        if isinstance(got, NoRoom):
            assert got.missing > 0
            return False
        self.perform(got)
        self.account()  # what was evicted for this may be computed again below
        live.tokens = live.tokens[: live.position * 4] + tokens + live.tokens[end * 4 :]
        table = self.cache.table(turn_id)
        for number in range(live.position // B, -(-end // B)):
            if number * B < live.write_floor:
                continue
            for name in self.layout.range_names:
                written = live.tokens[: min((number + 1) * B, end) * 4]
                self.memory[name, table.range[name][number]] = written
        if self.memory["state", table.state] != GARBAGE:
            self.memory["state", table.state] = live.tokens[: end * 4]
        self.pass_tails(table.state, live.tokens, live.position, end=end)
        live.position = end
        for depth in range(1, end // B + 1):
            self.sealed.add(live.tokens[: depth * BLOCK_BYTES])
        self.cache.advance(turn_id, tokens, self.now)
        self.check_row(turn_id, end // B * B)
        for tail in self.layout.tails:
            waiting = len(self.waiting[tail.name, table.state]) // 4
            assert table.tails.waiting[tail.name] == waiting
        return True

    def pass_tails(self, state: int, tokens: bytes, start: int, *, end: int) -> None:
        """What waited and what is new makes entries of the right tokens, or waits in its turn."""
        for tail in self.layout.tails:
            step = tail.step(start, end - start)
            rows = self.waiting.get((tail.name, state), GARBAGE)[: step.waiting * 4]
            new = tokens[start * 4 : end * 4]
            if step.entries:
                closing, new = rows + new[: step.taken * 4], new[step.taken * 4 :]
                window = tail.period * 4
                assert closing == tokens[step.first_entry * window : step.end_entry * window]
                rows = b""
            assert rows + new == tokens[(end - step.left) * 4 : end * 4], "wrong tokens wait"
            self.waiting[tail.name, state] = rows + new

    # -- operations ----------------------------------------------------------------------------

    def begin(
        self,
        name: str,
        tokens: bytes,
        *,
        session: str | None = None,
        resume: Resume | None = None,
        priority: int = 0,
        ttl_s: float = 300.0,
    ) -> Begun | CacheRefused:
        turn_id = TurnId(name)
        session_id = SessionId(session) if session else None
        turn = Turn(turn_id, session_id, tokens, priority, ttl_s)
        self.check_append_of(turn)
        begun = self.cache.begin(turn, self.now, resume=resume)
        if isinstance(begun, Begun):
            self.opened(turn_id, begun, tokens)
            self.live[turn_id].session = session_id
        self.check()
        return begun

    def check_append_of(self, turn: Turn) -> None:
        """By digests a prompt goes on from its session just where its tokens do."""
        session = self.cache.sessions.get(turn.session_id) if turn.session_id else None
        known = None if session is None else self.finished.get(session.session_id)
        if session is None or known is None:
            return
        said = known[1]
        digests = hash_prefix(turn.tokens, B)

        def digest_at(tokens: int) -> PrefixHash | None:
            return digests[tokens // B - 1] if 0 < tokens // B <= len(digests) else None

        append = self.cache.sessions.append_of(turn, digest_at)
        goes_on = turn.tokens.startswith(said) and len(turn.tokens) > len(said)
        if append is not None:
            assert goes_on and append.suffix == turn.tokens[len(said) :]
        elif goes_on:
            stop = session.stop
            assert stop is None or stop.depth < session.sealed or not stop.is_complete

    def append(self, name: str, session: str, suffix: bytes) -> Begun | CacheRefused:
        turn_id, session_id = TurnId(name), SessionId(session)
        done, tokens = self.finished[session_id]
        assert done.version is not None
        begun = self.cache.append(Append(turn_id, session_id, done.version, suffix), self.now)
        if isinstance(begun, Begun):
            self.opened(turn_id, begun, tokens + suffix)
            self.live[turn_id].session = session_id
        self.check()
        return begun

    def install(self, session: str, version: int, tokens: bytes, open_tokens: bytes = b"") -> bool:
        """Another worker's count arrives; False: a turn of the session runs here."""
        session_id = SessionId(session)
        installed = self.cache.install(
            Install(
                session_id,
                version,
                tokens,
                open_tokens,
                hash_prefix(tokens, B)[-1] if tokens else None,
            ),
            self.now,
        )
        self.check()
        if installed is not None:
            assert any(live.session == session_id for live in self.live.values())
            return False
        whole = tokens + open_tokens
        done = Finished(len(whole) // 4, len(tokens) // 4, version)
        self.finished[session_id] = (done, whole)
        status = self.cache.sessions.status(session_id)
        assert status is not None
        assert (status.version, status.tokens) == (version, done.tokens)
        depths = range(0, len(tokens) + 1, BLOCK_BYTES)
        resident = max(n for n in depths if not n or tokens[:n] in self.resident)
        assert status.resident_tokens == resident // 4
        return True

    def prefill(self, name: str, upto: int | None = None) -> bool:
        """Compute the prompt (or up to a position), ending a chunk at each boundary it keeps."""
        turn_id = TurnId(name)
        live = self.live[turn_id]
        goal = min(upto or live.prompt_end, live.prompt_end)
        last = live.prompt_end
        stops = {(last - 1) // B * B, last // B * B, goal}
        for stop in sorted(stop for stop in stops if live.position < stop <= goal):
            if not self.compute(turn_id, live.tokens[live.position * 4 : stop * 4]):
                self.check()
                return False
            if stop % B == 0:
                self.snapshot(name)
        self.check()
        return True

    def decode(self, name: str, tokens: bytes) -> bool:
        """Compute output token by token; snapshot at each boundary."""
        turn_id = TurnId(name)
        for at in range(0, len(tokens), 4):
            if not self.compute(turn_id, tokens[at : at + 4]):
                self.check()
                return False
            if self.live[turn_id].position % B == 0:
                self.snapshot(name)
        self.check()
        return True

    def snapshot(self, name: str) -> None:
        live = self.live[TurnId(name)]
        if live.position < live.write_floor:
            return  # in a replay the windows are not right yet
        if self.memory["state", self.cache.table(TurnId(name)).state] != GARBAGE:
            self.perform(self.cache.snapshot(TurnId(name), self.now))
            point = self.cache.residents.prefix(live.tokens[: live.position * 4])
            if live.position <= live.prompt_end and point.point_slots(live.position // B):
                live.kept.add(live.position)

    def fork(self, name: str, child: str) -> bool:
        forked = self.cache.fork(TurnId(name), TurnId(child), self.now)
        if not isinstance(forked, tuple):
            self.check()
            return False
        self.perform(forked)
        parent = self.live[TurnId(name)]
        twin = Live(parent.tokens, parent.prompt_end, parent.write_floor)
        twin.position = parent.position
        self.live[TurnId(child)] = twin
        self.check_row(TurnId(child), twin.position // B * B)
        self.check()
        return True

    def finish(self, name: str) -> Finished:
        live = self.live.pop(TurnId(name))
        digests = hash_prefix(live.tokens[: live.position * 4], B)
        tip = digests[-1] if digests else None
        done = self.cache.finish(TurnId(name), self.now, tip=tip)
        assert done.tokens == live.position
        if live.session is not None and done.version is not None:
            self.finished[live.session] = (done, live.tokens[: live.position * 4])
        self.check()
        return done

    def abort(self, name: str) -> None:
        del self.live[TurnId(name)]
        self.cache.abort(TurnId(name), self.now)
        self.check()

    def turn(self, name: str, tokens: bytes, output: bytes = b"", *, session: str = "") -> Begun:
        """A whole turn that is expected to fit."""
        begun = self.begin(name, tokens, session=session or None)
        assert isinstance(begun, Begun), begun
        assert self.prefill(name) and self.decode(name, output)
        self.finish(name)
        return begun

    def fill(self, sessions: Iterable[tuple[str, bytes]]) -> None:
        """A turn of each session, without eviction: all is looked at once, behind the last.

        Looking at all of a large cache after each of its turns takes seconds.
        """
        self.is_filling = True
        for name, tokens in sessions:
            self.turn(name, tokens, session=name)
        self.is_filling = False
        self.check()

    def evict(self, count: int) -> int:
        """Evict up to `count` blocks; returns how many."""
        count = min(count, self.cache.occupancy.evictable_blocks())
        if count:
            freed = self.cache.pressure.evict_blocks(count)
            assert len(freed) == count
        self.check()
        return count

    # -- arrivals ------------------------------------------------------------------------------

    def arrive(
        self, tokens: bytes, points: tuple[int, ...] = ()
    ) -> SlotsReserved | NoRoom | CacheRefused:
        arrival = Arrival(tokens, hash_prefix(tokens, B)[-1], points, PEER)
        got = self.cache.ingest.reserve(arrival, self.now)
        if isinstance(got, SlotsReserved):
            self.tickets[got.ticket] = (arrival, got)
        self.check()
        return got

    def parts(self, ticket: int) -> list[Verified]:
        """What a mover reads for this arrival, all of it as its source states it."""
        arrival, reserved = self.tickets[ticket]
        whole = len(arrival.tokens) // BLOCK_BYTES
        ranges = [(name, reserved.start // B, whole) for name in self.layout.range_names]
        ranges = [part for part in ranges if part[1] < part[2]]
        ranges += [(name, at // B, at // B) for at, of in reserved.points.items() for name in of]
        return [Verified(*part, b"digest", b"digest") for part in ranges]

    def land(
        self, ticket: int, digest: bytes = b"digest", *, parts: list[Verified] | None = None
    ) -> Inserted | CacheRefused:
        """The mover has written all slots, with bytes of this digest; commit."""
        read = self.parts(ticket) if parts is None else parts
        read[-1:] = [msgspec.structs.replace(part, found=digest) for part in read[-1:]]
        arrival, reserved = self.tickets.pop(ticket)
        for offset, slot in enumerate(reserved.blocks):
            upto = (reserved.start // B + offset + 1) * BLOCK_BYTES
            for name in self.layout.range_names:
                self.memory[name, slot] = arrival.tokens[:upto]
        for position, slots in reserved.points.items():
            for name in {part.component for part in read if part.first == part.end}:
                self.memory[name, slots[name]] = arrival.tokens[: position * 4]
        if digest == b"digest" or not read:
            for depth in range(1, len(arrival.tokens) // BLOCK_BYTES + 1):
                self.sealed.add(arrival.tokens[: depth * BLOCK_BYTES])
        done = self.cache.ingest.commit(ticket, read, self.now)
        self.check()
        return done

    def give_up(self, ticket: int) -> None:
        _, self.held[ticket] = self.tickets.pop(ticket)
        self.cache.ingest.abort(ticket, self.now)
        self.check()

    def write_late(self, ticket: int) -> None:
        """The writer of an arrival that was given up goes on."""
        reserved = self.held[ticket]
        written = [(name, slot) for name in self.layout.range_names for slot in reserved.blocks]
        written += [place for slots in reserved.points.values() for place in slots.items()]
        self.memory |= dict.fromkeys(written, GARBAGE)
        self.check()

    def quiet(self, ticket: int) -> None:
        """It has stopped."""
        del self.held[ticket]
        self.cache.ingest.quiet(ticket)
        self.check()

    # -- the oracle ----------------------------------------------------------------------------

    def check(self) -> None:
        """The cache's own invariants, then what the oracle knows."""
        if self.is_filling:
            return
        self.cache.check()
        self.account()
        for prefix in self.resident:
            shorter = prefix[:-BLOCK_BYTES]
            assert not shorter or shorter in self.resident, "a hole in a path"
        for turn_id, live in self.live.items():
            floor = parts_of(self.cache).running[turn_id].sealed * BLOCK_BYTES
            assert not floor or live.tokens[:floor] in self.resident, "a live path is gone"
        self.check_levels()

    def account(self) -> None:
        """What was resident or sealed since is resident still, or was counted as evicted."""
        if self.is_filling:
            return
        evicted = self.cache.counters.evicted_tokens // B
        if not self.sealed and evicted == self.evicted_before and not self.held:
            return
        before = self.resident | self.sealed
        self.sealed = set()
        self.resident = self.look()
        assert self.resident <= before, "a prefix is resident that nobody computed"
        assert len(before - self.resident) == evicted - self.evicted_before, "lost, not evicted"
        self.evicted_before = evicted

    def look(self) -> set[bytes]:
        """Every resident prefix, read out of the tree and compared with the memory."""
        found: set[bytes] = set()
        for node in prefix_tree.nodes(parts_of(self.cache).tree.root):
            whole = prefix_tree.tokens(node, 0, node.end, block_bytes=BLOCK_BYTES)
            for offset, slot in enumerate(node.blocks):
                prefix = whole[: (node.start + offset + 1) * BLOCK_BYTES]
                assert prefix not in found, "one prefix in two places"
                found.add(prefix)
                for name in self.layout.range_names:
                    assert self.memory[name, slot] == prefix, "the tree points at wrong bytes"
            for stop in node.stops:
                for name, slot in zip(self.layout.point_names, stop.slots or (), strict=False):
                    prefix = whole[: stop.depth * BLOCK_BYTES]
                    assert slot is None or self.memory[name, slot] == prefix, "a wrong point"
        return found

    def check_levels(self) -> None:
        """Invariant 1 as metrics report it."""
        for name, level in snapshot(self.cache, self.now).pools.items():
            parts = (level.free, level.reserved, level.private, level.held)
            assert sum(parts) + level.protected + level.evictable == level.capacity, name
            assert min(*parts, level.protected, level.evictable) >= 0, name

    def check_match(self, tokens: bytes) -> Match:
        """A match is the longest resident prefix, found by trying them all; and it only reads."""
        first, second = self.cache.match(tokens), self.cache.match(tokens)
        assert first == second
        whole = len(tokens) // BLOCK_BYTES
        depths = [d for d in range(1, whole + 1) if tokens[: d * BLOCK_BYTES] in self.resident]
        assert first.range_tokens == max(depths, default=0) * B
        cap = min(first.range_tokens, max(len(tokens) // 4 - 1, 0) // B * B)
        positions = [point.position for point in first.points]
        assert all(later < earlier for earlier, later in pairwise(positions))
        assert not cap or positions[0] == cap
        complete = {point.position for point in first.points if not point.lacks}
        if not self.layout.point_names:
            assert complete == ({cap} if cap else set())
            return first
        assert complete == {at for at in self.restorable(tokens) if at <= cap}
        return first

    def restorable(self, tokens: bytes) -> set[int]:
        """Boundaries of `tokens` whose point state the tree has in full, by reading every stop."""
        found = set()
        for node in prefix_tree.nodes(parts_of(self.cache).tree.root):
            for stop in node.stops:
                prefix = prefix_tree.tokens(node, 0, stop.depth, block_bytes=BLOCK_BYTES)
                if stop.is_complete and tokens.startswith(prefix):
                    found.add(stop.depth * B)
        return found
