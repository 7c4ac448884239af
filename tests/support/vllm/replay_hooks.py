"""What a test of replays does inside a worker: controls that take a part of them out, and probes.

Called as `hooks.py` is, by names that begin with `replay_hooks:`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ownerserve.engines.vllm import connector as connector_module
from ownerserve.engines.vllm.replay import padding
from ownerserve.engines.vllm.replay.padding import SlotPadding
from ownerserve.engines.vllm.replay.replays import ReplayLengths
from ownerserve.engines.vllm.scheduler_side import scheduler as scheduler_side
from ownerserve.kv.frame import LEAD
from ownerserve.plan.restore import Planner


def replay_lengths(worker: Any) -> dict[str, int]:
    """What a replay computes here, and whether there is any."""
    replays = worker.scheduler.get_kv_connector().replays
    lengths = replays.lengths
    return {
        "depth": lengths.depth,
        "reach": lengths.reach,
        "is_on": int(replays.is_on),
        "running": len(replays.running),
    }


def write_what_is_replayed(worker: Any) -> None:
    """A control: replayed rows write full attention's KV, right or not."""
    SlotPadding.pad = lambda self, slot_mapping, blocks: 0


def pad_by_full_blocks(worker: Any) -> None:
    """A control: rows are found by the full blocks that they would write, whoever else does."""

    def blocks(replays: Any, output: Any, groups: Any) -> tuple[int, ...]:
        own = [i for i, g in enumerate(groups) if type(g.kv_cache_spec).__name__ == padding.FULL]
        size, found = int(groups[own[0]].kv_cache_spec.block_size), []
        for request_id in output.num_scheduled_tokens:
            replay = replays.of(request_id)
            if replay is not None:
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                found += [block for i in own for block in tables[i][: replay.hit // size]]
        return tuple(found)

    def pad(self: Any, slot_mapping: Any, blocks: Any) -> int:
        for group in self._full:
            slots = slot_mapping[group.layer_names[0]]
            mine = torch.tensor(blocks, dtype=slots.dtype)
            rows = torch.isin(slots // int(group.kv_cache_spec.block_size), mine)
            slots.masked_fill_(rows & (slots >= 0), padding.NOT_WRITTEN)
        return 0

    connector_module.padded_blocks = blocks
    padding.SlotPadding.pad = pad


def replay_half(worker: Any) -> None:
    """A control: half of the tokens that make windows right are computed again."""
    replays = worker.scheduler.get_kv_connector().replays
    half = replays.lengths.depth // 2
    replays.lengths = ReplayLengths(half, half)
    planner = replays.planner
    model = msgspec.structs.replace(planner.model, exact_replay_tokens=half)
    replays.planner = Planner(model, planner.abilities)
    side = worker.scheduler.get_kv_connector()._scheduler  # noqa: SLF001 - nobody else has it
    side.state.use(replays.planner)


def hear_all_out(worker: Any) -> None:
    """From here on a step waits as long as it takes for what other threads have to say of prompts,
    so that those which come at once are computed at once: `most_at_once`."""
    scheduler_side.QUIET_WAIT_S = 20.0
    worker.scheduler.get_kv_connector()._scheduler._patience_s = 20.0  # noqa: SLF001 - nobody else has it
    schedule, worker.most_at_once = worker.scheduler.schedule, 0

    def scheduled(*arguments: Any, **options: Any) -> Any:
        output = schedule(*arguments, **options)
        worker.most_at_once = max(worker.most_at_once, len(output.scheduled_new_reqs))
        return output

    worker.scheduler.schedule = scheduled


def most_at_once(worker: Any) -> int:
    """How many requests one step began with, at most."""
    return int(worker.most_at_once)


def watch_replays(worker: Any) -> None:
    """From here on: which window blocks of replays get a hash, and which points are copied, before
    they are right: `seen_of_replays`."""
    connector = worker.scheduler.get_kv_connector()
    replays, side = connector.replays, connector._scheduler  # noqa: SLF001 - nobody else has it
    seen = worker.seen_of_replays = {"hashed": 0, "hashed_wrong": 0, "copied": 0, "copied_wrong": 0}
    coordinator = worker.scheduler.kv_cache_manager.coordinator
    pool = worker.scheduler.kv_cache_manager.block_pool
    cache_full_blocks = pool.cache_full_blocks

    def cached(request: Any, blocks: Any, *, num_cached_blocks: int, num_full_blocks: int, **rest):
        group = rest["kv_cache_group_id"]
        window = getattr(coordinator.single_type_managers[group], "sliding_window", 0)
        replay = replays.of(request.request_id)
        before = [block.block_hash for block in blocks[num_cached_blocks:num_full_blocks]]
        done = cache_full_blocks(
            request,
            blocks,
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            **rest,
        )
        if window and replay is not None:
            for at, had in enumerate(before, start=num_cached_blocks):
                if had is None and blocks[at].block_hash is not None:
                    seen["hashed"] += 1
                    # From the first row that a layer with this window has right.
                    right = replay.start + replay.depth - window + 1
                    seen["hashed_wrong"] += at * rest["block_size"] < right
        return done

    pool.cache_full_blocks = cached
    handle = side.state.handle

    def handled(event: Any, now: float) -> Any:
        effects = handle(event, now)
        replay = replays.of(getattr(event, "turn_id", ""))
        if replay is not None:
            for effect in effects:
                if type(effect).__name__ in ("StoreCopy", "Pin") and not getattr(
                    effect, "component", "window"
                ).startswith("dense"):
                    at = effect.slots[0] if hasattr(effect, "slots") else effect.position
                    if getattr(effect, "component", "") == LEAD:
                        at *= side._block  # noqa: SLF001 - its slots count boundaries
                    seen["copied"] += 1
                    seen["copied_wrong"] += at < replay.hit
        return effects

    side.state.handle = handled


def seen_of_replays(worker: Any) -> dict[str, int]:
    return dict(worker.seen_of_replays)


def watch_interruptions(worker: Any) -> None:
    """From here on: what becomes of replays whose rows are computed in part: `interruptions`."""
    scheduler = worker.scheduler
    connector = scheduler.get_kv_connector()
    replays = connector.replays
    seen = worker.interruptions = {
        "chunked": 0, "preempted": 0, "preempted_in_replay": 0, "aborted_in_replay": 0
    }  # fmt: skip

    def is_amid(request: Any) -> bool:
        replay = replays.of(request.request_id)
        return replay is not None and replay.start < request.num_computed_tokens < replay.hit

    preempt, finish = scheduler._preempt_request, scheduler.finish_requests  # noqa: SLF001 - vLLM tells nobody
    build = connector.build_connector_meta

    def preempted(request: Any, *arguments: Any, **options: Any) -> Any:
        seen["preempted"] += 1
        seen["preempted_in_replay"] += is_amid(request)
        return preempt(request, *arguments, **options)

    def finished(ids: Any, status: Any) -> Any:
        names = [ids] if isinstance(ids, str) else list(ids or ())
        found = [scheduler.requests[name] for name in names if name in scheduler.requests]
        seen["aborted_in_replay"] += sum(map(is_amid, found))
        return finish(ids, status)

    def built(output: Any) -> Any:
        for request_id in output.num_scheduled_tokens:
            seen["chunked"] += is_amid(scheduler.requests[request_id])
        return build(output)

    scheduler._preempt_request, scheduler.finish_requests = preempted, finished  # noqa: SLF001
    connector.build_connector_meta = built


def interruptions(worker: Any) -> dict[str, int]:
    """How many steps went on in mid-replay, and how many requests were stopped there."""
    return dict(worker.interruptions)


def step_into_a_replay(worker: Any, *, most: int = 200) -> bool:
    """Step until some replay is computed in part; whether one is."""
    scheduler = worker.scheduler
    replays = scheduler.get_kv_connector().replays
    for _ in range(most):
        for request_id, replay in replays.running.items():
            request = scheduler.requests.get(request_id)
            if request is not None and replay.start < request.num_computed_tokens < replay.hit:
                return True
        worker.do_run_steps(1)
    return False


def abort_amid_a_replay(worker: Any, *, asks: list[dict[str, Any]]) -> bool:
    """Submit requests, and give up all when a part of a replay is computed; whether one was."""
    worker.do_submit_all(asks)
    is_amid = step_into_a_replay(worker)
    worker.do_abort([ask["id"] for ask in asks])
    return is_amid


def preempt_amid_a_replay(worker: Any, *, asks: list[dict[str, Any]], most: int = 50) -> bool:
    """Submit requests, and once a part of a replay is computed let vLLM find no free block until it
    has preempted a request there; whether it has."""
    worker.do_submit_all(asks)
    if not step_into_a_replay(worker):
        return False
    pool = worker.scheduler.kv_cache_manager.block_pool
    for _ in range(most):
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        worker.do_run_steps(1)
        pool.free_blocks(taken)
        if worker.interruptions["preempted_in_replay"]:
            return True
        if not step_into_a_replay(worker):
            return False
    return False


def evict_windows(worker: Any) -> int:
    """vLLM's pool takes every cached block of a window, as other requests would; how many."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    manager = worker.scheduler.kv_cache_manager
    kinds = [
        type(g.kv_cache_spec).__name__ for g in worker.scheduler.kv_cache_config.kv_cache_groups
    ]
    taken = {
        block.block_id
        for block in manager.block_pool.blocks
        if block.block_hash is not None
        and kinds[get_group_id(block.block_hash)] == "SlidingWindowSpec"
    }
    manager.block_pool.evict_blocks(taken)
    return len(taken)
