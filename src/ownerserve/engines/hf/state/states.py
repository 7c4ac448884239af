"""This module says which tensors a model's state is made of, read from its Hugging Face
configuration.

Which layer keeps what kind of state the registry says (`kv.registry`); this module owns the shapes
of its tensors in the modeling code. Must never allocate, run a model, or guess: a model type that
has no adapter here is an InvalidInput, and so is whatever the registry does not know.

    section   one component of the cache, or a tail that lives only in the state block
    part      one tensor of a section; its first axis counts the layers that keep it

Shapes are those the modeling code hands over (transformers 5.19); the state between two forwards
is the least it needs: W-1 window rows, k-1 convolution columns, m-1 waiting rows of a window of m.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from ownerserve.cache.layout import Component, Layout, Tail
from ownerserve.kv.descriptor import TailForm
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import (
    COVERAGE_OF,
    CSA_MAIN,
    HCA,
    RECURRENT,
    WINDOW,
    PayloadPart,
    PayloadSection,
    payload_digest,
    sections_of,
)
from ownerserve.kv.registry import build_spec
from ownerserve.kv.specs import Coverage, ModelSpec, Role, Window
from ownerserve.plan.inputs import ModelState

PART_ALIGN_BYTES = 16
MIN_BLOCK_TOKENS = 16
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

CSA_TAIL, HCA_TAIL = "csa_tail", "hca_tail"
TAIL_OF = {Role.CSA_TAIL: CSA_TAIL, Role.HCA_TAIL: HCA_TAIL}
"""Where tokens wait to be compressed: sections of this engine's own, which no store has."""

FAMILIES = ("deepseek_v4", "gemma3_text", "gpt_oss", "qwen3", "qwen3_next")
"""The `model_type`s that this engine runs."""


class StateTensor(msgspec.Struct, frozen=True):
    """A `StateTensor` is one tensor of a section: `shape` is (layers, rows or entries, ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def payload_bytes(self) -> int:
        """`payload_bytes` counts the bytes that are information."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """`padded_bytes` counts what it takes in a slot, alignment included."""
        return -(-self.payload_bytes // PART_ALIGN_BYTES) * PART_ALIGN_BYTES


class ComponentTensors(msgspec.Struct, frozen=True):
    """`ComponentTensors` are a component's tensors in the order they lie in a slot. `coverage`
    None: a tail, live only."""

    name: str
    coverage: Coverage | None
    parts: tuple[StateTensor, ...]

    @property
    def slot_bytes(self) -> int:
        """`slot_bytes` counts what a slot occupies, alignment included."""
        return sum(part.padded_bytes for part in self.parts)

    @property
    def payload_bytes(self) -> int:
        """`payload_bytes` counts what of a slot is information."""
        return sum(part.payload_bytes for part in self.parts)


class LayerPlan(msgspec.Struct, frozen=True):
    """A `LayerPlan` is one layer: its type, as transformers' `layer_types` names it, and its index
    on the layer axis of each section it uses."""

    type: str
    index: dict[str, int]


class ModelStates(msgspec.Struct, frozen=True):
    """`ModelStates` are all state of a model at one block length."""

    block_tokens: int
    layers: tuple[LayerPlan, ...]
    sections: tuple[ComponentTensors, ...]
    window_tokens: int = 0
    csa_rate: int = 0
    hca_rate: int = 0
    hca_tail: TailForm = TailForm.RAW_ROWS

    @property
    def shared_window(self) -> bool:
        """`shared_window` tells whether a window row serves as key and value at once."""
        return any(s.name == WINDOW and len(s.parts) == 1 for s in self.sections)

    @property
    def compresses(self) -> bool:
        """`compresses` tells whether some layer compresses tokens into entries."""
        return bool(self.csa_rate or self.hca_rate)

    @property
    def range_sections(self) -> tuple[ComponentTensors, ...]:
        """`range_sections` are the components of range state."""
        return tuple(s for s in self.sections if s.coverage is Coverage.RANGE)

    @property
    def point_sections(self) -> tuple[ComponentTensors, ...]:
        """`point_sections` are the components of point state."""
        return tuple(s for s in self.sections if s.coverage is Coverage.POINT)

    @property
    def live_sections(self) -> tuple[ComponentTensors, ...]:
        """`live_sections` are what a state block holds: every point component as it is, then the
        tails."""
        tails = tuple(s for s in self.sections if s.coverage is None)
        return self.point_sections + tails

    def planned_state(self) -> ModelState:
        """Return this state as the restore planner needs it.

        A window of W rows is right once the W-1 tokens before were computed by a layer whose own
        input was right, so the reaches of the layers add up (kv.geometry.exact_replay_tokens).
        """
        windows = sum(WINDOW in layer.index for layer in self.layers)
        recurrent = any(RECURRENT in layer.index for layer in self.layers)
        replay = windows * (self.window_tokens - 1) if windows and not recurrent else None
        return ModelState(
            layers=len(self.layers),
            block_tokens=self.block_tokens,
            range_bytes_per_token=sum(s.slot_bytes for s in self.range_sections)
            / self.block_tokens,
            point_bytes=sum(s.slot_bytes for s in self.point_sections),
            exact_replay_tokens=replay,
            bounded_replay_tokens=self.window_tokens if replay is not None else None,
        )

    def payload_parts(self) -> dict[str, tuple[PayloadPart, ...]]:
        """Return the arrays of each kept section, in the words of kv.frame."""
        return {
            section.name: tuple(
                PayloadPart(part.name, part.shape, str(part.dtype).removeprefix("torch."))
                for part in section.parts
            )
            for section in self.sections
            if section.coverage is not None
        }

    def digest(self) -> bytes:
        """Return a SHA-256 over what the kept state means: kinds of layers, and each section's
        tensors.

        Not the tails: at a boundary they are empty, so workers that hold them in another form
        keep the same state and may exchange it.
        """
        sections = [PayloadSection(name, parts) for name, parts in self.payload_parts().items()]
        return payload_digest(
            [layer.type for layer in self.layers],
            sections,
            block_tokens=self.block_tokens,
            window_tokens=self.window_tokens,
            rates=(self.csa_rate, self.hca_rate),
        )

    def layout(self) -> Layout:
        """Return this state as the cache needs it."""
        components = tuple(
            Component(
                name=section.name,
                coverage=section.coverage,
                slot_bytes=section.slot_bytes,
                payload_bytes=section.payload_bytes,
            )
            for section in self.sections
            if section.coverage is not None
        )
        state_bytes = sum(section.slot_bytes for section in self.live_sections)
        tails = tuple(
            self._tail(section) for section in self.live_sections if section.coverage is None
        )
        return Layout(self.block_tokens, components, state_bytes, tails)

    def _tail(self, section: ComponentTensors) -> Tail:
        """Return a tail as the cache's books know it."""
        overlaps = section.name == CSA_TAIL
        period = self.csa_rate if overlaps else self.hca_rate
        form = TailForm.RAW_ROWS if overlaps else self.hca_tail
        rows = 1 if form is TailForm.ONLINE else period - 1
        return Tail(
            name=section.name,
            period=period,
            overlap=period if overlaps else 0,
            form=form,
            row_bytes=section.payload_bytes // max(rows, 1),
            slot_bytes=section.slot_bytes,
        )


def describe(
    config: Any,
    dtype: torch.dtype,
    *,
    block_tokens: int | None = None,
    hca_tail: TailForm = TailForm.RAW_ROWS,
) -> ModelStates:
    """Return the state of the model that `config` describes, kept in `dtype`. Raises InvalidInput
    for what can't be served.

    `hca_tail`: how tokens wait for their HCA window to close, as rows or as one online softmax.

    `block_tokens` (B) must be a multiple of every compression ratio; by default it is the least
    such number that is 16 or more.
    """
    spec = _spec(config)
    csa_rate, hca_rate = _rate(spec, Role.CSA_MAIN), _rate(spec, Role.HCA)
    windows = {state.kind.tokens for state in spec.states if isinstance(state.kind, Window)}
    block = _block_tokens(math.lcm(csa_rate or 1, hca_rate or 1), block_tokens)
    counts: dict[str, int] = {}
    layers = []
    for layer in spec.layers:
        tails = (TAIL_OF[state.role] for state in layer.states if state.role in TAIL_OF)
        index = {name: counts.get(name, 0) for name in (*sections_of(layer), *tails)}
        layers.append(LayerPlan(layer.type, index))
        counts.update({name: at + 1 for name, at in index.items()})
    if hca_tail is TailForm.ONLINE and not hca_rate:
        raise InvalidInput(
            "hca_tail", f"online, but {config.model_type} has no HCA layers here", "leave it out"
        )
    rates = {CSA_MAIN: csa_rate, HCA: hca_rate}
    shapes = _Shapes(config, dtype, block, hca_tail=hca_tail, rates=rates)
    return ModelStates(
        block_tokens=block,
        layers=tuple(layers),
        sections=tuple(shapes.section(name, layers=count) for name, count in counts.items()),
        window_tokens=max(windows, default=0),
        csa_rate=csa_rate,
        hca_rate=hca_rate,
        hca_tail=hca_tail,
    )


class _Shapes:
    """`_Shapes` gives the shapes of each section's parts for one configuration, dtype and block
    length."""

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        block_tokens: int,
        *,
        hca_tail: TailForm,
        rates: dict[str, int],
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._block = block_tokens
        self._hca_tail_form = hca_tail
        self._rates = rates

    def section(self, name: str, *, layers: int) -> ComponentTensors:
        coverage = COVERAGE_OF.get(name)  # a tail has none
        shapes = getattr(self, f"_{name}")()
        parts = tuple(
            StateTensor(part, (layers, *shape), self._part_dtype(name))
            for part, shape in shapes.items()
        )
        return ComponentTensors(name, coverage, parts)

    def _part_dtype(self, section: str) -> torch.dtype:
        # The delta rule computes in float32, whatever the model's dtype; an online softmax must.
        folded = section == HCA_TAIL and self._hca_tail_form is TailForm.ONLINE
        return torch.float32 if section == RECURRENT or folded else self._dtype

    def _dense(self) -> dict[str, tuple[int, ...]]:
        return self._keys_and_values(self._block)

    def _swa(self) -> dict[str, tuple[int, ...]]:
        rows = self._config.sliding_window - 1
        if self._config.model_type == "deepseek_v4":  # one row serves as key and value
            return {"keys": (rows, 1, self._config.head_dim)}
        return self._keys_and_values(rows)

    def _keys_and_values(self, rows: int) -> dict[str, tuple[int, ...]]:
        shape = (rows, self._config.num_key_value_heads, self._config.head_dim)
        return {"keys": shape, "values": shape}

    def _csa_main(self) -> dict[str, tuple[int, ...]]:
        return {"entries": (self._block // self._rates[CSA_MAIN], self._config.head_dim)}

    def _csa_index(self) -> dict[str, tuple[int, ...]]:
        return {"entries": (self._block // self._rates[CSA_MAIN], self._config.index_head_dim)}

    def _hca(self) -> dict[str, tuple[int, ...]]:
        return {"entries": (self._block // self._rates[HCA], self._config.head_dim)}

    def _csa_overlap(self) -> dict[str, tuple[int, ...]]:
        # Ca of the previous window: m rows of (value, gate), for the main and the index series.
        rows = self._rates[CSA_MAIN]
        main, index = self._config.head_dim, self._config.index_head_dim
        return {
            "compressor_kv": (rows, main),
            "compressor_gate": (rows, main),
            "indexer_kv": (rows, index),
            "indexer_gate": (rows, index),
        }

    def _csa_tail(self) -> dict[str, tuple[int, ...]]:
        # A waiting token has both series, Ca and Cb.
        rows = self._rates[CSA_MAIN] - 1
        main, index = 2 * self._config.head_dim, 2 * self._config.index_head_dim
        return {
            "compressor_kv": (rows, main),
            "compressor_gate": (rows, main),
            "indexer_kv": (rows, index),
            "indexer_gate": (rows, index),
        }

    def _hca_tail(self) -> dict[str, tuple[int, ...]]:
        if self._hca_tail_form is TailForm.ONLINE:
            return dict.fromkeys(("maximum", "sum", "value"), (self._config.head_dim,))
        shape = (self._rates[HCA] - 1, self._config.head_dim)
        return {"compressor_kv": shape, "compressor_gate": shape}

    def _conv(self) -> dict[str, tuple[int, ...]]:
        config = self._config
        keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        channels = keys + config.linear_num_value_heads * config.linear_value_head_dim
        return {"columns": (channels, config.linear_conv_kernel_dim - 1)}

    def _recurrent(self) -> dict[str, tuple[int, ...]]:
        config = self._config
        return {
            "state": (
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
            )
        }


def _spec(config: Any) -> ModelSpec:
    """Return what the registry says of the model. Raises InvalidInput for what this engine does not
    run."""
    if config.model_type not in FAMILIES:
        raise InvalidInput(
            "model_type",
            f"{config.model_type!r} has no adapter in the hf engine",
            f"use one of {', '.join(FAMILIES)}",
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise InvalidInput(
            "use_bidirectional_attention", "true", "use a causal model: state can't be re-used here"
        )
    _check_rope(config.rope_parameters)
    return build_spec(config.to_dict())


def _check_rope(parameters: dict[str, Any]) -> None:
    """Refuse rotations that change with the longest sequence seen: kept keys would be wrong."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            raise InvalidInput(
                "rope_parameters.rope_type",
                f"{rope['rope_type']!r} rotates keys by the present length",
                "use default, linear, yarn or llama3",
            )


def _rate(spec: ModelSpec, role: Role) -> int:
    """Return the compression ratio of the layers that keep a state of this role; 0 when the model
    has none."""
    return next((s.tokens_per_entry for s in spec.states if s.role is role), 0)


def _block_tokens(multiple: int, asked: int | None) -> int:
    if asked is None:
        return -(-MIN_BLOCK_TOKENS // multiple) * multiple
    if asked < MIN_BLOCK_TOKENS or asked % multiple:
        raise InvalidInput(
            "block_tokens",
            f"{asked} is no multiple of {multiple} from {MIN_BLOCK_TOKENS} on",
            f"use a multiple of {math.lcm(multiple, MIN_BLOCK_TOKENS)}",
        )
    return asked
