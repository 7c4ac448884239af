"""One choice of a request on its way through the scheduler. Data only."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from ownerserve.kv.ids import SessionId, TurnId


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class Sequence(msgspec.Struct):
    """One choice of a request on its way. `age` orders by (arrival, choice): small is old.

    `tokens` is prompt + sampled; the first `computed` have their state in slots; slots are
    reserved for `reserved`. `siblings` are the choices that fork off when the prompt is done.
    A held one waits for state and is not admitted. Below `write_floor` range state is kept: what
    is computed there is a replay. State is kept at `checkpoints` where a chunk ends there; one at
    risk of preemption keeps it at the next chunk's end. It may grow to `most_tokens`; a
    promised one was given its room beforehand.
    """

    turn_id: TurnId
    request_id: str
    age: tuple[int, int]
    tokens: list[int]
    session_id: SessionId | None = None
    siblings: tuple[TurnId, ...] = ()
    phase: Phase = Phase.WAITING
    computed: int = 0
    reserved: int = 0
    preempted: int = 0
    is_held: bool = False
    write_floor: int = 0
    checkpoints: Collection[int] = ()
    most_tokens: int = 0
    is_promised: bool = False
    is_at_risk: bool = False


def blocks_to_come(sequence: Sequence, block: int) -> int:
    """Blocks that a sequence may still take, those of choices that have not forked included."""
    most = -(-sequence.most_tokens // block)
    forks = len(sequence.siblings) * max(0, most - len(sequence.tokens) // block)
    return max(0, most - sequence.reserved // block) + forks


def age_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
