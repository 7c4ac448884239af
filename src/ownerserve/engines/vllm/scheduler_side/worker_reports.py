"""An engine core makes two kinds of reports: its load, by RPC; and what stands in its store, as KV
events.

Owns the requests that are here; the RPC handler and the KV events own the rest. Called on the
scheduler's thread; either half may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.scheduler_side.events import BlockSpan, ResidencyEvents, span_of
from ownerserve.engines.vllm.scheduler_side.node_rpc import NodeRpcHandler
from ownerserve.kv.wire.status import SpeedStatement, TierStatement
from ownerserve.store.format.model import Meta


class WorkerReports:
    """`WorkerReports` are the reports of one engine core. `handler` None: nobody can ask; `events`
    None: KV events are not enabled."""

    def __init__(
        self,
        handler: NodeRpcHandler | None,
        events: ResidencyEvents | None,
        *,
        component: str,
        groups: Sequence[int],
    ) -> None:
        """Make them; `component` is the one whose records stand for a prefix, `groups` are the
        tokens of a block, by group."""
        self._handler = handler
        self._events = events
        self._component = component
        self._blocks_per_token = sum(1 / size for size in groups)
        self._pool: Any = None
        self._filling: dict[str, Any] = {}
        """Requests of whose prompt something is still to be computed."""

    def bind(self, pool: Any) -> None:
        """Use vLLM's block pool."""
        self._pool = pool

    # -- load ----------------------------------------------------------------------------------

    def arrived(self, request: Any) -> Sequence[str]:
        """Report a request that is here and waits, ours or not; also one that lost its blocks.
        Return the sessions that went elsewhere since the last report."""
        if self._handler is None:
            return ()
        self._filling[request.request_id] = request
        self._handler.arrived(request.request_id, request.num_tokens)
        return self._handler.released()

    def stepped(self, scheduled: Mapping[str, int]) -> Sequence[str]:
        """Report a step that computes so many tokens of each request; return the sessions that went
        elsewhere since the last report."""
        handler, pool = self._handler, self._pool
        if handler is None or pool is None:
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
        handler.stepped(
            left,
            free_tokens=self._tokens(free - evictable),
            evictable_tokens=self._tokens(evictable),
            total_tokens=self._tokens(pool.num_gpu_blocks - 1),
        )
        return handler.released()

    def measured(self, speed: SpeedStatement, tiers: Sequence[TierStatement]) -> None:
        """Report what prompts, steps and loads take now."""
        if self._handler is not None:
            self._handler.measured(speed, tiers)

    def gone(self, request_id: str) -> None:
        """Report a request that ended, however."""
        if self._handler is not None:
            self._filling.pop(request_id, None)
            self._handler.gone(request_id)

    def _tokens(self, blocks: int) -> int:
        """Return how many tokens `blocks` hold of a sequence that needs a block of every group for
        its tokens."""
        return int(blocks / self._blocks_per_token)

    # -- the store -----------------------------------------------------------------------------

    def ordered(self, operation_id: int, request: Any, meta: Meta) -> None:
        """Remember a record that is being written, where its blocks are to be told."""
        if self._events is not None and meta.component == self._component:
            span = self._span(request, meta.first_token, meta.end_token)
            self._events.ordered(operation_id, span)

    def kept(self, operation_id: int) -> None:
        """Tell the blocks of a record as stored: it is READY."""
        if self._events is not None:
            self._events.kept(operation_id)

    def not_kept(self, operation_id: int) -> None:
        """Forget a record that was given up: nothing is told of it."""
        if self._events is not None:
            self._events.not_kept(operation_id)

    def missed(self, request: Any, end: int) -> None:
        """Tell that the first `end` tokens of the request are not stored after all."""
        if self._events is not None and (span := self._span(request, 0, end)) is not None:
            self._events.lost(span)

    def is_waiting(self) -> bool:
        """Return whether an event is still to come of what is being written."""
        return self._events is not None and self._events.is_waiting

    def events(self) -> list[Any]:
        """Return the KV events since the last call."""
        return self._events.take() if self._events is not None else []

    def close(self) -> None:
        """Stop answering."""
        if self._handler is not None:
            self._handler.close()

    def _span(self, request: Any, start: int, end: int) -> BlockSpan | None:
        return span_of(request, start, end, hash_block_tokens=self._pool.hash_block_size)
