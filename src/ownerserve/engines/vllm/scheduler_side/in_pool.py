"""What sessions have in vLLM's own block pool is noted here, as vLLM would find it for their next
prompt.

    scheduler's thread   PoolWatch   a turn ended: DeviceTip │ vLLM took blocks: their ids
                                            └── events, in order ──┐
    holding's thread     InPool      which blocks stand for whom <─┘──> Inventory: has | gone

vLLM takes every block out of its queue of free blocks, which is an order of ours (`free_order`): so
nothing can be missed, and no event of vLLM's, no socket and no flag is needed. The scheduler's
thread notes block ids and does no more; what they mean is found beside it. A session's tip shrinks
from there on, until its next turn ends: a block that comes back otherwise is not seen.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.layout.shape import StateShape
from ownerserve.engines.vllm.scheduler_side.free_order import Linked
from ownerserve.engines.vllm.worker_commands import Tables
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.specs import Coverage
from ownerserve.node.ownership.inventory import Inventory, kinds_of

POINTS_TRIED = 64
"""Boundaries below the end of a turn at which the state of a point is looked for, at most."""
STIR_S = 0.05
"""How often what vLLM took is told while it steps; who asks hears all of it."""
SESSIONS_KEPT = 4096
BLOCKS_KEPT_RATIO = 4
"""Blocks that all sessions stand on together, by the pool's: those shared by several count for
each."""

Ids: TypeAlias = NDArray[np.int32]


class RangeBlocks(msgspec.Struct, frozen=True):
    """A `RangeBlocks` is the blocks of one KV group that hold a prefix from its first token on,
    `block_tokens` in each."""

    ids: Sequence[int]
    block_tokens: int


class DeviceTip(msgspec.Struct, frozen=True):
    """A `DeviceTip` says that vLLM's pool holds a session's first `tokens` tokens, as its last turn
    left them: range state in `ranges`, and in the blocks `points` what else it takes to go on
    there.

    `digests` name its blocks of B tokens (the list may be longer), `tenant` is the salt in their
    names. `content` is the pool's cache that they are in: a reset makes another one.
    """

    session_id: SessionId
    tokens: int
    ranges: tuple[RangeBlocks, ...] = ()
    points: tuple[int, ...] = ()
    digests: Sequence[PrefixHash] = ()
    tenant: bytes = b""
    content: object = None


PoolEvents: TypeAlias = deque[DeviceTip | list[int]]
"""Tips that turns left, and ids of blocks that lost what they held, in the order in which it
happened. One thread appends, another one takes."""


class PoolWatch:
    """A `PoolWatch` notes on the scheduler's thread what turns leave in the pool and what vLLM
    takes. `stir` is called when there is something to take."""

    def __init__(self, shape: StateShape, events: PoolEvents, stir: Callable[[], None]) -> None:
        layout = shape.layout()
        self._shape = shape
        self._block = layout.block_tokens
        self._point_names = layout.point_names
        parts = [shape.components[name] for name in layout.range_names]
        self._ranges = {
            group: size
            for at in parts
            for group, size in zip(at.groups, at.block_tokens, strict=True)
        }
        self._events = events
        self._stir = stir
        self._stirred_s = 0.0
        self._pool: Any = None
        self._lost: list[int] = []

    def bind(self, pool: Any) -> None:
        """Watch this pool, whose free blocks are taken by an order that calls `taken`."""
        self._pool = pool

    def taken(self, blocks: Iterable[Linked]) -> None:
        """Note that vLLM took these free blocks: what they held is gone."""
        self._lost += [block.block_id for block in blocks]

    def lost(self, block_ids: Iterable[int]) -> None:
        """Note that these blocks serve no hit any more."""
        if self._pool is not None:
            self._lost += block_ids

    def stepped(self) -> None:
        """Tell what was taken, now and then."""
        if self._lost:
            self._events.append(self._lost)
            self._lost = []
            now = time.monotonic()
            if now - self._stirred_s >= STIR_S:
                self._stirred_s = now
                self._stir()

    def finished(
        self,
        session_id: SessionId,
        request: Any,
        *,
        tables: Tables,
        tokens: int,
        digests: Sequence[PrefixHash],
        tenant: bytes,
    ) -> None:
        """Note that a turn has left the first `tokens` tokens of its request computed, in blocks
        that are still its own. The caller leaves tables and digests as they are."""
        if self._pool is None:
            return
        depth, points = self._deepest(request, tables, tokens)
        ranges = tuple(
            RangeBlocks(tables[group][: depth // size], size)
            for group, size in self._ranges.items()
        )
        content = compat.prefix_cache_of(self._pool)
        tip = DeviceTip(session_id, depth, ranges, points, digests, tenant, content)
        if self._lost:
            self._events.append(self._lost)
            self._lost = []
        self._events.append(tip)
        self._stir()

    # -- parts ---------------------------------------------------------------------------------

    def _deepest(self, request: Any, tables: Tables, tokens: int) -> tuple[int, tuple[int, ...]]:
        """Return the deepest boundary up to `tokens` at which vLLM has all that a hit takes, and
        the blocks of that which is no range; (0, ()): there is none near the end."""
        last = tokens // self._block * self._block
        for depth in range(last, max(0, last - POINTS_TRIED * self._block), -self._block):
            points = self._point(request, tables, depth)
            if points is not None and self._has_range(tables, depth):
                return depth, tuple(points)
        return 0, ()

    def _has_range(self, tables: Tables, depth: int) -> bool:
        """Return whether the range blocks that end at `depth` are cached, and so those before
        them: a turn that ended well had them all."""
        blocks = self._pool.blocks
        return all(
            len(tables[group]) * size >= depth
            and blocks[tables[group][depth // size - 1]].block_hash is not None
            for group, size in self._ranges.items()
        )

    def _point(self, request: Any, tables: Tables, depth: int) -> list[int] | None:
        """Return the blocks of the state that is needed to go on at `depth`; None: one is gone."""
        found = []
        for name in self._point_names:
            at, (start, end) = self._shape.components[name], self._shape.span(name, depth)
            firsts = at.firsts(start, end)
            for group, size, first in zip(at.groups, at.block_tokens, firsts, strict=True):
                for index in range(first, end // size):
                    block_id = self._cached(request, tables, group, index=index, size=size)
                    if not block_id:
                        return None
                    found.append(block_id)
        return found

    def _cached(self, request: Any, tables: Tables, group: int, *, index: int, size: int) -> int:
        """Return the cached block of a group that is the `index`th of `size` tokens: the request's
        own, else another one, which a window has passed; 0: there is none."""
        ids = tables[group]
        own = ids[index] if index < len(ids) else 0
        if own and self._pool.blocks[own].block_hash is not None:
            return own
        return compat.cached_block(self._pool, request, group, end=(index + 1) * size)


class _Range(msgspec.Struct, eq=False):
    """A `_Range` is one KV group's blocks; the first `end` of them hold what they held."""

    ids: Ids
    block_tokens: int
    end: int


class _Standing(msgspec.Struct, eq=False):
    """A `_Standing` is what one session stands on in the pool; it goes by `number` in the book of
    blocks."""

    number: int
    tip: DeviceTip
    ranges: list[_Range]
    points: Ids
    has_points: bool = True


class InPool:
    """`InPool` says of each session what vLLM's pool could go on from. Owns which blocks stand for
    whom; called on one thread. Memory is bounded by the pool (BLOCKS_KEPT_RATIO, SESSIONS_KEPT):
    beyond, the session that was left longest ago is told as gone."""

    def __init__(self, shape: StateShape, pool: Any, *, inventory: Inventory) -> None:
        layout = shape.layout()
        self._block = layout.block_tokens
        self._kinds = kinds_of(layout, Coverage.RANGE) | kinds_of(layout, Coverage.POINT)
        self._inventory = inventory
        self._pool = pool
        self._content = compat.prefix_cache_of(pool)
        blocks = len(pool.blocks)
        self._stands_for: Ids = np.zeros(blocks, np.int32)
        """The number of a session that stands on each block; 0: none does."""
        self._also: dict[int, set[int]] = {}
        """Further ones that stand on a block."""
        self._gone = np.zeros(blocks, np.bool_)
        self._numbers = count(1)
        self._sessions: OrderedDict[SessionId, _Standing] = OrderedDict()
        """The session that was left longest ago stands first."""
        self._by_number: dict[int, _Standing] = {}
        self._kept_blocks = 0
        self._most_blocks = BLOCKS_KEPT_RATIO * blocks

    def __len__(self) -> int:
        """Return how many sessions have something in the pool."""
        return len(self._sessions)

    def take(self, events: PoolEvents) -> None:
        """Take in all that has happened since the last call."""
        if compat.prefix_cache_of(self._pool) is not self._content:
            self.clear()
        while events:
            event = events.popleft()
            if isinstance(event, DeviceTip):
                self._left(event)
            else:
                self._lost(event)

    def forget(self, session_id: SessionId) -> None:
        """Forget the session, of which nothing is told any more."""
        standing = self._sessions.pop(session_id, None)
        if standing is not None:
            self._let_go(standing)
        self._inventory.gone(session_id, Tier.DEVICE)

    def clear(self) -> None:
        """Forget all sessions: the cache was reset, or their state has another name."""
        for session_id in self._sessions:
            self._inventory.gone(session_id, Tier.DEVICE)
        self._sessions.clear()
        self._by_number.clear()
        self._also.clear()
        self._stands_for[:] = 0
        self._kept_blocks = 0
        self._content = compat.prefix_cache_of(self._pool)

    def check(self) -> None:
        """Raise InvariantViolated unless blocks, sessions and counts agree. Walks all: for
        tests."""
        held = {number: set(self._blocks_of(one)) for number, one in self._by_number.items()}
        for block_id, number in enumerate(self._stands_for.tolist()):
            by = self._also.get(block_id, set()) | ({number} if number else set())
            if by != {each for each, ids in held.items() if block_id in ids}:
                raise InvariantViolated(f"in pool: block {block_id} stands for {by}")
        if self._kept_blocks != sum(map(_size, self._by_number.values())):
            raise InvariantViolated(f"in pool: {self._kept_blocks} blocks counted")
        if {one.number for one in self._sessions.values()} != self._by_number.keys():
            raise InvariantViolated("in pool: a session without a number")

    # -- parts ---------------------------------------------------------------------------------

    def _left(self, tip: DeviceTip) -> None:
        """Take the tip for what the session has now."""
        former = self._sessions.pop(tip.session_id, None)
        if tip.content is not self._content or not tip.tokens:
            if former is not None:
                self._let_go(former)
            self._inventory.gone(tip.session_id, Tier.DEVICE)
            return
        number = next(self._numbers) if former is None else former.number
        ranges = [_Range(_ids(at.ids), at.block_tokens, len(at.ids)) for at in tip.ranges]
        standing = _Standing(number, tip, ranges, _ids(sorted(set(tip.points))))
        if former is None:
            new = [*(at.ids for at in ranges), standing.points]
        else:
            new = self._renew(former, standing)
        for ids in new:
            self._stand_on(ids, number)
        self._sessions[tip.session_id] = self._by_number[number] = standing
        self._kept_blocks += _size(standing)
        self._say(standing)
        while self._kept_blocks > self._most_blocks or len(self._sessions) > SESSIONS_KEPT:
            self.forget(next(iter(self._sessions)))

    def _renew(self, former: _Standing, standing: _Standing) -> list[Ids]:
        """Let go of what the session stood on and does not any more; return what is new. What its
        tables begin with as before is left as it is."""
        new = []
        self._kept_blocks -= _size(former)
        for before, now in zip(former.ranges, standing.ranges, strict=True):
            most = min(before.end, len(now.ids))
            differs = before.ids[:most] != now.ids[:most]
            same = int(np.argmax(differs)) if differs.any() else most
            self._leave(before.ids[same : before.end], former.number)
            new.append(now.ids[same:])
        if former.has_points:
            self._leave(former.points, former.number)
        return [*new, standing.points]

    def _stand_on(self, ids: Ids, number: int) -> None:
        is_free = self._stands_for[ids] == 0
        self._stands_for[ids[is_free]] = number
        for block_id in ids[~is_free].tolist():
            self._also.setdefault(block_id, set()).add(number)

    def _leave(self, ids: Ids, number: int) -> None:
        is_first = self._stands_for[ids] == number
        self._stands_for[ids[is_first]] = 0
        if not self._also:
            return
        for block_id, first in zip(ids.tolist(), is_first.tolist(), strict=True):
            also = self._also.get(block_id)
            if also is None:
                continue
            if first:
                self._stands_for[block_id] = also.pop()
            else:
                also.discard(number)
            if not also:
                del self._also[block_id]

    def _let_go(self, standing: _Standing) -> None:
        del self._by_number[standing.number]
        self._kept_blocks -= _size(standing)
        for at in standing.ranges:
            self._leave(at.ids[: at.end], standing.number)
        if standing.has_points:
            self._leave(standing.points, standing.number)

    def _lost(self, block_ids: Sequence[int]) -> None:
        """Shorten the sessions that stand on these blocks, which hold something else from now
        on."""
        ids = _ids(block_ids)
        first = self._stands_for[ids]
        ids, first = ids[first != 0], first[first != 0]
        if not len(ids):
            return
        numbers = set(np.unique(first).tolist())
        if self._also:
            for block_id in ids.tolist():
                numbers |= self._also.pop(block_id, set())
        self._stands_for[ids] = 0
        self._gone[ids] = True
        for number in numbers:
            self._shorten(self._by_number[number])
        self._gone[ids] = False

    def _shorten(self, standing: _Standing) -> None:
        for at in standing.ranges:
            gone = self._gone[at.ids[: at.end]]
            if gone.any():
                end = int(np.argmax(gone))
                self._leave_rest(at, end, standing.number)
        if standing.has_points and self._gone[standing.points].any():
            rest = standing.points[~self._gone[standing.points]]
            self._leave(rest, standing.number)
            self._kept_blocks -= len(standing.points)
            standing.has_points = False
        if not self._say(standing):
            self.forget(standing.tip.session_id)

    def _leave_rest(self, at: _Range, end: int, number: int) -> None:
        """Let go of a group's blocks from `end` on: without that one nothing behind it is found."""
        rest = at.ids[end : at.end]
        self._leave(rest[~self._gone[rest]], number)
        self._kept_blocks -= at.end - end
        at.end = end

    def _say(self, standing: _Standing) -> int:
        """Say what is there of the session, and return how many tokens."""
        tip = standing.tip
        tokens = min([tip.tokens, *(at.end * at.block_tokens for at in standing.ranges)])
        tokens -= tokens % self._block
        if tip.points and (not standing.has_points or tokens < tip.tokens):
            tokens = 0
        depth = tokens // self._block
        digest = tip.digests[depth - 1] if 0 < depth <= len(tip.digests) else None
        self._inventory.has(
            tip.session_id,
            Tier.DEVICE,
            tokens,
            digest=digest,
            kinds=self._kinds,
            tenant=tip.tenant,
        )
        return tokens

    def _blocks_of(self, standing: _Standing) -> list[int]:
        ids = [block_id for at in standing.ranges for block_id in at.ids[: at.end].tolist()]
        return [*ids, *(standing.points.tolist() if standing.has_points else ())]


def _ids(block_ids: Sequence[int]) -> Ids:
    return np.array(block_ids, np.int32)


def _size(standing: _Standing) -> int:
    points = len(standing.points) if standing.has_points else 0
    return sum(at.end for at in standing.ranges) + points
