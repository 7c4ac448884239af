"""DeepSeek-V4's compressed attention: HCA and CSA layers (paper §2.3.1, §2.3.2).

Owns no state: finished entries go to the range pools, tokens whose window of m is not full wait
in the state block's tail, and the window rows in its ring. Method names and results are those that
transformers' compressors call on their cache layer (modeling_deepseek_v4, 5.19).

    tokens     | 0 1 2 3 | 4 5 6 7 | 8 9          m = 4, start = 10
    entries       e0        e1       tail: 8, 9
    overlap                 Ca of 4..7            entry e2 = gate(Ca of 4..7, Cb of 8..11)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ownerserve.engines.hf.state.compressed_tails import OnlineTail, RawTail, TailRows
from ownerserve.engines.hf.state.dense import read_entries, write_entries
from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.span import Span
from ownerserve.engines.hf.state.states import (
    CSA_INDEX,
    CSA_MAIN,
    CSA_OVERLAP,
    CSA_TAIL,
    HCA,
    HCA_TAIL,
    WINDOW,
    LayerKind,
    LayerPlan,
    ModelStates,
)
from ownerserve.engines.hf.state.v4 import Borrowed
from ownerserve.engines.hf.state.window import SharedWindowLayer
from ownerserve.kv.descriptor import TailForm

COMPRESSOR, INDEXER = "compressor", "indexer"


class CompressedLayer(SharedWindowLayer):
    """A window layer with one or two compressors, each known by transformers' name for it."""

    entry_sections: ClassVar[Mapping[str, str]] = {COMPRESSOR: HCA}

    def __init__(
        self, span: Span, pools: Pools, *, states: ModelStates, plan: LayerPlan, borrowed: Borrowed
    ) -> None:
        super().__init__(span, pools, layer=plan.index[WINDOW], window_tokens=states.window_tokens)
        self._span = span
        self._pools = pools
        self._rate = states.csa_rate if plan.kind is LayerKind.CSA else states.hca_rate
        self._index = plan.index
        self._rotate = borrowed.rotate
        self._tail = self._tail_rows(states, borrowed)

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Rows of the windows that close now, and the position of the first one's first token.

        A batch has no one such position: it gets 0, and `update_compressor_states` rotates.
        """
        start = self._span.starts[0] if self._span.rows == 1 else 0
        first_position = start // self._rate * self._rate
        return *self._tail.close(name, kv, gate), first_position

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store new entries; all entries [R, count, dim] that the last token may see.

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
    """Heavily compressed attention: windows do not overlap."""


class CsaLayer(CompressedLayer):
    """Compressed sparse attention: overlapping windows, and an indexer with entries of its own."""

    entry_sections: ClassVar[Mapping[str, str]] = {COMPRESSOR: CSA_MAIN, INDEXER: CSA_INDEX}

    def _tail_rows(self, states: ModelStates, borrowed: Borrowed) -> TailRows:
        layer = self._index[CSA_TAIL]
        return RawTail(self._span, self._pools, section=CSA_TAIL, layer=layer, rate=self._rate)

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Ca rows of the window before this chunk, and keeps those of its last window.

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
