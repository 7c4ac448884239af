"""The runner runs a transformers model over our paged pools (prefill of one sequence, decode of a
batch), and samplers choose the next tokens from its logits: all that a step computes on tensors.

A `ModelRunner` owns the model and the pools' bytes. It must never choose a slot, or remember a
sequence between two calls: what a sequence is comes with every call, as its `Table` and position.
A `Sampler` owns one choice's random generator and knows nothing of batches' make-up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ownerserve.cache.effects import Effect
from ownerserve.cache.layout import Table
from ownerserve.engines.hf.model.progress import LayerWatches, StepSpan
from ownerserve.engines.hf.scheduling.requests import EngineRequest, Sampled, Sampling, TokenLogprob
from ownerserve.engines.hf.state.layers import PagedCache
from ownerserve.engines.hf.state.paged import ForwardRows, batch_inputs
from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.states import describe
from ownerserve.engines.hf.state.v4 import borrow
from ownerserve.kv.descriptor import TailForm
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.frame import PayloadPart
from ownerserve.kv.ids import TurnId
from ownerserve.plan.inputs import ModelState

ALL_LOGITS = 0
NOBODY = TurnId("")
"""A turn that nobody can watch."""


class DecodeRow(msgspec.Struct):
    """A `DecodeRow` is one sequence of a decode batch: `token` is computed at `position`."""

    table: Table
    token: int
    position: int
    turn_id: TurnId = NOBODY


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
        self.watches = LayerWatches(
            [plan.index for plan in self._states.layers],
            components=tuple(one.name for one in self._states.range_sections),
        )
        """`watches` are told how far a forward is, layer by layer."""
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
        turn_id: TurnId = NOBODY,
    ) -> Tensor:
        """Compute positions [start, start + len(tokens)) of one sequence and return logits [kept,
        vocab].

        `logits_to_keep`: how many last positions to give logits for; ALL_LOGITS for all.
        `write_floor`: range entries of tokens below it are read, never written (exact replay: the
        state block is rebuilt while sealed blocks stay as they are). The state block of a
        sequence at position 0 must have been reset. `turn_id`: whose tokens they are, for who
        watches the turn's layers.
        """
        if not tokens:
            raise InvalidInput("tokens", "none given", "prefill one token or more")
        span = self._span([table], [start], new_tokens=len(tokens), write_floor=write_floor)
        watched = [StepSpan(turn_id, start, start + len(tokens))]
        inputs = {"logits_to_keep": logits_to_keep}
        return self._forward(span, [tokens], inputs=inputs, watched=watched)[0]

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        """Compute one token for each row, all in one forward, and return logits [rows, vocab]."""
        if not rows:
            raise InvalidInput("rows", "none given", "decode one row or more")
        span = self._span([row.table for row in rows], [row.position for row in rows], new_tokens=1)
        inputs = batch_inputs(self._states, span, dtype=self._dtype) if len(rows) > 1 else {}
        watched = (StepSpan(row.turn_id, row.position, row.position + 1) for row in rows)
        tokens = [[row.token] for row in rows]
        return self._forward(span, tokens, inputs=inputs, watched=watched)[:, -1]

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
        self,
        span: ForwardRows,
        tokens: Sequence[Sequence[int]],
        *,
        inputs: Mapping[str, Any],
        watched: Iterable[StepSpan],
    ) -> Tensor:
        """Run the model over the tokens [R, q] and return logits [R, kept, vocab].

        Who watches a turn of `watched` hears of each layer, and of all at the end; on another
        device only then, when it has done all that it was given.
        """
        is_watched = self.watches.begin(watched)
        is_host = self.device.type == "cpu"
        cache = PagedCache(
            self._states,
            span,
            self.allocated,
            borrowed=self._borrowed,
            layers_done=self.watches.done if is_watched and is_host else None,
        )
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor(tokens, dtype=torch.int64, device=self.device),
                position_ids=span.positions(),
                past_key_values=cache,
                use_cache=True,
                **inputs,
            )
        if is_watched:
            if not is_host:
                torch.accelerator.synchronize()
            self.watches.done(len(self._states.layers))
        logits: Tensor = output.logits
        return logits


# ---- which token comes next
#
# A choice draws from a generator of its own and every operation works row by row, so the same seed
# gives the same tokens whatever runs beside it (as far as the logits themselves are equal).
#
#     logits -> bias, penalties -> / temperature -> softmax -> top_k -> top_p -> draw
#        `-> log_softmax: the reported log-probabilities, before any of this


SEEDS = 1 << 63
"""torch takes a seed as a signed 64-bit integer."""


class Sampler:
    """A `Sampler` is the sampling side of one choice: its generator and the tokens it has written
    so far."""

    __slots__ = ("_banned", "_generator", "_min_tokens", "_written", "sampling")

    def __init__(self, request: EngineRequest, choice: int, device: torch.device) -> None:
        self.sampling = request.sampling
        self._written: Counter[int] = Counter()
        self._min_tokens = request.stopping.min_tokens
        self._banned = sorted(request.stopping.token_ids | request.stopping.eos_token_ids)
        self._generator: torch.Generator | None = None
        if self.sampling.temperature > 0:
            self._generator = torch.Generator(device)
            self._generator.manual_seed((self.sampling.seed + choice) % SEEDS)
        if request.said is not None:
            self._written.update(request.said.tokens)
            if self._generator is not None:
                self._generator.set_state(generator_state(request.said.generator))

    def state(self) -> bytes:
        """Return the state of the generator, for whoever goes on with the choice; empty for a
        greedy one."""
        return b"" if self._generator is None else self._generator.get_state().numpy().tobytes()

    def adjust(self, row: Tensor) -> Tensor:
        """Return the logits with bias and penalties, and with no end before `min_tokens`; the row
        itself when there are none."""
        sampling = self.sampling
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        is_penalized = bool(self._written) and bool(presence or frequency)
        is_early = self._written.total() < self._min_tokens and bool(self._banned)
        if not (sampling.logit_bias or is_penalized or is_early):
            return row
        row = row.clone()
        if is_penalized:
            for token, count in self._written.items():
                row[token] -= presence + frequency * count
        for token, bias in sampling.logit_bias.items():
            row[token] += bias
        if is_early:
            row[self._banned] = -torch.inf
        return row

    def draw(self, row: Tensor) -> int:
        """Draw one token by its adjusted logits; not for a greedy choice."""
        probabilities = truncate(torch.softmax(row / self.sampling.temperature, -1), self.sampling)
        # Gumbel's trick in its exponential form: argmax p/E with E ~ Exp(1) has distribution p.
        # Unlike torch.multinomial it does not depend on p's sum and never syncs with the device.
        noise = torch.empty_like(probabilities).exponential_(generator=self._generator)
        return int((probabilities / noise).argmax())

    def note(self, token: int) -> None:
        """Note that `token` was chosen: penalties count it."""
        self._written[token] += 1


def generator_state(data: bytes) -> Tensor:
    """Return the state of a generator as torch has it."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def takes_state(data: bytes, device: torch.device) -> bool:
    """Tell whether a generator here can go on from that state: those of another kind of device
    draw otherwise."""
    try:
        torch.Generator(device).set_state(generator_state(data))
    except (RuntimeError, ValueError):
        return False
    return True


def truncate(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top_k and top_p leave out and return the rest (whose sum is no longer 1).

    top_p keeps the smallest set of most likely tokens whose probability reaches it, always the
    first (Holtzman et al. 2020, nucleus sampling).
    """
    if 0 < sampling.top_k < probabilities.shape[-1]:
        kept, places = probabilities.topk(sampling.top_k)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, places, kept)
        probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        ordered, places = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered[before >= sampling.top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(-1, places, ordered)
    return probabilities


def sample(logits: Sequence[Tensor], samplers: Sequence[Sampler]) -> list[Sampled]:
    """Choose one token for each row of logits, and note it in its sampler.

    Greedy rows are resolved in one argmax and one copy to the host.
    """
    rows = [sampler.adjust(row.float()) for row, sampler in zip(logits, samplers, strict=True)]
    is_greedy = [sampler.sampling.temperature == 0 for sampler in samplers]
    greedy = [row for row, plain in zip(rows, is_greedy, strict=True) if plain]
    best = iter(torch.stack(greedy).argmax(-1).tolist() if greedy else ())
    found = []
    for row, raw, sampler, plain in zip(rows, logits, samplers, is_greedy, strict=True):
        token = next(best) if plain else sampler.draw(row)
        sampler.note(token)
        found.append(_describe(token, raw, sampler.sampling.logprobs))
    return found


def _describe(token: int, row: Tensor, wanted: int | None) -> Sampled:
    if wanted is None:
        return Sampled(token)
    logprobs = torch.log_softmax(row.float(), -1)
    best, places = logprobs.topk(min(wanted, row.shape[-1]))
    top = tuple(map(TokenLogprob, places.tolist(), best.tolist()))
    return Sampled(token, TokenLogprob(token, float(logprobs[token])), top)
