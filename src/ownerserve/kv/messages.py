"""Several layers share these words and messages: what to do, what happened, who may serve and who
owns.

Owns the one name each of a tier, an action, a mode and a reason: code, metrics and reports use it;
and with a word the rule by which everybody gives it (a mode) or compares it (an epoch). Pure: must
never hold state. Messages carry no tensors and no addresses; a dated copy says `as_of`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, WorkerId


class Tier(StrEnum):
    """A tier is where bytes are kept. `device` needs no load; every other tier has a measured load
    cost."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"
    REMOTE = "remote"


class RestoreAction(StrEnum):
    """A restore action is what a restore planner may do to bring a state back."""

    LOAD_GLOBAL = "load_global"
    LOAD_POINT = "load_point"
    REPLAY = "replay"
    RECOMPUTE_TAIL = "recompute_tail"
    PREFILL = "prefill"
    PREFETCH = "prefetch"
    DROP = "drop"


class PlacementAction(StrEnum):
    """A placement action is what a router may do with a turn."""

    COLOCATED_PREFILL = "colocated_prefill"
    REMOTE_PREFILL = "remote_prefill"
    DECODE_CONTINUATION = "decode_continuation"
    ARTIFACT_FETCH = "artifact_fetch"
    TAIL_RECOMPUTE = "tail_recompute"
    STATE_MIGRATION = "state_migration"


class ExecutionMode(StrEnum):
    """An execution mode says how a turn was really served; `execution_mode` gives it. `refused` and
    `failed` carry an `UnservedReason`.
    """

    DIRECT_APPEND = "direct_append"
    SEED = "seed"
    RESEED = "reseed"
    REMOTE_PREFILL = "remote_prefill"
    FETCH = "fetch"
    MIGRATE = "migrate"
    COLD_PREFILL = "cold_prefill"
    REFUSED = "refused"
    FAILED = "failed"


class UnservedReason(StrEnum):
    """An UnservedReason says why a simulated turn was not served; it is a label of the simulator's
    rows and tables. A real worker's word is WorkerRefusal (kv.wire.refusals).
    """

    NO_ROOM = "no_room"
    TOO_LONG = "too_long"
    OVERLOADED = "overloaded"
    ENGINE_ERROR = "engine_error"
    CLIENT_TIMEOUT = "client_timeout"


class RoutingUnit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A routing unit can serve: one data-parallel rank in one life of a worker, with its own
    cache."""

    worker: WorkerId
    dp_rank: int
    incarnation: Incarnation


NO_UNIT = RoutingUnit(WorkerId(""), 0, Incarnation(0))
"""Nobody: who owns a session that its owner put away. No worker is called so, so it never lives."""


# ---- who is the later owner, without asking a clock
#
# An epoch is (term, counter). The directory issues it with every grant; a node keeps the highest
# one that it has heard of each session (directory/owner/doors.py) and refuses what is asked under a
# lower one. A directory that lost its memory, or found itself promoted, starts a new *term*; two
# that do so at the same time draw different nonces, so no epoch is ever issued twice, and any two
# epochs compare the same everywhere.

ORDINAL_LIMIT = 1 << 48
NONCE_LIMIT = 1 << 48
COUNTER_LIMIT = 1 << 48
"""All stay exact in JSON and in Lua, whose numbers are doubles."""


class Term(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A term is one memory of a directory. `ordinal` grows; `nonce` is random and tells twins
    apart.
    """

    ordinal: int
    nonce: int

    def __post_init__(self) -> None:
        if not 0 <= self.ordinal < ORDINAL_LIMIT or not 0 <= self.nonce < NONCE_LIMIT:
            raise InvalidInput("term", f"({self.ordinal}, {self.nonce})", "use 48-bit numbers")


class Epoch(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """An epoch is one grant of ownership. Epochs compare by term, then by counter."""

    term: Term
    counter: int


def later(first: Epoch | None, second: Epoch | None) -> Epoch | None:
    """Return the higher of two epochs, either of which may be absent."""
    if first is None or second is None:
        return first or second
    return max(first, second)


# ---- what came of a turn's prompt, by three counts of tokens
#
# Worker, gateway and simulator each know these counts in their own way and ask here for the name:
#
#     known     of the prompt, what the session's last turn left: it could all be at hand
#     cached    of the prompt, what was at hand when the turn began, what was brought included
#     brought   of `cached`, what came from a tier below or from a peer
#
#     known      |───────────────────────────────|
#     cached     |──────────────────|                 lost = known - cached
#     brought             |─────────|
#
# `known` says what the *session* left. A prefix that others left too (a system prompt) may be
# cached without it, and does not hide that the session's own state is gone.


def lost_tokens(known: int, cached: int) -> int:
    """Count the tokens that the session's last turn left and that must be computed again."""
    return max(0, known - cached)


def execution_mode(known: int, cached: int, brought: int) -> ExecutionMode:
    """Return the mode of a turn that ran where its prompt was computed.

    Any loss makes a known session's turn a reseed, unless more was brought than was lost. A turn
    that was moved or prefilled elsewhere is named by whoever did that.
    """
    lost = lost_tokens(known, cached)
    if brought > lost:
        return ExecutionMode.FETCH
    if lost:
        return ExecutionMode.RESEED
    if known:
        return ExecutionMode.DIRECT_APPEND
    return ExecutionMode.SEED if cached else ExecutionMode.COLD_PREFILL
