"""Ranks: which of a lender's ranks one of ours asks for what of the records that it wants. Pure.

    lender, 4 ranks   | 0 1 | 2 3 | 4 5 | 6 7 |     heads of the model
    ours, 1 of 2                  | 4 5 6 7 |       a share of rank 2, and one of rank 3

A share is brought as if it were all: it is lent, read and verified by itself. All shares of a
record have come, or it has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ownerserve.kv.addresses import EVERYWHERE, parse_endpoint
from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.holders import Holder, LendingRank
from ownerserve.transfer.control.events import WantedArtifact
from ownerserve.transfer.layout.heads import heads_of
from ownerserve.transfer.layout.shards import HeadAsk, Misfit, asks

RankHolders = Mapping[str, Holder]
"""What one rank keeps, by component."""


def holders_of(
    sections: Mapping[str, PayloadSection],
    *,
    spec: bytes,
    block_tokens: int,
    at: tuple[int, int] = (0, 1),
    heads: Mapping[str, int] | None = None,
) -> dict[str, Holder]:
    """Return what a rank states that keeps these sections, of a model with so many heads in each;
    `at`: which of how many ranks. None: the sections have all heads."""
    rank, ranks = at
    return {
        name: Holder(
            spec,
            block_tokens,
            section,
            rank,
            ranks,
            heads_of(section) if heads is None else heads.get(name, 0),
        )
        for name, section in sections.items()
    }


class RankShare(msgspec.Struct, frozen=True):
    """A `RankShare` is what one of the lender's ranks is asked for: its part of what is wanted,
    heads as it counts them; `own_heads` are those [first, end) of ours, by artifact."""

    lender: LenderAddress
    wanted: tuple[WantedArtifact, ...]
    own_heads: Mapping[bytes, tuple[int, int]]


def is_whole(own: Sequence[RankHolders], theirs: Sequence[LendingRank]) -> bool:
    """Tell whether one rank with all of it reads one with all of it: nothing is to be shared out.
    Who states nothing is one."""
    return len(theirs) <= 1 and all(one.ranks == 1 for rank in own for one in rank.values())


def misfit(
    own: Sequence[RankHolders], theirs: Sequence[LendingRank], components: Iterable[str]
) -> Misfit | None:
    """Return why some rank of ours can't read these components of the lender; None: all can."""
    if not theirs or not own:
        return None if is_whole(own, theirs) else Misfit.MISSING_RANKS
    for rank in own:
        for name in set(components):
            if isinstance(found := _asked(rank, theirs, name), Misfit):
                return found
    return None


def shares(
    own: RankHolders, theirs: Sequence[LendingRank], wanted: Sequence[WantedArtifact]
) -> tuple[RankShare, ...] | Misfit:
    """Return what our rank asks of each of the lender's, ranks ascending: each head of each record
    once. Or what is in the way."""
    parts: dict[int, list[tuple[WantedArtifact, HeadAsk]]] = {}
    asked: dict[str, tuple[HeadAsk, ...]] = {}
    for one in wanted:
        found = asked.get(one.component) or _asked(own, theirs, one.component)
        if isinstance(found, Misfit):
            return found
        asked[one.component] = found
        for ask in found:
            part = _part(one, ask, own[one.component])
            parts.setdefault(ask.rank, []).append((part, ask))
    lenders = {holder.rank: rank.lender for rank in theirs for holder in rank.holders}
    return tuple(
        RankShare(
            lenders[rank],
            tuple(part for part, _ in of),
            {part.piece.artifact: (ask.own_first, ask.own_end) for part, ask in of},
        )
        for rank, of in sorted(parts.items())
    )


def reached(ranks: Sequence[LendingRank], asked: LenderAddress) -> tuple[LendingRank, ...]:
    """Return the ranks as who reached the worker at `asked` reaches them: one that listens at every
    address of its host is at that one too. Raises InvalidInput for an address that is none."""
    return tuple(
        msgspec.structs.replace(
            rank,
            lender=LenderAddress(rank.lender.unit, _told(rank.lender.address, asked.address)),
        )
        for rank in ranks
    )


def _asked(
    own: RankHolders, theirs: Sequence[LendingRank], component: str
) -> tuple[HeadAsk, ...] | Misfit:
    """Return what our rank asks for of one component."""
    if component not in own:
        return Misfit.OTHER_SECTION
    found = [one for rank in theirs for one in rank.holders if one.section.name == component]
    return asks(own[component], found) if found else Misfit.OTHER_SECTION


def _part(wanted: WantedArtifact, ask: HeadAsk, own: Holder) -> WantedArtifact:
    """Return what of the artifact is asked for."""
    piece = msgspec.structs.replace(wanted.piece, first_head=ask.first_head, end_head=ask.end_head)
    heads = heads_of(own.section)
    size = wanted.bytes * (ask.own_end - ask.own_first) // heads if ask.own_end else wanted.bytes
    return msgspec.structs.replace(wanted, piece=piece, bytes=size)


def _told(address: str, reached_at: str) -> str:
    mend = "name its RPC port"
    host, port = parse_endpoint(address, field="rank", mend=mend)
    if host not in EVERYWHERE:
        return address
    known, _ = parse_endpoint(reached_at, field="peer", mend=mend)
    return f"{address.partition('://')[0]}://{known}:{port}"
