"""The runner runs a transformers model over our paged pools: prefill of one sequence, decode of a
batch.

Owns the model and the pools' bytes. Must never choose a slot, sample a token, or remember a
sequence between two calls: what a sequence is comes with every call, as its `Table` and position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ownerserve.cache.effects import Effect
from ownerserve.cache.layout import Table
from ownerserve.engines.hf.state.layers import PagedCache
from ownerserve.engines.hf.state.paged import ForwardRows, Pools, batch_inputs
from ownerserve.engines.hf.state.states import describe
from ownerserve.engines.hf.state.v4 import borrow
from ownerserve.kv.descriptor import TailForm
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.payload import PayloadPart
from ownerserve.plan.inputs import ModelState

ALL_LOGITS = 0


class DecodeRow(msgspec.Struct):
    """A `DecodeRow` is one sequence of a decode batch: `token` is computed at `position`."""

    table: Table
    token: int
    position: int


class ModelRunner:
    """A `ModelRunner` is a model with its pools.

    `prefill` and `decode` write the state of the tokens they are given and return logits on the
    model's device. Range slots must cover the new tokens before the call.
    """

    def __init__(
        self,
        model: Any,
        *,
        block_tokens: int | None = None,
        hca_tail: TailForm = TailForm.RAW_ROWS,
    ) -> None:
        self._model = model.eval()
        self._dtype: torch.dtype = model.dtype
        self._states = describe(
            model.config, self._dtype, block_tokens=block_tokens, hca_tail=hca_tail
        )
        self._borrowed = borrow(model) if self._states.compresses else None
        self._pools: Pools | None = None
        self.device: torch.device = model.device
        self.layout = self._states.layout()
        self.vocab_size: int = model.config.vocab_size
        self.max_positions: int = model.config.max_position_embeddings

    def allocate(self, slots: Mapping[str, int], state_slots: int) -> None:
        """Make the pools, all zero: slots of each component, and state blocks."""
        self._pools = Pools(self._states, slots, state_slots=state_slots, device=self.device)

    def apply(self, effects: Sequence[Effect]) -> None:
        """Perform the cache's effects in order."""
        with torch.inference_mode():
            for effect in effects:
                self.allocated.perform(effect)

    def prefill(
        self,
        table: Table,
        tokens: Sequence[int],
        start: int,
        *,
        write_floor: int = 0,
        logits_to_keep: int = 1,
    ) -> Tensor:
        """Compute positions [start, start + len(tokens)) of one sequence and return logits [kept,
        vocab].

        `logits_to_keep`: how many last positions to give logits for; ALL_LOGITS for all.
        `write_floor`: range entries of tokens below it are read, never written (exact replay: the
        state block is rebuilt while sealed blocks stay as they are). The state block of a
        sequence at position 0 must have been reset.
        """
        if not tokens:
            raise InvalidInput("tokens", "none given", "prefill one token or more")
        span = self._span([table], [start], new_tokens=len(tokens), write_floor=write_floor)
        return self._forward(span, [tokens], inputs={"logits_to_keep": logits_to_keep})[0]

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        """Compute one token for each row, all in one forward, and return logits [rows, vocab]."""
        if not rows:
            raise InvalidInput("rows", "none given", "decode one row or more")
        span = self._span([row.table for row in rows], [row.position for row in rows], new_tokens=1)
        inputs = batch_inputs(self._states, span, dtype=self._dtype) if len(rows) > 1 else {}
        return self._forward(span, [[row.token] for row in rows], inputs=inputs)[:, -1]

    def read_slot(self, component: str, slot: int) -> bytes:
        """Return all bytes of a slot, as they lie in the pool (its layout's `slot_bytes`)."""
        return self.allocated.component(component).read(slot)

    def write_slot(self, component: str, slot: int, data: bytes) -> None:
        """Write `data`, as `read_slot` gives it, into the slot; raises SpecMismatch on a wrong
        length."""
        self.allocated.component(component).write(slot, data)

    def read_slots(self, component: str, slots: Sequence[int]) -> memoryview:
        """Return the bytes of several slots one after another, in one copy."""
        return self.allocated.component(component).read_many(slots)

    def write_slots(self, component: str, slots: Sequence[int], data: memoryview) -> None:
        """Write `data`, as `read_slots` gives it, into the slots; raises SpecMismatch on a wrong
        length."""
        self.allocated.component(component).write_many(slots, data)

    def spec_digest(self) -> bytes:
        """Return the digest of what the state means, for artifacts' identity."""
        return self._states.digest()

    def payload_parts(self) -> dict[str, tuple[PayloadPart, ...]]:
        """Return the arrays of each component's slots."""
        return self._states.payload_parts()

    def planned_state(self) -> ModelState:
        """Return what the restore planner needs to know of the model."""
        return self._states.planned_state()

    @property
    def allocated(self) -> Pools:
        """`allocated` are the pools that `allocate` made. Raises InvariantViolated before."""
        if self._pools is None:
            raise InvariantViolated("allocate() comes before any other call")
        return self._pools

    def _span(
        self,
        tables: Sequence[Table],
        starts: Sequence[int],
        *,
        new_tokens: int,
        write_floor: int = 0,
    ) -> ForwardRows:
        return ForwardRows(
            tables,
            starts,
            new_tokens=new_tokens,
            block_tokens=self.layout.block_tokens,
            device=self.device,
            write_floor=write_floor,
        )

    def _forward(
        self, span: ForwardRows, tokens: Sequence[Sequence[int]], *, inputs: Mapping[str, Any]
    ) -> Tensor:
        """Run the model over the tokens [R, q] and return logits [R, kept, vocab]."""
        cache = PagedCache(self._states, span, self.allocated, borrowed=self._borrowed)
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor(tokens, dtype=torch.int64, device=self.device),
                position_ids=span.positions(),
                past_key_values=cache,
                use_cache=True,
                **inputs,
            )
        logits: Tensor = output.logits
        return logits
