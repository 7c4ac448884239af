"""What vLLM keeps for a model, as components: from its KV cache groups to the canonical payload.

    component   kv.payload's sections: dense, swa, mla, conv, recurrent
    group       vLLM's: layers that share a block table. One component may be in several of them

Owns the translation; an attention that has no canonical payload is refused by name. Torch-free:
reads specs by attribute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ownerserve.cache.layout import Component, Layout
from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.orders import Place
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.payload import (
    CONV,
    DENSE,
    MLA,
    RECURRENT,
    WINDOW,
    Payload,
    PayloadPart,
    PayloadSection,
)
from ownerserve.kv.specs import Extent
from ownerserve.plan.inputs import ModelState

LEAST_BLOCK_TOKENS = 32
"""Below that, hashing costs more than the tokens that a finer boundary saves."""
KIND_OF = {
    "FullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_attention",
    "MLAAttentionSpec": "mla_attention",
    "MambaSpec": "linear_attention",
}
SECTIONS_OF = {
    "full_attention": (DENSE,),
    "sliding_attention": (WINDOW,),
    "mla_attention": (MLA,),
    "linear_attention": (CONV, RECURRENT),
}
DELTA_STATES = 2
"""A gated delta net keeps a convolution state and a recurrent one."""


class LayerAt(msgspec.Struct, frozen=True):
    """One layer of a component: vLLM's name for it, and which of the component's groups has it."""

    name: str
    group: int


class ComponentMap(msgspec.Struct, frozen=True):
    """A component's layers in model order. `groups` are vLLM's group ids, `block_tokens` theirs."""

    section: PayloadSection
    groups: tuple[int, ...]
    block_tokens: tuple[int, ...]
    layers: tuple[LayerAt, ...]


class StateShape(msgspec.Struct, frozen=True):
    """A model on this engine: its payload, and where each component of it lies."""

    payload: Payload
    components: dict[str, ComponentMap]
    group_tokens: tuple[int, ...]
    """Tokens that a block of each KV group spans."""

    def layout(self) -> Layout:
        """As cache and node need it."""
        components = tuple(
            Component(
                name=section.name,
                extent=section.extent,
                slot_bytes=section.unit_bytes,
                payload_bytes=section.payload_bytes,
            )
            for section in self.payload.sections
        )
        return Layout(self.payload.block_tokens, components)

    def model_state(self) -> ModelState:
        """As the planner needs it. No replay: an engine that owns its blocks offers none."""
        sections, block = self.payload.sections, self.payload.block_tokens
        ranges = [s.unit_bytes for s in sections if s.extent is Extent.RANGE]
        points = [s.unit_bytes for s in sections if s.extent is Extent.POINT]
        return ModelState(
            layers=len(self.payload.kinds),
            block_tokens=block,
            range_bytes_per_token=sum(ranges) / block,
            point_bytes=sum(points),
        )

    @property
    def is_recurrent(self) -> bool:
        """Whether some state is overwritten by the next token."""
        return RECURRENT in self.components

    def span(self, component: str, position: int) -> tuple[int, int]:
        """Tokens that a point at `position` keeps rows of."""
        if component == WINDOW:
            return max(0, position - self.payload.window_tokens + 1), position
        return position - 1, position

    def place(self, component: str, tables: Sequence[Sequence[int]], start: int, end: int) -> Place:
        """Where tokens [start, end) lie, given a request's block tables."""
        at = self.components[component]
        blocks = tuple(
            tuple(tables[group][start // size : -(-end // size)])
            for group, size in zip(at.groups, at.block_tokens, strict=True)
        )
        return Place(component, blocks, start, end)

    def is_there(self, place: Place) -> bool:
        """Whether every block of a place is there: 0 is vLLM's null block."""
        sizes = self.components[place.component].block_tokens
        return all(
            0 not in ids and len(ids) == -(-place.end // size) - place.start // size
            for ids, size in zip(place.blocks, sizes, strict=True)
        )


class _Layer(msgspec.Struct, frozen=True):
    index: int
    name: str
    group: int
    kind: str
    spec: Any


def describe(kv_cache_config: Any, *, block_tokens: int = 0) -> StateShape:
    """The state of the model that vLLM's KV cache groups describe."""
    layers = sorted(_layers(kv_cache_config), key=lambda layer: layer.index)
    if not layers:
        raise InvalidInput("model", "keeps no KV", "serve it without a KV connector")
    block = _block_tokens(layers, block_tokens)
    names = dict.fromkeys(name for layer in layers for name in SECTIONS_OF[layer.kind])
    components = {}
    for name in names:
        own = [layer for layer in layers if name in SECTIONS_OF[layer.kind]]
        groups = tuple(sorted({layer.group for layer in own}))
        sizes = {layer.group: int(layer.spec.block_size) for layer in own}
        components[name] = ComponentMap(
            section=PayloadSection(name, _parts(name, own, block)),
            groups=groups,
            block_tokens=tuple(sizes[group] for group in groups),
            layers=tuple(LayerAt(layer.name, groups.index(layer.group)) for layer in own),
        )
    windows = {int(layer.spec.sliding_window) for layer in layers if layer.kind[:7] == "sliding"}
    if len(windows) > 1:
        raise InvalidInput("sliding_window", f"{sorted(windows)}", "one length is supported")
    payload = Payload(
        block_tokens=block,
        kinds=tuple(layer.kind for layer in layers),
        sections=tuple(at.section for at in components.values()),
        window_tokens=max(windows, default=0),
    )
    group_tokens = {layer.group: int(layer.spec.block_size) for layer in layers}
    return StateShape(payload, components, tuple(group_tokens[g] for g in sorted(group_tokens)))


def _layers(kv_cache_config: Any) -> list[_Layer]:
    found = []
    for group, at in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in compat.layer_specs(at):
            kind = KIND_OF.get(type(spec).__name__)
            if kind is None:
                raise InvalidInput(
                    "kv cache",
                    f"{type(spec).__name__} of {name} has no canonical payload",
                    "serve this model without OwnerServe's connector",
                )
            found.append(_Layer(compat.layer_index(name), name, group, kind, spec))
    return found


def _block_tokens(layers: Sequence[_Layer], asked: int) -> int:
    """B: what vLLM can resume at, and no shorter than pays for its hash."""
    least = math.lcm(*(int(layer.spec.block_size) for layer in layers))
    recurrent = any(layer.kind == "linear_attention" for layer in layers)
    if asked % least or (recurrent and asked not in (0, least)):
        raise InvalidInput(
            "block_tokens",
            f"{asked}",
            f"use {least}" if recurrent else f"use a multiple of {least}",
        )
    if asked:
        return asked
    # vLLM leaves recurrent state at multiples of its own block and nowhere else.
    return least if recurrent else -(-LEAST_BLOCK_TOKENS // least) * least


def _parts(name: str, layers: Sequence[_Layer], block: int) -> tuple[PayloadPart, ...]:
    shapes = {_shapes(name, layer.spec, block) for layer in layers}
    if len(shapes) > 1:
        raise InvalidInput(
            "kv cache", f"layers of {name} differ in shape or dtype", "one shape is supported"
        )
    return tuple(
        PayloadPart(part, (len(layers), *shape), dtype) for part, shape, dtype in shapes.pop()
    )


def _shapes(name: str, spec: Any, block: int) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    if name in (CONV, RECURRENT):
        return _delta_shapes(name, spec)
    _check_plain(spec)
    dtype = _dtype(spec.dtype)
    if name == MLA:
        return (("latent", (block, int(spec.head_size)), dtype),)
    value_size = getattr(spec, "head_size_v", spec.head_size) or spec.head_size
    if value_size != spec.head_size:
        raise InvalidInput("kv cache", "uneven keys and values", "serve this model without us")
    rows = block if name == DENSE else int(spec.sliding_window) - 1
    shape = (rows, int(spec.num_kv_heads), int(spec.head_size))
    return (("keys", shape, dtype), ("values", shape, dtype))


def _check_plain(spec: Any) -> None:
    """Refuse pages that hold more or less than one row a token of plain numbers: scales beside
    quantised values, several tokens in one state (DeepSeek-V4), an indexer's keys (V3.2)."""
    role = getattr(getattr(spec, "cache_role", None), "name", "SPARSE")
    reasons = {
        "quantised with scales": getattr(getattr(spec, "kv_quant_mode", None), "value", 0),
        "packed": getattr(spec, "state_content_bytes", None) is not None,
        "packed by version": getattr(spec, "model_version", None),
        "an fp8 latent with scales": "ds_mla" in str(getattr(spec, "cache_dtype_str", "")),
        "compressed": getattr(spec, "tokens_per_state", 1) != 1,
        "an indexer's": role != "SPARSE",
    }
    for reason, holds in reasons.items():
        if holds:
            raise InvalidInput(
                "kv cache",
                f"pages of {type(spec).__name__} are {reason}: no canonical payload",
                "use an unquantised KV cache, or serve this model without OwnerServe's connector",
            )


def _delta_shapes(name: str, spec: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    if "GDN" not in kind.upper() or len(spec.shapes) != DELTA_STATES:
        raise InvalidInput("kv cache", f"{kind} state has no canonical payload", "serve without")
    if spec.mamba_cache_mode != "align":
        raise InvalidInput(
            "mamba_cache_mode", f"{spec.mamba_cache_mode!r}", "use --enable-prefix-caching (align)"
        )
    conv, state = (tuple(int(n) for n in shape) for shape in spec.shapes)
    if name == CONV:
        shape = conv[::-1] if compat.conv_columns_first() else conv
        return (("columns", shape, _dtype(spec.dtypes[0])),)
    heads, first, second = state
    shape = (heads, second, first) if compat.delta_state_is_transposed() else state
    return (("state", shape, _dtype(spec.dtypes[1])),)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
