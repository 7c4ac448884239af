"""What a peer that reads (T) and one that lends (S) say to each other.

    T -> S  Lend        Lent | LendRefused       under a nonce; repeated, it gets the same answer
    T -> S  More        Grown | LendGone         a long poll: what was published behind `have`
    T -> S  ReturnLend  LendReturned             T is done
    T -> S  Cancel      Cancelled                (kv.wire.rpc) undoes what was asked under a nonce

What a ticket publishes is one growing list, the same for whoever asks, so that a repeated or late
`More` does no harm. `lender` names the life that the words are for: another one has other tickets.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Cancel, Cancelled, Nonce
from ownerserve.transfer.vocabulary import FramePiece

NO_TURN = TurnId("")


class LendRefusal(StrEnum):
    """A `LendRefusal` says why nothing is lent. Labels of metrics."""

    NOT_HELD = "not_held"  # nothing of it is here, and no such turn runs
    MISMATCH = "mismatch"  # other layouts, or ranks that can't serve each other
    BUSY = "busy"  # too many lends stand
    NO_ROOM = "no_room"  # its memory for what is lent from below the device is taken
    CANCELLED = "cancelled"  # the wish was called off before
    OTHER_LIFE = "other_life"  # asked of a unit that this process is not


class ReaderRank(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `ReaderRank` is a rank of T, and the heads [first_head, end_head) that it keeps."""

    rank: int
    first_head: int
    end_head: int


class LentRank(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `LentRank` is what one rank of T reads at an address, where one rank of S lends: its heads
    [first_head, end_head) of `component` (empty: of every one)."""

    reader_rank: int
    address: str
    first_head: int = 0
    end_head: int = 0
    component: str = ""


class PublishedPiece(msgspec.Struct, frozen=True, gc=False):
    """A `PublishedPiece` may be read: `digests` of its bytes, one for each `LentRank` that has its
    component, in their order."""

    piece: FramePiece
    digests: tuple[bytes, ...]


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Lend asks for pieces of artifacts: of sealed state, or, where `turn_id` is named, of what
    that turn computes, as it does."""

    nonce: Nonce
    lender: RoutingUnit
    wanted: tuple[FramePiece, ...]
    ranks: tuple[ReaderRank, ...]
    turn_id: TurnId = NO_TURN


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """Lent answers `Lend`: a ticket stands."""

    ticket: int
    ranks: tuple[LentRank, ...]


class LendRefused(msgspec.Struct, frozen=True, tag="refused"):
    """LendRefused answers `Lend`: nothing is lent."""

    reason: LendRefusal


class More(msgspec.Struct, frozen=True, tag="more", gc=False):
    """More asks what the ticket has published behind its first `have` pieces, and whether it
    stands. It is answered when there is something, or after `wait_ms`."""

    ticket: int
    lender: RoutingUnit
    have: int
    wait_ms: int


class Grown(msgspec.Struct, frozen=True, tag="grown"):
    """Grown answers `More`: the ticket stood after it was asked, and these pieces were behind the
    first `have`. `is_final`: no other will come behind them."""

    have: int
    pieces: tuple[PublishedPiece, ...]
    is_final: bool


class LendGone(msgspec.Struct, frozen=True, tag="gone"):
    """LendGone answers `More`: the ticket is over. What was read and not confirmed does not
    count."""


class ReturnLend(msgspec.Struct, frozen=True, tag="return", gc=False):
    """ReturnLend says that T is done with the ticket."""

    ticket: int
    lender: RoutingUnit


class LendReturned(msgspec.Struct, frozen=True, tag="returned"):
    """LendReturned answers `ReturnLend`, also where the ticket was over."""


PeerQuestion = Lend | More | ReturnLend | Cancel
PeerAnswer = Lent | LendRefused | Grown | LendGone | LendReturned | Cancelled
