"""What is told beyond the engine: its load, at the desk; what stands in the store, as KV events.

Owns the requests that are here; the desk and the events own the rest. Called on the scheduler's
thread; either half may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.scheduler_side.events import BlockSpan, ResidencyEvents, span_of
from ownerserve.engines.vllm.scheduler_side.node_rpc import NodeRpcHandler
from ownerserve.kv.wire.status import SpeedStatement, TierStatement
from ownerserve.store.format.model import Meta


class Outside:
    """`desk` None: nobody can ask; `residency` None: events are not enabled."""

    def __init__(
        self,
        desk: NodeRpcHandler | None,
        residency: ResidencyEvents | None,
        *,
        component: str,
        groups: Sequence[int],
    ) -> None:
        """`component`: whose records stand for a prefix; `groups`: tokens of a block, by group."""
        self._desk = desk
        self._residency = residency
        self._component = component
        self._blocks_per_token = sum(1 / size for size in groups)
        self._pool: Any = None
        self._filling: dict[str, Any] = {}
        """Requests of whose prompt something is still to be computed."""

    def bind(self, pool: Any) -> None:
        """vLLM's block pool."""
        self._pool = pool

    # -- load ----------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A request is here and waits, ours or not; also one that lost its blocks."""
        if self._desk is not None:
            self._filling[request.request_id] = request
            self._desk.arrived(request.request_id, request.num_tokens)

    def stepped(self, scheduled: Mapping[str, int]) -> Sequence[str]:
        """A step computes so many tokens of each; sessions that went elsewhere since the last."""
        desk, pool = self._desk, self._pool
        if desk is None or pool is None:
            return ()
        left = {}
        for request_id in scheduled.keys() & self._filling.keys():  # most decode: as few as can be
            request = self._filling[request_id]
            computed = request.num_computed_tokens + scheduled[request_id]
            left[request_id] = max(0, request.num_prompt_tokens - computed)
            if not left[request_id]:
                del self._filling[request_id]
        free = pool.get_num_free_blocks()
        evictable = compat.evictable_blocks(pool)
        desk.stepped(
            left,
            free_tokens=self._tokens(free - evictable),
            evictable_tokens=self._tokens(evictable),
            total_tokens=self._tokens(pool.num_gpu_blocks - 1),
        )
        return desk.released()

    def measured(self, speed: SpeedStatement, tiers: Sequence[TierStatement]) -> None:
        """What prompts, steps and loads take now."""
        if self._desk is not None:
            self._desk.measured(speed, tiers)

    def gone(self, request_id: str) -> None:
        """It ended, however."""
        if self._desk is not None:
            self._filling.pop(request_id, None)
            self._desk.gone(request_id)

    def _tokens(self, blocks: int) -> int:
        """What `blocks` hold of a sequence that needs a block of every group for its tokens."""
        return int(blocks / self._blocks_per_token)

    # -- the store -----------------------------------------------------------------------------

    def ordered(self, operation_id: int, request: Any, meta: Meta) -> None:
        """A record is being written."""
        if self._residency is not None and meta.component == self._component:
            span = self._span(request, meta.first_token, meta.end_token)
            self._residency.ordered(operation_id, span)

    def kept(self, operation_id: int) -> None:
        """It is READY."""
        if self._residency is not None:
            self._residency.kept(operation_id)

    def not_kept(self, operation_id: int) -> None:
        """It was given up."""
        if self._residency is not None:
            self._residency.not_kept(operation_id)

    def missed(self, request: Any, end: int) -> None:
        """Its first `end` tokens are not stored after all: what was told of them is void."""
        if self._residency is not None and (span := self._span(request, 0, end)) is not None:
            self._residency.lost(span)

    def is_waiting(self) -> bool:
        """Whether an event is still to come of what is being written."""
        return self._residency is not None and self._residency.is_waiting

    def events(self) -> list[Any]:
        """KV events since the last call."""
        return self._residency.take() if self._residency is not None else []

    def close(self) -> None:
        """Nobody is answered any more."""
        if self._desk is not None:
            self._desk.close()

    def _span(self, request: Any, start: int, end: int) -> BlockSpan | None:
        return span_of(request, start, end, hash_block_tokens=self._pool.hash_block_size)
