"""A `FormerCache` is vLLM's prefix cache as it stood when the weights changed: what is computed
beside it may be of both weights, as vLLM's own answers are then.

    weights change     state is stored under a new name, over blocks of before it may be
    vLLM's reset       those blocks are gone: state is stored under one more name from here on

vLLM tells no connector of that reset, so its cache is compared: a reset makes another one.
"""

from __future__ import annotations

from typing import Any

from ownerserve.engines.vllm import compat


class FormerCache:
    """One engine core's: owns which cache of the pool's was there at the last change of weights."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._cache: object | None = None

    def bind(self, pool: Any) -> None:
        """Use vLLM's block pool."""
        self._pool = pool

    def weights_changed(self) -> None:
        """Note the cache of now, unless nothing is in any of the pool's blocks."""
        if self._pool is not None and not compat.is_untouched(self._pool):
            self._cache = compat.prefix_cache_of(self._pool)

    def has_ended(self) -> bool:
        """Return, once, whether vLLM has reset the cache that was noted."""
        if self._cache is None or compat.prefix_cache_of(self._pool) is self._cache:
            return False
        self._cache = None
        return True
