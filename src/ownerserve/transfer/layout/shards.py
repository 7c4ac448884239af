"""Shards say which ranks of a source a rank asks, and for which heads; or why it asks none.

    source, 4 ranks   | 0 1 | 2 3 | 4 5 | 6 7 |     heads of the model
    mine, rank 1 of 2             | 4 5 6 7 |     asks rank 2 for all it has, and rank 3

Decided before a byte moves, from what both sides state of themselves. Ranks that have the same
heads (more ranks than heads, or a state that all have whole) share the asking. Block ids are each
rank's own: they are said by the one that is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from ownerserve.kv.frame import PayloadPart
from ownerserve.kv.wire.holders import Holder
from ownerserve.transfer.layout.heads import HEAD_AXIS, ON_EVERY_RANK, heads_of


class Misfit(StrEnum):
    """A `Misfit` says why nothing can be moved between two sides. Labels of metrics."""

    OTHER_SPEC = "other_spec"  # another model, or other state of its layers
    OTHER_BLOCK = "other_block"  # units of another number of tokens: other artifacts
    OTHER_SECTION = "other_section"
    OTHER_SCALAR = "other_scalar"
    OTHER_LAYERS = "other_layers"
    OTHER_SHAPE = "other_shape"
    OTHER_HEADS = "other_heads"  # ranks whose heads are not those of the model
    NOT_BY_HEAD = "not_by_head"  # cut otherwise, over another number of ranks
    MISSING_RANKS = "missing_ranks"  # all ranks count, or none


class HeadAsk(msgspec.Struct, frozen=True, gc=False):
    """A `HeadAsk` goes to the source's `rank`, for heads [first_head, end_head) as that one counts
    them, which are [own_first, own_end) of mine. All 0: the whole of the component."""

    rank: int
    first_head: int = 0
    end_head: int = 0
    own_first: int = 0
    own_end: int = 0


def asks(mine: Holder, theirs: Sequence[Holder]) -> tuple[HeadAsk, ...] | Misfit:
    """Return what `mine` asks of the source's ranks, heads ascending: each of its heads once. Or
    what is in the way."""
    by_rank = {one.rank: one for one in theirs}
    ranks = {one.ranks for one in theirs}
    if len(ranks) != 1 or sorted(by_rank) != list(range(len(theirs))) or ranks != {len(theirs)}:
        return Misfit.MISSING_RANKS
    for other in theirs:
        misfit = _misfit(mine, other)
        if misfit is not None:
            return misfit
    name = mine.section.name
    if name in ON_EVERY_RANK:
        return (HeadAsk(mine.rank % len(theirs)),)
    if name not in HEAD_AXIS:
        alike = mine.ranks == len(theirs) and mine.section == by_rank[mine.rank].section
        return (HeadAsk(mine.rank),) if alike else Misfit.NOT_BY_HEAD
    if not all(map(_has_its_heads, (mine, *theirs))):
        return Misfit.OTHER_HEADS
    return tuple(_by_head(mine, [by_rank[rank] for rank in sorted(by_rank)]))


def _misfit(mine: Holder, other: Holder) -> Misfit | None:
    own, their = mine.section, other.section
    if mine.spec != other.spec:
        return Misfit.OTHER_SPEC
    if mine.block_tokens != other.block_tokens:
        return Misfit.OTHER_BLOCK
    if (own.name, [p.name for p in own.parts]) != (their.name, [p.name for p in their.parts]):
        return Misfit.OTHER_SECTION
    if [part.dtype for part in own.parts] != [part.dtype for part in their.parts]:
        return Misfit.OTHER_SCALAR
    if [len(part.shape) for part in own.parts] != [len(part.shape) for part in their.parts]:
        return Misfit.OTHER_SHAPE
    if [part.shape[0] for part in own.parts] != [part.shape[0] for part in their.parts]:
        return Misfit.OTHER_LAYERS
    axis = HEAD_AXIS.get(own.name)
    by_head = axis is not None or own.name not in ON_EVERY_RANK
    if by_head and axis is None:
        return None  # looked at as a whole
    if [_but(part, axis) for part in own.parts] != [_but(part, axis) for part in their.parts]:
        return Misfit.OTHER_SHAPE
    return Misfit.OTHER_HEADS if mine.heads != other.heads else None


def _but(part: PayloadPart, axis: int | None) -> tuple[int, ...]:
    return part.shape if axis is None else (*part.shape[:axis], *part.shape[axis + 1 :])


def _has_its_heads(holder: Holder) -> bool:
    """Return whether the section has as many heads as its rank of so many has of the model's."""
    heads, ranks = holder.heads, holder.ranks
    is_even = heads > 0 and (heads % ranks == 0 or ranks % heads == 0)
    return is_even and heads_of(holder.section) == len(holder.own_heads)


def _by_head(mine: Holder, theirs: Sequence[Holder]) -> list[HeadAsk]:
    found, own = list[HeadAsk](), mine.own_heads
    head = own.start
    while head < own.stop:
        having = [one for one in theirs if head in one.own_heads]
        other = having[mine.rank % len(having)]
        end = min(own.stop, other.own_heads.stop)
        at, there = head - own.start, head - other.own_heads.start
        count = end - head
        if count == len(own) == len(other.own_heads):
            return [HeadAsk(other.rank)]
        found.append(HeadAsk(other.rank, there, there + count, at, at + count))
        head = end
    return found
