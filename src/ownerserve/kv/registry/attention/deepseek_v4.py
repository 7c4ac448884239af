"""DeepSeek-V4 Pro and Flash have windows everywhere, and over them CSA, HCA or nothing.

    ratio 0 (or 1)      swa
    ratio 4     (CSA)   swa + main + index + main tail + index tail
    ratio 128   (HCA)   swa + hca + hca tail

Geometry: DeepSeek-V4 report, 2.3 and 4.2.1; overlap and tails as in transformers 5.19 and the
engines' compressor states. Published `compress_ratios` go on past the last layer with a 0 for
each draft layer; any other surplus is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ownerserve.kv.descriptor import KvDescriptor, TailForm
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry.entries import LatentShape, index_entry, latent_entry, window
from ownerserve.kv.registry.family import SLIDING, Family
from ownerserve.kv.registry.fields import Fields, agree, layer_types, ratios_of_layers
from ownerserve.kv.specs import (
    Compressed,
    Entry,
    LayerSpec,
    Part,
    Precision,
    Ring,
    Role,
    Sharding,
    StateSpec,
)

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
TYPE_OF_RATIO = {0: SLIDING, 1: SLIDING, 4: CSA, 128: HCA}


class Pattern(msgspec.Struct, frozen=True):
    """A pattern is each layer's type, and the ratios m (CSA) and m' (HCA) where they are used."""

    kinds: tuple[str, ...]
    rates: dict[str, int]


def read_pattern(fields: Fields) -> Pattern:
    """Read the pattern from `compress_ratios`, or `layer_types` + `compress_rates`, or both when
    they agree.
    """
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    rates: dict[str, int] = {}
    if fields.has("compress_ratios"):
        ratios = ratios_of_layers(fields, layers)
        for index, ratio in enumerate(ratios):
            if ratio not in TYPE_OF_RATIO:
                raise InvalidInput(
                    fields.name(f"compress_ratios[{index}]"),
                    f"{ratio} names no layer type of DeepSeek-V4",
                    "use 0, 4 or 128, or give layer_types with compress_rates",
                )
        found["compress_ratios"] = tuple(TYPE_OF_RATIO[ratio] for ratio in ratios)
        rates = {kind: ratio for ratio, kind in TYPE_OF_RATIO.items() if ratio > 1}
    if fields.has("layer_types") or not found:
        if not fields.has("layer_types"):
            fields.first_of("compress_ratios", "layer_types")
        found["layer_types"] = layer_types(fields, layers, (SLIDING, CSA, HCA))
    kinds = agree(fields, found)
    used = {kind: _rate(fields, kind, rates.get(kind)) for kind in (CSA, HCA) if kind in kinds}
    return Pattern(kinds, used)


def _rate(fields: Fields, kind: str, from_ratios: int | None) -> int:
    """Return the compression ratio of one layer type, under any of its three spellings."""
    legacy = {CSA: "compress_rate_csa", HCA: "compress_rate_hca"}[kind]
    if fields.has("compress_rates"):
        where, rate = "compress_rates", fields.nested("compress_rates").integer(kind)
    elif fields.has(legacy):
        where, rate = legacy, fields.integer(legacy)
    elif from_ratios is None:
        raise InvalidInput(
            fields.name("compress_rates"),
            "is missing",
            f'add it, like {{"{kind}": {4 if kind == CSA else 128}}}, or give compress_ratios',
        )
    else:
        return from_ratios
    if from_ratios is not None and rate != from_ratios:
        raise fields.contradiction(
            where, "compress_ratios", problem=f"{kind} has {rate}, there {from_ratios}"
        )
    return rate


def latent_shape(fields: Fields) -> LatentShape:
    """Return the shape of the one shared head: K = V, rotated in its last `qk_rope_head_dim`
    dimensions.
    """
    dims = fields.integer("head_dim")
    spelling = fields.first_of("qk_rope_head_dim", "partial_rotary_factor")
    if spelling == "qk_rope_head_dim":
        rope = fields.integer(spelling, least=0)
    else:
        rope = _rotated_part(fields, spelling, dims)
    if rope > dims:
        raise fields.contradiction("qk_rope_head_dim", "head_dim", problem=f"{rope} > {dims}")
    return LatentShape(dims - rope, rope, scale_group=64, scale_precision=Precision.UE8M0)


def _rotated_part(fields: Fields, field: str, dims: int) -> int:
    factor = fields.raw(field)
    if not isinstance(factor, int | float) or not 0 <= factor <= 1:
        raise InvalidInput(fields.name(field), f"{factor!r}", "use a number from 0 to 1")
    return int(dims * factor)


class Builder(msgspec.Struct, frozen=True):
    """A builder makes the states of V4 layers from its dimensions and an engine's formats."""

    shape: LatentShape
    kv: KvDescriptor

    @property
    def dims(self) -> int:
        """Count the dimensions of a latent."""
        return self.shape.nope + self.shape.rope

    @property
    def entry(self) -> Entry:
        """Return the entry of one latent in the engine's KV format."""
        return latent_entry(self.shape, self.kv.kv)

    def swa(self, tokens: int) -> StateSpec:
        """Return the state of a window of `tokens` tokens, in the engine's window format."""
        entry = latent_entry(self.shape, self.kv.window or self.kv.kv)
        return window(entry, tokens, self.kv, sharding=Sharding.REPLICATED)

    def compressed(self, role: Role, entry: Entry, kind: Compressed) -> StateSpec:
        """Return the state of compressed entries."""
        return StateSpec(role, kind, entry, align_bytes=self.kv.align_bytes)

    def tail(self, role: Role, dims: int, kind: Compressed) -> StateSpec:
        """Make a tail of waiting rows: a value and a gate score for each dimension of each series.

        With overlap there are two series, Ca and Cb, in a ring of two windows, and at a boundary
        the Ca half of the last window is still needed.
        """
        series = 2 if kind.overlap else 1
        row = self._row(series * dims)
        ring = Ring(
            rows=kind.tokens + kind.overlap,
            period=kind.tokens,
            carry_rows=kind.overlap,
            carry=self._row(dims) if kind.overlap else Entry(()),
        )
        extra_bytes = self.kv.lookahead_tokens * row.payload_bytes
        return StateSpec(role, ring, row, extra_bytes=extra_bytes)

    def online_tail(self, role: Role, dims: int, kind: Compressed) -> StateSpec:
        """Make a tail that is an online softmax over the waiting rows: maximum, sum and weighted
        value.
        """
        names = ("maximum", "sum", "value")
        row = Entry(tuple(Part(name, dims, Precision.FP32) for name in names))
        return StateSpec(role, Ring(rows=1, period=kind.tokens), row)

    def dense_bytes(self, states: Sequence[StateSpec]) -> int:
        """Return the bytes a token of an uncompressed layer: a latent, and an index key where there
        is an indexer.
        """
        index = sum(s.entry.payload_bytes for s in states if s.role is Role.CSA_INDEX)
        return self.entry.payload_bytes + index

    def _row(self, elements: int) -> Entry:
        precision = self.kv.tail_precision
        return Entry((Part("value", elements, precision), Part("score", elements, precision)))


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    pattern = read_pattern(fields)
    make = Builder(latent_shape(fields), kv)
    swa = make.swa(fields.integer("sliding_window", least=2))
    states: dict[str, tuple[StateSpec, ...]] = {SLIDING: (swa,)}
    if rate := pattern.rates.get(CSA):
        index_dims = fields.integer("index_head_dim")
        kind = Compressed(rate, overlap=rate)
        states[CSA] = (
            swa,
            make.compressed(Role.CSA_MAIN, make.entry, kind),
            make.compressed(Role.CSA_INDEX, index_entry(index_dims, kv.index), kind),
            make.tail(Role.CSA_TAIL, make.dims, kind),
            make.tail(Role.CSA_INDEX_TAIL, index_dims, kind),
        )
    if rate := pattern.rates.get(HCA):
        kind = Compressed(rate)
        tail = make.online_tail if kv.tail is TailForm.ONLINE else make.tail
        states[HCA] = (
            swa,
            make.compressed(Role.HCA, make.entry, kind),
            tail(Role.HCA_TAIL, make.dims, kind),
        )
    return [
        LayerSpec(index, kind_name, states[kind_name], make.dense_bytes(states[kind_name]))
        for index, kind_name in enumerate(pattern.kinds)
    ]


FAMILY = Family("deepseek_v4", ("deepseek_v4",), "fp8_ds_mla", make_layers)
