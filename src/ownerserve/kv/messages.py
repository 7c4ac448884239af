"""Several layers share these words and messages: what to do, what happened, what a worker says.

Owns the one name each of a tier, an action, a mode and a reason: code, metrics and reports use it.
Must never hold behaviour. Messages carry no tensors and no addresses; a dated copy says `as_of`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

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
    """An execution mode says how a turn was really served. `refused` and `failed` carry an
    `UnservedReason`.
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


class RoutingUnit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A routing unit can serve: one data-parallel rank in one life of a worker, with its own
    cache."""

    worker: WorkerId
    dp_rank: int
    incarnation: Incarnation
