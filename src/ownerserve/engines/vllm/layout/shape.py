"""A shape says what vLLM keeps for a model, as components: from its KV cache groups to the
canonical payload.

    component   kv.frame's sections: dense, swa, mla, conv, recurrent; pages, window_pages
    group       vLLM's: layers that share a block table. One component may be in several of them

Owns the translation. State whose pages have no canonical payload is kept as bytes (`packed`): other
kinds of recurrent state, chunks, windows or heads of several sizes; kinds that can't be restored
raise NotServed. Torch-free: reads specs by attribute,
and of a group only what scheduler and workers both have, so that both come to the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from ownerserve.cache.layout import Component, Layout
from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.layout import packed
from ownerserve.engines.vllm.layout.packed import LayerPages, PageRun
from ownerserve.engines.vllm.served import NotServed
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import (
    CONV,
    DENSE,
    LEAD,
    MLA,
    PAGES,
    RECURRENT,
    SECTION_OF,
    WINDOW,
    WINDOW_PAGES,
    Payload,
    PayloadPart,
    PayloadSection,
)
from ownerserve.kv.specs import Coverage, ModelSpec, Role, StateSpec, Window
from ownerserve.node.vocabulary.records import LeadForm
from ownerserve.plan.inputs import ModelState

LEAST_BLOCK_TOKENS = 32
"""Below that, hashing costs more than the tokens that a finer boundary saves."""


class PageMeaning(msgspec.Struct, frozen=True):
    """A `PageMeaning` is what the pages of a class of vLLM's KV cache specs hold: `kind`, as a
    payload names it; `roles` of the registry's specs, where they are plain (none: they never are);
    and where they go that are kept as bytes (`pages`)."""

    kind: str
    roles: tuple[Role, ...]
    pages: str

    @property
    def sections(self) -> tuple[str, ...]:
        """`sections` are those of the canonical payload that its plain pages hold."""
        return tuple(SECTION_OF[role] for role in self.roles)


KEPT_BY = {
    "FullAttentionSpec": PageMeaning("full_attention", (Role.DENSE,), PAGES),
    "SlidingWindowSpec": PageMeaning("sliding_attention", (Role.SWA,), WINDOW_PAGES),
    "MLAAttentionSpec": PageMeaning("mla_attention", (Role.MLA_LATENT,), PAGES),
    "SlidingWindowMLASpec": PageMeaning("sliding_mla", (), WINDOW_PAGES),
    "ChunkedLocalAttentionSpec": PageMeaning("chunked_attention", (), WINDOW_PAGES),
    "MambaSpec": PageMeaning("linear_attention", (Role.CONV, Role.RECURRENT), WINDOW_PAGES),
}
RECURRENT_KIND = KEPT_BY["MambaSpec"].kind
DELTA_STATES = 2
"""A gated delta net keeps a convolution state and a recurrent one."""


class LayerAt(msgspec.Struct, frozen=True):
    """A `LayerAt` is one layer of a component: vLLM's name for it, and which of the component's
    groups has it."""

    name: str
    group: int


class ComponentMap(msgspec.Struct, frozen=True):
    """A `ComponentMap` is a component's layers in model order. `groups` are vLLM's group ids,
    `block_tokens` theirs.

    Of pages kept as bytes: `rows`, for each part of the section; `reaches`: tokens before a
    boundary that each group's blocks are kept of, at most; `chunks`: a group reads back to the
    last multiple of so many tokens, and no further (0: as far as it reaches).
    """

    section: PayloadSection
    groups: tuple[int, ...]
    block_tokens: tuple[int, ...]
    layers: tuple[LayerAt, ...] = ()
    rows: tuple[tuple[PageRun, ...], ...] = ()
    reaches: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    def firsts(self, start: int, end: int) -> list[int]:
        """Return, for each group, its first block with something of [start, end)."""
        starts = [max(start, end - reach) for reach in self.reaches] or [start] * len(self.groups)
        for at, chunk in enumerate(self.chunks):
            if chunk:
                starts[at] = max(starts[at], end // chunk * chunk)
        return [at // size for at, size in zip(starts, self.block_tokens, strict=True)]


class StateShape(msgspec.Struct, frozen=True):
    """A `StateShape` is a model on this engine: its payload, and where each component of it
    lies."""

    payload: Payload
    components: dict[str, ComponentMap]
    group_tokens: tuple[int, ...]
    """Tokens that a block of each KV group spans."""
    group_windows: tuple[int, ...]
    """Tokens back that each KV group is read; 0: all of them."""
    is_recurrent: bool = False
    """Whether some state is overwritten by the next token."""

    def layout(self) -> Layout:
        """Return the layout of this state as cache and node need it."""
        components = tuple(
            Component(
                name=section.name,
                coverage=section.coverage,
                slot_bytes=section.unit_bytes,
                payload_bytes=section.payload_bytes,
            )
            for section in self.payload.sections
        )
        return Layout(self.payload.block_tokens, components)

    def lead(self) -> LeadForm | None:
        """Return how windows lead up to a point's; None where a point is more than rows of
        windows, or has none."""
        at = self.components.get(LEAD)
        if at is None:
            return None
        section = at.section
        component = Component(LEAD, section.coverage, section.unit_bytes, section.payload_bytes)
        return LeadForm(component, WINDOW, self.payload.window_tokens - 1)

    def model_state(self) -> ModelState:
        """Return the model as the planner needs it. An engine that owns its blocks offers no
        replay."""
        sections, block = self.payload.sections, self.payload.block_tokens
        ranges = [s.unit_bytes for s in sections if s.coverage is Coverage.RANGE]
        points = [s.unit_bytes for s in sections if s.coverage is Coverage.POINT]
        return ModelState(
            layers=max(1, len(self.payload.kinds)),
            block_tokens=block,
            range_bytes_per_token=sum(ranges) / block,
            point_bytes=sum(points),
        )

    def blocks_for(self, tokens: int, *, step_tokens: int) -> int:
        """Return how many blocks so many more tokens of a request take at most, in steps of
        `step_tokens`: what a window has passed is freed between them."""
        return sum(
            -(-(min(tokens, window + step_tokens) if window else tokens) // size) + 1
            for size, window in zip(self.group_tokens, self.group_windows, strict=True)
        )

    def span(self, component: str, position: int) -> tuple[int, int]:
        """Return the tokens [start, end) that a point at `position` keeps rows of."""
        if component == WINDOW:
            return max(0, position - self.payload.window_tokens + 1), position
        if component == WINDOW_PAGES:
            return max(0, position - max(self.components[component].reaches)), position
        return position - 1, position

    def place(
        self, component: str, tables: Sequence[Sequence[int]], start: int, end: int
    ) -> BlockPlace:
        """Return where tokens [start, end) lie, given a request's block tables."""
        at = self.components[component]
        blocks = tuple(
            tuple(tables[group][first : -(-end // size)])
            for group, size, first in zip(
                at.groups, at.block_tokens, at.firsts(start, end), strict=True
            )
        )
        return BlockPlace(component, blocks, start, end)

    def is_there(self, place: BlockPlace) -> bool:
        """Return whether every block of a place is there: 0 is vLLM's null block."""
        at = self.components[place.component]
        firsts = at.firsts(place.start, place.end)
        return all(
            0 not in ids and len(ids) == -(-place.end // size) - first
            for ids, size, first in zip(place.blocks, at.block_tokens, firsts, strict=True)
        )


class _Layer(msgspec.Struct, frozen=True):
    index: int
    name: str
    group: int
    kept: PageMeaning
    spec: Any


class _Group(msgspec.Struct, frozen=True):
    index: int
    kept: PageMeaning
    spec: Any
    names: tuple[str, ...]
    is_packed: bool
    is_drafts: bool = False
    """Whether all its layers are a drafter's, none the target's."""

    @property
    def kind(self) -> str:
        return self.kept.kind

    @property
    def block_tokens(self) -> int:
        return int(self.spec.block_size)

    def layers(self) -> list[_Layer]:
        return [
            _Layer(compat.layer_index(name), name, self.index, self.kept, self.spec)
            for name in self.names
        ]


def describe(
    kv_cache_config: Any,
    *,
    block_tokens: int = 0,
    packed_by: str = "",
    drafts: Collection[str] = (),
    stage_layers: Sequence[int] = (),
    model: ModelSpec | None = None,
) -> StateShape:
    """Return the state of the model that vLLM's KV cache groups describe. Raises NotServed for a
    model whose state can't be kept, InvalidInput for a `block_tokens` that does not fit it.

    `packed_by` names whose bytes are in pages without a canonical payload (compat.packed_by).
    `drafts` are layers of a drafter, which are no state of the model (compat.draft_layers).

    Of a pipeline, the configuration has one stage's layers: a scheduler's the first one's. Its
    groups are all stages' alike. `stage_layers` counts the layers of each; every stage has to keep
    something of each component, so that a place means the same to all of them.

    `model` is what the registry says of the model, None where it does not know it: then vLLM's own
    specs are all there is. Of what is kept as bytes vLLM alone knows what it means.
    """
    pages = packed.pages_of(kv_cache_config)
    everything = _groups(kv_cache_config, pages, drafts, stages=max(1, len(stage_layers)))
    groups = [group for group in everything if not group.is_drafts]
    if not groups:
        raise NotServed("model", "keeps no KV", "serve it without a KV connector")
    block = _block_tokens(everything, block_tokens)
    plain = [layer for group in groups if not group.is_packed for layer in group.layers()]
    layers = sorted(plain, key=lambda layer: layer.index)
    if model is not None:
        _check_against(model, layers)
    components = _canonical(groups, layers, block)
    opaque = [group for group in groups if group.is_packed]
    for name in dict.fromkeys(group.kept.pages for group in opaque if group.names):
        own = [group for group in opaque if group.kept.pages == name]
        components[name] = _packed(name, own, pages, block)
    for group in groups:
        missing = [name for name in _sections_of(group) if name not in components]
        if missing:
            problem = f"a pipeline stage has no layer with {missing[0]}"
            raise NotServed("pipeline_parallel_size", problem, "use fewer stages")
    sections = tuple(at.section for at in components.values())
    if [s.name for s in sections if s.coverage is Coverage.POINT] == [WINDOW]:
        components[LEAD] = _lead(components[WINDOW], block)
    windows = {int(layer.spec.sliding_window) for layer in layers if WINDOW in layer.kept.sections}
    meanings = [packed.meaning(g.spec, g.names, packed_by=packed_by) for g in opaque]
    payload = Payload(
        block_tokens=block,
        kinds=(*(layer.kept.kind for layer in layers), *meanings, *_elsewhere(stage_layers)),
        sections=sections,
        window_tokens=max(windows, default=0),
    )
    return StateShape(
        payload,
        components,
        group_tokens=tuple(group.block_tokens for group in everything),
        group_windows=tuple(map(_tokens_back, everything)),
        is_recurrent=any(group.kind == RECURRENT_KIND for group in groups),
    )


def nothing(kv_cache_config: Any) -> StateShape:
    """Return the shape of a model of which nothing is kept: its groups, and no component."""
    groups = [compat.group_spec(at) for at in kv_cache_config.kv_cache_groups]
    sizes = tuple(int(getattr(spec, "block_size", LEAST_BLOCK_TOKENS)) for spec in groups)
    block = math.lcm(*sizes) if sizes else LEAST_BLOCK_TOKENS
    windows = tuple(int(getattr(spec, "sliding_window", 0) or 0) for spec in groups)
    return StateShape(Payload(block, (), ()), {}, group_tokens=sizes, group_windows=windows)


def _tokens_back(group: _Group) -> int:
    """Return how far back a group is read; 0: all of the context."""
    if group.kind == "chunked_attention":
        return int(group.spec.attention_chunk_size)
    return int(getattr(group.spec, "sliding_window", 0) or 0)


def _check_against(model: ModelSpec, layers: Sequence[_Layer]) -> None:
    """Raise NotServed for a layer of which vLLM keeps what the model's spec does not need, or less
    than it needs. Layers that the spec has not are a draft's."""
    by_index = {layer.index: layer for layer in model.layers}
    for layer in layers:
        known = by_index.get(layer.index)
        if known is None:
            continue
        for role in layer.kept.roles:
            if not any(_holds(role, layer.spec, state) for state in known.states):
                needed = ", ".join(state.role for state in known.states) or "nothing"
                problem = f"{layer.name} keeps {role}; the model's spec has {needed}"
                raise NotServed("kv cache", problem, "report this model to OwnerServe")


ATTENTION = (Role.DENSE, Role.SWA, Role.MLA_LATENT)


def _holds(role: Role, spec: Any, state: StateSpec) -> bool:
    """Return whether a layer that keeps `role`, as vLLM's spec says, has what a state of the
    model's spec needs: of attention, keys and values of all tokens are never too little."""
    if role is Role.DENSE:
        return state.role in ATTENTION
    if role is Role.SWA and isinstance(state.kind, Window):
        return int(spec.sliding_window) >= state.kind.tokens
    return state.role is role


def _elsewhere(stage_layers: Sequence[int]) -> Iterator[str]:
    """Yield a name for each layer of the stages after the first: which stage has it. Who cuts a
    model elsewhere has other state at each stage."""
    for stage, layers in enumerate(stage_layers):
        yield from [f"stage {stage} of {len(stage_layers)}"] * layers if stage else []


def _sections_of(group: _Group) -> tuple[str, ...]:
    return (group.kept.pages,) if group.is_packed else group.kept.sections


def _canonical(
    all_groups: Sequence[_Group], layers: Sequence[_Layer], block: int
) -> dict[str, ComponentMap]:
    names = dict.fromkeys(name for layer in layers for name in layer.kept.sections)
    components = {}
    for name in names:
        own = [layer for layer in layers if name in layer.kept.sections]
        sizes = {at.index: at.block_tokens for at in all_groups if name in _sections_of(at)}
        groups = tuple(sorted(sizes))
        components[name] = ComponentMap(
            section=PayloadSection(name, _parts(name, own, block)),
            groups=groups,
            block_tokens=tuple(sizes[group] for group in groups),
            layers=tuple(LayerAt(layer.name, groups.index(layer.group)) for layer in own),
        )
    return components


def _lead(window: ComponentMap, block: int) -> ComponentMap:
    """Return the component of rows before a window: its layers, in units of the block."""
    parts = tuple(
        msgspec.structs.replace(part, shape=(part.shape[0], block, *part.shape[2:]))
        for part in window.section.parts
    )
    return msgspec.structs.replace(window, section=PayloadSection(LEAD, parts))


def _packed(
    name: str, groups: Sequence[_Group], pages: dict[str, LayerPages], block: int
) -> ComponentMap:
    """Describe a component whose pages are kept as bytes: rows of equal shape are one part, in
    whole blocks, those of a unit or a window's last ones."""
    reaches, chunks = [], []
    by_shape: dict[tuple[int, int], list[PageRun]] = {}
    for index, group in enumerate(groups):
        size, reach = group.block_tokens, block
        if name == WINDOW_PAGES:
            # Of recurrent state the last block is all.
            back = 2 if group.kind == RECURRENT_KIND else _tokens_back(group)
            reach = -(-(back - 1) // size) * size
            reaches.append(reach)
            chunks.append(back if group.kind == "chunked_attention" else 0)
        for row in packed.rows_of(pages, group.names, group=index, blocks=reach // size):
            by_shape.setdefault((row.blocks, row.bytes), []).append(row)
    parts = tuple(
        PayloadPart(f"rows{number}", (len(rows), *shape), "uint8")
        for number, (shape, rows) in enumerate(by_shape.items())
    )
    return ComponentMap(
        section=PayloadSection(name, parts),
        groups=tuple(group.index for group in groups),
        block_tokens=tuple(group.block_tokens for group in groups),
        rows=tuple(map(tuple, by_shape.values())),
        reaches=tuple(reaches),
        chunks=tuple(chunks),
    )


def _groups(
    kv_cache_config: Any, pages: dict[str, LayerPages], drafts: Collection[str], *, stages: int
) -> list[_Group]:
    found = []
    for index, at in enumerate(kv_cache_config.kv_cache_groups):
        if stages == 1 and not at.layer_names:
            continue  # layers that keep nothing
        own = (s for name, s in compat.layer_specs(at) if name not in drafts)
        spec = next(own, None) or compat.group_spec(at)
        names = tuple(name for name in at.layer_names if name not in drafts)
        if at.layer_names and not names:
            known = KEPT_BY.get(type(spec).__name__, PageMeaning("", (), PAGES))
            found.append(_Group(index, known, spec, (), is_packed=True, is_drafts=True))
            continue
        kept = KEPT_BY.get(type(spec).__name__)
        first = names[0] if names else f"group {index}"
        reason = f"{type(spec).__name__} of {first} has no canonical payload"
        if getattr(spec, "bounded_replay", False):
            reason, kept = f"{first} is rebuilt by computing its window again", None
        elif getattr(at, "host_resident", False):
            reason, kept = f"{first} is in host memory (HiSparse)", None
        if kept is None:
            raise NotServed("kv cache", reason, "serve this model without this connector")
        if kept.kind == RECURRENT_KIND and spec.mamba_cache_mode != "align":
            mode = f"{spec.mamba_cache_mode!r} leaves no state at a boundary"
            raise NotServed("mamba_cache_mode", mode, "use --enable-prefix-caching (align)")
        mixed = packed.is_mixed(pages, names)
        found.append(_Group(index, kept, spec, names, mixed or not _is_plain(kept, spec)))
    return _alike(found)


def _alike(groups: Sequence[_Group]) -> list[_Group]:
    """Return the groups, those of a kind all kept as bytes where they are not of one shape: a
    canonical section has one."""
    forms: dict[str, set[object]] = {}
    for group in groups:
        if not group.is_packed:
            shapes = [_shapes(name, group.spec, 1) for name in group.kept.sections]
            forms.setdefault(group.kind, set()).add((*shapes, _tokens_back(group)))
    mixed = {kind for kind, found in forms.items() if len(found) > 1}
    return [
        msgspec.structs.replace(group, is_packed=group.is_packed or group.kind in mixed)
        for group in groups
    ]


def _block_tokens(groups: Sequence[_Group], asked: int) -> int:
    """Return B: what vLLM can resume at, and no shorter than pays for its hash."""
    least = math.lcm(*(group.block_tokens for group in groups))
    recurrent = any(group.kind == RECURRENT_KIND for group in groups)
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
    shapes = _shapes(name, layers[0].spec, block)
    return tuple(PayloadPart(part, (len(layers), *shape), dtype) for part, shape, dtype in shapes)


def _shapes(name: str, spec: Any, block: int) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    if name in (CONV, RECURRENT):
        return _delta_shapes(name, spec)
    dtype = _dtype(spec.dtype)
    if name == MLA:
        return (("latent", (block, int(spec.head_size)), dtype),)
    rows = block if name == DENSE else int(spec.sliding_window) - 1
    shape = (rows, int(spec.num_kv_heads), int(spec.head_size))
    return (("keys", shape, dtype), ("values", shape, dtype))


def _is_plain(kept: PageMeaning, spec: Any) -> bool:
    """Return whether a page holds one row a token of plain numbers, and nothing else: no scales
    beside quantised values, several tokens in one state (DeepSeek-V4), an indexer's keys (V3.2), or
    keys and values of two lengths. Of recurrent state: whether it is a gated delta net's."""
    if kept.kind == RECURRENT_KIND:
        return "GDN" in _mamba_kind(spec).upper() and len(spec.shapes) == DELTA_STATES
    value_size = getattr(spec, "head_size_v", spec.head_size) or spec.head_size
    return (
        bool(kept.roles)
        and not getattr(getattr(spec, "kv_quant_mode", None), "value", 0)
        and getattr(spec, "state_content_bytes", None) is None
        and not getattr(spec, "model_version", None)
        and "ds_mla" not in str(getattr(spec, "cache_dtype_str", ""))
        and getattr(spec, "tokens_per_state", 1) == 1
        and getattr(getattr(spec, "cache_role", None), "name", "SPARSE") == "SPARSE"
        and _dtype(spec.dtype) not in ("uint8", "int8")
        and value_size == spec.head_size
    )


def _delta_shapes(name: str, spec: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    conv, state = (tuple(int(n) for n in shape) for shape in spec.shapes)
    if name == CONV:
        shape = conv[::-1] if compat.conv_columns_first() else conv
        return (("columns", shape, _dtype(spec.dtypes[0])),)
    heads, first, second = state
    shape = (heads, second, first) if compat.delta_state_is_transposed() else state
    return (("state", shape, _dtype(spec.dtypes[1])),)


def _mamba_kind(spec: Any) -> str:
    return str(getattr(spec.mamba_type, "name", spec.mamba_type))


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
