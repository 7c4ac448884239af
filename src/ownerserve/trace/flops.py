"""This module counts floating-point operations of a forward pass, as a function of the positions it
computes.

One token at position p (p tokens before it) costs

    linear                        2 · active parameters
    + scores and values           sum over layers   2 · H · (d_qk + d_v) · attended(p)
    + choosing entries            sum over layers   2 · H_index · d_index · entries(p)

A multiply-add is two operations. Each attention state contributes a *term* with a stride (tokens
that one entry stands for) and a cap: attended(p) = min(p / stride, cap).

    keys and values, latents   stride 1           capped by index_topk where an indexer chooses
    CSA entries                stride m           capped by index_topk
    HCA entries                stride m'          none
    windows                    stride 1           capped by the window
    indexer keys               stride 1 or m      none: every entry is scored
    recurrent, conv            constant a token: 6 per state element (decay, update, read out)

MLA is counted as prefill computes it (heads of nope + rope and v dimensions), in decode too;
absorbed decode does more operations, so the prefill share errs to the high side by well under
a point at the ratios of agent traces. Norms, softmax, RoPE and the router are left out (< 1 %).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry import find_family
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.specs import Compressed, LayerSpec, ModelSpec, Role, StateSpec, Window

Positions = NDArray[np.float64]

RECURRENT_OPS_PER_ELEMENT = 6
SPARSE = "sparse_attention_config"


class FlopsTerm(NamedTuple):
    """A term costs `ops` for each entry attended, of which there are min(p / stride, cap) at
    position p."""

    stride: int
    cap: float
    ops: float


class Flops(NamedTuple):
    """The cost of a model is `per_token` whatever the position, and terms that grow with it."""

    per_token: float
    terms: tuple[FlopsTerm, ...]

    def between(self, start: Positions, end: Positions) -> Positions:
        """Return the operations to compute the tokens at positions [start, end), given all
        before."""
        total = self.per_token * (end - start)
        for term in self.terms:
            total = total + term.ops * (_attended(end, term) - _attended(start, term))
        return total


def _attended(positions: Positions, term: FlopsTerm) -> Positions:
    """Return the sum of min(p / stride, cap) over p in [0, n): a ramp up to cap · stride, then
    level."""
    ramp = np.minimum(positions, term.cap * term.stride)
    above = np.maximum(0.0, positions - ramp)
    level = 0.0 if term.cap == np.inf else term.cap
    area: Positions = ramp * ramp / (2 * term.stride) + level * above
    return area


def flops_of(config: Mapping[str, Any], spec: ModelSpec, active_parameters: float) -> Flops:
    """Return the cost of the model that `config` describes and `spec` was built from.

    Raises InvalidInput naming a field of the configuration that is missing.
    """
    fields, _ = find_family(config)
    counted: dict[tuple[int, float], float] = {}
    constant = 0.0
    for layer in spec.layers:
        states = layer.states if layer.kv_source is None else spec.layers[layer.kv_source].states
        chooses = _chooses(layer, states)
        for state in states:
            if state.role in (Role.RECURRENT, Role.CONV):
                elements = sum(part.elements for part in state.entry.parts)
                constant += RECURRENT_OPS_PER_ELEMENT * elements
                continue
            term = _term(state, fields, topk=_topk(fields) if chooses else np.inf)
            if term is not None:
                key = (term.stride, term.cap)
                counted[key] = counted.get(key, 0.0) + term.ops
    terms = tuple(FlopsTerm(stride, cap, ops) for (stride, cap), ops in sorted(counted.items()))
    return Flops(2 * active_parameters + constant, terms)


def _chooses(layer: LayerSpec, states: tuple[StateSpec, ...]) -> bool:
    """Return whether the layer attends to entries that an indexer chose, its own or another
    layer's."""
    own = any(state.role in (Role.INDEX, Role.CSA_INDEX) for state in states)
    return own or layer.index_source is not None


def _term(state: StateSpec, fields: Fields, *, topk: float) -> FlopsTerm | None:
    """Return what one state costs; None for tails, which hold what a later entry is made of."""
    stride = state.kind.tokens if isinstance(state.kind, Compressed) else 1
    match state.role:
        case Role.DENSE | Role.MLA_LATENT | Role.CSA_MAIN:
            return FlopsTerm(stride, topk, _attention_ops(fields))
        case Role.HCA:
            return FlopsTerm(stride, np.inf, _attention_ops(fields))
        case Role.SWA:
            assert isinstance(state.kind, Window)
            return FlopsTerm(1, float(state.kind.tokens), _attention_ops(fields))
        case Role.INDEX | Role.CSA_INDEX:
            heads, dims = _indexer(fields)
            return FlopsTerm(stride, np.inf, 2.0 * heads * dims)
        case _:
            return None


def _attention_ops(fields: Fields) -> float:
    """Return 2 · H · (d_qk + d_v), the operations of one query against one entry, all heads."""
    heads = fields.integer("num_attention_heads")
    if fields.has("kv_lora_rank"):
        qk = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim", least=0)
        return 2.0 * heads * (qk + fields.integer("v_head_dim"))
    return 2.0 * heads * 2 * head_dims(fields)


def head_dims(fields: Fields) -> int:
    """Return `head_dim`, or hidden size over heads."""
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    return fields.integer("hidden_size") // fields.integer("num_attention_heads")


def _topk(fields: Fields) -> float:
    if fields.has(SPARSE):
        sparse = fields.nested(SPARSE)
        return float(sparse.integer("sparse_topk_blocks") * sparse.integer("sparse_block_size"))
    return float(fields.integer("index_topk"))


def _indexer(fields: Fields) -> tuple[int, int]:
    if fields.has(SPARSE):
        sparse = fields.nested(SPARSE)
        return sparse.integer("sparse_num_index_heads"), sparse.integer("sparse_index_dim")
    return fields.integer("index_n_heads"), fields.integer("index_head_dim")


def active_parameters(config: Mapping[str, Any]) -> float:
    """Return the parameters that one token uses, of the models whose configuration tells.

    These have grouped-query attention in every layer with gated MLPs, dense or mixture of experts.
    Embeddings are looked up, not multiplied; the output head counts once.

    Raises InvalidInput naming the missing field: give the number instead then.
    """
    fields, family = find_family(config)
    mend = "give the number with --active-params, like 22B"
    if family.name not in ("dense", "mistral"):
        raise InvalidInput("--active-params", f"can't be told for family {family.name}", mend)
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer_or("num_key_value_heads", heads)
    attention = 2 * hidden * head_dims(fields) * (heads + kv_heads)
    width = "moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size"
    for field in (width, "vocab_size"):
        if not fields.has(field):
            raise InvalidInput(fields.name(field), "is missing", mend)
    used = fields.integer_or("num_experts_per_tok", 1)
    mlp = 3 * hidden * fields.integer(width) * used
    return float(layers * (attention + mlp) + hidden * fields.integer("vocab_size"))
