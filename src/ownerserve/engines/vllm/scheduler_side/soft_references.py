"""Soft references decide which blocks of vLLM's own pool idle sessions wish to find again.

A wish is an order of eviction and never a reference: see `free_order`. Owns the sessions that are
idle, with the block tables that their last turns left; wishes are kept over a turn, so that the end
of a turn costs what the turn has changed. What a session ceases to wish for (its time is over, it
has gone elsewhere, there are too many) is worked off a few blocks at a time, and taken first
meanwhile.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.scheduler_side.free_order import Block, FreeOrder, Keeper, Linked
from ownerserve.engines.vllm.settings import SoftReference
from ownerserve.engines.vllm.worker_commands import Tables
from ownerserve.kv.errors import InvariantViolated

log = logging.getLogger("vllm.ownerserve")

WORKED_OFF = 128
"""Most blocks whose wishes end in one call: about 0.1 ms."""

OnTaken = Callable[[Sequence[Linked]], None]


class BlockPool(Protocol):
    """A `BlockPool` is vLLM's BlockPool, as far as it is used here."""

    blocks: Sequence[Block]


class SoftStatus(msgspec.Struct, frozen=True):
    """A `SoftStatus` counts what idle sessions keep now, and what they do not keep any more:
    `given_up` were needed by others, `expired` in time, `over_limit` were too many."""

    sessions: int
    blocks: int
    given_up: int
    expired: int
    over_limit: int


class SessionKeeper(Keeper):
    """A `SessionKeeper` is an idle session, which wishes for blocks [first, end) of each KV cache
    group's table, as its last turn left them."""

    __slots__ = ("end", "first", "name", "tables", "until_s", "why")

    def __init__(self, name: str, groups: int) -> None:
        super().__init__()
        self.name = name
        self.until_s = 0.0
        self.why = ""
        """What its wishes end of, once they do."""
        self.tables: list[Sequence[int]] = [()] * groups
        self.first = [0] * groups
        self.end = [0] * groups


class SoftReferences:
    """`SoftReferences` keep the wishes of idle sessions (see the module). Called on the scheduler's
    thread only."""

    def __init__(self, settings: SoftReference) -> None:
        self._settings = settings
        self._pool: BlockPool | None = None
        self._order: FreeOrder | None = None
        self._group_tokens: Sequence[int] = ()
        self._most_blocks = 0
        self._content: object = None
        """The pool's cache that wishes are about: a reset makes another one."""
        self._sessions: OrderedDict[str, SessionKeeper] = OrderedDict()
        """The session idle for longest stands first."""
        self._leaving: deque[SessionKeeper] = deque()
        """Sessions whose wishes end, a few blocks at a time."""
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """`counts` are blocks so far: `given_up`, `expired`, `over_limit`."""
        if self._order is not None:
            self._counts["given_up"] = self._order.counts["given_up"]
        return self._counts

    def __len__(self) -> int:
        """Return how many blocks idle sessions wish for."""
        return 0 if self._order is None else self._order.kept

    def bind(
        self, pool: BlockPool, group_tokens: Sequence[int], *, on_taken: OnTaken | None = None
    ) -> bool:
        """Use this pool, in which a block of each KV cache group spans `group_tokens` tokens.

        Return whether `on_taken` is told of the blocks that vLLM takes from now on; not where a
        version of vLLM has a queue that an order can't stand for.
        """
        self._pool, self._group_tokens = pool, group_tokens
        self._most_blocks = int((len(pool.blocks) - 1) * self._settings.pool_fraction)
        order = FreeOrder(compat.free_queue(pool), pool.blocks)
        if missing := compat.take_the_place_of_the_queue(pool, order):
            log.warning(
                "idle sessions have no soft references, and what they have on the device is not "
                "told: free blocks have %s",
                missing,
            )
            return False
        if on_taken is not None:
            order.on_taken = on_taken
        if self._settings.ttl_s > 0:
            self._order, self._content = order, compat.prefix_cache_of(pool)
        return on_taken is not None

    def finished(self, session_id: str | None, tables: Tables, now: float) -> None:
        """Wish for the blocks of a session's turn that ended well, with these block tables; 0 is
        the null block. The caller leaves the tables as they are."""
        if self._order is None or session_id is None:
            return
        self._forget_a_reset()
        idle = self._sessions.pop(session_id, None) or SessionKeeper(session_id, len(tables))
        has_lost, idle.has_lost = idle.has_lost, False
        for group, ids in enumerate(tables):
            self._renew(self._order, idle, group, ids=ids, has_lost=has_lost)
        if idle.blocks:
            idle.until_s = now + self._settings.ttl_s
            self._sessions[session_id] = idle
            self._order.give_up_last(idle)
        self.tidy(now)

    def resumed(self, session_id: str | None, now: float) -> None:
        """Begin the session's time anew, since a turn of it is here; it may have to wait."""
        idle = self._sessions.get(session_id) if session_id is not None else None
        if idle is not None and self._order is not None:
            idle.until_s = now + self._settings.ttl_s
            self._sessions.move_to_end(idle.name)
            self._order.give_up_last(idle)

    def released(self, session_id: str) -> None:
        """Forget the session, which has gone elsewhere or is over."""
        idle = self._sessions.get(session_id)
        if idle is not None:
            self._leave(idle, "released")

    def tidy(self, now: float) -> None:
        """End the wishes of sessions whose time is over, and those that are too many: WORKED_OFF at
        most, the rest in later calls. Called in every step."""
        if self._order is None:
            return
        self._forget_a_reset()
        while self._sessions:
            idle = next(iter(self._sessions.values()))
            if idle.until_s > now:
                break
            self._leave(idle, "expired")
        left = WORKED_OFF
        while left and self._leaving:
            left -= self._shorten(self._order, self._leaving[0], most=left)
            if not self._leaving[0].blocks:
                self._leaving.popleft()
        while left and self._sessions and self._order.kept > self._most_blocks:
            idle = next(iter(self._sessions.values()))
            idle.why = "over_limit"
            left -= self._shorten(self._order, idle, most=1)
            if not idle.blocks:
                del self._sessions[idle.name]

    def clear(self) -> None:
        """Forget every wish: the cache was reset, or the engine stops."""
        if self._order is not None and self._pool is not None:
            self._order.clear()
            self._sessions.clear()
            self._leaving.clear()
            self._content = compat.prefix_cache_of(self._pool)

    def wants(self, block: Block) -> bool:
        """Return whether an idle session wishes for what the block holds now."""
        return self._order is not None and self._order.is_kept(block.block_id)

    def check(self) -> None:
        """Raise InvariantViolated unless wishes, sessions and the order agree."""
        if self._order is None:
            return
        self._order.check()
        for idle in (*self._sessions.values(), *self._leaving):
            held = sum(
                idle in self._order.keepers_of(block_id)
                for ids, first, end in zip(idle.tables, idle.first, idle.end, strict=True)
                for block_id in set(ids[first:end])
            )
            if held != idle.blocks:
                raise InvariantViolated(f"{idle.name} holds {held} blocks, {idle.blocks} counted")
        if self._order.kept > self._most_blocks and not self._leaving:
            raise InvariantViolated(f"{self._order.kept} blocks, {self._most_blocks} may be")

    def status(self) -> SoftStatus:
        """Return what idle sessions keep now."""
        kept = sum(1 for idle in self._sessions.values() if idle.blocks)
        names = ("given_up", "expired", "over_limit")
        return SoftStatus(kept, len(self), *(self.counts[name] for name in names))

    # -- parts ---------------------------------------------------------------------------------

    def _renew(
        self,
        order: FreeOrder,
        idle: SessionKeeper,
        group: int,
        *,
        ids: Sequence[int],
        has_lost: bool,
    ) -> None:
        """Wish for a group's table as it is now: what it begins with as before stays as it is."""
        assert self._pool is not None
        blocks, before, last = self._pool.blocks, idle.tables[group], idle.end[group]
        same = _alike(before, ids, most=last)
        if has_lost:
            same = order.kept_in_row(idle, ids[:same])
        gone = before[max(same, idle.first[group]) : last]
        for block_id in set(gone).difference(ids[same:]) if gone else ():
            order.let_go(idle, block_id)
        start, end = same, len(ids)
        while end > same and (not ids[end - 1] or blocks[ids[end - 1]].block_hash is None):
            end -= 1
            order.let_go(idle, ids[end])
        while start < end and not ids[start]:
            start += 1
        # One of them that holds nothing is let go of when vLLM frees it, and noted as lost then.
        order.keep_all(idle, ids[start:end])
        idle.first[group] = idle.first[group] if same else start
        idle.tables[group], idle.end[group] = ids, end

    def _leave(self, idle: SessionKeeper, why: str) -> None:
        del self._sessions[idle.name]
        idle.why = why
        self._leaving.append(idle)
        if self._order is not None:
            self._order.give_up_first(idle)

    def _shorten(self, order: FreeOrder, idle: SessionKeeper, *, most: int) -> int:
        """End up to `most` wishes of the session, from its tail; return how many were looked at."""
        for looked in range(most):
            if not idle.blocks:
                return looked
            group = self._deepest(idle)
            idle.end[group] -= 1
            block_id = idle.tables[group][idle.end[group]]
            if block_id and order.let_go(idle, block_id):
                self._counts[idle.why] += 1
        return most

    def _deepest(self, idle: SessionKeeper) -> int:
        """Return the group whose last wished-for block ends with the latest token."""
        groups = [at for at, end in enumerate(idle.end) if end > idle.first[at]]
        assert groups, f"{idle.name} wishes for {idle.blocks} blocks that are in no table"
        if len(groups) == 1:
            return groups[0]
        return max(groups, key=lambda at: idle.end[at] * self._group_tokens[at])

    def _forget_a_reset(self) -> None:
        """Forget all wishes when vLLM has reset its cache since: they are for what is no more."""
        if self._pool is not None and compat.prefix_cache_of(self._pool) is not self._content:
            self.clear()


def _alike(before: Sequence[int], ids: Sequence[int], *, most: int) -> int:
    """Return how many of the first `most` blocks are the same in both tables."""
    low, high = 0, min(most, len(before), len(ids))
    middle = high
    while low < high:
        if before[low:middle] == ids[low:middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
