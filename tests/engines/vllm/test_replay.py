"""What of replays needs no vLLM: how long they are, why they are off, which rows they keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ownerserve.engines.vllm.replay.padding import SlotPadding, padded_blocks
from ownerserve.engines.vllm.replay.replays import ReplayLengths, ReplayRange, Replays, ResumeAt
from ownerserve.engines.vllm.replay.rules import (
    is_asked,
    replay_lengths,
    why_off,
)
from ownerserve.plan.inputs import FULL_ABILITIES, ModelState
from ownerserve.plan.restore import Planner
from ownerserve.plan.window_replay import why_too_long

PLANNER = Planner(
    ModelState(layers=4, block_tokens=32, range_bytes_per_token=1.0, point_bytes=1),
    FULL_ABILITIES,
)


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's class of this name, by which it is known."""


class SlidingWindowSpec(SimpleNamespace):
    """As vLLM's class of this name."""


class MambaSpec(SimpleNamespace):
    """As vLLM's class of this name."""


def group(spec: Any, *layers: str) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers))


FULL = group(FullAttentionSpec(block_size=32), "layers.1", "layers.3")
WINDOW = group(SlidingWindowSpec(block_size=32, sliding_window=64), "layers.0", "layers.2")
GROUPS = [FULL, WINDOW]


def config(**changes: Any) -> Any:
    """A vLLM configuration under which replays are on; `changes` by `part__field`."""
    parts: dict[str, Any] = {
        "scheduler_config": SimpleNamespace(scheduler_cls="x.y.ReplayScheduler"),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, enable_dbo=False
        ),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "model_config": SimpleNamespace(use_mla=False, hf_text_config=SimpleNamespace()),
        "speculative_config": None,
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            setattr(parts[part], field, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


def off(groups: list[Any] = GROUPS, *, has_hooks: bool = True, **changes: Any) -> str | None:
    return why_off(config(**changes), SimpleNamespace(kv_cache_groups=groups), has_hooks=has_hooks)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"has_hooks": False}, "0.31 and 0.32"),
        ({"cache_config__enable_prefix_caching": False}, "prefix caching"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context"),
        ({"parallel_config__enable_dbo": True}, "micro-batches"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "speculation"),
        ({"model_config__use_mla": True}, "MLA"),
        (
            {"model_config__hf_text_config": SimpleNamespace(num_kv_shared_layers=4)},
            "share their KV",
        ),
        ({"groups": [*GROUPS, group(MambaSpec(block_size=32), "layers.4")]}, "MambaSpec"),
        ({"groups": [FULL]}, "no window"),
        ({"groups": [WINDOW]}, "windows alone"),
    ],
)
def test_each_thing_that_makes_a_replay_inexact_switches_it_off(
    changes: dict[str, Any], reason: str
) -> None:
    assert off() is None
    why = off(**changes)
    assert why is not None
    assert reason in why


def test_ngram_speculation_leaves_it_on() -> None:
    assert off(speculative_config=SimpleNamespace(method="ngram")) is None


def test_only_our_schedulers_ask_for_replays() -> None:
    assert is_asked(config())
    assert is_asked(config(scheduler_config__scheduler_cls="x.AsyncReplayScheduler"))
    assert not is_asked(config(scheduler_config__scheduler_cls=None))
    assert not is_asked(config(scheduler_config__scheduler_cls="vllm.x.Scheduler"))


GPTOSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_attention_heads": 64,
    "hidden_size": 2880,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


def test_all_stages_of_a_pipeline_count() -> None:
    """The scheduler's groups have the layers of the first stage: 2 of 18 windows here."""
    first = [group(SlidingWindowSpec(block_size=16, sliding_window=128), "layers.0", "layers.2")]
    lengths = replay_lengths(GPTOSS, first, stages=2)
    assert lengths == ReplayLengths(18 * 127, 18 * 127 + 1)


def test_a_model_that_no_registry_knows_is_counted_by_its_groups_if_there_is_one_stage() -> None:
    unknown = {"model_type": "nobody"}
    assert replay_lengths(unknown, GROUPS, stages=1) == ReplayLengths(126, 127)
    assert isinstance(replay_lengths(unknown, GROUPS, stages=2), str)


def test_a_replay_longer_than_a_step_is_off() -> None:
    assert why_too_long(510, block_tokens=32, step_tokens=542) is None
    assert why_too_long(510, block_tokens=32, step_tokens=541) is not None


def test_rows_are_right_once_every_window_before_them_was() -> None:
    replay = ReplayRange(start=1000, hit=1126, depth=126)
    assert replay.exact(64) == 1126 - 63
    earlier = ReplayRange(start=961, hit=1088, depth=126)
    assert earlier.exact(64) == 1024  # two whole blocks of 32 before the hit


def test_replays_begin_when_the_scheduler_and_every_worker_take_part() -> None:
    replays = Replays(ReplayLengths(126, 127), PLANNER, workers=2)
    assert not replays.is_on
    assert not replays.is_unknown  # vLLM's own scheduler: nothing to wait for
    replays.take_part()
    replays.heard((True,))
    assert replays.is_unknown
    assert not replays.is_on
    replays.heard((True,))
    assert replays.is_on
    assert not replays.is_unknown


def test_one_worker_that_can_not_is_enough() -> None:
    replays = Replays(ReplayLengths(126, 127), PLANNER, workers=2)
    replays.take_part()
    replays.heard((True, False))
    assert not replays.is_on
    assert not replays.is_unknown


# ---- rows


def step(replays: Replays, *, computed: int, table: list[int]) -> tuple[int, ...]:
    tables = SimpleNamespace(get_block_ids=lambda _: ([], table))
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 10, "b": 5},
        scheduled_cached_reqs=SimpleNamespace(req_ids=["b"], num_computed_tokens=[7]),
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=computed)],
        kv_connector_block_state=tables,
    )
    return padded_blocks(replays, output, GROUPS)


def test_a_step_names_the_window_blocks_of_what_it_replays() -> None:
    replays = Replays(ReplayLengths(126, 127), PLANNER, workers=1)
    table = [0, 11, 12, 13, 14, 15]
    assert step(replays, computed=64, table=table) == ()
    replays.begin("a", ResumeAt(start=33, local=128, hit=128))
    assert step(replays, computed=64, table=table) == (11, 12, 13)
    assert step(replays, computed=127, table=[0, 0, 0, 13, 14, 15]) == (13,)
    assert step(replays, computed=128, table=table) == ()
    replays.end("a")
    assert step(replays, computed=64, table=table) == ()


def test_what_goes_on_at_a_point_replays_nothing() -> None:
    replays = Replays(ReplayLengths(126, 127), PLANNER, workers=1)
    replays.begin("a", ResumeAt(start=128, local=96, hit=128))
    assert replays.of("a") is None


@pytest.mark.engine
def test_rows_are_found_by_the_requests_own_window_blocks() -> None:
    """Two requests in one step have the same full blocks; one computes them, the other replays."""
    torch = pytest.importorskip("torch")
    backends = dict.fromkeys(("layers.0", "layers.1", "layers.2", "layers.3"), "CPU_ATTN")
    padding = SlotPadding(GROUPS, backends)
    assert padding.works
    full = torch.tensor([5 * 32 + 0, 5 * 32 + 1, 5 * 32 + 0, 5 * 32 + 1, -1])
    window = torch.tensor([8 * 32 + 0, 8 * 32 + 1, 9 * 32 + 0, 9 * 32 + 1, -1])
    slots = {"layers.0": window, "layers.1": full, "layers.2": window, "layers.3": full}
    assert padding.pad(slots, [9]) == 2
    assert full.tolist() == [160, 161, -1, -1, -1]
    assert window.tolist() == [256, 257, 288, 289, -1]


def test_attention_that_is_not_known_to_read_the_cache_is_refused() -> None:
    backends = {"layers.1": "CPU_ATTN", "layers.3": "ROCM_AITER_FA"}
    padding = SlotPadding(GROUPS, backends)
    assert not padding.works
    assert padding.unknown == ["ROCM_AITER_FA"]
