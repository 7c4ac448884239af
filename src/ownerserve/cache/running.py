"""A running turn's record. Owned by HeteroCache for as long as the turn runs."""

from __future__ import annotations

import msgspec

from ownerserve.cache.layout import Table
from ownerserve.cache.tree.node import Receipt, ResumeDepth, Session
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed


class Running(msgspec.Struct, eq=False):
    """A running turn is one between begin and finish or abort.

        row:   0 ....... sealed | private .......... len(row)      slots of blocks
               shared, in tree  | written or reserved
        tail:  tokens from block `sealed` on to `position`

    `sealed` is the depth of `lock`. In a replay `position` starts before it. `prompt` holds the
    known tokens from position `prompt_at` on, to check what the engine says it computed. The
    turn opened at `begun_s` with `restored` tokens, of `expected` that its session once had.
    """

    turn_id: TurnId
    session: Session | None
    order: int
    begun_s: float
    restored: int
    expected: int
    priority: int
    ttl_s: float
    prompt: Packed
    prompt_at: int
    prompt_end: int
    position: int
    sealed: int
    row: list[int]
    table: Table
    lock: Receipt
    tail: bytearray
    decode_stop: ResumeDepth | None = None

    def frontier(self, block_tokens: int) -> tuple[int, Packed]:
        """Return the depth and tail where the turn stands. Inside its replay the tree's blocks go
        on behind it, with tokens of the prompt that it has not computed."""
        depth = self.position // block_tokens
        if depth >= self.sealed:
            return self.sealed, bytes(self.tail)
        first = depth * block_tokens - self.prompt_at
        last = self.position - self.prompt_at
        return depth, self.prompt[first * TOKEN_BYTES : last * TOKEN_BYTES]
