"""Tails of compressed layers: rows of tokens whose window of m is not full.

Owns no state: reads and writes the tail sections of state blocks, where the cache's `TailStep`
says. Two forms of one thing, chosen a worker (`ModelStates.hca_tail`):

    raw      | kv, gate | kv, gate | ...   a row a token, at most m-1
    online   | max | sum | value |         all of them folded into one, in float32:
                                           sum = S exp(g - max), value = S exp(g - max) kv

with g = gate + the compressor's bias of the token's place in its window. Softmax needs no more of
the past, so folding is exact up to rounding. When the window closes, transformers' compressor gets
m rows as ever: the first is value / sum with the gate whose biased value is log-sum-exp, the other
folded ones have a gate of -inf and so no weight. Such windows are handed over in float32: one row
rounded to half precision would lose what the rows it stands for lose together.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.span import Span
from ownerserve.engines.hf.state.states import HCA_TAIL


class TailRows(Protocol):
    """What a compressed layer needs of its tail."""

    def close(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """(kv, gate) rows [R, windows * m, dim] of the windows that close now: those waiting, then
        new ones. The other new rows wait from now on."""
        ...


class RawTail:
    """A row for each waiting token."""

    def __init__(self, span: Span, pools: Pools, *, section: str, layer: int, rate: int) -> None:
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
    """One row for all waiting tokens of an HCA layer; `bias` [m, dim] is its compressor's."""

    def __init__(self, span: Span, pools: Pools, *, layer: int, bias: Tensor) -> None:
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
            folded_kv, folded_gate = self._folded(at.waiting)
            closing_kv = torch.cat((folded_kv, closing_kv.float()), dim=1)
            closing_gate = torch.cat((folded_gate, closing_gate.float()), dim=1)
        if at.left.numel():
            rows = at.left_rows
            self._fold(kv[rows, at.first_left :], gate[rows, at.first_left :])
        return closing_kv, closing_gate

    def _folded(self, waiting: int) -> tuple[Tensor, Tensor]:
        """`waiting` rows that weigh as much as the tokens that were folded."""
        total = self._sum[self._states]
        shape = (len(self._states), waiting, self._bias.shape[1])
        kv = torch.zeros(shape, device=total.device)
        gate = torch.full(shape, -torch.inf, device=total.device)
        kv[:, 0] = self._value[self._states] / total
        gate[:, 0] = self._max[self._states] + total.log() - self._bias[0]
        return kv, gate

    def _fold(self, kv: Tensor, gate: Tensor) -> None:
        """Add rows [r, k, dim]. One in the first place of its window begins anew: what the state
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
