"""What the router remembers of each session, in bounded memory.

Owns: which worker a session is bound to, how many bytes its tokens take, which prefix it stands
on. Losing an entry costs a cache hit, never a right answer.

A binding is good for one life of a worker, so that a restart unbinds all its sessions at once
without a look at any of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ownerserve.kv.epoch import Epoch
from ownerserve.kv.ids import SessionId
from ownerserve.plan.inputs import Tier
from ownerserve.router.extents import Copy, Prefix
from ownerserve.router.usage import Usage
from ownerserve.router.worker import Worker

DEFAULT_BYTES_PER_TOKEN = 4.0
"""Until a session has shown its own ratio (English text and code lie between 3 and 5)."""

OUTPUT_WEIGHT = 0.3
"""Share of the newest answer in the expected length of the next."""

SESSIONS_MAX = 131_072


class Session:
    """One session. `owner` in its life `owner_life` is where it runs; None before the first turn.

    `prefix` is what its last turn left; `stem` the prefix that it was forked from. `turns` counts
    dispatches, `moved_at_s` when it last changed its owner for load's sake.
    """

    __slots__ = (
        "bytes_per_token", "epoch", "idle_since_s", "moved_at_s", "output_tokens", "owner",
        "owner_life", "pending_tokens", "prefix", "seen_at_s", "stem",
        "stem_tokens", "turns",
    )  # fmt: skip

    def __init__(self, now_s: float) -> None:
        self.owner: Worker | None = None
        self.owner_life = 0
        self.epoch: Epoch | None = None
        self.prefix: Prefix | None = None
        self.stem: Prefix | None = None
        self.stem_tokens = 0
        self.bytes_per_token = DEFAULT_BYTES_PER_TOKEN
        self.output_tokens = 0.0
        self.pending_tokens = 0
        self.turns = 0
        self.seen_at_s = self.idle_since_s = now_s
        self.moved_at_s = float("-inf")

    @property
    def live_owner(self) -> Worker | None:
        """The owner, if it is up and in the life in which it became it."""
        owner = self.owner
        if owner is None or not owner.up or owner.life != self.owner_life:
            return None
        return owner

    def is_bound_to(self, worker: Worker) -> bool:
        """Whether `worker`, in its present life, is the owner."""
        return self.owner is worker and self.owner_life == worker.life

    @property
    def known_tokens(self) -> int:
        """How much of its context was computed once."""
        return self.stem_tokens if self.prefix is None else self.prefix.tokens

    def copies(self) -> tuple[Copy, ...]:
        """Who holds the beginning of its context and can be used now."""
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
        """A finished turn: its ratio, and the context that `worker` holds now."""
        if usage.prompt_tokens > 0 and prompt_bytes > 0:
            self.bytes_per_token = prompt_bytes / usage.prompt_tokens
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
        """`prefill` computed the prompt for another worker and still holds it."""
        if self.prefix is not None:
            self.prefix.hold(prefill, Tier.DEVICE, tokens)

    def released(self, source: Copy | None) -> None:
        """A migration's source gave up its copy."""
        if self.prefix is not None and source is not None:
            self.prefix.drop(source.worker, source.tier)

    def leave(self) -> None:
        """It ends: others may still stand on its prefixes."""
        self._leave_stem()
        if self.prefix is not None:
            self.prefix.refs -= 1
            self.prefix = None

    def _leave_stem(self) -> None:
        if self.stem is not None:
            self.stem.refs -= 1
            self.stem, self.stem_tokens = None, 0


class SessionTable:
    """Sessions by id, least recently used first; at most `limit`, none idle for over `idle_s`.

    Owns the binding on both sides: `session.owner` and the worker's `bound_sessions`.
    """

    def __init__(self, *, limit: int = SESSIONS_MAX, idle_s: float = 4 * 3600.0) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._sessions: OrderedDict[SessionId, Session] = OrderedDict()
        self._aliases: OrderedDict[SessionId, SessionId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> Iterator[tuple[SessionId, Session]]:
        return iter(self._sessions.items())

    def resolve(self, session: SessionId) -> SessionId:
        """The session that a response alias stands for; any other name is its own."""
        return self._aliases.get(session, session)

    def get(self, session: SessionId) -> Session | None:
        return self._sessions.get(session)

    def touch(self, session: SessionId, now_s: float) -> Session:
        """The session, made when it is new, now the most recently used."""
        known = self._sessions.get(session)
        if known is None:
            self._make_room(now_s)
            known = self._sessions[session] = Session(now_s)
        else:
            self._sessions.move_to_end(session)
        known.seen_at_s = now_s
        return known

    def bind(self, session: Session, worker: Worker) -> None:
        """`worker` in its present life is where the session runs now."""
        if session.is_bound_to(worker):
            return
        self.unbind(session)
        session.owner, session.owner_life = worker, worker.life
        worker.bound_sessions += 1

    def unbind(self, session: Session) -> None:
        """Nobody owns it."""
        owner = session.owner
        if owner is not None and owner.life == session.owner_life:
            owner.bound_sessions -= 1
            owner.refresh()
        session.owner = None

    def alias(self, alias: SessionId, session: SessionId) -> None:
        """Let `alias` mean `session`."""
        if alias != session:
            while len(self._aliases) >= self._limit:
                self._aliases.popitem(last=False)
            self._aliases[alias] = session

    def forget(self, session: SessionId) -> None:
        known = self._sessions.pop(session, None)
        if known is not None:
            self.unbind(known)
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
