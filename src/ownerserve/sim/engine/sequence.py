"""A sequence is a turn inside a modelled engine: what of it is computed, sampled, and told to the
cache.

Owns the arithmetic between tokens (what an engine computes) and units (what the cache holds).

    units    |----|----|----|--          the last one of a prompt may be part of a unit
    tokens   0         restored  prompt_tokens ... end
"""

from __future__ import annotations

import msgspec

from ownerserve.cache.outcomes import DEFAULT_TTL_S
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.sim.timeline.turns import SimTurn


class SimSequence(msgspec.Struct, gc=False, eq=False):
    """A sequence is one turn at one engine.

    `position` tokens are computed, of which `told` units are in the cache; `target` is where its
    prefill ends: the prompt, or after a preemption all that was known by then. `landed_tokens`
    came from elsewhere down to the token (a remote prefill); `loaded_bytes` from a tier, for which
    it waited `load_s`; `replayed_tokens` are computed again over kept range state.
    """

    turn: SimTurn
    turn_id: TurnId
    unit_tokens: int
    units: Packed
    target: int
    left: int
    order: int = 0
    priority: int = 0
    ttl_s: float = DEFAULT_TTL_S
    position: int = 0
    told: int = 0
    reserved: int = 0
    write_floor: int = 0
    restored_tokens: int = 0
    landed_tokens: int = 0
    pending_tokens: int = 0
    preempted: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    replayed_tokens: int = 0
    computed_tokens: int = 0
    checkpoints: frozenset[int] = frozenset()
    begun_s: float = -1.0
    first_token_s: float = -1.0

    @property
    def prompt(self) -> Packed:
        """The units of `target` tokens, the last one perhaps in part."""
        if self.target == self.turn.prompt_tokens:
            return self.turn.prompt  # until it is preempted
        return self.units[: -(-self.target // self.unit_tokens) * TOKEN_BYTES]

    def forget(self) -> None:
        """Forget the place in the batch: what was sampled is prompt when the turn comes back."""
        sampled = self.turn.output_tokens - self.left
        self.target = self.turn.prompt_tokens + sampled
        self.position = self.told = self.reserved = self.write_floor = 0
        self.landed_tokens = 0
        self.preempted += 1


def sequence_of(turn: SimTurn, unit_tokens: int) -> SimSequence:
    """Make the sequence of a turn that has computed nothing yet."""
    turn_id = TurnId(f"t{turn.number}")
    units = turn.prompt + turn.output + _SPARE
    sequence = SimSequence(
        turn, turn_id, unit_tokens, units, turn.prompt_tokens, turn.output_tokens
    )
    sequence.pending_tokens = turn.prompt_tokens
    return sequence


_SPARE = bytes(TOKEN_BYTES)
"""A unit that never becomes full has no id of its own."""
