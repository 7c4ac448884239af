"""This module defines one turn as the simulator's parts hand it to each other: plain data, no
behaviour.

Owns the units of the simulated world. A *unit* is one block of the trace (64 tokens for
Claude-Code, 512 for Mooncake); a prompt is its packed unit ids, little-endian uint32. Ids are
chained and unique over a run: an id names its unit and everything before it. Never holds text.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.ids import PrefixHash, SessionId

UNIT_BYTES = 4
"""Bytes of one packed unit id."""

_PADDING = bytes(32 - UNIT_BYTES)


def prefix_name(units: bytes) -> PrefixHash:
    """Return the name of packed units, their last id: ids are chained, so that it names all before
    it."""
    return PrefixHash(_PADDING + units[-UNIT_BYTES:])


class SimTurn(msgspec.Struct, gc=False):
    """A turn is one request, built when it is released.

        unit            0 ... full-1   full      ... (prompt_tokens + output_tokens - 1) // U
        prompt          |───────────|──partial──|
        output                                  |─── become full while decoding ───|

    `prompt` holds ceil(prompt_tokens / U) ids. The id of a last, partial unit is the one the unit
    has once decoding has filled it, where decoding fills it. `output` holds the ids of the units
    that become full behind the prompt; the last sampled token is never computed.
    """

    number: int
    """Position in the order of release; unique."""
    session: int
    """Index of the session in the workload."""
    name: SessionId
    """What the router is told: `s12`, or `s12/a3` for a sub-agent, a conversation of its own."""
    position: int
    """Index of the request in its session."""
    arrived_s: float
    prompt: bytes
    prompt_tokens: int
    output_tokens: int
    output: bytes
    parent: SessionId | None = None
    """On the first turn of a sub-agent or a fork: the conversation whose beginning it shares."""
    shared_tokens: int = 0
    """How much of it."""
    is_last: bool = False
    """No later turn of this conversation."""
