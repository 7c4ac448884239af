"""State that is computed beside what vLLM cached under former weights ends with that cache."""

from __future__ import annotations

import pytest

from ownerserve.engines.vllm.scheduler_side.former_cache import FormerCache
from tests.support.vllm_parts.fake_vllm.cache import FakePool

pytestmark = pytest.mark.engine


def former(pool: FakePool) -> FormerCache:
    cache = FormerCache()
    cache.bind(pool)
    return cache


def cached(pool: FakePool) -> None:
    (block,) = pool.take(1)
    pool.fill(block, (b"hash", 0))
    pool.free_blocks([block])


def test_it_ends_once_with_vllms_reset_and_not_before() -> None:
    pool = FakePool(4)
    cached(pool)
    cache = former(pool)
    cache.weights_changed()
    assert not cache.has_ended()
    assert pool.reset()
    assert cache.has_ended()
    assert not cache.has_ended()


def test_what_a_request_that_is_here_has_counts_before_it_is_cached() -> None:
    pool = FakePool(4)
    blocks = pool.take(1)
    cache = former(pool)
    cache.weights_changed()
    pool.free_blocks(blocks)
    assert pool.reset() and cache.has_ended()


def test_weights_that_change_while_nothing_is_in_the_pool_leave_nothing_to_end() -> None:
    """As after a sleep or a pause that cleared it: a later reset forgets nothing that is stored."""
    pool = FakePool(4)
    cache = former(pool)
    cache.weights_changed()
    cached(pool)
    assert pool.reset() and not cache.has_ended()


def test_a_reset_without_a_change_of_weights_ends_nothing() -> None:
    pool = FakePool(4)
    cached(pool)
    cache = former(pool)
    assert pool.reset() and not cache.has_ended()
