"""An idle session moves between nodes: its state first, ownership after.

    gateway ── Take ──> T ── AskSession ──> S      where it stands: epoch, version, tokens
                        T <══ lends, reads ══ S    landed on T's device, verified; S serves on
                        T ── HandOver ──> S        the same version, and no turn? S stops, and asks
                        T <── Moved ─────── S      the directory; its soft reference goes
    gateway <── SessionTaken  T                    installed: idle here, as if its turn had ended

| T | leaves by | holds |
|---|---|---|
| asking | where it stands; a refusal, silence | nothing |
| bringing | as much is here, or computing it is as good; it did not come; called off | slots |
| handing | `Moved`; a version that moved on: asking, once; refused; 2 s of silence | cached state |

After silence both are guests, and T asks the directory whose the session is.
What is brought and not handed over stays as cached state without a reference: it goes first. One
that T began to hand over is seen to its end, whoever calls it off: S may have asked already.

`Takes` is T's side, `LeavingSessions` S's. A session is named by tokens as caches have them, so a
tenant's salt goes with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol, cast

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Install
from ownerserve.cache.sessions import restorable_tokens
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    NO_NONCE,
    AskSession,
    HandOver,
    Moved,
    Reject,
    RpcAnswer,
    SessionStands,
    SessionTaken,
    Take,
    new_nonce,
)
from ownerserve.node.restore.coming import ANY_TOKEN, USABLE
from ownerserve.node.transfers.lenders import OnEngine
from ownerserve.node.transfers.state_brings import (
    ANSWER_S,
    TOKENS_MAX_BYTES,
    AskedPeer,
    BringingNode,
    StateBrings,
)
from ownerserve.node.vocabulary.events import RestoreOutcome, SessionCame

ROUNDS = 2
"""What S finished meanwhile is brought once more; a session that goes on then stays."""
SETTLES_S = 0.2
"""A turn that has just ended is counted within this time."""


class OwnedAs(Protocol):
    """An `OwnedAs` is what a unit owns of a session."""

    @property
    def epoch(self) -> Epoch:
        """Return the grant."""
        ...

    @property
    def version(self) -> int:
        """Return how many turns its owners finished."""
        ...


class MovingOwner(Protocol):
    """A `MovingOwner` asks the directory (node.ownership); any thread may call."""

    def standing(self, session: SessionId, /) -> OwnedAs | None:
        """Return what is owned of the session now; None: nothing."""
        ...

    def owner_of(self, session: SessionId, /) -> object | None:
        """Return who owns the session, as far as was heard here; None: nothing was."""
        ...

    def hand_over(
        self, asked: HandOver, told: Callable[[Moved | Reject], None], /
    ) -> Reject | None:
        """Give the session up to its target; `told` hears when that is the record. Else return why
        it stays."""
        ...

    def moved_here(self, session: SessionId, epoch: Epoch | None, /) -> None:
        """Ask for a session that may be this unit's now."""
        ...


class MovingEngine(Protocol):
    """A `MovingEngine` is what both sides need of the engine; called on its thread."""

    @property
    def ownership(self) -> MovingOwner:
        """Return who owns here."""
        ...

    def is_live(self, session_id: SessionId) -> bool:
        """Return whether a turn of the session is here, if only in the queue."""
        ...

    def let_go(self, session_id: SessionId) -> RpcAnswer:
        """Have what the session has here go before all else, since it is another's; one that is
        unknown, or runs, is no error."""
        ...

    def met(self, session_id: SessionId, hashed: HashedPrefix) -> None:
        """Know the session as if its last turn had left these whole blocks here."""
        ...


class MovingNode(BringingNode, Protocol):
    """A `MovingNode` brings the state of sessions that come, and puts away that of those that
    leave; called on the engine's thread."""

    def put_away(self, session_id: SessionId, told: Callable[[], None]) -> None:
        """Begin to put an idle session's state into the store; `told` hears once when that is
        over."""
        ...


class LeavingSessions:
    """`LeavingSessions` tells peers where sessions stand that are owned here, and hands them over.
    All calls are made on the engine's thread. `counts` says what came of it: metric labels."""

    def __init__(self, cache: HeteroCache, engine: MovingEngine, on_engine: OnEngine) -> None:
        self.counts: Counter[str] = Counter()
        self._cache = cache
        self._engine = engine
        self._on_engine = on_engine

    def stands(self, asked: AskSession) -> SessionStands | Reject:
        """Tell where the session stands, as its last turn here left it; one that is owned here,
        and of which nothing is left, stands at its beginning. What is another's is refused, and the
        directory asked whether it still is: who is asked again knows."""
        session = self._cache.sessions.get(asked.session_id)
        grant = self._engine.ownership.standing(asked.session_id)
        version = 0 if session is None else session.version
        if grant is None and not version:
            return Reject(WorkerRefusal.UNKNOWN_SESSION)
        if grant is None and self._engine.ownership.owner_of(asked.session_id) is not None:
            # It may be ours since its turn here, and nobody has told us: the directory is asked.
            self._engine.ownership.moved_here(asked.session_id, None)
            return Reject(WorkerRefusal.NOT_OWNER)
        tokens = self._cache.residents.tokens_of(asked.session_id)
        if len(tokens) > TOKENS_MAX_BYTES:
            return Reject(WorkerRefusal.TOO_LONG)
        sealed = 0 if session is None else session.sealed * self._cache.layout.block_tokens
        return SessionStands(
            version if grant is None else grant.version,
            sealed,
            tokens,
            b"" if session is None else session.tip or b"",
            None if grant is None else grant.epoch,
            restorable_tokens(session, self._cache.layout),
        )

    def hand_over(self, asked: HandOver, answer: Future[RpcAnswer]) -> None:
        """Begin to hand the session over, or say why it stays; the answer comes once the directory
        has said whose it is."""
        refused = self._refused(asked)
        if refused is not None:
            self._say(answer, Reject(refused))
            return
        session = self._cache.sessions.get(asked.session_id)
        open_tokens = b"" if session is None else session.tail

        def told(said: Moved | Reject) -> None:
            if isinstance(said, Moved):
                self._let_go(asked.session_id)
                said = Moved(said.epoch, open_tokens)
            self._say(answer, said)

        stays = self._engine.ownership.hand_over(asked, told)
        if stays is not None:
            self._say(answer, stays)

    def _refused(self, asked: HandOver) -> WorkerRefusal | None:
        """Return why the session stays, as far as the cache knows it."""
        session = self._cache.sessions.get(asked.session_id)
        if self._engine.is_live(asked.session_id):
            return WorkerRefusal.SESSION_IS_RUNNING
        if asked.epoch is not None:  # then the grant counts, which the owner looks at
            return None
        if session is None or not session.version:
            return WorkerRefusal.UNKNOWN_SESSION
        return None if session.version == asked.version else WorkerRefusal.STALE_VERSION

    def _let_go(self, session_id: SessionId) -> None:
        try:
            self._on_engine(lambda: self._engine.let_go(session_id))
        except RuntimeError:  # the engine has ended: nothing is kept
            return

    def _say(self, answer: Future[RpcAnswer], said: Moved | Reject) -> None:
        self.counts["moved" if isinstance(said, Moved) else said.reason.value] += 1
        answer.set_result(said)


class _Brought(NamedTuple):
    """What T has of a session: where it stands, and the digests of what is here of it."""

    stands: SessionStands
    hashed: HashedPrefix

    @property
    def is_whole(self) -> bool:
        """Tell whether all whole blocks of the session were at its owner, so that it can be
        installed."""
        tokens = self.hashed.tokens
        return (
            len(tokens) == self.stands.sealed_tokens * TOKEN_BYTES
            and len(tokens) > 0
            and self.hashed.digests[-1] == self.stands.tip
        )


class Takes:
    """`Takes` take sessions over for one node; calls but `counts` are made on the service's thread.
    `counts` says what came of them: metric labels. `handover_s`: for how long those that came were
    nobody's to serve, at most."""

    def __init__(
        self, unit: RoutingUnit, cache: HeteroCache, engine: MovingEngine, *, node: MovingNode,
        on_engine: OnEngine,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter()
        self.handover_s = 0.0
        self._unit = unit
        self._cache = cache
        self._engine = engine
        self._node = node
        self._on_engine = on_engine
        self._brings = StateBrings(node, on_engine, kind="take")
        self._under_way: set[SessionId] = set()

    async def take(self, asked: Take, peer: AskedPeer) -> RpcAnswer:
        """Take the session over, or say why it stays where it is."""
        if asked.source.unit == self._unit:
            return self._over(Reject(WorkerRefusal.WRONG_TARGET))
        if asked.session_id in self._under_way:
            return self._over(Reject(WorkerRefusal.SESSION_IS_MOVING))
        self._under_way.add(asked.session_id)
        try:
            return self._over(await self._taken(asked, peer))
        except RuntimeError:  # the engine has ended
            return Reject(WorkerRefusal.ENGINE_DEAD)
        finally:
            self._under_way.discard(asked.session_id)

    def _over(self, said: SessionTaken | Reject) -> RpcAnswer:
        self.counts["taken" if isinstance(said, SessionTaken) else said.reason.value] += 1
        return said

    async def _taken(self, asked: Take, peer: AskedPeer) -> SessionTaken | Reject:
        said: SessionTaken | Reject = Reject(WorkerRefusal.NOT_BROUGHT)
        for _ in range(ROUNDS):
            brought = await self._brought(asked, peer)
            if isinstance(brought, Reject):
                return brought
            said = await asyncio.shield(self._handed(asked, brought, peer))
            if said != Reject(WorkerRefusal.STALE_VERSION) and said != Reject(
                WorkerRefusal.SESSION_IS_RUNNING
            ):
                break
            await asyncio.sleep(SETTLES_S)
        return said

    async def _brought(self, asked: Take, peer: AskedPeer) -> _Brought | Reject:
        """Ask where the session stands, and bring what of it is there."""
        question = AskSession(asked.session_id)
        stands = await peer.ask(asked.source, question, within_s=ANSWER_S, nonce=NO_NONCE)
        if isinstance(stands, Reject):
            return stands
        if not isinstance(stands, SessionStands):
            return Reject(WorkerRefusal.NO_ANSWER)
        hashed = HashedPrefix(self._cache.layout.block_tokens)
        hashed.grow(stands.tokens)
        if not hashed.digests:
            return _Brought(stands, hashed)
        came = await self._brings.bring(asked.session_id, hashed, asked.source)
        goes_without = came.outcome is RestoreOutcome.NOT_WORTH_IT and not asked.with_state
        if came.outcome not in USABLE and not goes_without:
            here = await asyncio.wrap_future(self._on_engine(lambda: self._restorable(hashed)))
            if cast("int", here) < stands.restorable_tokens:
                return Reject(WorkerRefusal.NOT_BROUGHT)
        return _Brought(stands, hashed)

    def _restorable(self, hashed: HashedPrefix) -> int:
        """Return how many of these tokens a turn could go on from here; on the engine's thread."""
        points = self._cache.match(hashed.tokens + ANY_TOKEN).points
        return max((point.position for point in points if not point.lacks), default=0)

    async def _handed(
        self, asked: Take, brought: _Brought, peer: AskedPeer
    ) -> SessionTaken | Reject:
        """Ask the owner to hand the session over, and install it."""
        session, stands = asked.session_id, brought.stands
        question = HandOver(session, stands.version, self._unit, stands.epoch)
        asked_s = time.monotonic()
        said = await peer.ask(asked.source, question, within_s=ANSWER_S, nonce=new_nonce())
        if isinstance(said, Moved):
            installed = self._on_engine(lambda: self._install(session, brought, said))
            tokens = cast("int", await asyncio.wrap_future(installed))
            self.handover_s += time.monotonic() - asked_s
            return SessionTaken(stands.version, tokens, said.epoch)
        if isinstance(said, Reject) and said.reason is not WorkerRefusal.NO_ANSWER:
            return said
        if stands.epoch is not None:  # it may be ours: the directory is asked
            self._engine.ownership.moved_here(session, None)
        return Reject(WorkerRefusal.NO_ANSWER)

    def _install(self, session_id: SessionId, brought: _Brought, moved: Moved) -> int:
        """Make the session this node's, on the engine's thread: as its owners left it, unless a
        turn of it is here, or was, that went further. Return how many of its tokens a turn could go
        on from."""
        if moved.epoch is not None:
            self._engine.ownership.moved_here(session_id, moved.epoch)
        sessions, layout = self._cache.sessions, self._cache.layout
        known, hashed = sessions.get(session_id), brought.hashed
        is_further = known is not None and known.sealed > len(hashed.digests)
        if brought.is_whole and not is_further:
            # A turn left it, if only a guest's, which its owner's version does not count.
            version, tip = max(1, brought.stands.version), hashed.digests[-1]
            there = Install(session_id, version, hashed.tokens, moved.open_tokens, tip)
            if self._cache.install(there, time.monotonic()) is None:
                self._engine.met(session_id, hashed)
                self._node.came(SessionCame(session_id, hashed))
        return restorable_tokens(sessions.get(session_id), layout)
