"""Linear-attention layers (Qwen3-Next's gated delta net): convolution columns and a recurrence.

Owns no state. The modeling code reads `conv_states` and changes them in place when q = 1, so it is
given a copy, which goes back to the state block together with the new recurrent state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.span import Span
from ownerserve.engines.hf.state.states import CONV, RECURRENT, LayerPlan


class DeltaLayer:
    """What modeling_qwen3_next reads of its cache layer."""

    record_past = False

    def __init__(self, span: Span, pools: Pools, *, plan: LayerPlan) -> None:
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
        """Old columns, if any, then `new` [R, channels, q]; keeps the last k-1."""
        columns = torch.cat((self._columns, new), dim=-1)
        self._columns = columns[..., columns.shape[-1] - self._columns.shape[-1] :]
        return columns if self.has_previous_state else new

    def update_recurrent_state(self, state: Tensor) -> Tensor:
        """Called last in the layer's forward: both states go back to their block."""
        self._conv[self._state] = self._columns
        self._recurrent[self._state] = state
        return state
