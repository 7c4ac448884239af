"""This module holds what the router remembers of each session, in bounded memory, and which state
lies where.

**Sessions**: where a session's next turn goes and whose it is, how many bytes its tokens take,
which prefix it stands on. Losing an entry costs a cache hit, never a right answer. Two facts, told
apart by what makes them true:

    owner   who may change the session for others: the directory's word, else the worker that began
            to answer its newest turn
    home    where the next turn goes: where the newest dispatch went, until the first byte settles
            it; from then on, and when the dispatch comes to nothing, the owner

            send            answered                    send            lost
    w0 ───────────> home w1 ────────> owner, home w1    ───> home w2 ────────> home w1 again
    owner w0        owner w0

Each is good for one life of a worker, so that a restart unbinds all its sessions at once without a
look at any of them.

**Prefixes**: a dated copy of what workers and directory know of where state lies. Owns no truth.
Each copy is one extent, (prefix, [0, tokens), holder), never one a block. Losing one costs a cache
hit; believing a wrong one costs a cache hit too, since the worker has the word.

    a worker's copy is good while    device, host   its life is the one in which it was told
                                     disk           its worker is up: a later life re-adopts it
    the shared store's copy          always
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Epoch, Tier
from ownerserve.router.requests.body import Usage, bytes_per_token
from ownerserve.router.worker import Load, Receipt, Worker

COPIES_MAX = 8
"""Copies remembered of one prefix; the one told longest ago is forgotten first."""


CLEAN_MIN = 1024
"""An index of fewer names than this is not worth cleaning."""


class Use(enum.Enum):
    """A use says what a worker does with a copy below its device when a turn comes, by its own
    word."""

    BY_PRICE = "by_price"
    """The worker has not said: the router prices both."""
    LOADED = "loaded"
    """The worker loads the copy, whatever the router's prices say."""
    LEFT = "left"
    """The worker computes what the copy has: that is cheaper by its own prices."""


class Copy(msgspec.Struct, frozen=True, gc=False):
    """A copy says that tokens [0, tokens) lie in `tier` of `worker`; None: in the store that all
    workers share."""

    worker: Worker | None
    life: int
    tier: Tier
    tokens: int
    use: Use = Use.BY_PRICE

    def is_good(self) -> bool:
        """Return whether it can be used now (invariant 6: what is resident decides, nothing
        else). What is drained gets no turn, and is read by others still."""
        worker = self.worker
        if worker is None:
            return True
        answers = worker.up or (worker.is_drained and self.tier in worker.profile.lends)
        return answers and (self.life == worker.life or self.tier is Tier.DISK)


class Prefix:
    """A prefix is a chain of tokens and who holds it, shared by all sessions that stand on it
    (forks).

    `refs` sessions stand on it. One alone may grow it; with more, the session that goes on gets a
    prefix of its own and this one stays as it is: copy-on-write (seed 000 §3.6.6, rules 1 and 3).
    """

    __slots__ = ("copies", "hash", "refs", "spec_digest", "tokens")

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens
        self.copies: tuple[Copy, ...] = ()
        self.hash: PrefixHash | None = None
        self.refs = 1
        self.spec_digest = ""
        """The spec digest of the workers that hold it; under another digest it is another state."""

    def grow(self, worker: Worker, tokens: int) -> None:
        """Note that a turn has left [0, tokens) on the device of `worker`."""
        digest = worker.profile.spec_digest
        if tokens < self.tokens or digest != self.spec_digest:
            self.copies = ()  # an edited history, or another numerics: others hold other state
            self.spec_digest = digest
        self.tokens = tokens
        self.hold(worker, Tier.DEVICE, tokens)

    def hold(
        self, worker: Worker | None, tier: Tier, tokens: int, *, use: Use = Use.BY_PRICE
    ) -> None:
        """Note that `worker` holds [0, tokens) in `tier`; this replaces what was known of the same
        place."""
        copy = Copy(worker, 0 if worker is None else worker.life, tier, tokens, use)
        copies = self.copies
        if copies and (
            len(copies) > 1 or copies[0].worker is not worker or copies[0].tier is not tier
        ):
            self.drop(worker, tier)
            self.copies = (copy, *self.copies[: COPIES_MAX - 1])
        else:
            self.copies = (copy,)  # as for most: nobody else holds it
        if tokens > self.tokens:
            self.tokens = tokens

    def drop(self, worker: Worker | None, tier: Tier) -> None:
        """Forget the copy in `tier` of `worker`, which is gone."""
        self.copies = tuple(
            [copy for copy in self.copies if copy.worker is not worker or copy.tier is not tier]
        )


class PrefixIndex:
    """The index finds prefixes by their hash, as long as some session stands on them.

    Those that nobody stands on any more are let go when they may be half of all: a turn names its
    prefix anew, and a dictionary of weak references would cost it more than all else here.
    """

    def __init__(self) -> None:
        self._by_hash: dict[PrefixHash, Prefix] = {}
        self._clean_at = CLEAN_MIN

    def __len__(self) -> int:
        return len(self._by_hash)

    def get(self, prefix_hash: PrefixHash) -> Prefix | None:
        """Return what is known of the prefix; None: nothing is."""
        prefix = self._by_hash.get(prefix_hash)
        return prefix if prefix is not None and prefix.refs > 0 else None

    def name(self, prefix: Prefix, prefix_hash: PrefixHash) -> None:
        """Let `prefix_hash` name `prefix`, which ends in it now, in place of its former hash."""
        by_hash = self._by_hash
        former = prefix.hash
        if former is not None and by_hash.get(former) is prefix:
            del by_hash[former]
        prefix.hash = prefix_hash
        by_hash[prefix_hash] = prefix
        if len(by_hash) >= self._clean_at:
            self._by_hash = {name: one for name, one in by_hash.items() if one.refs > 0}
            self._clean_at = max(CLEAN_MIN, 2 * len(self._by_hash))


DEFAULT_BYTES_PER_TOKEN = 4.0
"""Until a session has shown its own ratio (English text and code lie between 3 and 5)."""

_NEVER = float("-inf")

OUTPUT_WEIGHT = 0.3
"""Share of the newest answer in the expected length of the next."""

SESSIONS_MAX = 131_072


class Grant(msgspec.Struct, frozen=True, gc=False):
    """A grant is the last word heard of who owns a session: `owner` in its life `life`, under
    `epoch`, after `version` finished turns."""

    owner: Worker
    life: int
    epoch: Epoch
    version: int

    @property
    def live_owner(self) -> Worker | None:
        """The owner, if it is up, or drained, which answers too, and in the life in which it became
        the owner; else None."""
        owner = self.owner
        answers = owner.up or owner.is_drained
        return owner if answers and owner.life == self.life else None


class RoutedSession:
    """A routed session has its owner in the life `owner_life` and its home in `home_life`; None:
    none yet.

    `heading` is the dispatch that made its home another than its owner may be: sent, and without
    a first byte so far. `prefix` is what its last turn left; `stem` the prefix that it was forked
    from. `turns` counts those that are under way or were answered. `pending` are the parts of its
    own live dispatches. `moved_at_s`: when it last changed its owner for load's sake or in a gap;
    `left_at_s`: when it was last sent away, while that is not settled.
    """

    __slots__ = (
        "answered_by", "bytes_per_token", "emptied", "epoch", "grant", "heading", "home",
        "home_life", "idle_since_s", "is_forgotten", "is_handed_over", "left_at_s", "moved_at_s",
        "output_tokens", "owner", "owner_life", "pending", "prefix", "prompt_tokens", "seen_at_s",
        "stem", "stem_tokens", "turns",
    )  # fmt: skip

    def __init__(self, now_s: float) -> None:
        self.owner: Worker | None = None
        self.owner_life = 0
        self.home: Worker | None = None
        self.home_life = 0
        self.heading: Receipt | None = None
        self.answered_by = 0
        """The newest dispatch that a worker began to answer."""
        self.emptied: Worker | None = None
        """The worker that said last that nothing of the session is left on its device."""
        self.is_forgotten = False
        """Whether the table has let it go: it binds nobody any more."""
        self.epoch: Epoch | None = None
        """The highest that was heard; `grant` is that one's, until its owner gives it up."""
        self.grant: Grant | None = None
        self.is_handed_over = False
        """Whether who had it under `epoch` has given it up: what names that one came late."""
        self.prefix: Prefix | None = None
        self.stem: Prefix | None = None
        self.stem_tokens = 0
        self.bytes_per_token = DEFAULT_BYTES_PER_TOKEN
        self.prompt_tokens = 0
        """The prompt of its last counted turn, without the answer."""
        self.output_tokens = 0.0
        self.pending: tuple[tuple[Worker, Load], ...] = ()
        self.turns = 0
        self.seen_at_s = self.idle_since_s = now_s
        self.moved_at_s = self.left_at_s = _NEVER

    @property
    def live_owner(self) -> Worker | None:
        """The owner, if it is up and in the life in which it became the owner; else None."""
        owner = self.owner
        if owner is None or not owner.up or owner.life != self.owner_life:
            return None
        return owner

    @property
    def live_home(self) -> Worker | None:
        """The worker where the next turn goes: the home, if it is up and in that life, else the
        live owner."""
        home = self.home
        if home is None or not home.up or home.life != self.home_life:
            return self.live_owner
        return home

    @property
    def last_move_s(self) -> float:
        """When the session last left for load's sake, in seconds; a leaving that came to nothing
        does not count."""
        return self.left_at_s if self.left_at_s > self.moved_at_s else self.moved_at_s

    def pending_at(self, worker: Worker) -> int:
        """Return the prefill tokens of the session's own live turns that `worker` has not begun to
        answer."""
        return sum(load.prefill_tokens for where, load in self.pending if where is worker)

    def ended(self, loads: tuple[Load, ...]) -> None:
        """Take the loads of a dispatch that is over out of `pending`."""
        self.pending = tuple(
            [part for part in self.pending if not any(part[1] is load for load in loads)]
        )

    @property
    def known_tokens(self) -> int:
        """How many tokens of the session's context were computed once, wherever they lie now."""
        return self.stem_tokens if self.prefix is None else self.prefix.tokens

    def copies(self) -> tuple[Copy, ...]:
        """Return the copies of the beginning of its context that can be used now."""
        prefix, stem = self.prefix, self.stem
        every = () if prefix is None else prefix.copies
        if stem is not None:
            every += stem.copies
        for copy in every:
            if not copy.is_good():
                return tuple([copy for copy in every if copy.is_good()])
        return every

    def fork(self, parent: Prefix, tokens: int) -> None:
        """Stand on the first `tokens` of another session's prefix; what is added is its own."""
        self._leave_stem()
        parent.refs += 1
        self.stem, self.stem_tokens = parent, min(tokens, parent.tokens)

    def grow(self, worker: Worker, usage: Usage, *, prompt_bytes: int) -> None:
        """Note a finished turn: the context that `worker` holds now, and the session's bytes a
        token from the `prompt_bytes` (0: not known) that its prompt took."""
        self.prompt_tokens = usage.prompt_tokens
        self.emptied = None
        learnt = bytes_per_token(prompt_bytes, usage.prompt_tokens)
        if learnt is not None:
            self.bytes_per_token = learnt
        weight = OUTPUT_WEIGHT if self.output_tokens else 1.0
        self.output_tokens += weight * (usage.output_tokens - self.output_tokens)
        stem = self.stem
        if stem is not None and usage.prompt_tokens >= self.stem_tokens:
            stem.hold(worker, Tier.DEVICE, self.stem_tokens)  # a replica, made on the way
        prefix = self.prefix
        if prefix is None or prefix.refs > 1:
            if prefix is not None:  # others stand on it: it becomes this one's stem too
                self.fork(prefix, prefix.tokens)
                prefix.refs -= 1
            prefix = self.prefix = Prefix()
        prefix.grow(worker, usage.prompt_tokens + usage.output_tokens)

    def lent(self, prefill: Worker, tokens: int) -> None:
        """Note that `prefill` computed the prompt for another worker and still holds it, unless it
        frees such."""
        if self.prefix is not None and not prefill.profile.frees_prompts:
            self.prefix.hold(prefill, Tier.DEVICE, tokens)

    def released(self, source: Copy | None) -> None:
        """Note that a migration's source gave up its copy."""
        if self.prefix is not None and source is not None:
            self.prefix.drop(source.worker, source.tier)

    def leave(self) -> None:
        """Leave its prefixes, as the session ends: others may still stand on them."""
        self._leave_stem()
        if self.prefix is not None:
            self.prefix.refs -= 1
            self.prefix = None

    def _leave_stem(self) -> None:
        if self.stem is not None:
            self.stem.refs -= 1
            self.stem, self.stem_tokens = None, 0


class SessionTable:
    """The table holds sessions by id, least recently used first: at most `limit`, none idle for
    over `idle_s`.

    Owns the binding on both sides: `session.home` and the worker's `bound_sessions`.
    """

    def __init__(self, *, limit: int = SESSIONS_MAX, idle_s: float = 4 * 3600.0) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._sessions: OrderedDict[SessionId, RoutedSession] = OrderedDict()
        self._aliases: OrderedDict[SessionId, SessionId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> Iterator[tuple[SessionId, RoutedSession]]:
        """Give each session with its name."""
        return iter(self._sessions.items())

    def newest(self) -> Iterator[tuple[SessionId, RoutedSession]]:
        """Give each session with its name, the most recently used one first."""
        return reversed(self._sessions.items())

    def resolve(self, session: SessionId) -> SessionId:
        """Return the session that a response alias stands for; any other name is its own."""
        return self._aliases.get(session, session)

    def get(self, session: SessionId) -> RoutedSession | None:
        """Return the session; None when it is not known."""
        return self._sessions.get(session)

    def touch(self, session: SessionId, now_s: float) -> RoutedSession:
        """Return the session, made when it is new, as the most recently used one."""
        known = self._sessions.get(session)
        if known is None:
            self._make_room(now_s)
            known = self._sessions[session] = RoutedSession(now_s)
        else:
            self._sessions.move_to_end(session)
        known.seen_at_s = now_s
        return known

    def send(self, session: RoutedSession, worker: Worker, receipt: Receipt) -> None:
        """Bind the session's home to `worker`, in its present life, to which the dispatch `receipt`
        goes."""
        self._move_home(session, worker, worker.life)
        session.heading = receipt

    def answered(self, session: RoutedSession, worker: Worker, receipt: Receipt) -> Worker | None:
        """Note that `worker` began to answer that dispatch: it owns the session, unless a later
        dispatch was answered before. Return the worker that owned it until now, and answers still;
        None: there is none, or it is the same."""
        if session.is_forgotten:
            return None
        former = None
        if receipt >= session.answered_by:
            former = _answering_owner(session)
            session.answered_by = receipt
            if session.home is worker and not _is_in(worker, session.owner, session.owner_life):
                session.moved_at_s = session.last_move_s
            session.owner, session.owner_life = worker, worker.life
        self._settle(session, receipt)
        return None if former is worker else former

    def lost(self, session: RoutedSession, receipt: Receipt) -> None:
        """Note a dispatch that came to nothing before a first byte: the next turn goes to the
        owner."""
        if not session.is_forgotten and session.heading == receipt:
            self._settle(session, receipt)

    def claim(self, session: RoutedSession, worker: Worker) -> None:
        """Note the news that `worker`, in its present life, owns the session."""
        session.owner, session.owner_life = worker, worker.life
        self._settle(session, None)

    def disown(self, session: RoutedSession) -> None:
        """Note the news that nobody owns the session."""
        session.owner = None
        self._settle(session, None)

    def _settle(self, session: RoutedSession, receipt: Receipt | None) -> None:
        """Make the owner the home, unless a later dispatch than `receipt` is on its way."""
        if session.heading not in (None, receipt):
            return
        session.heading, session.left_at_s = None, _NEVER
        self._move_home(session, session.owner, session.owner_life)

    def _move_home(self, session: RoutedSession, worker: Worker | None, life: int) -> None:
        former, former_life = session.home, session.home_life
        if former is worker and former_life == life:
            return
        session.home, session.home_life = worker, life
        if former is not None and former.life == former_life:
            former.bound_sessions -= 1
            former.refresh()
        if worker is not None and worker.life == life:
            worker.bound_sessions += 1
            worker.refresh()

    def alias(self, alias: SessionId, session: SessionId) -> None:
        """Let `alias` mean `session`."""
        if alias != session:
            while len(self._aliases) >= self._limit:
                self._aliases.popitem(last=False)
            self._aliases[alias] = session

    def forget(self, session: SessionId) -> None:
        """Forget the session; one that is not known is no error."""
        known = self._sessions.pop(session, None)
        if known is not None:
            self._move_home(known, None, 0)
            known.is_forgotten, known.heading, known.owner = True, None, None
            known.leave()

    def _make_room(self, now_s: float) -> None:
        """Drop from the old end: one entry when full, two a call when expired (so it drains)."""
        if len(self._sessions) >= self._limit:
            self.forget(next(iter(self._sessions)))
        for _ in range(2):
            oldest = next(iter(self._sessions.items()), None)
            if oldest is None or now_s - oldest[1].seen_at_s <= self._idle_s:
                return
            self.forget(oldest[0])


def _is_in(worker: Worker, owner: Worker | None, life: int) -> bool:
    """Return whether `worker`, in its present life, is that owner in that life."""
    return owner is worker and life == worker.life


def _answering_owner(session: RoutedSession) -> Worker | None:
    """Return the live owner, or one that is drained, which gets no turn and lets state go still."""
    owner = session.owner
    is_there = owner is not None and owner.is_drained and owner.life == session.owner_life
    return owner if is_there else session.live_owner
