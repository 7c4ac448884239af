"""This module orders the evictions of the host memory of vLLM's own OffloadingConnector, for
agents' sessions.

    "kv_connector_extra_config": {"eviction_policy": "SessionPolicy",
        "cache_policy_module_path": "ownerserve.engines.vllm.offload_policy", ...}

    once    [ oldest ... newest ]   stored, and no request came back to it     goes first
    again   [ oldest ... newest ]   a second request has used it; at most AGAIN_SHARE of the room

A long prompt that nobody continues so can't push out the sessions that go on. Within a request
tails are older than heads: what is left of it is a prefix that still can be hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

AGAIN_SHARE = 0.8


class SessionPolicy(CachePolicy):  # type: ignore[misc]
    """A `SessionPolicy` owns the order of the chunks and nothing of them; vLLM makes one for its
    primary tier."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._once: OrderedDict[bytes, ChunkStatus] = OrderedDict()
        self._again: OrderedDict[bytes, ChunkStatus] = OrderedDict()

    def get(self, key: bytes) -> ChunkStatus | None:
        return self._once.get(key) or self._again.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:
        self._once[key] = chunk

    def remove(self, key: bytes) -> None:
        (self._once if key in self._once else self._again).pop(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Note that the chunks were used; whether by a second request is known when that one
        ends."""
        self._used(list(keys), frozenset())

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        self._used(order_request_keys(key_groups, req_context), reused_keys)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        """Evict `n` chunks, oldest first, and return them; None, with nothing changed, when there
        are fewer."""
        chosen: list[tuple[bytes, ChunkStatus]] = []
        for key, chunk in chain(self._once.items(), self._again.items()):
            if len(chosen) == n:
                break
            if chunk.ref_cnt == 0 and key not in protected:
                chosen.append((key, chunk))
        if len(chosen) < n:
            return None
        for key, _ in chosen:
            self.remove(key)
        return chosen

    def clear(self) -> None:
        self._once.clear()
        self._again.clear()

    def _used(self, keys: Sequence[bytes], reused: Iterable[bytes]) -> None:
        """Note the use of one request's chunks, given heads first: the tail becomes the older."""
        again = set(reused)
        for key in reversed(keys):
            if key in self._once and key in again:
                self._again[key] = self._once.pop(key)
            elif key in self._once:
                self._once.move_to_end(key)
            elif key in self._again:
                self._again.move_to_end(key)
        while len(self._again) > AGAIN_SHARE * self.cache_capacity:
            key, chunk = self._again.popitem(last=False)
            self._once[key] = chunk
