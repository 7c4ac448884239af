"""This module makes the cache object that transformers' models are handed, with an object for each
kind of layer.

No layer owns state: each reads and writes the pools at the addresses of the forward's
`ForwardRows`.

    DenseLayer                      a key and a value for every token (full attention)
    WindowLayer, SharedWindowLayer  the last W-1 tokens, a ring in the state block
    DeltaLayer                      linear attention: convolution columns and a recurrence
    HcaLayer, CsaLayer              DeepSeek-V4's compressed attention (paper §2.3.1, §2.3.2)
    PagedCache                      `past_key_values` of one forward

The objects are duck-typed: a subclass of transformers' `Cache` or of its layer classes would enter
itself into global mappings and change other models in the process. Method names and results are
those that modeling and mask code call; transformers 5.19.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ownerserve.engines.hf.state.paged import EntryAddresses, ForwardRows
from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.states import CSA_TAIL, HCA_TAIL, LayerPlan, ModelStates
from ownerserve.engines.hf.state.v4 import Borrowed
from ownerserve.kv.descriptor import TailForm
from ownerserve.kv.frame import (
    CONV,
    CSA_INDEX,
    CSA_MAIN,
    CSA_OVERLAP,
    DENSE,
    HCA,
    RECURRENT,
    WINDOW,
)


class DenseLayer:
    """A `DenseLayer` serves full attention: `update` takes and gives [R, heads, tokens, dim], as
    transformers does.

    New rows are written first and read back with the rest, so that rows below the write floor stay
    as they were sealed.
    """

    def __init__(self, span: ForwardRows, pools: Pools, *, layer: int) -> None:
        pool = pools.component(DENSE)
        self._at = span.entries(DENSE, 1, zero_slot=pool.zero_slot)
        self._keys = pool.part(DENSE, "keys")[:, layer]
        self._values = pool.part(DENSE, "values")[:, layer]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values; return those of all tokens so far, right-padded in a
        batch."""
        write_entries(self._keys, self._at, keys.transpose(1, 2))
        write_entries(self._values, self._at, values.transpose(1, 2))
        keys, values = read_entries(self._keys, self._at), read_entries(self._values, self._at)
        return keys.transpose(1, 2), values.transpose(1, 2)


def write_entries(pool: Tensor, at: EntryAddresses, entries: Tensor) -> None:
    """Put new `entries` [R, n, ...] at their addresses in `pool` [slots, per block, ...]."""
    rows, written = at.write_slots.shape
    if not rows or not written:
        return
    if rows < entries.shape[0]:
        entries = entries[at.write_rows]
    pool[at.write_slots, at.write_offsets] = entries[:, entries.shape[1] - written :]


def read_entries(pool: Tensor, at: EntryAddresses) -> Tensor:
    """Gather the entries [R, count, ...] of all rows."""
    return pool[at.blocks].flatten(1, 2)[:, : at.count]


class WindowLayer:
    """A `WindowLayer` serves sliding-window attention with separate keys and values.

    The rows are a ring in the state block, the row of position p at p mod (W-1). transformers'
    masks want exactly min(start, W-1) old rows before the new ones.
    """

    parts: ClassVar[tuple[str, ...]] = ("keys", "values")

    def __init__(self, span: ForwardRows, pools: Pools, *, layer: int, window_tokens: int) -> None:
        self._states = span.states
        self._at = span.window(window_tokens)
        self._rings = [pools.state.part(WINDOW, part)[:, layer] for part in self.parts]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new rows; return the old rows, then the new ones, [R, heads, h + q, dim],
        left-padded in a batch."""
        seen = [
            self._roll(ring, new.transpose(1, 2)).transpose(1, 2)
            for ring, new in zip(self._rings, (keys, values), strict=False)
        ]
        return seen[0], seen[-1]

    def _roll(self, ring: Tensor, new: Tensor) -> Tensor:
        """Read what `ring` [slots, W-1, ...] has, then overwrite its oldest with `new`."""
        rows = torch.cat((ring[self._states, self._at.read], new), dim=1)
        kept = self._at.write.shape[1]
        ring[self._states, self._at.write] = new[:, new.shape[1] - kept :]
        return rows


class SharedWindowLayer(WindowLayer):
    """A `SharedWindowLayer` serves DeepSeek-V4's window, where one row is key and value."""

    parts: ClassVar[tuple[str, ...]] = ("keys",)


class DeltaLayer:
    """A `DeltaLayer` serves a layer of Qwen3-Next's gated delta net, as modeling_qwen3_next reads
    its cache layer.

    The modeling code reads `conv_states` and changes them in place when q = 1, so it is given a
    copy, which goes back to the state block together with the new recurrent state.
    """

    record_past = False

    def __init__(self, span: ForwardRows, pools: Pools, *, plan: LayerPlan) -> None:
        self._state = span.states[:, 0]
        self._conv = pools.state.part(CONV, "columns")[:, plan.index[CONV]]
        self._recurrent = pools.state.part(RECURRENT, "state")[:, plan.index[RECURRENT]]
        # An empty state block is all zero, which is what an empty history convolves and recurs to.
        self.has_previous_state = max(span.starts) > 0
        self._columns = self._conv[self._state]

    @property
    def conv_states(self) -> list[Tensor]:
        return [self._columns]

    @property
    def recurrent_states(self) -> list[Tensor]:
        return [self._recurrent[self._state]]

    def update_conv_state(self, new: Tensor) -> Tensor:
        """Return the old columns, if any, then `new` [R, channels, q]; keep the last k-1."""
        columns = torch.cat((self._columns, new), dim=-1)
        self._columns = columns[..., columns.shape[-1] - self._columns.shape[-1] :]
        return columns if self.has_previous_state else new

    def update_recurrent_state(self, state: Tensor) -> Tensor:
        """Write both states back to their block; the last call in the layer's forward."""
        self._conv[self._state] = self._columns
        self._recurrent[self._state] = state
        return state


# ---- tails of compressed layers: rows of tokens whose window of m is not full
#
# The tail sections of state blocks are read and written where the cache's `TailStep` says. Two
# forms of one thing, chosen a worker (`ModelStates.hca_tail`):
#
#     raw      | kv, gate | kv, gate | ...   a row a token, at most m-1
#     online   | max | sum | value |         all of them folded into one, in float32:
#                                            sum = S exp(g - max), value = S exp(g - max) kv
#
# with g = gate + the compressor's bias of the token's place in its window. Softmax needs no more of
# the past, so folding is exact up to rounding. When the window closes, transformers' compressor
# gets m rows as ever: the first is value / sum with the gate whose biased value is log-sum-exp, the
# other folded ones have a gate of -inf and so no weight. Such windows are handed over in float32:
# one row rounded to half precision would lose what the rows it stands for lose together.


class TailRows(Protocol):
    """`TailRows` are what a compressed layer needs of its tail."""

    def close(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (kv, gate) rows [R, windows * m, dim] of the windows that close now: those
        waiting, then new ones. The other new rows wait from now on."""
        ...


class RawTail:
    """A `RawTail` keeps a row for each waiting token."""

    def __init__(
        self, span: ForwardRows, pools: Pools, *, section: str, layer: int, rate: int
    ) -> None:
        self._states = span.states[:, 0]
        self._at = span.tail(rate)
        self._pool = pools.state
        self._section = section
        self._layer = layer

    def close(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        return self._pass(f"{name}_kv", kv), self._pass(f"{name}_gate", gate)

    def _pass(self, part: str, new: Tensor) -> Tensor:
        tail = self._pool.part(self._section, part)[:, self._layer]
        at = self._at
        closing = new[:, : at.closing]
        if at.waiting:
            closing = torch.cat((tail[self._states, : at.waiting], closing), dim=1)
        tail[self._states[at.left_rows, None], at.left] = new[at.left_rows, at.first_left :]
        return closing


class OnlineTail:
    """An `OnlineTail` keeps one row for all waiting tokens of an HCA layer; `bias` [m, dim] is its
    compressor's."""

    def __init__(self, span: ForwardRows, pools: Pools, *, layer: int, bias: Tensor) -> None:
        self._states = span.states[:, 0]
        self._at = span.tail(bias.shape[0])
        self._bias = bias.detach().float()
        self._max, self._sum, self._value = (
            pools.state.part(HCA_TAIL, part)[:, layer] for part in ("maximum", "sum", "value")
        )

    def close(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        at = self._at
        closing_kv, closing_gate = kv[:, : at.closing], gate[:, : at.closing]
        if at.waiting:
            folded_kv, folded_gate = self.folded(at.waiting)
            closing_kv = torch.cat((folded_kv, closing_kv.float()), dim=1)
            closing_gate = torch.cat((folded_gate, closing_gate.float()), dim=1)
        if at.left.numel():
            rows = at.left_rows
            self._fold(kv[rows, at.first_left :], gate[rows, at.first_left :])
        return closing_kv, closing_gate

    def folded(self, waiting: int) -> tuple[Tensor, Tensor]:
        """Return `waiting` rows that weigh as much as the tokens that were folded."""
        total = self._sum[self._states]
        shape = (len(self._states), waiting, self._bias.shape[1])
        kv = torch.zeros(shape, device=total.device)
        gate = torch.full(shape, -torch.inf, device=total.device)
        kv[:, 0] = self._value[self._states] / total
        gate[:, 0] = self._max[self._states] + total.log() - self._bias[0]
        return kv, gate

    def _fold(self, kv: Tensor, gate: Tensor) -> None:
        """Add rows [r, k, dim]. A row in the first place of its window begins anew: what the state
        block still has is of a window that closed, or of another sequence."""
        at = self._at
        states = self._states[at.left_rows]
        begins = at.left[:, :1] == 0
        score = gate.float() + self._bias[at.left]
        before = self._max[states].masked_fill(begins, -torch.inf)
        highest = torch.maximum(before, score.amax(dim=1))
        kept, weights = (before - highest).exp(), (score - highest.unsqueeze(1)).exp()
        total = self._sum[states].masked_fill(begins, 0)
        value = self._value[states].masked_fill(begins, 0)
        self._max[states] = highest
        self._sum[states] = total * kept + weights.sum(dim=1)
        self._value[states] = value * kept + (weights * kv.float()).sum(dim=1)


# ---- compressed layers


COMPRESSOR, INDEXER = "compressor", "indexer"


class CompressedLayer(SharedWindowLayer):
    """A `CompressedLayer` is a window layer with one or two compressors, each known by
    transformers' name for it.

    Finished entries go to the range pools, tokens whose window of m is not full wait in the state
    block's tail, and the window rows in its ring.

        tokens     | 0 1 2 3 | 4 5 6 7 | 8 9          m = 4, start = 10
        entries       e0        e1       tail: 8, 9
        overlap                 Ca of 4..7            entry e2 = gate(Ca of 4..7, Cb of 8..11)
    """

    entry_sections: ClassVar[Mapping[str, str]] = {COMPRESSOR: HCA}

    def __init__(
        self,
        span: ForwardRows,
        pools: Pools,
        *,
        states: ModelStates,
        plan: LayerPlan,
        borrowed: Borrowed,
    ) -> None:
        super().__init__(span, pools, layer=plan.index[WINDOW], window_tokens=states.window_tokens)
        self._span = span
        self._pools = pools
        self._rate = states.csa_rate if CSA_MAIN in plan.index else states.hca_rate
        self._index = plan.index
        self._rotate = borrowed.rotate
        self._tail = self._tail_rows(states, borrowed)

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Return the rows of the windows that close now, and the position of the first one's first
        token.

        A batch has no one such position: it gets 0, and `update_compressor_states` rotates.
        """
        start = self._span.starts[0] if self._span.rows == 1 else 0
        first_position = start // self._rate * self._rate
        return *self._tail.close(name, kv, gate), first_position

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store new entries; return all entries [R, count, dim] that the last token may see.

        Never more: after a restore the pools hold entries that lie ahead of a replay.
        """
        section = self.entry_sections[name]
        pool = self._pools.component(section)
        entries = pool.part(section, "entries")[:, self._index[section]]
        at = self._span.entries(section, self._rate, zero_slot=pool.zero_slot)
        if self._span.rows > 1 and compressed.shape[1]:
            compressed = self._rotate(compressed, self._span.open_windows(self._rate))
        write_entries(entries, at, compressed.to(entries.dtype))
        return read_entries(entries, at)

    def _tail_rows(self, states: ModelStates, borrowed: Borrowed) -> TailRows:
        layer = self._index[HCA_TAIL]
        if states.hca_tail is TailForm.ONLINE:
            bias = borrowed.hca_biases[layer]
            return OnlineTail(self._span, self._pools, layer=layer, bias=bias)
        return RawTail(self._span, self._pools, section=HCA_TAIL, layer=layer, rate=self._rate)


class HcaLayer(CompressedLayer):
    """An `HcaLayer` serves heavily compressed attention: windows do not overlap."""


class CsaLayer(CompressedLayer):
    """A `CsaLayer` serves compressed sparse attention: overlapping windows, and an indexer with
    entries of its own."""

    entry_sections: ClassVar[Mapping[str, str]] = {COMPRESSOR: CSA_MAIN, INDEXER: CSA_INDEX}

    def _tail_rows(self, states: ModelStates, borrowed: Borrowed) -> TailRows:
        layer = self._index[CSA_TAIL]
        return RawTail(self._span, self._pools, section=CSA_TAIL, layer=layer, rate=self._rate)

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the Ca rows of the window before this chunk, and keep those of its last window.

        A row's first window has none before it: None, or in a batch a gate that lets none in.
        """
        kv, gate = self._overlap(f"{name}_kv"), self._overlap(f"{name}_gate")
        prior_kv, prior_gate = kv[self._span.states[:, 0]], gate[self._span.states[:, 0]]
        rows = self._span.closing_rows(self._rate)
        closing = self._span.states[rows, 0]
        kv[closing] = chunk_kv[rows, -1, :, :head_dim]
        gate[closing] = chunk_gate[rows, -1, :, :head_dim]
        if not any(step.first_entry for step in self._span.steps(self._rate)):
            return None, None
        first = self._span.open_windows(self._rate) == 0
        return prior_kv, prior_gate.masked_fill(first.unsqueeze(-1), -torch.inf)

    def _overlap(self, part: str) -> Tensor:
        return self._pools.state.part(CSA_OVERLAP, part)[:, self._index[CSA_OVERLAP]]


class PagedCache:
    """A `PagedCache` is the `past_key_values` of one forward: it asks the layer objects, and
    translates only."""

    is_compileable = False

    def __init__(
        self,
        states: ModelStates,
        span: ForwardRows,
        pools: Pools,
        *,
        borrowed: Borrowed | None,
        layers_done: Callable[[int], None] | None = None,
    ) -> None:
        """`layers_done` is told of how many layers, from the first, all state is in the pools: a
        layer's own last call says so where it has one, else the next layer's first."""
        self._layers_done = layers_done
        self._is_done_by_update = [
            plan.index.keys() in ({DENSE}, {WINDOW}) for plan in states.layers
        ]
        self._span = span
        self._window_tokens = states.window_tokens
        self.is_sliding = [WINDOW in plan.index for plan in states.layers]
        self.layers = [
            _layer(plan, states, span, pools=pools, borrowed=borrowed) for plan in states.layers
        ]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._span.starts[0]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._span.starts[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many rows `update` will give, and the position of the first. For one row only.

        A linear layer is asked too and answers as full attention.
        """
        start = self._span.starts[0]
        kept = self._span.kept_window(self._window_tokens) if self.is_sliding[layer_idx] else start
        return kept + query_length, start - kept

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        told = self._layers_done
        if told is not None:
            told(layer_idx)  # those before it
        updated: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        if told is not None and self._is_done_by_update[layer_idx]:
            told(layer_idx + 1)
        return updated

    def has_previous_state(self, layer_idx: int) -> bool:
        return bool(self.layers[layer_idx].has_previous_state)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        columns: Tensor = self.layers[layer_idx].update_conv_state(conv_states)
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        state: Tensor = self.layers[layer_idx].update_recurrent_state(recurrent_states)
        if self._layers_done is not None:
            self._layers_done(layer_idx + 1)
        return state


def _layer(
    plan: LayerPlan,
    states: ModelStates,
    span: ForwardRows,
    *,
    pools: Pools,
    borrowed: Borrowed | None,
) -> Any:
    """Make the layer object that the modeling code of this kind of layer expects."""
    if DENSE in plan.index:
        return DenseLayer(span, pools, layer=plan.index[DENSE])
    if RECURRENT in plan.index:
        return DeltaLayer(span, pools, plan=plan)
    if plan.index.keys() == {WINDOW}:
        window = SharedWindowLayer if states.shared_window else WindowLayer
        return window(span, pools, layer=plan.index[WINDOW], window_tokens=states.window_tokens)
    assert borrowed is not None, "a model that compresses lends what its layers need"
    compressed = CsaLayer if CSA_MAIN in plan.index else HcaLayer
    return compressed(span, pools, states=states, plan=plan, borrowed=borrowed)
