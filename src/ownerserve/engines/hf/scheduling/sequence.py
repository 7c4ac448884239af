"""One choice of a request on its way through the scheduler. Data only."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Tokens
from enum import StrEnum

import msgspec

from ownerserve.engines.hf.scheduling.step import Intake
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed, pack, unpack
from ownerserve.node.vocabulary.chains import PromptPrefix


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class Sequence(msgspec.Struct):
    """One choice of a request on its way. `age` orders by (arrival, choice): small is old.

    `said` was sampled behind the prompt; the first `computed` tokens have their state in slots;
    slots are reserved for `reserved`. `siblings` are choices that fork off when the prompt is done.
    A held one waits for state and is not admitted. Below `write_floor` range state is kept: what
    is computed there is a replay. State is kept at `checkpoints` where a chunk ends there; one at
    risk of preemption keeps it at the next chunk's end. It may grow to `most_tokens`; a
    promised one was given its room beforehand.
    """

    turn_id: TurnId
    request_id: str
    age: tuple[int, int]
    prompt: PromptPrefix
    said: list[int] = []
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
    intake: Intake = Intake.BEGIN

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.prompt.count + len(self.said)

    def packed(self) -> Packed:
        """Prompt and answer so far."""
        return self.prompt.tokens + pack(self.said) if self.said else self.prompt.tokens

    def span(self, start: int, end: int) -> Tokens[int]:
        """Tokens [start, end). O(end - start)."""
        known = self.prompt.count
        tokens = unpack(self.prompt.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
        if end > known:
            tokens.extend(self.said[max(0, start - known) : end - known])
        return tokens

    def tip(self) -> PrefixHash | None:
        """The digest of all full blocks that a turn leaves: the last token is never computed. None
        for one that has no session, or fills no block."""
        if self.session_id is None:
            return None
        return self.prompt.answered(pack(self.said[:-1])).digest_at(self.computed)


def blocks_to_come(sequence: Sequence, block: int) -> int:
    """Blocks that a sequence may still take, those of choices that have not forked included."""
    most = -(-sequence.most_tokens // block)
    forks = len(sequence.siblings) * max(0, most - sequence.length // block)
    return max(0, most - sequence.reserved // block) + forks


def age_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
