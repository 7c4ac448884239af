"""An `Ownership` is the thread that keeps one unit's `OwnerState` and asks the directory for it.

    engine's thread ── came, left, over ──> inbox ── each FLUSH_S ──> one frame ──> directory
    engine's thread ── release ──> door, OwnerState <────── answers ───────────────────────┘
    any thread <── standing ──────────┘

The engine never waits: what it tells goes into a queue, and who owns what is read from memory. What
others ask of a session is decided at once, under a lock that is never held while one waits. A
directory that is away or hung holds up this thread alone; the lease then ends by this unit's own
clock, turns are served as a guest, and what is still true is told once it answers again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

from ownerserve.directory.messages import (
    Advance,
    Advanced,
    Bound,
    Conflict,
    DirectoryRefusal,
    Dropped,
    Leased,
    Outcome,
    Publish,
    Refused,
    Request,
    Retired,
    Transfer,
)
from ownerserve.directory.owner.doors import GuardedOwner
from ownerserve.directory.owner.state import (
    Asks,
    OwnerPhase,
    OwnerState,
    SessionGrant,
    SessionTip,
    is_ahead,
    is_for_later,
)
from ownerserve.directory.port import Directory
from ownerserve.directory.rules import MAIN_KINDS, Kinds, TierCode
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import HandOver, Moved, Reject, Released, ReleaseSession
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.publishing import Publishing
from ownerserve.node.vocabulary.chains import Chains

log = logging.getLogger("ownerserve.node")

FLUSH_S = 0.05
"""What is told within this time goes as one frame."""

LOOK_S = 0.5
"""How often an idle unit looks whether something is due."""

AT_ONCE_S = 0.001
"""How long one that has more to publish waits for what else is told."""

PAUSE_S = 0.5
"""Between a fault and the next try."""

MARGIN_S = 0.1
"""By how much this unit's clock may drift from the directory's over one lease."""


class TurnCame(msgspec.Struct, frozen=True, gc=False):
    """A `TurnCame` tells that a turn of the session is here. `parent` is the session that this one
    was forked from; `epoch` the highest under which its gateway knows the session to be owned."""

    session: SessionId
    parent: SessionId | None = None
    epoch: Epoch | None = None


class TurnLeft(msgspec.Struct, frozen=True, gc=False):
    """A `TurnLeft` tells that a turn of the session has ended and left it at the last whole block
    of `tokens`. `group` names prefixes that share a repository or document; `tenant` is the salt of
    the tenant whose state it is; `before`, how many turns its owners are known to have finished
    before it."""

    session: SessionId
    tokens: Packed
    group: str = ""
    tenant: bytes = b""
    before: int = 0


class SessionLeft(msgspec.Struct, frozen=True, gc=False):
    """A `SessionLeft` tells that the session is over."""

    session: SessionId


class _MovedHere(msgspec.Struct, frozen=True, gc=False):
    """A `_MovedHere` names a session that may be this unit's now, under `epoch` where that was
    said."""

    session: SessionId
    epoch: Epoch | None


class _Leaves(msgspec.Struct, frozen=True, gc=False):
    """A `_Leaves` carries what is to be asked of the directory for a session that was given up on
    the engine's thread."""

    asks: Asks


Told: TypeAlias = TurnCame | TurnLeft | SessionLeft | _MovedHere | _Leaves
MoveTold: TypeAlias = Callable[[Moved | Reject], None]
"""Hears once what came of a hand-over; on any thread, it must neither wait nor raise."""


def boot_time_s() -> float:
    """Return the seconds since this machine started, suspended ones included: a lease ends while we
    sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class OwnerIs(msgspec.Struct, frozen=True):
    """An `OwnerIs` names a session's owner and its epoch. `version` is the number of turns that
    were finished; None where another unit owns the session, since only the owner tells it."""

    unit: RoutingUnit
    epoch: Epoch
    version: int | None = None


class Owning(Protocol):
    """An `Owning` takes what an engine tells of its sessions and answers who owns them."""

    def tell(self, told: Told) -> None:
        """Take a word about a session; never waits."""
        ...

    def standing(self, session: SessionId) -> SessionGrant | None:
        """Return what this unit owns of the session now; None: it serves the session as a guest."""
        ...

    def prefix_name(self, digest: PrefixHash, session: SessionId) -> PrefixHash:
        """Return the name that grants use for the session's prefix of this digest."""
        ...

    def owner_of(self, session: SessionId) -> OwnerIs | None:
        """Return the session's owner, as far as was heard here; None: nothing was heard."""
        ...

    def release(self, asked: ReleaseSession) -> Released | Reject:
        """Give the session up to its target, or end it."""
        ...

    def hand_over(self, asked: HandOver, told: MoveTold) -> Reject | None:
        """Give the session up to its target, which has its state; `told` hears when that is the
        record. Else return why it stays."""
        ...

    def moved_here(self, session: SessionId, epoch: Epoch | None) -> None:
        """Ask for a session whose owner was asked to hand it over to this unit, and has, under
        `epoch`; None: it has not said."""
        ...

    def start(self) -> None:
        """Begin to serve what is told."""
        ...

    def close(self, *, within_s: float) -> None:
        """Give everything back within `within_s` seconds, as far as that goes."""
        ...


class Unowned:
    """`Unowned` stands for no directory: its worker owns nothing, and gateways keep its sessions
    themselves."""

    def tell(self, told: Told) -> None: ...
    def standing(self, session: SessionId) -> SessionGrant | None:
        return None

    def prefix_name(self, digest: PrefixHash, session: SessionId) -> PrefixHash:
        return digest

    def owner_of(self, session: SessionId) -> OwnerIs | None:
        return None

    def release(self, asked: ReleaseSession) -> Released | Reject:
        return Released()

    def hand_over(self, asked: HandOver, told: MoveTold) -> Reject | None:
        told(Moved())
        return None

    def moved_here(self, session: SessionId, epoch: Epoch | None) -> None: ...

    def start(self) -> None: ...
    def close(self, *, within_s: float) -> None: ...


class Ownership:
    """An `Ownership` keeps the sessions that one unit owns, and runs the thread that asks the
    directory for them.

    `open_directory` is called on that thread; digests of what turns left are made there too,
    `block_tokens` tokens a block.
    """

    def __init__(
        self,
        unit: RoutingUnit,
        open_directory: Callable[[], Directory],
        *,
        block_tokens: int,
        scope: bytes,
        inventory: Inventory | None = None,
        kinds: Kinds = MAIN_KINDS,
    ) -> None:
        """Make it, not started. `scope` is a digest of all else that state follows from beside its
        tokens (publishing.extent_name); `inventory` holds what the directory is to know of this
        unit; None: only the tips of its finished turns are told."""
        self.owner = OwnerState(unit, margin_s=MARGIN_S)
        self._guarded = GuardedOwner(self.owner)
        self._lock = threading.RLock()
        """Held by whoever changes `owner`: this unit's thread, and the engine's as it releases."""
        self._to_count: Counter[SessionId] = Counter()
        """Turns that are told and not counted yet: their sessions are not given up before."""
        self._moving: dict[SessionId, MoveTold] = {}
        """`_moving` has who hears of each session that is handed over to who has its state."""
        self.answers: Counter[str] = Counter()
        """Outcomes by name, refusals by reason: metric labels. Written by the thread alone."""
        self.frames = 0
        self._open_directory = open_directory
        self._chains = Chains(block_tokens, block_bytes=block_tokens * TOKEN_BYTES)
        holds = Inventory() if inventory is None else inventory
        self.publishing = Publishing(unit, holds, scope=scope, digest_at=self._digest_at)
        self._memory: Term | None = None
        """The directory's that was told of what is held here."""
        self._block_tokens = block_tokens
        self._kinds = kinds
        self._inbox: Queue[Told | None] = Queue()  # a SimpleQueue can sleep past its timeout
        self._closing = threading.Event()
        self._is_failing = False
        """Whether the last try met a fault."""
        self._thread = threading.Thread(target=self._run, name="ownership", daemon=True)

    def start(self) -> None:
        """Start the thread that asks the directory."""
        self._thread.start()

    def close(self, *, within_s: float) -> None:
        """Give everything back, if the directory answers within `within_s` seconds, and stop the
        thread."""
        self._closing.set()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(within_s)

    # ---- told by the engine's thread

    def tell(self, told: Told) -> None:
        """Queue the word for the thread; never waits for the directory. The epoch that a turn's
        line names counts at once."""
        with self._lock:
            if isinstance(told, TurnLeft) and self._will_count(told):
                self._to_count[told.session] += 1
            elif isinstance(told, TurnCame) and told.epoch is not None:
                self._guarded.hear(told.session, told.epoch)
        self._inbox.put(told)

    def standing(self, session: SessionId) -> SessionGrant | None:
        """Return what this unit owns of the session now, with turns that are told and not counted
        yet in its version; None: the unit serves it as a guest."""
        with self._lock:
            grant = self.owner.may_serve(session, boot_time_s())
            more = self._to_count[session]
        return grant if grant is None or not more else replace(grant, version=grant.version + more)

    def prefix_name(self, digest: PrefixHash, session: SessionId) -> PrefixHash:
        """Return the name that grants use for the session's prefix of this digest."""
        return self.publishing.name(digest, session)

    def owner_of(self, session: SessionId) -> OwnerIs | None:
        """Return the session's owner, as far as was heard here: this unit, or the unit whose guests
        its turns are. None: nothing was heard."""
        grant = self.standing(session)
        if grant is not None:
            return OwnerIs(self.owner.unit, grant.epoch, grant.version)
        with self._lock:
            other = self._guarded.other_owner(session)
        return None if other is None else OwnerIs(*other)

    def release(self, asked: ReleaseSession) -> Released | Reject:
        """Give a session of which no turn runs here up to its target, or end it: it is not ours at
        once, and the directory is asked for that until it answers or the lease is over. Rejected
        while turns of it are not counted yet."""
        if asked.epoch is None:
            return Released()
        with self._lock:
            leaving = self._released(asked.session_id, asked.epoch, asked.target)
        if isinstance(leaving, WorkerRefusal):
            return Reject(leaving)
        self._inbox.put(_Leaves(leaving))
        return Released()

    def hand_over(self, asked: HandOver, told: MoveTold) -> Reject | None:
        """Give a session of which no turn runs here up to its target, if its version is still the
        one that the target has: it is not ours at once. `told` hears when the directory has
        answered, unless the lease ends before. Else return why it stays."""
        session, epoch = asked.session_id, asked.epoch
        if epoch is None:
            return Reject(WorkerRefusal.STALE_EPOCH)
        with self._lock:
            grant = self.owner.grants.get(session)
            if grant is not None and grant.epoch == epoch and grant.version != asked.version:
                return Reject(WorkerRefusal.STALE_VERSION)
            leaving = self._released(session, epoch, asked.target)
            if isinstance(leaving, WorkerRefusal):
                return Reject(leaving)
            self._moving[session] = told
        self._inbox.put(_Leaves(leaving))
        return None

    def moved_here(self, session: SessionId, epoch: Epoch | None) -> None:
        """Ask for a session whose owner was asked to hand it over to this unit, and has, under
        `epoch`; None: it has not said."""
        self._inbox.put(_MovedHere(session, epoch))

    def _released(
        self, session: SessionId, epoch: Epoch, target: RoutingUnit | None
    ) -> Asks | WorkerRefusal:
        """Give the session up, unless turns of it are not counted yet; under the lock."""
        if session in self._to_count and session in self.owner.grants:
            return WorkerRefusal.SESSION_IS_RUNNING
        return self._guarded.release(session, epoch, target, now_s=boot_time_s())

    @property
    def phase(self) -> OwnerPhase:
        """`phase` is where the unit stands with the directory."""
        return self.owner.phase

    # ---- the thread

    def _run(self) -> None:
        """Run rounds until `close`, as the thread's root: an exception costs a round and never the
        thread."""
        goes_on = True
        while goes_on:
            try:
                self._rounds()
                goes_on = False
            except Exception:  # noqa: BLE001 - the root of the thread: it is logged there
                self._failed("the unit's word with the directory fails: it begins again")
                goes_on = not self._closing.is_set()

    def _rounds(self) -> None:
        """Open the directory, ask it until it is time to go, and give everything back."""
        directory = self._open_directory()
        try:
            while self._round(directory):
                pass
            self._leave(directory)
        finally:
            directory.close()

    def _round(self, directory: Directory) -> bool:
        """Take what was told and ask what is due; False: it is time to go."""
        told, goes_on = self._gather()
        self._ask(self._due(told), directory)
        return goes_on

    def _due(self, told: Sequence[Told]) -> Asks:
        """Return what is to be asked of the directory after all that was told."""
        asks = [ask for one in _with_parents(told) for ask in self._taken(one)]
        now_s = boot_time_s()
        with self._lock:
            asks += self.owner.tick(now_s)
            if asks:
                asks += self._guarded.along(now_s)
            given_up = self._moving.keys() - self.owner.leaving() if self._moving else ()
            dropped = [self._moving.pop(session) for session in given_up]
        for hears in dropped:  # the lease is over: whose it is, is not known here
            hears(Reject(WorkerRefusal.NO_ANSWER))
        return asks

    def _taken(self, told: Told) -> Asks:
        """Return what one thing told asks for. A fault loses that one word, not those beside it."""
        try:
            tip = self._tip(told) if isinstance(told, TurnLeft) else None
            with self._lock:
                asks = self._take(told, tip, boot_time_s())
                self._count_off(told)
            return asks
        except Exception:  # noqa: BLE001 - it is logged there
            self._count_off(told)  # else its session stays for ever
            self._failed("what was told of a session is lost")
            return []

    def _count_off(self, told: Told) -> None:
        """Count a turn that was told no longer as still to be counted."""
        if isinstance(told, TurnLeft) and self._will_count(told):
            with self._lock:
                self._to_count -= Counter([told.session])

    def _will_count(self, left: TurnLeft) -> bool:
        """Return whether the turn left at least a block: with less there is nothing to advance
        to."""
        return len(left.tokens) >= self._block_tokens * TOKEN_BYTES

    def _gather(self) -> tuple[list[Told], bool]:
        """Return what is told within FLUSH_S of the first word, and whether to go on."""
        told: list[Told] = []
        wait_s, until_s = AT_ONCE_S if self._may_publish_more else LOOK_S, float("inf")
        while wait_s > 0:
            try:
                one = self._inbox.get(timeout=wait_s)
            except Empty:
                break
            if one is None:
                return told, False
            if not told:
                until_s = boot_time_s() + FLUSH_S
            told.append(one)
            wait_s = until_s - boot_time_s()
        return told, True

    def _tip(self, left: TurnLeft) -> SessionTip | None:
        """Return where a turn left its session, and note its group and tenant; None: it left less
        than a block."""
        hashed = self._chains.digests(left.tokens, left.session)
        if not hashed:
            return None
        self.publishing.belongs(left.session, group=left.group, tenant=left.tenant)
        name = self.publishing.name(hashed[-1], left.session)
        tokens = len(hashed) * self._block_tokens
        return SessionTip(name, tokens, TierCode.DEVICE, self._kinds, left.group, left.before)

    def _digest_at(self, session: SessionId, tokens: int) -> PrefixHash | None:
        """Return the digest of the session's first so many tokens, as its last turn here left them;
        None where it is not known."""
        depth, rest = divmod(tokens, self._block_tokens)
        return None if rest else self._chains.digest_at(session, depth)

    def _take(self, told: Told, tip: SessionTip | None, now_s: float) -> Asks:
        match told:
            case TurnCame(session, parent, epoch):
                return self._guarded.came(session, now_s, parent=parent, epoch=epoch)
            case TurnLeft(session):
                if tip is not None:
                    return self._guarded.left(session, tip, now_s)
                self._guarded.served(session, now_s)
                return []
            case _MovedHere(session, epoch):
                return self._guarded.moved_here(session, now_s, epoch=epoch)
            case SessionLeft(session):
                return self._guarded.over(session, now_s)
            case _Leaves(asks):
                return asks

    def _ask(self, asks: Asks, directory: Directory) -> None:
        """Send one frame, and one more for what its answers ask for. News of the inventory goes
        with them, and alone only where it is more than one message takes."""
        while asks or self._may_publish_more:
            published = self._published(asks)
            requests = [*(ask.request for ask in asks), *published]
            if not requests:
                return
            outcomes = self._execute(requests, directory)
            now_s, more = boot_time_s(), Asks()
            for ask, outcome in zip(asks, outcomes, strict=False):
                with self._lock:
                    more += self._guarded.answered(ask, outcome, now_s)
                self._note(ask.request, outcome)
            for outcome in outcomes[len(asks) :]:
                self.publishing.answered(outcome)
            if not more:
                return
            asks = more

    @property
    def _may_publish_more(self) -> bool:
        return self.phase is OwnerPhase.LIVE and self.publishing.has_backlog

    def _published(self, asks: Asks) -> tuple[Publish, ...]:
        """Return what the directory is to know of the inventory, beside what `asks` tell of it."""
        if self.phase is not OwnerPhase.LIVE:
            return ()
        requests = [ask.request for ask in asks]
        busy = {told.session_id for told in requests if isinstance(told, Advance)}
        told = self.publishing.next(seen=self.owner.seen, ours=self.owner.grants, busy=busy)
        return () if told is None else (told,)

    def _note(self, request: Request, outcome: Outcome) -> None:
        """Tell `publishing` what an answer says of what the directory knows to be here."""
        if isinstance(request, Advance) and isinstance(outcome, Advanced):
            self.publishing.claimed(request, outcome.duty)
        elif isinstance(outcome, Leased) and outcome.memory != self._memory:
            self._memory = outcome.memory
            self.publishing.forgotten()
        elif isinstance(request, Transfer) and (said := end_of_move(request, outcome)) is not None:
            with self._lock:
                told = self._moving.pop(request.session_id, None)
            if told is not None:
                told(said)

    def _leave(self, directory: Directory) -> None:
        """Drop the copies held here from the directory and retire the unit, so that what it owns is
        free."""
        with self._lock:
            asks = self.owner.retire(boot_time_s())
        if not asks:
            return
        last_copies = 0
        for drops in self.publishing.leaving():
            dropped = self._execute(drops, directory)
            if not any(isinstance(one, Dropped) for one in dropped):
                break  # the lease runs out by itself
            last_copies += dropped.count(Refused(DirectoryRefusal.LAST_COPY))
        if last_copies:
            log.warning("%d last copies that sessions stand on leave with this worker", last_copies)
        (outcome,) = self._execute([ask.request for ask in asks], directory)
        if not isinstance(outcome, Retired):
            log.warning("the directory has not heard that this worker leaves: its lease runs out")

    def _execute(self, requests: Sequence[Request], directory: Directory) -> list[Outcome]:
        """Send one frame and return its outcomes. A directory that fails counts as unreachable, and
        is asked again."""
        self.frames += 1
        try:
            outcomes = directory.execute(requests)
            if len(outcomes) != len(requests):
                raise InvariantViolated(f"{len(outcomes)} answers to {len(requests)} requests")
            self._is_failing = False
        except Exception:  # noqa: BLE001 - whatever a backend raises: it is logged there
            self._failed("the directory fails: asked again until it answers")
            outcomes = [Refused(DirectoryRefusal.UNREACHABLE) for _ in requests]
        self.answers.update(map(_label, outcomes))
        return outcomes

    def _failed(self, what: str) -> None:
        """Count a fault, log the first of a row, and pause for PAUSE_S."""
        self.answers["failed"] += 1
        if not self._is_failing:
            log.exception("%s", what)
        self._is_failing = True
        self._closing.wait(PAUSE_S)


def _with_parents(told: Sequence[Told]) -> list[Told]:
    """Return `told`, where each `TurnCame` names the parent that any of its session's names.

    A session is asked for at the first of these words, and the directory counts a fork only then;
    an engine whose turns and their lines come on two ways may hear of the turn first.
    """
    came = [one for one in told if isinstance(one, TurnCame)]
    parents = {one.session: one.parent for one in came if one.parent is not None}
    return [
        replace(one, parent=parents[one.session])
        if isinstance(one, TurnCame) and one.session in parents
        else one
        for one in told
    ]


def end_of_move(request: Transfer, outcome: Outcome) -> Moved | Reject | None:
    """Return what the target of a hand-over hears once the directory has answered; None: nothing is
    decided yet, and it is asked again."""
    if is_for_later(outcome) or is_ahead(request, outcome):
        return None
    if isinstance(outcome, Bound):
        return Moved(outcome.epoch)
    if isinstance(outcome, Conflict) and outcome.current.owner == request.target:
        return Moved(outcome.current.epoch)  # an earlier attempt's answer was lost
    is_conflict = isinstance(outcome, Conflict)
    return Reject(WorkerRefusal.STALE_EPOCH if is_conflict else WorkerRefusal.WRONG_TARGET)


def _label(outcome: Outcome) -> str:
    return outcome.reason.value if isinstance(outcome, Refused) else type(outcome).__name__.lower()
