"""Parts are those of one cache, for who looks at all of them: invariants, snapshots, tests.

No other package may: what it needs of a cache, HeteroCache answers (tools/closed.py holds this).
"""

from __future__ import annotations

from typing import NamedTuple

from ownerserve.cache.counters import Counters
from ownerserve.cache.ingest import Ingest
from ownerserve.cache.layout import Layout
from ownerserve.cache.lends import Lends
from ownerserve.cache.pools.evictor import Evictor
from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.pressure import Pressure
from ownerserve.cache.sessions import ResidentState, Running, Sessions
from ownerserve.cache.tree.prefix_tree import PrefixTree
from ownerserve.kv.ids import TurnId


class Parts(NamedTuple):
    """Parts are the objects that one cache works with; they are live."""

    layout: Layout
    counters: Counters
    tree: PrefixTree
    evictor: Evictor
    pools: SlotPools
    running: dict[TurnId, Running]
    sessions: Sessions
    residents: ResidentState
    ingest: Ingest
    lends: Lends
    pressure: Pressure
