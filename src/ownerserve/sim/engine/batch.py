"""This module says what a modelled engine takes on, counts and tells. Data only."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ownerserve.cache.outcomes import Resume
from ownerserve.kv.prefix import Packed
from ownerserve.sim.engine.sequence import SimSequence

FOLD_MAX = 1 << 30


class BatchLimits(msgspec.Struct, frozen=True):
    """The limits say what an engine takes on: tokens a step, sequences at once."""

    step_tokens: int = 8192
    running: int = 256


class BatchCounts(msgspec.Struct, gc=False):
    """The counts say what an engine has done so far.

    `interfered_ms`: by how much prefill in the same step delayed decodes, summed over them.
    """

    steps: int = 0
    busy_ms: float = 0.0
    preemptions: int = 0
    prefill_tokens: int = 0
    decoded_tokens: int = 0
    decoding_ms: float = 0.0
    interfered_ms: float = 0.0


class StepsEnded(msgspec.Struct, gc=False):
    """The end of some steps names the sequences that began to answer in them and those that
    ended."""

    began: list[SimSequence]
    done: list[SimSequence]


class NodeHooks(msgspec.Struct, frozen=True):
    """The hooks are what a node decides for its engine: how a prompt begins, where state is kept in
    a prefill."""

    resume: Callable[[Packed], Resume | None]
    checkpoints: Callable[[int, int], frozenset[int]]
