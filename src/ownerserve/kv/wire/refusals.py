"""Worker refusals say why a worker would not take a turn: the one list, for engines, their
admission and gateways.

A reason is a metric label, the value of the header `x-ownerserve-refusal` and the `code` of an
error answer. A gateway that hears one that it does not know counts `other`.
"""

from __future__ import annotations

from enum import StrEnum


class WorkerRefusal(StrEnum):
    """A WorkerRefusal says why a worker would not take a turn. Hashes as the text it equals, and as
    fast (Enum's own does not).
    """

    __hash__ = str.__hash__

    TOO_LONG = "too_long"
    CONTEXT_LENGTH = "context_length_exceeded"
    """A turn that is here is too long: OpenAI's word, and its client can mend it."""
    QUEUE_FULL = "queue_full"
    NO_ROOM = "no_room"
    DRAINING = "draining"
    UNKNOWN_SESSION = "unknown_session"
    STALE_EPOCH = "stale_epoch"
    """A later owner of the session was heard of than who asks knows."""
    STALE_VERSION = "stale_version"
    """Turns of the session have ended since who asks heard of it."""
    NOT_OWNER = "not_owner"
    NOT_BROUGHT = "not_brought"
    """A session's state did not come from where it is."""
    NO_ANSWER = "no_answer"
    """The owner did not say in time whether it hands the session over."""
    SESSION_IS_MOVING = "session_is_moving"
    SESSION_IS_RUNNING = "session_is_running"
    UNKNOWN_TURN = "unknown_turn"
    """No such turn runs or is kept here."""
    NOT_DECODING = "not_decoding"
    """Nothing of the turn's answer is written yet, or it is stopped already."""
    NOT_MOVABLE = "not_movable"
    """A turn that moves amid its answer has one choice, and came through a gateway."""
    MOVED = "moved"
    """The turn was stopped and goes on elsewhere, where its gateway finds it."""
    UNKNOWN_RESERVATION = "unknown_reservation"
    MALFORMED = "malformed"
    ENGINE_BUSY = "engine_busy"
    ENGINE_DEAD = "engine_dead"
    ENGINE_STUCK = "engine_stuck"
    WRONG_TARGET = "wrong_target"
    """The turn was meant for another worker, or for another life of this one."""
    OTHER = "other"
