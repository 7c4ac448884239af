"""The cache object that transformers' models are handed: ours, per forward.

Translates only. It is duck-typed: a subclass of transformers' `Cache` or of its layer classes
would enter itself into global mappings and change other models in the process. What modeling and
mask code really call is listed in the class; transformers 5.19.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ownerserve.engines.hf.state.compressed import CsaLayer, HcaLayer
from ownerserve.engines.hf.state.dense import DenseLayer
from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.recurrent import DeltaLayer
from ownerserve.engines.hf.state.span import Span
from ownerserve.engines.hf.state.states import (
    DENSE,
    WINDOW,
    LayerKind,
    LayerPlan,
    ModelStates,
)
from ownerserve.engines.hf.state.v4 import Borrowed
from ownerserve.engines.hf.state.window import SharedWindowLayer, WindowLayer


class PagedCache:
    """`past_key_values` of one forward."""

    is_compileable = False

    def __init__(
        self, states: ModelStates, span: Span, pools: Pools, *, borrowed: Borrowed | None
    ) -> None:
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
        """(rows that `update` will give, position of the first). For one row only.

        A linear layer is asked too and answers as full attention.
        """
        start = self._span.starts[0]
        kept = self._span.kept_window(self._window_tokens) if self.is_sliding[layer_idx] else start
        return kept + query_length, start - kept

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        updated: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return updated

    def has_previous_state(self, layer_idx: int) -> bool:
        return bool(self.layers[layer_idx].has_previous_state)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        columns: Tensor = self.layers[layer_idx].update_conv_state(conv_states)
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        state: Tensor = self.layers[layer_idx].update_recurrent_state(recurrent_states)
        return state


def _layer(
    plan: LayerPlan, states: ModelStates, span: Span, *, pools: Pools, borrowed: Borrowed | None
) -> Any:
    """The layer object that the modeling code of this kind of layer expects."""
    if plan.kind is LayerKind.FULL:
        return DenseLayer(span, pools, layer=plan.index[DENSE])
    if plan.kind is LayerKind.LINEAR:
        return DeltaLayer(span, pools, plan=plan)
    if plan.kind is LayerKind.SLIDING:
        window = SharedWindowLayer if states.shared_window else WindowLayer
        return window(span, pools, layer=plan.index[WINDOW], window_tokens=states.window_tokens)
    assert borrowed is not None, "a model that compresses lends what its layers need"
    compressed = CsaLayer if plan.kind is LayerKind.CSA else HcaLayer
    return compressed(span, pools, states=states, plan=plan, borrowed=borrowed)
