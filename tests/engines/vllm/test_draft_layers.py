"""A drafter's layers are told from the target's by name, and are no state of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ownerserve.engines.vllm.compat import draft_layers
from ownerserve.engines.vllm.layout import shape
from ownerserve.engines.vllm.served import NotServed
from tests.support.vllm_parts.specs import (
    Config,
    FullAttentionSpec,
    Group,
    KVCacheTensor,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.engine

TARGET = [f"model.layers.{number}.self_attn.attn" for number in range(4)]


def engine(method: str | None, *, depth: int = 4, **draft: Any) -> SimpleNamespace:
    """What is read of vLLM's configuration; `draft` is the drafter's config."""
    speculative = SimpleNamespace(
        method=method, draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**draft))
    )
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: depth)
    return SimpleNamespace(
        speculative_config=None if method is None else speculative,
        model_config=model,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )


def groups(*names: str) -> list[Group]:
    return [Group(list(names), FullAttentionSpec(32, 2, 32))]


@pytest.mark.parametrize(
    ("of", "beside"),
    [
        (engine(None), []),
        (engine("ngram"), []),
        (engine("suffix"), []),
        (engine("medusa"), []),
        (engine("draft_model"), ["draft_model.model.layers.0.self_attn.attn"]),
        (engine("eagle", num_hidden_layers=1), ["model.layers.4.self_attn.attn"]),
        (
            engine("eagle3", num_hidden_layers=2),
            ["model.layers.4.self_attn.attn", "model.layers.5.self_attn.attn"],
        ),
        (engine("mtp", n_predict=1, num_hidden_layers=4), ["model.layers.4.self_attn.attn"]),
        (engine("mtp", n_predict=1, num_hidden_layers=4), ["mtp.layers.0.self_attn.attn"]),
        (engine("mtp", n_predict=1), []),  # Gemma-4's reads the target's KV and has none
    ],
)
def test_each_kind_of_drafter_is_known_by_its_names(of: Any, beside: list[str]) -> None:
    assert draft_layers(of, groups(*TARGET, *beside)) == frozenset(beside)


@pytest.mark.parametrize(
    "of",
    [
        engine("draft_model"),
        engine("extract_hidden_states"),
        engine("a method of tomorrow"),
        # A model that counts fewer layers than it has would lose its own to the drafter.
        engine("eagle", depth=3, num_hidden_layers=0),
        engine("mtp", depth=2, n_predict=1),
    ],
)
def test_what_can_not_be_told_apart_is_not_served(of: Any) -> None:
    with pytest.raises(NotServed, match="speculative_config"):
        draft_layers(of, groups(*TARGET))


def tensors(names: list[str], page: int) -> list[KVCacheTensor]:
    return [
        KVCacheTensor([name], page * 64, page, offset=page * 64 * number)
        for number, name in enumerate(names)
    ]


def config(*own: Group) -> Config:
    names = [name for group in own for name in group.layer_names]
    return Config(list(own), kv_cache_tensors=tensors(names, 4096))


def test_the_target_has_the_shape_that_it_has_alone() -> None:
    draft = ["draft_model.model.layers.0.self_attn.attn", "draft_model.model.layers.1.self_attn"]
    full, window = FullAttentionSpec(32, 2, 32), SlidingWindowSpec(32, 2, 32, sliding_window=64)
    alone = config(Group(TARGET[:2], full), Group(TARGET[2:], window))
    beside = config(
        Group([*TARGET[:2], draft[0]], full),
        Group(draft[1:], SlidingWindowSpec(64, 4, 32, sliding_window=128)),
        Group(TARGET[2:], window),
    )
    plain = shape.describe(alone)
    drafting = shape.describe(beside, drafts=draft, block_tokens=64)
    assert [layer.name for layer in drafting.components["dense"].layers] == TARGET[:2]
    assert drafting.components["swa"].groups == (2,)
    assert drafting.payload.kinds == plain.payload.kinds
    assert (drafting.group_tokens, drafting.group_windows) == ((32, 64, 32), (0, 128, 64))
    # vLLM goes on where all groups may, the drafter's among them.
    assert shape.describe(beside, drafts=draft).payload.block_tokens == 64
