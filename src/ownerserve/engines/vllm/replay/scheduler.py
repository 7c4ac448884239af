"""vLLM's schedulers with replays: `--scheduler-cls` names one of the two classes below.

    ownerserve.engines.vllm.replay.scheduler.ReplayScheduler        without async scheduling
    ownerserve.engines.vllm.replay.scheduler.AsyncReplayScheduler   with it, vLLM's default on GPUs

All that they add is the question at a request's admission: vLLM found so much, our connector knows
what else there is, and says where the request goes on. Where replay is off they are vLLM's own.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.compat import LocalHit
from ownerserve.engines.vllm.replay.replays import Replays, ResumeAt
from ownerserve.engines.vllm.replay.rules import FULL, SLIDING
from ownerserve.engines.vllm.replay.windows import holding_replays

log = logging.getLogger("vllm.ownerserve")


class ReplayScheduler(compat.Rewinds, Scheduler):  # type: ignore[misc]
    """`ReplayScheduler` is vLLM's scheduler with replays."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rewinding = replaying(self)


class AsyncReplayScheduler(compat.Rewinds, AsyncScheduler):  # type: ignore[misc]
    """`AsyncReplayScheduler` is vLLM's scheduler for overlapping steps, with replays."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rewinding = replaying(self)


def replaying(scheduler: Any) -> RequestReplays | None:
    """Return what decides for the scheduler; None, with a warning, where nothing is replayed."""
    connectors = compat.sub_connectors(scheduler.connector)
    ours = [at for at in connectors if hasattr(at, "replays")]
    if not ours:
        log.warning("nothing is replayed: OwnerServeConnector is not in --kv-transfer-config")
        return None
    replays: Replays = ours[0].replays
    if len(connectors) > 1:
        # Another connector may store window rows of a replay that are not right yet.
        log.warning("nothing is replayed: another connector stands beside OwnerServeConnector")
        return None
    if replays.planner is None:
        return None  # the connector has said why
    if scheduler.scheduler_config.async_scheduling and not isinstance(scheduler, AsyncScheduler):
        log.warning("async scheduling is off: use AsyncReplayScheduler")
    for manager in compat.window_managers(scheduler.kv_cache_manager):
        manager.__class__ = holding_replays(type(manager), replays)
    replays.take_part()
    log.info("windows are replayed: %d tokens before a hit that lacks them", replays.lengths.reach)
    return RequestReplays(scheduler, ours[0], replays)


class RequestReplays:
    """`RequestReplays` decides for each request of one scheduler where it goes on."""

    def __init__(self, scheduler: Any, connector: Any, replays: Replays) -> None:
        self._scheduler = scheduler
        self._resuming = connector.resuming
        self._replays = replays
        groups = scheduler.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        self._full = [index for index, kind in enumerate(kinds) if kind == FULL]
        self._sizes = [int(group.kv_cache_spec.block_size) for group in groups]
        self._windows = [
            (int(group.kv_cache_spec.block_size), int(group.kv_cache_spec.sliding_window))
            for group, kind in zip(groups, kinds, strict=True)
            if kind == SLIDING
        ]
        self._asked: tuple[str, ResumeAt] | None = None

    def found(self, request: Any, hit: LocalHit) -> LocalHit:
        """Ask the connector where the request goes on: behind vLLM's own hit, it may be."""
        self._asked = None
        manager = self._scheduler.kv_cache_manager
        self._replays.end(request.request_id)
        if not manager.prefix_cache_lookup_enabled(request):
            return hit
        blocks, resident = hit.blocks.blocks, hit.tokens
        if hit.junction > hit.tokens:
            blocks, spans = compat.hits_per_group(manager, request)
            resident = min(spans[index] for index in self._full)
        room = self._has_room(request)
        resume = self._resuming.at(request, hit.tokens, resident=resident, may_replay=room)
        if resume is None:
            return hit
        self._asked = request.request_id, resume
        mine = tuple(
            list(blocks[index])[: resume.local // size] if index in self._full else []
            for index, size in enumerate(self._sizes)
        )
        kept = manager.create_kv_cache_blocks(mine)
        return LocalHit(kept, resume.local, hit.junction, diverged=False)

    def tokens(self) -> int:
        """Return how much of the hit is computed again. All of it, and the hit counts for nothing,
        if the connector has taken back what it said."""
        if self._asked is None:
            return 0
        request_id, resume = self._asked
        if not self._resuming.keeps(request_id, resume):
            self._replays.end(request_id)
            return int(self._scheduler.max_model_len)
        return resume.hit - resume.start

    def rewound(self, request: Any, hit: int) -> int:
        """Return how many tokens before `hit` the request computes again."""
        replay = self._replays.of(request.request_id)
        if replay is None or hit == 0:  # nothing is known any more: its load has failed
            self._replays.end(request.request_id)
            return 0
        assert hit == replay.hit, f"{request.request_id} was to go on at {replay.hit}, not at {hit}"
        compat.tell_cached_tokens(request, replay.start)
        return replay.hit - replay.start

    def _has_room(self, request: Any) -> bool:
        """Return whether the pool could ever hold the request with a replay, which takes all of its
        windows' blocks at once."""
        manager, reach = self._scheduler.kv_cache_manager, self._replays.lengths.reach
        step = int(self._scheduler.max_num_scheduled_tokens)
        blocks = sum(-(-request.num_tokens // self._sizes[index]) for index in self._full)
        blocks += sum(
            -(-min(request.num_tokens, reach + window + step) // size) + 2
            for size, window in self._windows
        )
        kept_free = int(getattr(manager, "watermark_blocks", 0))
        return bool(blocks < int(manager.block_pool.num_gpu_blocks) - kept_free)
