"""Sampling decides which token comes next. Owns each choice's random generator; knows nothing of
batches' make-up.

A choice draws from a generator of its own and every operation works row by row, so the same seed
gives the same tokens whatever runs beside it (as far as the logits themselves are equal).

    logits -> bias, penalties -> / temperature -> softmax -> top_k -> top_p -> draw
       `-> log_softmax: the reported log-probabilities, before any of this
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ownerserve.engines.hf.scheduling.requests import EngineRequest, Sampled, Sampling, TokenLogprob

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
