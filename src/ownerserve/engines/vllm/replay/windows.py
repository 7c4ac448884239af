"""vLLM's manager of sliding-window blocks, where it also holds the rows of a replay.

vLLM gives a request with a hit the blocks of its last window; here one with a replay has blocks
from the replay's start on, all of its own and new. What is not right in them bears no hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ownerserve.engines.vllm.replay.replays import ReplayRange, Replays


def holding_replays(manager_class: type, replays: Replays) -> type:
    """Return vLLM's class of window managers, which holds what `replays` wants.

    The class is for managers that exist: they are made by vLLM and get this class afterwards.
    """

    class ReplayWindows(manager_class):  # type: ignore[misc]
        """`ReplayWindows` are one window group's blocks of all requests."""

        def get_num_blocks_to_allocate(
            self, request_id: str, num_tokens: int, *args: Any, **options: Any
        ) -> int:
            replay = replays.of(request_id)
            if replay is None or request_id in self.num_cached_block:
                needed: int = super().get_num_blocks_to_allocate(
                    request_id, num_tokens, *args, **options
                )
                return needed
            cap = self.max_admission_blocks_per_request
            is_capped = bool(options.get("apply_admission_cap")) and cap is not None
            return _blocks(replay, num_tokens, self.block_size, cap if is_capped else None)

        def add_local_computed_blocks(
            self, request_id: str, new_computed_blocks: Sequence[Any], *args: Any, **options: Any
        ) -> None:
            replay = replays.of(request_id)
            if replay is None:
                super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **options)
                return
            assert not new_computed_blocks, "a replay has no block of a window that others share"
            gone = [self.block_pool.null_block] * (replay.start // self.block_size)
            self.req_to_blocks[request_id].extend(gone)
            self.num_cached_block[request_id] = -(
                -replay.exact(self.sliding_window) // self.block_size
            )

        def allocate_external_computed_blocks(
            self, request_id: str, *args: Any, **options: Any
        ) -> None:
            if replays.of(request_id) is None:
                super().allocate_external_computed_blocks(request_id, *args, **options)
            # Else `allocate_new_blocks`, which follows, fills up to the hit and beyond.

        def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **options: Any) -> None:
            replay = replays.of(request.request_id)
            if replay is None or not _is_only_planned(replay, request, num_tokens):
                super().cache_blocks(request, num_tokens, *args, **options)

        def pop_blocks_for_free(self, request_id: str) -> list[Any]:
            replays.end(request_id)
            blocks: list[Any] = super().pop_blocks_for_free(request_id)
            return blocks

    return ReplayWindows


def _blocks(replay: ReplayRange, num_tokens: int, size: int, cap: int | None) -> int:
    """Return how many blocks a replaying request takes for so many tokens. `cap` is what one takes
    at most whose window moves on: a replay has its whole range beside that."""
    most = -(-num_tokens // size) - replay.start // size
    spread = -(-(replay.hit - replay.start) // size) + 1
    return most if cap is None else min(most, spread + cap)


def _is_only_planned(replay: ReplayRange, request: Any, num_tokens: int) -> bool:
    """Return whether the hit itself is named, at the request's admission or when its load is done:
    no row of the replay is computed yet."""
    return num_tokens <= replay.hit and request.num_computed_tokens in (0, replay.hit)
