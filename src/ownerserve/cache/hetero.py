"""HeteroCache decides block by block what a worker keeps in device memory.

The facade of the package and the main path of a turn. Owns the running turns; composes the tree
(residency, recency, locks), the pools (slots), the evictor (order) and the sessions (metadata).
Those parts are its own: others ask its calls, or one of its public sides:

    sessions    who goes on from what, and until when somebody is expected back
    residents   what of a token sequence is here, and in which slots
    occupancy   how full the pools are
    ingest      state from outside
    lends       who may read what is here, and until when
    pressure    room that is made before it is short
    turnover    what would go next, and how long it was idle
    border      what of the memory is for range blocks, and what for point state

Knows positions and slot numbers; must never see a tensor, read a clock or hash a known prefix.

    begin | append --> reserve --> advance --> ... --> finish | abort
       ^                  ^          |  `--> snapshot (at a boundary), fork
    install               `----------'

docs/cache.md draws the parts and the transition table; docs/invariants.md numbers what holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ownerserve.cache import check as checks
from ownerserve.cache.counters import Counters, LossCause
from ownerserve.cache.effects import (
    CopyBlock,
    CopyState,
    Effect,
    LoadPoint,
    ResetState,
    SavePoint,
)
from ownerserve.cache.ingest import Ingest
from ownerserve.cache.layout import Layout, Table, TailBook
from ownerserve.cache.leftovers import Leftovers
from ownerserve.cache.lends import Lends
from ownerserve.cache.occupancy import Occupancy
from ownerserve.cache.outcomes import (
    Append,
    Begun,
    CacheRefusal,
    CacheRefused,
    Finished,
    Install,
    Match,
    NoRoom,
    Resume,
    Turn,
)
from ownerserve.cache.parts import Parts
from ownerserve.cache.policies.base import EvictionPolicy
from ownerserve.cache.policies.cost_aware import CostAware
from ownerserve.cache.pools.border import Border
from ownerserve.cache.pools.evictor import Evictor
from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.pressure import Pressure
from ownerserve.cache.sessions import ResidentState, Running, Sessions
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Node, PrefixTree, ResumeDepth, ResumePlace, Session
from ownerserve.cache.turnover import Turnover
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed


class HeteroCache:
    """A HeteroCache is one worker's cache. All calls are pure: they change only this object and
    return effects.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Mapping[str, int],
        state_slots: int,
        policy: EvictionPolicy | None = None,
        *,
        least_points: int | None = None,
    ) -> None:
        """Make an empty cache of `slots` by component name, for `state_slots` running turns at
        once.

        `policy` orders eviction; without one, CostAware does. All but `least_points` of the point
        slots may give way to range blocks, where the engine performs MoveBorder; None: none may.
        """
        self.layout = layout
        self.counters = Counters()
        self.policy = policy or CostAware()
        self._running: dict[TurnId, Running] = {}
        self._tree = PrefixTree(layout.block_tokens * TOKEN_BYTES)
        self._evictor = Evictor(self._tree, layout, self.policy)
        self._pools = SlotPools(
            layout,
            slots,
            state_slots=state_slots,
            evictor=self._evictor,
            counters=self.counters,
            least_points=least_points,
        )
        self.occupancy: Occupancy = self._pools
        self.running: Collection[TurnId] = self._running.keys()
        """Turns that were begun, and have not ended."""
        self.sessions = Sessions(self._tree, layout, policy=self.policy)
        self.residents = ResidentState(self._tree, self.sessions, names=layout.point_names)
        self.ingest = Ingest(self._tree, self._pools, self.counters)
        self.lends = Lends(self._tree, self._pools, self._running)
        self.pressure = Pressure(
            self._pools, self._evictor, self._running, lends=self.lends, counters=self.counters
        )
        self.leftovers = Leftovers(self._tree, self._pools)
        self.turnover = Turnover(self._pools, self._evictor, self.pressure)
        self.border = Border(
            self._pools,
            self._evictor,
            running=self._running,
            sessions=self.sessions,
            ingest=self.ingest,
            lends=self.lends,
        )
        self._order = 0
        self._block = layout.block_tokens
        self._range_names = layout.range_names
        self._point_names = layout.point_names

    # -- looking -------------------------------------------------------------------------------

    def match(self, tokens: Packed, *, behind: ResumeDepth | None = None) -> Match:
        """Tell everything resident of a prompt that it could go on from; nothing changes.

        `behind` is a place that the prompt is known to reach (`residents.behind`): the comparison
        begins there.
        """
        known = len(tokens) // TOKEN_BYTES
        node, depth = (None, 0) if behind is None else (behind.node, behind.depth)
        node, depth = self._tree.walk(tokens, known // self._block, node=node, depth=depth)
        cap = min(depth, max(known - 1, 0) // self._block)
        points = prefix_tree.points(node, cap, names=self._point_names, block_tokens=self._block)
        return Match(depth * self._block, points)

    # -- opening a turn ------------------------------------------------------------------------

    def begin(
        self, turn: Turn, now: float, *, resume: Resume | None = None
    ) -> Begun | CacheRefused:
        """Start a turn from its whole prompt, at the deepest complete point or as `resume` says.

        Locks the path of that point and takes a state block. Restores at most N - 1 of N tokens:
        the last one must be computed to have logits.
        """
        known = len(turn.tokens) // TOKEN_BYTES
        if not known or len(turn.tokens) % TOKEN_BYTES:
            raise InvalidInput(
                "tokens", f"{len(turn.tokens)} bytes", "pass at least one token of 4 bytes"
            )
        self._expire(now)
        refusal = self._refusal(turn.turn_id, known)
        if refusal is not None:
            return refusal
        node, depth = self._tree.walk(turn.tokens, (known - 1) // self._block)
        place: ResumePlace | None
        if resume is not None:
            place = prefix_tree.chosen(
                node, depth, resume, names=self._point_names, block_tokens=self._block
            )
        else:
            place = prefix_tree.deepest(node, depth, names=self._point_names)
        if place is None:
            return self._refuse(CacheRefusal.POINT_GONE)
        name = turn.session_id
        session = self.sessions.open(name, now) if name is not None else None
        return self._open(turn, session, prompt_at=0, node=node, place=place, now=now)

    def append(self, turn: Append, now: float) -> Begun | CacheRefused:
        """Start a session's next turn from what it adds. No hashing, no work on the known prefix.

        Refused when the session's tokens are not all at hand: send the whole prompt to `begin`.
        """
        self._expire(now)
        session = self.sessions.get(turn.session_id)
        if session is None or not session.version:
            return self._refuse(CacheRefusal.UNKNOWN_SESSION)
        if turn.version != session.version:
            return self._refuse(CacheRefusal.STALE_VERSION)
        if not turn.suffix or len(turn.suffix) % TOKEN_BYTES:
            raise InvalidInput(
                "suffix", f"{len(turn.suffix)} bytes", "pass at least one token of 4 bytes"
            )
        known = session.tokens + len(turn.suffix) // TOKEN_BYTES
        refusal = self._refusal(turn.turn_id, known)
        if refusal is not None:
            return refusal
        if session.depth < session.sealed:
            return self._refuse(CacheRefusal.POINT_GONE)
        fresh = session.tail + turn.suffix
        node, depth = self._tree.walk(
            fresh,
            (known - 1) // self._block,
            node=session.node or self._tree.root,
            depth=session.depth,
            skip=session.depth,
        )
        place = prefix_tree.deepest(node, depth, names=self._point_names)
        first = min(place.floor, session.depth)
        if first < session.depth:  # its point state went: compute again from tokens the tree has
            size = self._tree.block_bytes
            fresh = prefix_tree.tokens(node, first, session.depth, block_bytes=size) + fresh
        whole = Turn(turn.turn_id, turn.session_id, fresh, turn.priority, turn.ttl_s)
        prompt_at = first * self._block
        return self._open(whole, session, prompt_at=prompt_at, node=node, place=place, now=now)

    def _expire(self, now: float) -> None:
        """End the soft references and the tickets whose time is over."""
        self.sessions.expire(now)
        self.lends.expire(now)

    def _refusal(self, turn_id: TurnId, known: int) -> CacheRefused | None:
        if turn_id in self._running:
            return self._refuse(CacheRefusal.TURN_IS_LIVE)
        if known > self._pools.most_blocks * self._block:
            return self._refuse(CacheRefusal.TOO_LONG)
        if not self._pools.states.free:
            return self._refuse(CacheRefusal.NO_STATE_BLOCK)
        return None

    def _refuse(self, reason: CacheRefusal) -> CacheRefused:
        self.counters.turns_refused += 1
        return CacheRefused(reason)

    def _open(
        self,
        turn: Turn,
        session: Session | None,
        *,
        prompt_at: int,
        node: Node,
        place: ResumePlace,
        now: float,
    ) -> Begun:
        stop, floor = place.stop, place.floor
        if floor <= node.start:
            node = prefix_tree.locate(node, floor)
        if stop is not None:
            stop.last_s, stop.trimmed = now, 0
            stop.uses += 1
            self.policy.touched(stop)
        lock = self._tree.lock(node, floor)
        row = self._row(session, node, floor)
        state = self._pools.states.take_one()
        self._order += 1
        known = prompt_at + len(turn.tokens) // TOKEN_BYTES
        restored = place.start * self._block
        expected = 0
        if session is not None:
            session.running += 1
            expected = self._expected(session, known)
        tails = TailBook.at(self.layout.tails, restored)
        table = Table(dict.fromkeys(self._range_names, row), state, tails)
        run = Running(  # by position, in the order of its docstring's fields: a third faster
            turn.turn_id, session, self._order, now, restored, expected, turn.priority, turn.ttl_s,
            turn.tokens, prompt_at, known, restored, floor, row, table, lock, bytearray(),
        )  # fmt: skip
        self._running[turn.turn_id] = run
        self._count(run, 1)
        effect: Effect
        if stop is not None:
            effect = LoadPoint(stop.point_slots(self._point_names), state)
        else:
            effect = ResetState(state)
        skip = (restored - prompt_at) * TOKEN_BYTES
        return Begun(restored, (effect,), floor * self._block, turn.tokens[skip:])

    def _row(self, session: Session | None, node: Node, depth: int) -> list[int]:
        """Return the slots of the shared blocks: the session's own row when nobody else has it."""
        stop = None if session is None else session.stop
        if session is None or stop is None or session.row is None or stop.node is not node:
            return prefix_tree.row(node, depth)
        row, session.row = session.row, None
        del row[depth if depth < stop.depth else stop.depth :]
        row += node.blocks[len(row) - node.start : depth - node.start]
        return row

    def _expected(self, session: Session, known: int) -> int:
        """Return how many of the prompt's tokens the session had computed and a restore could
        bring."""
        if not session.version:
            return 0
        most = (known - 1) // self._block
        return (session.sealed if session.sealed < most else most) * self._block

    def _count(self, run: Running, sign: int) -> None:
        """Count a turn that opens; -1 takes it back when it ends before it computed anything."""
        counters = self.counters
        counters.turns_begun += sign
        counters.prompt_tokens += sign * run.prompt_end
        counters.cached_tokens += sign * run.restored
        if run.expected > run.restored:
            counters.reprefilled_tokens += sign * (run.expected - run.restored)

    # -- running -------------------------------------------------------------------------------

    def reserve(self, turn_id: TurnId, upto: int, now: float) -> tuple[Effect, ...] | NoRoom:
        """Take range slots for all tokens before position `upto`, evicting as needed: all or
        none."""
        run = self._running.get(turn_id) or self._run(turn_id)
        missing = -(-upto // self._block) - len(run.row)
        if missing > 0:
            taken = self._pools.take_blocks(missing)
            if isinstance(taken, NoRoom):
                return self._reserve_scarce(run, taken, now, missing=missing)
            run.row += taken
        return ()

    def _reserve_scarce(
        self, run: Running, short: NoRoom, now: float, *, missing: int
    ) -> tuple[Effect, ...] | NoRoom:
        """Take blocks that evicting does not free: point slots give way, then lends do."""
        effects: tuple[Effect, ...] = ()
        taken: list[int] | NoRoom = short
        while isinstance(taken, NoRoom):
            moved = self.border.give_way(taken.missing)
            if not moved and not self.lends.room.revoke_for(taken.missing, now):
                assert not effects, "the border gave way for room that is not there"
                return taken
            effects += moved
            taken = self._pools.take_blocks(missing)
        run.row += taken
        return effects

    def advance(self, turn_id: TurnId, tokens: Packed, now: float) -> None:
        """Note that `tokens` are computed, their state in the slots, and seal each block now full.

        Raises InvalidInput when they contradict the prompt or have no reserved slots.
        """
        run = self._running.get(turn_id) or self._run(turn_id)
        before = run.position
        after = before + len(tokens) // TOKEN_BYTES
        if before < run.prompt_end:
            known = tokens
            if after > run.prompt_end:
                known = tokens[: (run.prompt_end - before) * TOKEN_BYTES]
            if not run.prompt.startswith(known, (before - run.prompt_at) * TOKEN_BYTES):
                raise InvalidInput(
                    "tokens", f"differ from the prompt behind {before}", "advance what was begun"
                )
        if after > len(run.row) * self._block:
            raise InvalidInput("tokens", f"reach {after}", "reserve before computing")
        run.position = after
        tails = run.table.tails
        if tails.tails:
            tails.advance(after - before)
        else:
            tails.position = after
        first = run.sealed * self._block
        if before < first:  # a replay: these blocks are sealed already
            tokens = tokens[(first - before) * TOKEN_BYTES :]
        size = self._tree.block_bytes
        if len(run.tail) + len(tokens) < size:
            run.tail += tokens
            return
        if run.tail:
            tokens = bytes(run.tail) + tokens
            run.tail.clear()
        full = len(tokens) - len(tokens) % size
        run.tail += tokens[full:]
        self._seal(run, tokens[:full])

    def _seal(self, run: Running, keys: Packed) -> None:
        """Put full blocks, which follow what is sealed, into the tree and move the lock behind."""
        tree, whole = self._tree, len(keys) // self._tree.block_bytes
        blocks = run.row[run.sealed : run.sealed + whole]
        node, depth, spares = tree.extend(run.lock.node, run.sealed, keys, blocks)
        if spares:
            run.row[run.sealed : depth] = blocks
            self.counters.duplicate_blocks += len(spares)
        tree.relock(run.lock, node, depth)
        run.sealed = depth
        self.lends.sealed(run, spares)

    def snapshot(self, turn_id: TurnId, now: float) -> tuple[Effect, ...]:
        """Keep the point state of the present position, which must be a boundary.

        One taken behind the prompt replaces this turn's previous one there. Empty when the state
        is kept already, or no slot is to be had: a later turn then restores further back.
        """
        run = self._run(turn_id)
        depth, rest = divmod(run.position, self._block)
        if rest:
            raise InvalidInput(
                "position", f"{run.position} is no boundary", f"use a multiple of {self._block}"
            )
        if run.position < run.sealed * self._block:
            raise InvalidInput(
                "position",
                f"{run.position} is replayed: its windows are not right yet",
                f"snapshot from {run.sealed * self._block} on, where range state is written again",
            )
        if not self._point_names or not depth:
            return ()
        stop = self._tree.stop_at(prefix_tree.locate(run.lock.node, depth), depth, now)
        former = run.decode_stop
        if former is not None and former is not stop:
            self._supersede(former)
        is_decode = run.position > run.prompt_end
        run.decode_stop = None
        effects: tuple[Effect, ...] = ()
        if not stop.is_complete:
            if stop.slots is None:
                self.policy.touched(stop)
            taken = self._pools.fill_point(stop)
            if isinstance(taken, NoRoom):
                self._tree.prune(stop)
                return ()
            run.decode_stop = stop if is_decode else None
            effects = (SavePoint(run.table.state, taken),)
        if not is_decode:
            self.lends.kept(turn_id, stop)
        return effects

    def _supersede(self, stop: ResumeDepth) -> None:
        """Free a decode snapshot that its own turn has passed, unless somebody uses it."""
        if stop.slots is not None and not stop.anchors and not stop.holds and stop.uses <= 1:
            self._pools.drop_point(stop, LossCause.SUPERSEDED)

    def fork(
        self, turn_id: TurnId, child_id: TurnId, now: float
    ) -> tuple[Effect, ...] | NoRoom | CacheRefused:
        """Open a second turn that goes on from here: it shares sealed blocks, copies the unfinished
        one.

        The child belongs to no session: of several answers only the first moves it.
        """
        run = self._run(turn_id)
        refusal = self._refusal(child_id, run.position)
        if refusal is not None:
            return refusal
        unfinished = bool(run.tail)
        taken = self._pools.take_blocks(int(unfinished))
        while isinstance(taken, NoRoom):
            if not self.lends.room.revoke_for(taken.missing, now):
                return taken
            taken = self._pools.take_blocks(int(unfinished))
        [state] = self._pools.states.take(1)
        self._order += 1
        row = run.row[: run.sealed] + taken
        self._running[child_id] = Running(
            turn_id=child_id,
            session=None,
            order=self._order,
            begun_s=now,
            restored=run.position,
            expected=0,
            priority=run.priority,
            ttl_s=run.ttl_s,
            prompt=run.prompt,
            prompt_at=run.prompt_at,
            prompt_end=run.prompt_end,
            position=run.position,
            sealed=run.sealed,
            row=row,
            table=Table(dict.fromkeys(self._range_names, row), state, run.table.tails.copy()),
            lock=self._tree.lock(run.lock.node, run.sealed),
            tail=bytearray(run.tail),
        )
        self.counters.turns_begun += 1
        effects: list[Effect] = [CopyState(run.table.state, state)]
        if unfinished:
            pair = (run.row[run.sealed], taken[0])
            effects.append(CopyBlock(dict.fromkeys(self._range_names, pair)))
        return tuple(effects)

    def install(self, install: Install, now: float) -> CacheRefused | None:
        """Take over a session that was counted elsewhere: what its owners left is its frontier from
        now on, as far as it is resident. Refused while a turn of it runs: that one will count.
        """
        self._expire(now)
        return self.sessions.install(install, self._order, now)

    # -- ending --------------------------------------------------------------------------------

    def finish(self, turn_id: TurnId, now: float, *, tip: PrefixHash | None = None) -> Finished:
        """End a turn: its sealed output stays, its session's frontier moves behind it.

        The session keeps a soft reference; the hard lock goes after that is in place. One that
        ends inside its replay leaves its session where it stopped. `tip`: the chain digest of all
        full blocks that were computed, by which a next prompt is known as an append.
        """
        run = self._run(turn_id)
        session, (depth, tail) = run.session, run.frontier(self._block)
        stop = self._leave(run, depth, now)
        self.counters.turns_finished += 1
        version = None
        if session is not None and self._moves_frontier(run, session):
            session.version += 1
            session.stored = min(session.stored, run.restored // self._block)
            session.tokens, session.sealed = run.position, depth
            session.tail, session.tip, session.frontier_order = tail, tip, run.order
            self.sessions.move(session, stop, ttl_s=run.ttl_s, now=now)
            del run.row[depth:]
            session.row = run.row if stop is not None else None
            version = session.version
        self._tree.unlock(run.lock)
        if self._tree.cooled:
            self._evictor.look_at_cooled()
        return Finished(run.position, depth * self._block, version)

    def _moves_frontier(self, run: Running, session: Session) -> bool:
        """Tell whether the turn's end counts: its session was not released meanwhile, and no turn
        that began later has finished."""
        is_current = self.sessions.get(session.session_id) is session
        return is_current and run.order > session.frontier_order

    def abort(self, turn_id: TurnId, now: float) -> None:
        """End a turn as if it had not been: private slots go, the session's frontier stays.

        Also how a turn is preempted: what it sealed remains matchable, and evictable.
        """
        run = self._run(turn_id)
        self._leave(run, run.sealed, now)
        if run.position > run.restored:
            self.counters.turns_aborted += 1
        else:
            self._count(run, -1)
        self._tree.unlock(run.lock)

    def _leave(self, run: Running, depth: int, now: float) -> ResumeDepth | None:
        """Give back all that is private; returns the stop at `depth`, where the turn ends."""
        del self._running[run.turn_id]
        if run.session is not None:
            run.session.running -= 1
        self.lends.left(run)
        del run.row[run.sealed :]
        self._pools.states.give_one(run.table.state)
        if not depth:
            return None
        stop = self._tree.stop_at(prefix_tree.locate(run.lock.node, depth), depth, now)
        stop.last_s, stop.trimmed = now, 0
        if stop.born_s < run.begun_s:
            stop.uses += 1
        if run.priority > stop.priority:
            stop.priority = run.priority
        self.policy.touched(stop)
        return stop

    # -- what the engine and the tests read ----------------------------------------------------

    def table(self, turn_id: TurnId) -> Table:
        """Return the slots of a running turn. The table is live: the next call changes it."""
        return self._run(turn_id).table

    def check(self) -> None:
        """Raise InvariantViolated unless invariants 1, 3, 5-7, 9, 12 hold. O(cache): for tests."""
        checks.check(self._parts())

    def _parts(self) -> Parts:
        return Parts(
            layout=self.layout,
            counters=self.counters,
            tree=self._tree,
            evictor=self._evictor,
            pools=self._pools,
            running=self._running,
            sessions=self.sessions,
            residents=self.residents,
            ingest=self.ingest,
            lends=self.lends,
            pressure=self.pressure,
        )

    def _run(self, turn_id: TurnId) -> Running:
        run = self._running.get(turn_id)
        if run is None:
            raise InvalidInput("turn_id", f"{turn_id!r} is not running", "begin it first")
        return run


def parts_of(cache: HeteroCache) -> Parts:
    """Return the parts of a cache, to look at once: for checks, snapshots and tests."""
    return cache._parts()  # noqa: SLF001 - its one door
