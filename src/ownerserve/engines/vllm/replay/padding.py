"""The worker's part of a replay: a replayed row writes its window's KV, and none of full attention.

Full attention's rows of a replayed prefix stand in blocks that others share, and are right there;
what a replay computes for them is not. Their slots are set to -1, at which no kernel writes.

Rows are found by the request's own window blocks, which nobody else has. Full blocks would not do:
another request may rightly write the very same ones in this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ownerserve.engines.vllm.replay.replays import Replays
from ownerserve.engines.vllm.replay.rules import FULL, READS_THE_CACHE, SLIDING

NOT_WRITTEN = -1


def padded_blocks(
    replays: Replays, scheduler_output: Any, kv_cache_groups: Sequence[Any]
) -> tuple[int, ...]:
    """Return the window blocks of all rows that a step replays, of one window group: the others
    have the same rows. A step is what vLLM's scheduler puts out."""
    index, size = next(
        (index, int(group.kv_cache_spec.block_size))
        for index, group in enumerate(kv_cache_groups)
        if type(group.kv_cache_spec).__name__ == SLIDING
    )
    running = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
    computed |= {at.req_id: at.num_computed_tokens for at in scheduler_output.scheduled_new_reqs}
    blocks: list[int] = []
    for request_id in scheduler_output.num_scheduled_tokens:
        replay = replays.of(request_id)
        if replay is not None and computed[request_id] < replay.hit:
            table = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[index]
            blocks += filter(None, table[replay.start // size : replay.hit // size])
    return tuple(blocks)


class SlotPadding:
    """A `SlotPadding` keeps the replayed rows of one worker's steps from being written."""

    def __init__(self, kv_cache_groups: Sequence[Any], backends: dict[str, str]) -> None:
        """Make it; `backends` names the attention of each layer."""
        groups = [group for group in kv_cache_groups if group.layer_names]
        self._full = [g for g in groups if type(g.kv_cache_spec).__name__ == FULL]
        self._windows = [g for g in groups if type(g.kv_cache_spec).__name__ == SLIDING]
        layers = [name for group in self._full for name in group.layer_names]
        self.unknown = sorted({backends.get(name, "none") for name in layers} - READS_THE_CACHE)
        """What this worker's full layers compute with that is not known to read the cache."""

    @property
    def works(self) -> bool:
        """`works` tells whether this worker may take part in a replay."""
        return not self.unknown and bool(self._windows)

    def pad(self, slot_mapping: dict[str, Any], blocks: Sequence[int]) -> int:
        """Set the slots of full attention to -1 in every row whose slot in a window group lies in
        `blocks`; return how many rows that were. `slot_mapping` is a step's, by layer."""
        import torch

        window = self._windows[0]
        slots = slot_mapping[window.layer_names[0]]
        mine = torch.tensor(blocks, dtype=slots.dtype, device=slots.device)
        rows = torch.isin(slots // int(window.kv_cache_spec.block_size), mine) & (slots >= 0)
        seen = {slots.data_ptr()}
        for group in self._full:
            for name in group.layer_names:
                own = slot_mapping[name]
                if own.data_ptr() not in seen:
                    seen.add(own.data_ptr())
                    own.masked_fill_(rows, NOT_WRITTEN)
        return int(rows.sum())
