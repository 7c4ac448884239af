"""This module defines what a cache is asked and what it answers. Plain data; outcomes are types,
never flags.

Positions are tokens from the start of the sequence. A position at which something can be restored
is a boundary: a multiple of the layout's block length B.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ownerserve.cache.effects import Effect
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.prefix import HashedPrefix, Packed

DEFAULT_TTL_S = 300.0
"""How long an idle session keeps its soft reference: 7 % of the gaps between turns are longer."""


class Turn(msgspec.Struct, frozen=True):
    """A turn is one request: the whole prompt as packed tokens. `session_id` None: nobody will come
    back."""

    turn_id: TurnId
    session_id: SessionId | None
    tokens: Packed
    priority: int = 0
    ttl_s: float = DEFAULT_TTL_S


class Append(msgspec.Struct, frozen=True):
    """An append is one request as what it adds: `suffix` follows the session's tokens at `version`.

    Both are in the `Finished` of the session's last turn. The suffix therefore opens with the last
    sampled token, whose state was never computed.
    """

    turn_id: TurnId
    session_id: SessionId
    version: int
    suffix: Packed
    priority: int = 0
    ttl_s: float = DEFAULT_TTL_S


class Install(msgspec.Struct, frozen=True):
    """An install says where a session stands that other workers counted: `version` turns were
    finished, and the last one left `tokens` (whole blocks, whose chain digest is `tip`) and
    `open_tokens`."""

    session_id: SessionId
    version: int
    tokens: Packed
    open_tokens: Packed = b""
    tip: PrefixHash | None = None


class Restore(msgspec.Struct, frozen=True):
    """A Restore goes on at a restorable point that lacks nothing."""

    position: int


class Replay(msgspec.Struct, frozen=True):
    """A Replay keeps the range state of [0, floor), and computes again from `start` without writing
    below `floor`.

        0 ........ start ~~~~~~~~ floor ------------ N
          resident        replayed       computed

    The caller vouches that `floor - start` covers the model's exact replay length, or that a
    complete point stands at `start`; the cache knows no attention windows.
    """

    start: int
    floor: int


Resume = Restore | Replay


class CacheRefusal(StrEnum):
    """CacheRefusal says why a request was refused; its values are metric labels."""

    NO_STATE_BLOCK = "no_state_block"
    TURN_IS_LIVE = "turn_is_live"
    TOO_LONG = "too_long"
    UNKNOWN_SESSION = "unknown_session"
    STALE_VERSION = "stale_version"
    POINT_GONE = "point_gone"
    DIGEST_MISMATCH = "digest_mismatch"
    PREFIX_MISMATCH = "prefix_mismatch"


class CacheRefused(msgspec.Struct, frozen=True):
    """The request was refused, and nothing was changed."""

    reason: CacheRefusal


class NoRoom(msgspec.Struct, frozen=True):
    """There is no room, and nothing was changed: `missing` slots of `pool` are neither free nor
    evictable."""

    pool: str
    missing: int


class Begun(msgspec.Struct, frozen=True):
    """A turn runs: compute from `restored` on, once `effects` are done.

    Below `write_floor` the range slots are shared and must not be written; the two differ only in
    a replay. `pending` are the tokens from `restored` on, also for who sent only a suffix.
    """

    restored: int
    effects: tuple[Effect, ...]
    write_floor: int
    pending: Packed


class Finished(msgspec.Struct, frozen=True):
    """A finished turn is one of which `tokens` were computed, and `sealed` of them stand in the
    tree.

    `version` is the session's for its next `Append`; None when the turn did not move the session
    (it has none, was released meanwhile, or a later turn finished first).
    """

    tokens: int
    sealed: int
    version: int | None


class Victim(msgspec.Struct, frozen=True):
    """A victim is state that would be evicted next: `blocks` range blocks that end at token
    `position`.

    Whoever comes back for it computes `tokens` again, or loads it where it is `is_backed` by a
    copy below the device. `is_expected`: a session with a soft reference stands there.
    """

    blocks: int
    position: int
    tokens: int
    is_backed: bool
    is_expected: bool


class Shortage(msgspec.Struct, frozen=True):
    """A shortage is room for `wanted` range blocks, of which `free` are free: what would go for the
    others, as far as the cache looked. A block takes `block_bytes`."""

    wanted: int
    free: int
    block_bytes: int
    victims: tuple[Victim, ...]


class RestorablePoint(msgspec.Struct, frozen=True):
    """A restorable point is a boundary with resident range state of [0, position); `lacks` names
    what else is needed to go on there and is not.
    """

    position: int
    lacks: tuple[str, ...] = ()


class Match(msgspec.Struct, frozen=True):
    """A match is what is resident of a prompt.

    `points`, deepest first, hold every boundary that has any point state, and the deepest resident
    boundary even when it has none (its range state can be replayed). A layout without point
    components has only that one: all boundaries before it are as good.
    """

    range_tokens: int
    points: tuple[RestorablePoint, ...]


class SessionStatus(msgspec.Struct, frozen=True):
    """A session's status is what the tree has of it now."""

    session_id: SessionId
    version: int
    tokens: int
    resident_tokens: int
    restorable_tokens: int
    resident_bytes: dict[str, int]
    running_turns: int
    last_s: float
    expires_s: float


class WriterKind(StrEnum):
    """A `WriterKind` says what sort of writer fills an arrival's slots; its values are metric
    labels."""

    STORE = "store"
    """This process's own reader of the tiers below."""
    PEER = "peer"
    """A mover that reads another worker's memory; the writer's name is that worker's."""


class Writer(msgspec.Struct, frozen=True):
    """A writer is who fills an arrival's slots: they are nobody else's until it has stopped."""

    kind: WriterKind
    name: str = ""


STORE_WRITER = Writer(WriterKind.STORE)


class Arrival(msgspec.Struct, frozen=True):
    """An arrival is state from outside for the prefix `tokens` (whole blocks), with point state at
    `points`.

    `prefix_hash` is the chain digest of `tokens`, `writer` who will fill the slots. `hashed`, when
    this side has hashed the tokens before, spares it to do so again. What the bytes must be is
    said at commit (`Verified`): a producer that computes while it sends does not know it before.
    """

    tokens: Packed
    prefix_hash: PrefixHash
    points: tuple[int, ...] = ()
    writer: Writer = STORE_WRITER
    hashed: HashedPrefix | None = None


class Verified(msgspec.Struct, frozen=True, gc=False):
    """A `Verified` is a part of an arrival that lies in its slots: blocks [first, end) of a
    component, or its point at block `end` where the two are equal.

    `stated` is what its producer said of it, `found` what this side found of what it has written:
    both an id or a digest, made alike. A peer states a digest of the bytes, and the same is
    computed here over what came; of a store's record the id stands for its digest, since the
    store gives out only bytes that match the digest written under their id.
    """

    component: str
    first: int
    end: int
    stated: bytes
    found: bytes

    @property
    def is_as_stated(self) -> bool:
        """Tell whether something was stated, and just that was found."""
        return bool(self.stated) and self.found == self.stated


class SlotsReserved(msgspec.Struct, frozen=True):
    """An arrival has its slots: range blocks from token `start` on, and per point position its
    slots."""

    ticket: int
    start: int
    blocks: tuple[int, ...]
    points: dict[int, dict[str, int]]


class Inserted(msgspec.Struct, frozen=True):
    """The arrival is in the tree up to `tokens`; `duplicate_blocks` were there first."""

    tokens: int
    duplicate_blocks: int
