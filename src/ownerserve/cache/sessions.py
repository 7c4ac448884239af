"""This module says who stands where in the tree: the session table, the record of a running turn,
and what of a session's or a prompt's tokens is resident. Metadata only: it owns versions, soft
references and their TTL, no slot.

A soft reference orders eviction and nothing else; what a session may re-use is what the tree has
(invariant 6). Every method that changes a frontier does so by `tree.lift` and `tree.anchor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from ownerserve.cache.layout import Layout, Table
from ownerserve.cache.outcomes import (
    DEFAULT_TTL_S,
    Append,
    CacheRefusal,
    CacheRefused,
    Install,
    SessionStatus,
    Turn,
)
from ownerserve.cache.policies.base import EvictionPolicy
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Node, PrefixTree, Receipt, ResumeDepth, Session
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed

FORGET_CHECK_S = 600.0
"""How long a session of which nothing is resident is remembered, unless its reference lasts longer:
one that comes back is told from a new one."""


class Awaited(IntEnum):
    """An `Awaited` says for how many more sessions that may come a turn counts which is here, and
    has not begun: what it goes on from goes after the state of any idle one."""

    IN_LINE = 1
    LET_ON = 4
    """Its state has come, or comes: it goes after what any turn goes on from that is in line, its
    session's own reference included. Else what is brought would go for what is brought next."""


DigestAt = Callable[[int], PrefixHash | None]
"""The digest of a prompt's first n tokens, where it is known."""


class SessionView(Protocol):
    """A session view is a session's record as others may read it; the record itself is the
    cache's.
    """

    @property
    def session_id(self) -> SessionId:
        """`session_id` is the session's name."""
        ...

    @property
    def version(self) -> int:
        """`version` counts the session's turns that have ended."""
        ...

    @property
    def tokens(self) -> int:
        """`tokens` counts what the session committed."""
        ...

    @property
    def sealed(self) -> int:
        """`sealed` counts the full blocks of that."""
        ...

    @property
    def tail(self) -> Packed:
        """`tail` are the tokens behind the last full block, packed."""
        ...

    @property
    def tip(self) -> PrefixHash | None:
        """`tip` is the digest of the last full block; None before there is one."""
        ...

    @property
    def depth(self) -> int:
        """`depth` counts the blocks that are resident."""
        ...

    @property
    def running(self) -> int:
        """`running` counts the session's turns that run."""
        ...

    @property
    def last_s(self) -> float:
        """`last_s` is when the session was used last, in seconds."""
        ...

    @property
    def pin(self) -> object | None:
        """`pin` is what keeps the session's state where it is; None: nothing does."""
        ...


class Sessions:
    """Sessions is the table of sessions by id, with a heap of when to look at each next."""

    def __init__(self, tree: PrefixTree, layout: Layout, *, policy: EvictionPolicy) -> None:
        self._tree = tree
        self._policy = policy
        self._layout = layout
        self._by_id: dict[SessionId, Session] = {}
        self.expected: dict[TurnId, Session] = {}
        """Soft references of turns that are here and have not begun; see `expect`."""
        self._checks: list[tuple[float, int, Session]] = []
        self._generations = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, session_id: SessionId) -> Session | None:
        """Return the session's record, if it is known."""
        return self._by_id.get(session_id)

    def open(self, session_id: SessionId, now: float) -> Session:
        """Return the session's record, made when missing. A released id that comes back is a new
        generation, so that a turn of its former life can't move it."""
        session = self._by_id.get(session_id)
        if session is None:
            self._generations += 1
            session = Session(session_id=session_id, generation=self._generations)
            self._by_id[session_id] = session
            self._look_again(session, now + FORGET_CHECK_S)
        return session

    def _look_again(self, session: Session, at_s: float) -> None:
        """Have the session looked at again then. It has one entry: one that waits already under an
        earlier instant is put back when that comes, so a turn pushes none.
        """
        session.next_check_s = at_s
        if session.queued_s is None or session.queued_s > at_s:
            session.queued_s = at_s
            heappush(self._checks, (at_s, session.generation, session))

    def move(self, session: Session, stop: ResumeDepth | None, *, ttl_s: float, now: float) -> None:
        """Move the session's frontier to `stop`, under a fresh soft reference until now + ttl_s.

        `stop` None: the turn sealed no block, there is nothing to stand at.
        """
        before = self._tree.lift(session)
        session.last_s = now
        session.expires_s = now + ttl_s
        session.is_referenced = ttl_s > 0
        self._look_again(session, session.expires_s)
        if stop is None:
            session.row = None
        else:
            if before is not None and before.uses >= stop.uses:
                stop.uses = before.uses + 1
            self._tree.anchor(session, stop)
        if before is not None:
            self._tree.prune(before)  # only now: it may be the same one
        if self._policy.pins_idle_sessions and stop is not None:
            self._pin(session, stop)

    def _pin(self, session: Session, stop: ResumeDepth) -> None:
        former, session.pin = session.pin, self._tree.lock(stop.node, stop.depth)
        if former is not None:
            self._tree.unlock(former)

    def append_of(self, turn: Turn, digest_at: DigestAt) -> Append | None:
        """Return `turn` as what it adds to its session, by digests alone; None when its session is
        not known, its history was edited, or not all that the session left is at hand.

            session   |======= sealed =======|- tail -|          tip: the digest of what is sealed
            prompt    |=======================--------+++++|     its digest there is the tip, the
                                                                 tail follows: +++ is the suffix

        Equal digests mean equal tokens (kv.prefix), so nothing of what is sealed is compared again.
        """
        session = None if turn.session_id is None else self._by_id.get(turn.session_id)
        if session is None:
            return None
        known, sealed = session.tokens * TOKEN_BYTES, session.sealed
        sealed_tokens, stop = sealed * self._layout.block_tokens, session.stop
        if not session.version or len(turn.tokens) <= known:
            return None
        if sealed and (session.tip is None or digest_at(sealed_tokens) != session.tip):
            return None
        if sealed and (stop is None or stop.depth < sealed):
            return None
        if stop is not None and self._layout.point_names and not stop.is_complete:
            return None
        if not turn.tokens.startswith(session.tail, sealed_tokens * TOKEN_BYTES):
            return None
        return Append(
            turn.turn_id,
            session.session_id,
            session.version,
            turn.tokens[known:],
            turn.priority,
            turn.ttl_s,
        )

    def install(self, install: Install, order: int, now: float) -> CacheRefused | None:
        """Put a session that was counted elsewhere at the deepest resident block of what its owners
        left; nothing becomes resident by this. Turns up to the `order`th began before. Refused
        while a turn of it runs: that one will count."""
        _check_install(install, self._tree.block_bytes)
        session = self.open(install.session_id, now)
        if session.running:
            return CacheRefused(CacheRefusal.TURN_IS_LIVE)
        blocks = len(install.tokens) // self._tree.block_bytes
        node, depth = self._tree.walk(install.tokens, blocks)
        stop = None
        if depth:
            stop = self._tree.stop_at(prefix_tree.locate(node, depth), depth, now)
            self._policy.touched(stop)
        session.version, session.sealed = install.version, blocks
        session.tokens = (len(install.tokens) + len(install.open_tokens)) // TOKEN_BYTES
        session.tail, session.tip, session.row = install.open_tokens, install.tip, None
        self.move(session, stop, ttl_s=DEFAULT_TTL_S, now=now)
        session.frontier_order = order
        return None

    def expire(self, now: float) -> None:
        """Drop the soft references that are due; forget sessions of which nothing is left."""
        checks, left = self._checks, self._tree.left
        if left:
            for session in left:
                if session.queued_s is None:
                    self._look_again(session, now + FORGET_CHECK_S)
            left.clear()
        while checks and checks[0][0] <= now:
            due, _, session = heappop(checks)
            if due != session.queued_s or self._by_id.get(session.session_id) is not session:
                continue
            session.queued_s = None
            if due < session.next_check_s:
                self._look_again(session, session.next_check_s)
                continue
            self._dereference(session)
            if session.stop is not None:
                continue  # the tree says when nothing of it is left
            if session.running:
                self._look_again(session, now + FORGET_CHECK_S)
            else:
                del self._by_id[session.session_id]

    def next_due(self) -> float | None:
        """Return when `expire` has something to look at next."""
        return self._checks[0][0] if self._checks else None

    def _dereference(self, session: Session) -> None:
        if session.is_referenced and session.stop is not None:
            session.stop.refs -= 1
            self._tree.cool(session.stop)
        session.is_referenced = False

    def release(self, session_id: SessionId) -> int:
        """Forget the session, which is over. Frees nothing: what it alone stood on goes before all
        else from now on. Returns how many of its blocks, at the end of its path, no branch and no
        running turn needs.

        Raises InvalidInput when the id is unknown.
        """
        session = self._by_id.pop(session_id, None)
        if session is None:
            raise InvalidInput("session_id", f"{session_id!r} is unknown", "list the sessions")
        node, depth = session.node, session.depth
        stop = self._tree.lift(session)
        if stop is not None:
            if not stop.anchors:
                prefix_tree.let_go(self._tree, stop)
            self._tree.prune(stop)
        session.row = None
        session.is_referenced = False
        if session.pin is not None:
            self._tree.unlock(session.pin)
            session.pin = None
        return 0 if node is None else max(0, depth - node.floor)

    def let_go(self, session_id: SessionId) -> None:
        """Have what the session alone stands on go before all else, since it goes on elsewhere.

        Its record stays until nothing of it is left, as one of which no turn was counted. Raises
        InvalidInput when the id is unknown, or a turn of it runs.
        """
        session = self._by_id.get(session_id)
        if session is None or session.running:
            problem = f"{session_id!r} is unknown" if session is None else "a turn of it runs"
            raise InvalidInput("session_id", problem, "name a session that is idle here")
        session.version, session.tip, session.row = 0, None, None
        self._dereference(session)
        if session.pin is not None:
            self._tree.unlock(session.pin)
            session.pin = None
        if session.stop is not None and len(session.stop.anchors or ()) == 1:
            prefix_tree.let_go(self._tree, session.stop)

    def expect(
        self, turn_id: TurnId, stop: ResumeDepth, now: float, *, awaited: Awaited = Awaited.IN_LINE
    ) -> None:
        """Give a turn that goes on from `stop`, and can't begin yet, a soft reference of its own,
        in place of its former one, until `met`."""
        waiting = self.expected.get(turn_id)
        before = None if waiting is None else self._lift_expected(waiting)
        self._generations += 1
        waiting = Session(
            session_id=SessionId(f"turn {turn_id}"),
            generation=self._generations,
            sealed=stop.depth,
            is_referenced=True,
            more_refs=awaited,
        )
        self.expected[turn_id] = waiting
        self._tree.anchor(waiting, stop)
        stop.refs += waiting.more_refs
        stop.last_s = max(stop.last_s, now)
        if before is not None:
            self._tree.prune(before)  # only now: it may be the same one

    def met(self, turn_id: TurnId) -> None:
        """Drop what `expect` gave: the turn has ended or is gone. One nobody expected is no
        error."""
        waiting = self.expected.pop(turn_id, None)
        stop = None if waiting is None else self._lift_expected(waiting)
        if stop is not None:
            self._tree.prune(stop)

    def _lift_expected(self, waiting: Session) -> ResumeDepth | None:
        stop = self._tree.lift(waiting)
        if stop is not None:
            stop.refs -= waiting.more_refs
        return stop

    def __iter__(self) -> Iterator[Session]:
        """Iterate over all records, oldest generation first."""
        return iter(tuple(self._by_id.values()))

    def status(self, session_id: SessionId) -> SessionStatus | None:
        """Tell what the tree holds for a session now; None when the id is unknown."""
        session = self._by_id.get(session_id)
        return self._status(session) if session is not None else None

    def _status(self, session: Session) -> SessionStatus:
        layout, node = self._layout, session.node
        resident: dict[str, int] = {}
        points = dict.fromkeys(layout.point_names, 0)
        restorable = 0 if layout.point_names else session.depth
        for stop in prefix_tree.stops_above(node, session.depth) if node is not None else ():
            for name, slot in zip(layout.point_names, stop.slots or (), strict=False):
                points[name] += slot is not None
            if stop.is_complete:
                restorable = max(restorable, stop.depth)
        for component in layout.components:
            slots = points.get(component.name, session.depth)
            resident[component.name] = slots * component.slot_bytes
        return SessionStatus(
            session_id=session.session_id,
            version=session.version,
            tokens=session.tokens,
            resident_tokens=session.depth * layout.block_tokens,
            restorable_tokens=restorable * layout.block_tokens,
            resident_bytes=resident,
            running_turns=session.running,
            last_s=session.last_s,
            expires_s=session.expires_s,
        )


def restorable_tokens(session: Session | None, layout: Layout) -> int:
    """Return how many of a session's first tokens a turn could go on from, as `Sessions.status`
    says; 0 where there is no session."""
    if session is None or session.node is None:
        return 0
    depth = session.depth
    if layout.point_names:
        stop = prefix_tree.complete_stop(session.node, depth)
        depth = 0 if stop is None else stop.depth
    return depth * layout.block_tokens


def _check_install(install: Install, block_bytes: int) -> None:
    """Raise InvalidInput for tokens that are no whole blocks, or a version that no turn made."""
    tail = len(install.open_tokens)
    if len(install.tokens) % block_bytes or tail >= block_bytes or tail % TOKEN_BYTES:
        raise InvalidInput(
            "tokens",
            f"{len(install.tokens)} bytes and {tail} open ones",
            f"give whole blocks of {block_bytes} bytes, and less than one behind them",
        )
    if install.version < 1:
        raise InvalidInput("version", f"{install.version}", "a session begins with its first turn")


class Running(msgspec.Struct, eq=False):
    """A running turn is one between begin and finish or abort.

        row:   0 ....... sealed | private .......... len(row)      slots of blocks
               shared, in tree  | written or reserved
        tail:  tokens from block `sealed` on to `position`

    `sealed` is the depth of `lock`. In a replay `position` starts before it. `prompt` holds the
    known tokens from position `prompt_at` on, to check what the engine says it computed. The
    turn opened at `begun_s` with `restored` tokens, of `expected` that its session once had.
    """

    turn_id: TurnId
    session: Session | None
    order: int
    begun_s: float
    restored: int
    expected: int
    priority: int
    ttl_s: float
    prompt: Packed
    prompt_at: int
    prompt_end: int
    position: int
    sealed: int
    row: list[int]
    table: Table
    lock: Receipt
    tail: bytearray
    decode_stop: ResumeDepth | None = None

    def frontier(self, block_tokens: int) -> tuple[int, Packed]:
        """Return the depth and tail where the turn stands. Inside its replay the tree's blocks go
        on behind it, with tokens of the prompt that it has not computed."""
        depth = self.position // block_tokens
        if depth >= self.sealed:
            return self.sealed, bytes(self.tail)
        first = depth * block_tokens - self.prompt_at
        last = self.position - self.prompt_at
        return depth, self.prompt[first * TOKEN_BYTES : last * TOKEN_BYTES]


# ---- what of a token sequence is on the device
#
# Questions by tokens, answered in blocks and slots. Whoever asks never sees an interval: a place
# that a prompt is known to reach is handed back as it came (`behind`), and the comparison begins
# there.


class ResidentPrefix:
    """A resident prefix is the first `blocks` blocks of a sequence, which are all resident, to copy
    them out. Valid until the cache changes.
    """

    __slots__ = ("_names", "_node", "_row", "blocks")

    def __init__(self, node: Node, blocks: int, *, names: tuple[str, ...]) -> None:
        self.blocks = blocks
        self._node, self._names = node, names
        self._row: list[int] | None = None

    def range_slots(self, first: int, end: int) -> tuple[int, ...]:
        """List the slots of blocks [first, end), the same in every range pool."""
        if self._row is None:
            self._row = prefix_tree.row(self._node, self.blocks)
        return tuple(self._row[first:end])

    def point_slots(self, depth: int) -> dict[str, int] | None:
        """Return the point state's slots behind the first `depth` blocks, by component; None if any
        is gone."""
        stop = prefix_tree.complete_stop(self._node, depth)
        if stop is None or stop.depth != depth:
            return None
        return stop.point_slots(self._names)


class ResidentState:
    """ResidentState answers for one cache what of a prompt or a session is resident: it reads the
    tree, and keeps in it what somebody who is here will go on from.
    """

    def __init__(self, tree: PrefixTree, sessions: Sessions, *, names: tuple[str, ...]) -> None:
        self._tree = tree
        self._sessions = sessions
        self._names = names

    # -- a prompt ------------------------------------------------------------------------------

    def behind(
        self, session_id: SessionId, hashed: HashedPrefix, blocks: int
    ) -> ResumeDepth | None:
        """Return the place where the session stands, if a prompt of so many whole blocks, of which
        `hashed` are the digests, is known to reach it without a comparison."""
        session = self._sessions.get(session_id)
        if session is None or session.stop is None or session.tip is None:
            return None
        sealed = session.sealed
        if sealed > blocks or hashed.digests[sealed - 1] != session.tip:
            return None
        return session.stop

    def blocks(self, tokens: Packed) -> int:
        """Count the leading blocks of `tokens` that are resident."""
        return self._walk(tokens, None)[1]

    def missing_blocks(
        self,
        tokens: Packed,
        *,
        behind: ResumeDepth | None = None,
        held: int = 0,
        more: int | None = None,
    ) -> int:
        """Count the blocks of a prompt, its last unfinished one included, that are neither among
        the first `held` nor kept for a running turn; resident or not, they may have to be had
        again. Behind what is resident only `more` blocks count; None: all."""
        node, depth = self._walk(tokens, behind)
        kept = max(held, prefix_tree.locked_depth(node, depth))
        total = -(-len(tokens) // self._tree.block_bytes)
        return (total if more is None else min(total, depth + more)) - kept

    def retain(
        self,
        turn_id: TurnId,
        tokens: Packed,
        now: float,
        *,
        behind: ResumeDepth | None = None,
        awaited: Awaited = Awaited.IN_LINE,
    ) -> None:
        """Keep what of `tokens` is resident for a turn that is here and has not begun: a soft
        reference stands there, in place of the turn's former one, until `release`."""
        node, depth = self._walk(tokens, behind)
        if depth:
            stop = self._tree.stop_at(node, depth, now)
            self._sessions.expect(turn_id, stop, now, awaited=awaited)

    def release(self, turn_id: TurnId) -> None:
        """Let go what a turn retained: it has ended or is gone. One that retained nothing is no
        error."""
        self._sessions.met(turn_id)

    # -- slots to copy out ---------------------------------------------------------------------

    def tokens_of(self, session_id: SessionId) -> Packed:
        """Return the resident tokens of what the session committed; none for one that is
        unknown."""
        session = self._sessions.get(session_id)
        if session is None or session.node is None:
            return b""
        size = self._tree.block_bytes
        return prefix_tree.tokens(session.node, 0, session.depth, block_bytes=size)

    def prefix(self, tokens: Packed) -> ResidentPrefix:
        """Return the leading blocks of `tokens` that are resident."""
        node, depth = self._walk(tokens, None)
        return ResidentPrefix(node, depth, names=self._names)

    def reorder(self, session_id: SessionId) -> None:
        """Have the eviction order look again at what the session stands at: it may be worth
        less."""
        session = self._sessions.get(session_id)
        if session is not None and session.stop is not None:
            self._tree.cool(session.stop)

    # -- what lies below -----------------------------------------------------------------------

    def stored(self, session_id: SessionId, tokens: int) -> None:
        """Note that of the session's first tokens so many can be brought from below the device now,
        more than before or fewer. One that is unknown is no error: nothing of it is here."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        blocks = tokens * TOKEN_BYTES // self._tree.block_bytes
        if blocks != session.stored:
            session.stored = blocks
            self.reorder(session_id)

    # -- what went -----------------------------------------------------------------------------

    def watch(self) -> None:
        """Note, from now on, of which sessions something was evicted, until `take_lost` asks."""
        self._tree.slid = set()

    @property
    def has_lost(self) -> bool:
        """Tell whether `take_lost` has anybody to name."""
        return bool(self._tree.slid)

    def take_lost(self) -> list[SessionId]:
        """List the sessions that lost blocks or point state since the last call, in no order."""
        slid = self._tree.slid
        if not slid:
            return []
        self._tree.slid = set()
        return [session.session_id for stop in slid for session in (stop.anchors or {}).values()]

    def _walk(self, tokens: Packed, behind: ResumeDepth | None) -> tuple[Node, int]:
        limit = len(tokens) // self._tree.block_bytes
        if behind is None:
            return self._tree.walk(tokens, limit)
        return self._tree.walk(tokens, limit, node=behind.node, depth=behind.depth)
