"""PinnedSlot is the baseline that seed 001 replaces: an idle session's slot is pinned until it is
released.
"""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.lru import Lru


class PinnedSlot(Lru):
    """PinnedSlot is LRU among what no session holds. Every session keeps its hard lock between
    turns, so a pool full of idle sessions refuses all turns for ever (sglang issue #27024). For
    comparison only.
    """

    name: ClassVar[str] = "pinned-slot"
    pins_idle_sessions: ClassVar[bool] = True
