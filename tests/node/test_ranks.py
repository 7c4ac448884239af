"""Which of a lender's ranks a rank of ours asks for which heads of a record; and what is refused
before anything is asked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import CONV, DENSE, MLA, PayloadPart, PayloadSection
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.holders import LendingRank
from ownerserve.node.transfers.ranks import (
    RankHolders,
    RankShare,
    holders_of,
    is_whole,
    misfit,
    reached,
    shares,
)
from ownerserve.transfer.control.events import WantedArtifact
from ownerserve.transfer.layout.shards import Misfit
from ownerserve.transfer.vocabulary import FramePiece

HEADS, LAYERS, B, DIM = 4, 2, 8, 3
WANTED = (
    WantedArtifact(DENSE, FramePiece(b"d", 0, 2, 0, LAYERS), 800),
    WantedArtifact(MLA, FramePiece(b"m", 0, 2, 0, LAYERS), 100),
)


def sections(ranks: int) -> Mapping[str, PayloadSection]:
    """What a rank keeps of a model with dense and latent layers."""
    shapes = {DENSE: (LAYERS, B, max(1, HEADS // ranks), DIM), MLA: (LAYERS, B, DIM)}
    return {
        name: PayloadSection(name, (PayloadPart("p", shape, "float32"),))
        for name, shape in shapes.items()
    }


def keeps(rank: int, ranks: int) -> RankHolders:
    return holders_of(
        sections(ranks), spec=b"s", block_tokens=B, at=(rank, ranks), heads={DENSE: HEADS}
    )


def lending(rank: int, ranks: int, address: str = "tcp://10.0.0.1:7") -> LendingRank:
    unit = RoutingUnit(WorkerId(f"s.rank-{rank}"), 0, Incarnation(1))
    return LendingRank(LenderAddress(unit, address), tuple(keeps(rank, ranks).values()))


def lender(ranks: int) -> tuple[LendingRank, ...]:
    return tuple(lending(rank, ranks) for rank in range(ranks))


def shared(rank: int, ranks: int, theirs: int) -> tuple[RankShare, ...]:
    found = shares(keeps(rank, ranks), lender(theirs), WANTED)
    assert not isinstance(found, Misfit)
    return found


@pytest.mark.parametrize(("ranks", "theirs"), [*itertools.product((1, 2, 4, 8), repeat=2)])
def test_each_head_of_a_record_comes_once_and_a_latent_of_one_rank(ranks: int, theirs: int) -> None:
    for rank in range(ranks):
        own = keeps(rank, ranks)[DENSE].own_heads
        came, latents = list[int](), list[WorkerId]()
        for share in shared(rank, ranks, theirs):
            (source,) = [one for one in lender(theirs) if one.lender == share.lender]
            there = next(one for one in source.holders if one.section.name == DENSE).own_heads
            for one in share.wanted:
                piece = one.piece
                if one.component == MLA:
                    assert (piece, one.bytes) == (WANTED[1].piece, 100)
                    latents.append(share.lender.unit.worker)
                    continue
                first, end = share.own_heads[piece.artifact]
                taken = there[piece.first_head : piece.end_head] if piece.end_head else there
                assert list(taken) == list(own[first:end] if end else own)
                assert one.bytes == 800 * len(taken) // len(own)
                came += taken
        assert came == list(own) and len(latents) == 1


def test_one_with_all_of_it_reads_another_as_it_is() -> None:
    assert is_whole((keeps(0, 1),), lender(1)) and is_whole((), ())
    assert is_whole((keeps(0, 1),), ()), "who states nothing has all of it"
    (share,) = shared(0, 1, 1)
    assert (share.wanted, set(share.own_heads.values())) == (WANTED, {(0, 0)})
    assert not is_whole((keeps(0, 2),), ()) and not is_whole((), lender(2))


@pytest.mark.parametrize(
    ("own", "theirs", "why"),
    [
        ((keeps(0, 2), keeps(1, 2)), lender(4), None),
        ((keeps(0, 2), keeps(1, 2)), lender(4)[:3], Misfit.MISSING_RANKS),
        ((keeps(0, 2), keeps(1, 2)), (), Misfit.MISSING_RANKS),
        ((), lender(2), Misfit.MISSING_RANKS),
        ((keeps(0, 3),), lender(1), Misfit.OTHER_HEADS),
    ],
)
def test_ranks_that_do_not_fit_are_told_why(
    own: tuple[RankHolders, ...], theirs: tuple[LendingRank, ...], why: Misfit | None
) -> None:
    assert misfit(own, theirs, [DENSE, MLA]) is why


def test_what_one_side_does_not_keep_is_asked_of_nobody() -> None:
    assert misfit((keeps(0, 1),), lender(2), [CONV]) is Misfit.OTHER_SECTION
    other = WantedArtifact(CONV, FramePiece(b"c", 0, 1, 0, LAYERS), 10)
    assert shares(keeps(0, 1), lender(2), [other]) is Misfit.OTHER_SECTION


def test_a_rank_at_every_address_is_at_that_where_its_engine_was_reached() -> None:
    engine = LenderAddress(lending(0, 1).lender.unit, "tcp://10.1.2.3:9")
    ranks = (lending(0, 2, "curve://0.0.0.0:71"), lending(1, 2, "curve://10.0.0.1:72"))
    found = [one.lender.address for one in reached(ranks, engine)]
    assert found == ["curve://10.1.2.3:71", "curve://10.0.0.1:72"]
    with pytest.raises(InvalidInput, match="rank"):
        reached((lending(0, 1, "nowhere"),), engine)
