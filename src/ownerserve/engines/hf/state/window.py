"""Layers that keep the last W-1 tokens (sliding-window attention).

Owns no state: the rows are a ring in the state block, the row of position p at p mod (W-1).
transformers' masks want exactly min(start, W-1) old rows before the new ones.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.span import Span
from ownerserve.engines.hf.state.states import WINDOW


class WindowLayer:
    """Sliding-window attention with separate keys and values."""

    parts: ClassVar[tuple[str, ...]] = ("keys", "values")

    def __init__(self, span: Span, pools: Pools, *, layer: int, window_tokens: int) -> None:
        self._states = span.states
        self._at = span.window(window_tokens)
        self._rings = [pools.state.part(WINDOW, part)[:, layer] for part in self.parts]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Old rows then the new ones, [R, heads, h + q, dim]; left-padded in a batch."""
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
    """DeepSeek-V4's window: one row is key and value."""

    parts: ClassVar[tuple[str, ...]] = ("keys",)
