"""Holders are what the ranks of a lender state of themselves, so that who reads knows which of them
to ask for what, or why none of them fits, before a byte moves."""

from __future__ import annotations

import msgspec

from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.wire.headers import LenderAddress


class Holder(msgspec.Struct, frozen=True):
    """A `Holder` is what a rank states of one component: `spec` (ModelSpec.digest), the tokens of a
    unit, the `section` as this rank has it, which of how many ranks it is, and `heads` of the
    model, 0 where state is not cut by heads."""

    spec: bytes
    block_tokens: int
    section: PayloadSection
    rank: int
    ranks: int
    heads: int = 0

    @property
    def own_heads(self) -> range:
        """Return which of the model's heads the rank has. Of more ranks than heads, several have
        the same one."""
        first = self.rank * self.heads // self.ranks
        return range(first, first + max(1, self.heads // self.ranks))


class LendingRank(msgspec.Struct, frozen=True):
    """A `LendingRank` is one rank of a lender: where it is asked to lend, and what it keeps of each
    component. Its unit is its own, since each rank has its own tickets."""

    lender: LenderAddress
    holders: tuple[Holder, ...]
