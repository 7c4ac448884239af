"""Where prefill chunks end and where snapshots are taken. Arithmetic only.

    B = 64, chunk = 256, N = 600

    0        256       512 576 600
    |---------|---------|---|--|      chunks; '|' at 576 = floor((N-1)/B)*B = floor(N/B)*B
                            ^         snapshot

Chunk ends lie on an absolute grid, so a prefix is computed in the same pieces whoever computes it.
"""

from __future__ import annotations


def resume_points(total: int, block: int) -> tuple[int, int]:
    """Boundaries worth a snapshot in a prompt of `total` tokens: the last one that leaves a token
    to compute (what the same prompt can re-use), and the last one at all (what a longer one can).
    They differ only when `total` is a boundary itself. 0 means none.
    """
    return (total - 1) // block * block, total // block * block


def chunk_end(start: int, total: int, *, block: int, chunk: int) -> int:
    """End of the prefill chunk that starts at `start`: the next multiple of `chunk`, cut short at
    the resume points and at `total`.
    """
    ends = (start - start % chunk + chunk, *resume_points(total, block), total)
    return min(end for end in ends if end > start)
