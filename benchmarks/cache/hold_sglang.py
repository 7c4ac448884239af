"""SGLang's RadixCache under replay, plain and with session references. Runs in .venv-sglang.

Page size 1, a page a block id. The tree is SGLang's own and evicts as it does, whole nodes at a
time. Session references follow its UnifiedRadixCache (sglang PR #27058): a finished turn's leaf
is its session's frontier, every node on the path counts it, and what nobody refers to goes first.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, NamedTuple

from cache.replay import Replay, Request, load
from cache.serve import serve
from cache.sglang_import import Allocator, stub_torchvision

stub_torchvision()

import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode  # noqa: E402

torch.set_num_threads(1)


class ReferencedTree(RadixCache):
    """RadixCache that keeps session references on its nodes, through splits and deletions."""

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params)
        self.frontier: dict[int, TreeNode] = {}

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        parent = super()._split_node(key, child, split_len)
        parent.refs = refs(child)
        return parent

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        for session, leaf in self.frontier.items():
            if leaf is node:
                self.frontier[session] = node.parent

    def refer(self, session: int, leaf: TreeNode) -> None:
        """Move the session's frontier to `leaf`."""
        self._add(leaf, 1)
        self.release(session)
        self.frontier[session] = leaf

    def release(self, session: int) -> None:
        """The session is closed."""
        leaf = self.frontier.pop(session, None)
        if leaf is not None:
            self._add(leaf, -1)

    def _add(self, node: TreeNode, count: int) -> None:
        while node is not self.root_node:
            node.refs = refs(node) + count
            node = node.parent


def refs(node: TreeNode) -> int:
    """Sessions that refer to this node."""
    return getattr(node, "refs", 0)


class ReferenceOrder:
    """Eviction order (referenced, references, least recently used)."""

    def get_priority(self, node: TreeNode) -> tuple[bool, int, float]:
        return (refs(node) > 0, refs(node), node.last_access_time)


class Live(NamedTuple):
    request: Request
    lock: Any
    restored: int


class Sglang:
    """Admission as SGLang's scheduler: match, lock, evict what is missing, insert, unlock."""

    def __init__(self, policy: str, capacity: int) -> None:
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=Allocator(1),
            page_size=1,
        )
        self._tree = ReferencedTree(params)
        self._keeps_references = policy == "session-reference"
        if self._keeps_references:
            self._tree.eviction_strategy = ReferenceOrder()
        self._capacity = capacity
        self._live: dict[int, Live] = {}
        self._private: dict[int, int] = {}
        self._counts: dict[str, float] = {"evictions": 0, "freed": 0, "wanted": 0}

    def _take(self, count: int) -> bool:
        tree = self._tree
        used = tree.evictable_size() + tree.protected_size() + sum(self._private.values())
        missing = count - (self._capacity - used)
        if missing > tree.evictable_size():
            return False
        if missing > 0:
            freed = tree.evict(EvictParams(num_tokens=missing)).num_tokens_evicted
            self._counts["evictions"] += 1
            self._counts["freed"] += freed
            self._counts["wanted"] += missing
        return True

    def begin(self, turn: int, request: Request, now: float) -> int | None:
        tree = self._tree
        key = RadixKey(array("q", request.ids[: request.cap]))
        found = tree.match_prefix(MatchPrefixParams(key=key))
        lock = tree.lock(found.last_device_node)
        need = len(request.ids) - found.device_prefix_len
        if not self._take(need):
            tree.unlock(lock)
            return None
        self._private[turn] = 0
        whole = RadixKey(array("q", request.ids))
        leaf = tree.insert(InsertParams(key=whole)).last_device_node
        held = tree.lock(leaf)
        tree.unlock(lock)
        self._live[turn] = Live(request, held, found.device_prefix_len)
        return int(found.device_prefix_len)

    def decode(self, turn: int, now: float) -> bool:
        if not self._take(1):
            return False
        self._private[turn] += 1
        return True

    def finish(self, turn: int, now: float) -> None:
        live = self._live.pop(turn)
        del self._private[turn]
        key = RadixKey(array("q", live.request.ids + live.request.answer))
        leaf = self._tree.insert(InsertParams(key=key)).last_device_node
        if self._keeps_references and leaf is not self._tree.root_node:
            self._tree.refer(live.request.chain, leaf)
        self._tree.unlock(live.lock)

    def abort(self, turn: int, now: float) -> None:
        del self._private[turn]
        self._tree.unlock(self._live.pop(turn).lock)

    def close(self, chain: int) -> None:
        self._tree.release(chain)

    def relieve(self, now: float) -> bool:
        return False

    def resident(self, ids: list[int]) -> int:
        node, depth = self._tree.root_node, 0
        while depth < len(ids) and ids[depth] in node.children:
            node = node.children[ids[depth]]
            same = node.key.match(RadixKey(array("q", ids[depth:])))
            depth += same
            if same < len(node.key):
                break
        return depth

    def counts(self) -> dict[str, float]:
        return self._counts


def replay(
    path: str, *, policy: str, capacity: int, lanes: int, goodbye: str, points: int
) -> dict[str, float]:
    """One policy's numbers. RadixCache keeps no point state."""
    assert not points
    holder = Sglang(policy, capacity)
    return Replay(load(Path(path)), holder, lanes=lanes, goodbye=goodbye).run()


if __name__ == "__main__":
    serve({"replay": replay})
