"""Pieces are cut without a gap or an overlap, and fit together again once each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ownerserve.transfer.control.pieces import Cover, SizedPiece, cells, clip, cut
from ownerserve.transfer.vocabulary import FramePiece


@st.composite
def pieces(draw: st.DrawFn) -> FramePiece:
    first, layer = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    units, layers = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return FramePiece(b"one", first, first + units, layer, layer + layers)


@given(pieces(), st.integers(1, 5000), st.integers(1, 3000))
def test_what_is_cut_covers_the_piece_once(piece: FramePiece, size: int, most: int) -> None:
    parts, cover = list(cut(SizedPiece(piece, size), most)), Cover([piece])
    assert all(cover.takes(part) for part in parts)
    assert not cover.missing
    cell_bytes = -(-size // cells(piece))
    assert all(cells(part) * cell_bytes <= most or cells(part) == 1 for part in parts)


@given(pieces(), pieces())
def test_what_is_clipped_is_in_both(piece: FramePiece, wanted: FramePiece) -> None:
    inside = clip(SizedPiece(piece, 64 * cells(piece)), wanted)
    if inside is None:
        assert not Cover([wanted]).takes(piece)
        return
    assert inside.bytes == 64 * cells(inside.piece)
    assert Cover([wanted]).takes(inside.piece) and Cover([piece]).takes(inside.piece)


def test_a_cover_takes_only_what_is_wanted_and_once() -> None:
    cover = Cover([FramePiece(b"one", 2, 4, 0, 3)])
    for stranger in (
        FramePiece(b"two", 2, 3, 0, 1),
        FramePiece(b"one", 1, 3, 0, 1),
        FramePiece(b"one", 3, 5, 0, 1),
        FramePiece(b"one", 2, 3, 2, 4),
        FramePiece(b"one", 3, 3, 0, 1),
        FramePiece(b"one", 2, 3, 0, 1 << 40),
        FramePiece(b"one", 2, 3, -1, 1),
    ):
        assert not cover.takes(stranger)
    assert cover.takes(FramePiece(b"one", 2, 4, 1, 3))
    assert not cover.takes(FramePiece(b"one", 3, 4, 0, 2)), "some of it is there"
    assert cover.takes(FramePiece(b"one", 2, 4, 0, 1)) and not cover.missing
