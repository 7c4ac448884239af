"""Settings are what an operator may choose for a node. Data only; `cli.worker` owns the flags."""

from __future__ import annotations

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.kv.units import MIB

BELOW = frozenset({Tier.HOST, Tier.DISK, Tier.REMOTE})
BRINGS_AT_ONCE = 6
"""So many turns may wait for what other workers hold, or compute for them, beside the store's own
reads, where nobody says how many: each waits on a thread, which has a connection of its own to the
index."""


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`NodeSettings` say how a node treats state that is not on the device.

    below               tiers that state may lie in below the device; none: a turn starts at once
                        with what the device has, and short room is evicted
    record_blocks       blocks a range record spans: the grain at which a branch finds its prefix
    spill_after_s       how long a session is idle before its state is copied to the store; None:
                        as plan.gaps says once its gaps are known, 0.25 s before
    restore_deadline_s  after that a restore is given up and its turn computes instead
    room_wait_s         how long a turn waits for room for its prompt before its state is brought
    attempts            restores tried for one turn: the second one plans without what failed
    part_tokens         a restore comes in parts of so many tokens at most, of whole records, each
                        reserved, read and committed by itself; 0: all of it is one
    step_tokens         what a step of the engine may take: a part comes where that is left too
    least_fetched       blocks of range state that a load brings at least, resident or not: an
                        engine may know a load by the tokens that it brings
    copy_bytes_a_tick   most bytes read off the device between two engine steps
    copies_in_flight    most records being written at once
    hold_ms_per_s       price of device memory while it holds an idle session's state
    order_tokens        a prompt of which so much is to be computed is ordered of a peer that the
                        node knows, where no gateway has named one; 0: none is
    """

    below: frozenset[Tier] = BELOW
    record_blocks: int = 8
    spill_after_s: float | None = None
    restore_deadline_s: float = 5.0
    room_wait_s: float = 600.0
    attempts: int = 2
    part_tokens: int = 8192
    step_tokens: int = 0
    least_fetched: int = 0
    copy_bytes_a_tick: int = 4 * MIB
    copies_in_flight: int = 32
    hold_ms_per_s: float = 1.0
    order_tokens: int = 0

    def __post_init__(self) -> None:
        for field in ("record_blocks", "attempts", "copy_bytes_a_tick", "copies_in_flight"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, f"{getattr(self, field)}", "use 1 or more")
        for field in ("part_tokens", "step_tokens"):
            if getattr(self, field) < 0:
                raise InvalidInput(field, f"{getattr(self, field)}", "use 0 or more tokens")
        for field in ("spill_after_s", "restore_deadline_s", "room_wait_s"):
            if (getattr(self, field) or 0) < 0:
                raise InvalidInput(field, f"{getattr(self, field)}", "use 0 or more seconds")
