"""This module reads what a worker's tiers hold: of a prompt, for transfers, which may send from
host memory; of the records of a session, for what is told to others; and what went from them.
Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.messages import Tier
from ownerserve.node.vocabulary.records import Cell, Digests, RecordNames
from ownerserve.sim.storage.store import SimStore
from ownerserve.sim.storage.tier import SimTier


def located(store: SimStore, ids: Sequence[bytes]) -> dict[Tier, frozenset[bytes]]:
    """Return which of `ids` each tier has.

    A remote tier is not asked, as by a worker: what is written through to it counts as there.
    """
    found: dict[Tier, frozenset[bytes]] = {}
    for level, tier in enumerate(store.tiers):
        if tier.tier is not Tier.REMOTE:
            found[tier.tier] = frozenset(tier.held(ids))
        elif level == store.home:
            found[tier.tier] = frozenset(ids)
    return found


class LostRecords:
    """The lost records are those that went from a node's own tiers since they were last taken."""

    def __init__(self, store: SimStore) -> None:
        self._tiers = [tier for tier in store.tiers if tier.tier is not Tier.REMOTE]
        for tier in self._tiers:
            tier.lost = []

    def take(self) -> tuple[PrefixHash, ...]:
        """Return the prefix hashes of the lost records, each once, and forget them."""
        ends: dict[PrefixHash, None] = {}
        for tier in self._tiers:
            if tier.lost:
                ends |= dict.fromkeys(tier.lost)
                tier.lost = []
        return tuple(ends)


def held_units(names: RecordNames, digests: Digests, store: SimStore) -> int:
    """Return the units from the prompt's start on that are in host memory, up to the deepest
    boundary at which nothing is lacking. `digests` are those of the prompt's blocks."""
    host = store.tiers[0]
    if host.tier is not Tier.HOST:
        return 0
    depth = _range_depth(names, digests, host)
    while depth and not _has_point(names, digests, depth, host):
        depth -= 1
    return depth * names.layout.block_tokens


def _range_depth(names: RecordNames, digests: Digests, host: SimTier) -> int:
    grid, depth = names.blocks, 0
    while depth + grid <= len(digests) and _has_cell(names, digests, depth + grid, host):
        depth += grid
    longest = min(depth + grid - 1, len(digests))
    ends = range(longest, depth, -1)  # the last cell was written as far as it had grown
    return next((end for end in ends if _has_cell(names, digests, end, host)), depth)


def _has_cell(names: RecordNames, digests: Digests, end: int, host: SimTier) -> bool:
    cell: Cell = names.cell_ending_at(end)
    return all(host.get(names.range_id(n, cell, digests)) for n in names.range_names)


def _has_point(names: RecordNames, digests: Digests, depth: int, host: SimTier) -> bool:
    return all(host.get(names.point_id(n, depth, digests)) for n in names.point_names)
