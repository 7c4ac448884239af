"""The kernels that move pieces on a device, in Triton: one program for some words of one piece.

Every word of a piece is found by its axes (at most four), so rows that touch, tiles and axes that
change places are the same to them. Addresses are in bytes, as the codec knows them: `own` lists
where pieces begin in the engine's memory, `staged` where they begin in staging memory, which has
the frame's order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
BLOCK = 1024
"""Words of a program."""


@triton.jit
def _place(piece, at, own, n1, n2, n3, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
    """Return the addresses of words `at` of a piece in the engine's memory."""
    rest = at.to(tl.int64)
    last = rest % n3
    rest = rest // n3
    third = rest % n2
    rest = rest // n2
    second = rest % n1
    first = rest // n1
    return tl.load(own + piece) + first * s0 + second * s1 + third * s2 + last * s3


@triton.jit  # type: ignore[untyped-decorator]
def gather(  # type: ignore[no-untyped-def]
    own, staged, words, n1, n2, n3, s0, s1, s2, s3, WORD: tl.constexpr, SIZE: tl.constexpr
):
    """Copy words of a piece from the engine's memory to staging memory."""
    piece = tl.program_id(0)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = _place(piece, at, own, n1, n2, n3, s0, s1, s2, s3).to(tl.pointer_type(WORD))
    here = tl.load(staged + piece) + at.to(tl.int64) * (WORD.primitive_bitwidth // 8)
    value = tl.load(there, mask=at < words)
    tl.store(here.to(tl.pointer_type(WORD)), value, mask=at < words)


@triton.jit  # type: ignore[untyped-decorator]
def scatter(  # type: ignore[no-untyped-def]
    own, staged, words, n1, n2, n3, s0, s1, s2, s3, WORD: tl.constexpr, SIZE: tl.constexpr
):
    """Copy words of a piece from staging memory to the engine's memory."""
    piece = tl.program_id(0)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = _place(piece, at, own, n1, n2, n3, s0, s1, s2, s3).to(tl.pointer_type(WORD))
    here = tl.load(staged + piece) + at.to(tl.int64) * (WORD.primitive_bitwidth // 8)
    value = tl.load(here.to(tl.pointer_type(WORD)), mask=at < words)
    tl.store(there, value, mask=at < words)


def launch(
    kernel: Any, own: Any, staged: Any, *, axes: tuple[tuple[int, int], ...], word_bytes: int
) -> None:
    """Queue `kernel` for the pieces whose begins are in the tensors `own` and `staged`, on the
    current stream. `axes`: at most four, each as (count, stride in bytes), the last of words."""
    filled = ((1, 0),) * (4 - len(axes)) + axes
    (n0, s0), (n1, s1), (n2, s2), (n3, s3) = filled
    words = n0 * n1 * n2 * n3
    grid = (len(own), -(-words // BLOCK))
    kernel[grid](own, staged, words, n1, n2, n3, s0, s1, s2, s3, WORD=WORDS[word_bytes], SIZE=BLOCK)
