"""Masks of a batched decode.

transformers makes the masks of a single sequence itself. For rows of different lengths it is given
finished additive masks [R, 1, 1, keys], 0 or the dtype's least number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ownerserve.engines.hf.state.span import Span
from ownerserve.engines.hf.state.states import DENSE, WINDOW, LayerKind, ModelStates


def batch_inputs(states: ModelStates, span: Span, *, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments that a model's forward needs beside the tokens of a batch."""
    uses = {name for plan in states.layers for name in plan.index}
    masks: dict[str, Tensor | None] = {}
    if WINDOW in uses:
        masks[LayerKind.SLIDING] = _window_mask(span, states.window_tokens, dtype=dtype)
    if DENSE in uses:
        masks[LayerKind.FULL] = _count_mask(span, 1, dtype=dtype)
        masks[LayerKind.LINEAR] = None
    inputs: dict[str, Any] = {"attention_mask": masks}
    if states.hca_rate:
        inputs["hca_padding"] = _count_mask(span, states.hca_rate, dtype=dtype)
    return inputs


def _window_mask(span: Span, window_tokens: int, *, dtype: torch.dtype) -> Tensor:
    """Hides left padding: rows of positions below zero."""
    old = span.window(window_tokens).read_positions >= 0
    new = torch.ones((span.rows, span.new_tokens), dtype=torch.bool, device=span.device)
    return _additive(torch.cat((old, new), dim=1), dtype)


def _count_mask(span: Span, rate: int, *, dtype: torch.dtype) -> Tensor:
    """Hides right padding: entries that a row does not have."""
    counts = span.completed(rate)
    longest = max(step.end_entry for step in span.steps(rate))
    return _additive(torch.arange(longest, device=span.device) < counts, dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None, None, :]
