"""A `FreeOrder` is the order in which vLLM's BlockPool takes its free blocks: what idle sessions
wish for is taken last.

    others          | idle sessions, the longest idle first, each from its tail | shared by several
    taken first       taken when nothing else is left                             last of all

The order stands in the place of the pool's own queue (`compat`) and has its verbs. A block
that is wished for stays a free block: vLLM counts it as room, can always have it, and resets its
cache when it likes. Nothing is moved out of anybody's way, so no hook walks blocks: a block is
looked at when vLLM frees it, when vLLM takes it, and when a session begins or ceases to keep it.

Owns the links of the pool's free blocks, and who wishes for which block; which sessions may wish,
and for how long, is `SoftReferences`' to decide.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from typing import Protocol, TypeAlias

from ownerserve.kv.errors import InvariantViolated


class Linked(Protocol):
    """A `Linked` is a block, or an end of a chain, with its neighbours among the free blocks."""

    block_id: int
    prev_free_block: Linked | None
    next_free_block: Linked | None


class Block(Linked, Protocol):
    """A `Block` is vLLM's KVCacheBlock, as far as it is read here."""

    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> Hashable | None:
        """Return the hash that vLLM gave the block; None where it holds nothing that is named."""


class FreeQueue(Protocol):
    """A `FreeQueue` is vLLM's FreeKVCacheBlockQueue, as far as an order takes it over."""

    fake_free_list_head: Linked
    fake_free_list_tail: Linked
    num_free_blocks: int


class End:
    """An `End` is a chain's first or last link, which is no block."""

    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self) -> None:
        self.block_id = -1
        self.prev_free_block: Linked | None = None
        self.next_free_block: Linked | None = None


class Chain:
    """A `Chain` is a doubly linked list of free blocks, between two ends that are none."""

    __slots__ = ("head", "tail")

    def __init__(self, head: Linked, tail: Linked) -> None:
        self.head = head
        self.tail = tail

    def __iter__(self) -> Iterator[Linked]:
        link = self.head.next_free_block
        while link is not None and link is not self.tail:
            yield link
            link = link.next_free_block

    def append(self, block: Linked) -> None:
        """Add the block as the last one."""
        last = self.tail.prev_free_block
        assert last is not None
        last.next_free_block, block.prev_free_block = block, last
        block.next_free_block, self.tail.prev_free_block = self.tail, block

    def take(self, most: int) -> list[Linked]:
        """Take up to `most` blocks from the front and return them, linked to nothing."""
        taken: list[Linked] = []
        link, tail = self.head.next_free_block, self.tail
        while link is not tail and len(taken) < most:
            assert link is not None
            taken.append(link)
            following = link.next_free_block
            link.prev_free_block = link.next_free_block = None
            link = following
        assert link is not None
        self.head.next_free_block, link.prev_free_block = link, self.head
        return taken

    def move_to(self, other: Chain) -> None:
        """Put all blocks behind those of `other`, in their order."""
        first, last = self.head.next_free_block, self.tail.prev_free_block
        before = other.tail.prev_free_block
        assert first is not None and last is not None and before is not None
        if first is not self.tail:
            before.next_free_block, first.prev_free_block = first, before
            last.next_free_block, other.tail.prev_free_block = other.tail, last
            self.head.next_free_block, self.tail.prev_free_block = self.tail, self.head


def empty_chain() -> Chain:
    """Return a chain without a block."""
    head, tail = End(), End()
    head.next_free_block, tail.prev_free_block = tail, head
    return Chain(head, tail)


class Keeper:
    """A `Keeper` is a session that wishes for blocks: `chain` are the free ones that it alone
    wishes for, `blocks` counts all. `has_lost`: vLLM took one of them."""

    __slots__ = ("blocks", "chain", "has_lost")

    def __init__(self) -> None:
        self.chain = empty_chain()
        self.blocks = 0
        self.has_lost = False


Keepers: TypeAlias = Keeper | set[Keeper] | None
"""`Keepers` of a block: several as a set, which is rare, so that most blocks need none."""


def _nothing(taken: Sequence[Linked]) -> None:
    """Nobody wants to know."""


class FreeOrder:
    """A `FreeOrder` keeps the free blocks of one pool (see the module). Called on the scheduler's
    thread only; its verbs are those of vLLM's queue."""

    def __init__(self, former: FreeQueue, blocks: Sequence[Block]) -> None:
        """Take over the free blocks of `former`, in their order, out of all of the pool's."""
        self.num_free_blocks = former.num_free_blocks
        self.fake_free_list_head = former.fake_free_list_head
        self.fake_free_list_tail = former.fake_free_list_tail
        self.counts: Counter[str] = Counter()
        """`given_up`: wished-for blocks that vLLM took, since nothing else was left."""
        self.kept = 0
        """Blocks that somebody wishes for."""
        self.on_taken: Callable[[Sequence[Linked]], None] = _nothing
        """Called with the blocks that vLLM takes, each time: what they held is gone."""
        self._blocks = blocks
        self._kept_by: list[Keepers] = [None] * len(blocks)
        self._others = Chain(self.fake_free_list_head, self.fake_free_list_tail)
        self._shared = empty_chain()
        self._keepers: OrderedDict[Keeper, None] = OrderedDict()
        """Keepers that may have free blocks of their own; the first gives up first."""

    # -- verbs of vLLM's queue -----------------------------------------------------------------

    def popleft(self) -> Linked:
        """Take the first free block. Raises ValueError where there is none."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Linked]:
        """Take the first `n` free blocks, which must be there."""
        assert self.num_free_blocks >= n
        self.num_free_blocks -= n
        taken = self._others.take(n)
        if len(taken) < n:
            wished = [*self._given_up(n - len(taken))]
            for block in wished:
                self._forget(block.block_id)
            self.counts["given_up"] += len(wished)
            taken += wished
        self.on_taken(taken)
        return taken

    def remove(self, block: Linked) -> None:
        """Take this free block, wherever it stands: it is in use again. Raises RuntimeError for a
        block that is not free."""
        before, behind = block.prev_free_block, block.next_free_block
        if before is None or behind is None:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        before.next_free_block, behind.prev_free_block = behind, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Linked) -> None:
        """Free a block that is cached."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Linked]) -> None:
        """Free blocks that are cached; each goes where whoever wishes for it has its place."""
        kept_by, others = self._kept_by, self._others
        chain, last = others, others.tail.prev_free_block
        of: Keepers = None
        for block in blocks:
            by = kept_by[block.block_id]
            if by is not of:
                assert last is not None
                last.next_free_block, chain.tail.prev_free_block = chain.tail, last
                chain, of = self._chain_of(by), by
                last = chain.tail.prev_free_block
            assert last is not None
            block.prev_free_block, last.next_free_block = last, block
            last = block
        assert last is not None
        last.next_free_block, chain.tail.prev_free_block = chain.tail, last
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Linked]) -> None:
        """Free blocks that hold nothing: they are taken first, and nobody can wish for them."""
        behind, before = self._others.head.next_free_block, self._others.head
        assert behind is not None
        for block in blocks:
            if self._kept_by[block.block_id] is not None:
                self._forget(block.block_id)
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, behind.prev_free_block = behind, before
        self.num_free_blocks += len(blocks)

    def iter_blocks_after(self, cursor: Linked | None) -> Iterator[Linked]:
        """Yield the free blocks in the order in which they are taken, behind the free block
        `cursor`; None: all of them."""
        chains = iter(self._chains())
        if cursor is not None:
            own = self._chain_of(self._kept_by[cursor.block_id])
            while next(chains) is not own:
                pass
            link = cursor.next_free_block
            while link is not None and link is not own.tail:
                yield link
                link = link.next_free_block
        for chain in chains:
            yield from chain

    def get_all_free_blocks(self) -> list[Linked]:
        """Return the free blocks in the order in which they are taken."""
        return list(self.iter_blocks_after(None))

    # -- wishes --------------------------------------------------------------------------------

    def keep(self, keeper: Keeper, block_id: int) -> None:
        """Let the keeper wish for the block, while it holds what it holds now."""
        by = self._kept_by[block_id]
        if by is keeper or (isinstance(by, set) and keeper in by):
            return
        keeper.blocks += 1
        if by is None:
            self.kept += 1
            self._kept_by[block_id] = keeper
        elif isinstance(by, set):
            by.add(keeper)
        else:
            self._kept_by[block_id] = {by, keeper}
        self._relink(block_id)

    def keep_all(self, keeper: Keeper, ids: Sequence[int]) -> None:
        """Let the keeper wish for blocks that are in use, as `keep` does, but for null blocks, of
        id 0; at some 70 ns a block that nobody else keeps."""
        kept_by = self._kept_by
        new = [block_id for block_id in ids if kept_by[block_id] is None and block_id]
        for block_id in new:
            kept_by[block_id] = keeper
        self.kept += len(new)
        keeper.blocks += len(new)
        if len(new) < len(ids):
            for block_id in [at for at in ids if kept_by[at] is not keeper and at]:
                self.keep(keeper, block_id)

    def let_go(self, keeper: Keeper, block_id: int) -> bool:
        """Let the keeper wish for the block no more; return whether nobody does, now that it has
        ceased to. One that did not wish for it is no error."""
        by = self._kept_by[block_id]
        if by is keeper:
            self._kept_by[block_id] = None
            self.kept -= 1
        elif isinstance(by, set) and keeper in by:
            by.remove(keeper)
            if len(by) == 1:
                self._kept_by[block_id] = by.pop()
        else:
            return False
        keeper.blocks -= 1
        self._relink(block_id)
        return by is keeper

    def kept_in_row(self, keeper: Keeper, ids: Sequence[int]) -> int:
        """Return how many of `ids`, from the first on, the keeper wishes for; null blocks, of id 0,
        count. A walk over them all, at some 40 ns a block."""
        kept_by = self._kept_by
        for at, block_id in enumerate(ids):
            by = kept_by[block_id]
            if by is not keeper and block_id and keeper not in self.keepers_of(block_id):
                return at
        return len(ids)

    def keepers_of(self, block_id: int) -> Set[Keeper]:
        """Return who wishes for the block."""
        by = self._kept_by[block_id]
        return by if isinstance(by, set) else frozenset() if by is None else {by}

    def is_kept(self, block_id: int) -> bool:
        """Return whether somebody wishes for the block."""
        return self._kept_by[block_id] is not None

    def give_up_last(self, keeper: Keeper) -> None:
        """Take what only this one wishes for behind what any other one does, from now on."""
        self._keepers[keeper] = None
        self._keepers.move_to_end(keeper)

    def give_up_first(self, keeper: Keeper) -> None:
        """Take what only this one wishes for before what any other one does, from now on."""
        self._keepers[keeper] = None
        self._keepers.move_to_end(keeper, last=False)

    def clear(self) -> None:
        """Forget every wish; no block is looked at."""
        for keeper in self._keepers:
            keeper.chain.move_to(self._others)
        self._shared.move_to(self._others)
        self._keepers.clear()
        self._kept_by = [None] * len(self._blocks)
        self.kept = 0

    def check(self) -> None:
        """Raise InvariantViolated unless every free block stands in the chain of who wishes for it,
        and the counts are right. Walks all blocks: for tests."""
        free = [block.block_id for block in self.get_all_free_blocks()]
        if len(free) != self.num_free_blocks or len(set(free)) != len(free):
            raise InvariantViolated(f"free order: {free}, {self.num_free_blocks} counted")
        for chain in self._chains():
            wrong = [
                b.block_id for b in chain if self._chain_of(self._kept_by[b.block_id]) != chain
            ]
            if wrong:
                raise InvariantViolated(f"free order: {wrong} stand in another's place")
        if any(isinstance(by, set) and len(by) < 2 for by in self._kept_by):
            raise InvariantViolated("free order: a block of one session stands as shared")
        kept = sum(by is not None for by in self._kept_by)
        if kept != self.kept:
            raise InvariantViolated(f"free order: {kept} kept, {self.kept} counted")

    # -- parts ---------------------------------------------------------------------------------

    def _chains(self) -> list[Chain]:
        return [self._others, *(keeper.chain for keeper in self._keepers), self._shared]

    def _chain_of(self, by: Keepers) -> Chain:
        if by is None:
            return self._others
        if isinstance(by, set):
            return self._shared
        if by not in self._keepers:
            self._keepers[by] = None
        return by.chain

    def _given_up(self, missing: int) -> Iterator[Linked]:
        """Take wished-for blocks: of each keeper in turn, then shared ones."""
        while missing and self._keepers:
            keeper = next(iter(self._keepers))
            taken = keeper.chain.take(missing)
            yield from taken
            missing -= len(taken)
            if missing:
                del self._keepers[keeper]
        yield from self._shared.take(missing)

    def _forget(self, block_id: int) -> None:
        """End all wishes for a block, which loses what it holds."""
        by, self._kept_by[block_id] = self._kept_by[block_id], None
        self.kept -= 1
        for keeper in by if isinstance(by, set) else (by,):
            assert keeper is not None
            keeper.blocks -= 1
            keeper.has_lost = True

    def _relink(self, block_id: int) -> None:
        """Put the block, if it is free, where it belongs by who wishes for it now."""
        block = self._blocks[block_id]
        if not block.ref_cnt and block.prev_free_block is not None:
            self.remove(block)
            self._chain_of(self._kept_by[block_id]).append(block)
            self.num_free_blocks += 1
