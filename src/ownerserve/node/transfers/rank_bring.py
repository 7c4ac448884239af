"""A rank's bring has what our rank wants come from several of the lender's, each by a bring of its
own into one landing. All of them bring their share, or nothing counts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from ownerserve.node.transfers.landing import Landing
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.node.transfers.ranks import RankShare
from ownerserve.node.transfers.target_side import PartLanded, TargetSide
from ownerserve.transfer.control.events import BringEnd, BringOver
from ownerserve.transfer.vocabulary import ReadFailure


async def bring_shares(
    target: TargetSide,
    shares: Sequence[RankShare],
    hint: SessionHint,
    *,
    landing: Landing,
    landed: PartLanded,
    compute_ms: float,
) -> BringOver:
    """Bring all shares into the landing, at once; return what came of the first that failed, after
    which the others are not wanted any more, or of all of them. Cancelled, none is. Who writes is
    waited for by its own bring, which keeps the memory."""
    brings = [
        asyncio.ensure_future(
            target.bring(
                (share.wanted,),
                share.lender,
                hint,
                landed=_nothing_yet,
                compute_ms=compute_ms,
                into=landing.share(share.own_heads),
            )
        )
        for share in shares
    ]
    ended: list[BringOver] = []
    try:
        for one in asyncio.as_completed(brings):
            ended.append(await one)
            if ended[-1].end is not BringEnd.BROUGHT:
                break
    finally:
        for bring in brings:
            bring.cancel()
        await asyncio.gather(*brings, return_exceptions=True)  # their peers have been told
    over = _joined(ended)
    if over.end is BringEnd.BROUGHT:
        landed(0, landing)
    return over


def _nothing_yet(part: int, landing: Landing) -> None:
    """Do nothing: a share is not the whole."""


def _joined(ended: Sequence[BringOver]) -> BringOver:
    """Return what came of them all; one that failed is the last."""
    end = ended[-1].end
    read, failures = Counter[str](), Counter[ReadFailure]()
    for over in ended:
        read.update(over.read_bytes)
        failures.update(over.failures)
    return BringOver(
        number=ended[-1].number,
        end=end,
        parts=int(end is BringEnd.BROUGHT),
        took_ms=max(over.took_ms for over in ended),
        read_bytes=read,
        early_bytes=sum(over.early_bytes for over in ended),
        failures=failures,
    )
