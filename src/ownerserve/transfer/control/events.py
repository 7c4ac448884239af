"""Events tell the control of transfer what happened, and effects are how it asks for something.

Data only. `question` numbers what was asked over the wire: of S by its runtime, of a peer by
`TransferTarget`; an answer comes back under it, late, twice or not at all. `number` is a lend's (at
S), a bring's or a read's (at T), each counted by whoever begins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Nonce
from ownerserve.transfer.control.messages import (
    NO_TURN,
    Lend,
    LendRefusal,
    LentRank,
    PeerAnswer,
    PeerQuestion,
    ReaderRank,
)
from ownerserve.transfer.control.pieces import SizedPiece
from ownerserve.transfer.vocabulary import Ended, FramePiece, ReadFailure, Road

# ---- both sides


class WakeUp(msgspec.Struct, frozen=True, gc=False):
    """Event: the instant that `next_deadline` named has come."""


# ---- events of S, who lends


class PeerAsked(msgspec.Struct, frozen=True):
    """Event: a peer asks. Each question gets one `AnswerPeer`, unless it was asked again."""

    question: int
    reader: RoutingUnit
    message: PeerQuestion


class LendOpened(msgspec.Struct, frozen=True):
    """Event: an `OpenLend` is done. `pieces` can be read under the ticket now; `follows`: the turn
    that adds to them, none where they are all."""

    number: int
    ticket: int
    ranks: tuple[LentRank, ...]
    pieces: tuple[SizedPiece, ...]
    follows: TurnId = NO_TURN


class LendNotOpened(msgspec.Struct, frozen=True, gc=False):
    """Event: an `OpenLend` came to nothing."""

    number: int
    reason: LendRefusal


class TurnGrew(msgspec.Struct, frozen=True):
    """Event: the engine has computed these pieces of a turn: after a step, or after a layer of it
    where it says so (`layer_done`). Each cell is told once."""

    turn_id: TurnId
    pieces: tuple[SizedPiece, ...]


class TurnOver(msgspec.Struct, frozen=True, gc=False):
    """Event: the turn adds nothing any more: it ended, was aborted or preempted."""

    turn_id: TurnId


class DigestsMade(msgspec.Struct, frozen=True):
    """Event: a `MakeDigests` is done; the digests of each piece, one for each rank that has its
    component, in the order of the lend's ranks."""

    ticket: int
    batch: int
    digests: tuple[tuple[bytes, ...], ...]


class TicketStands(msgspec.Struct, frozen=True, gc=False):
    """Event: the ticket stood when `CheckTicket` was done, after all that was written before it."""

    ticket: int
    check: int


class TicketOver(msgspec.Struct, frozen=True, gc=False):
    """Event: the ticket does not stand: the answer to a `CheckTicket`, or told as it is revoked."""

    ticket: int


class TicketRead(msgspec.Struct, frozen=True, gc=False):
    """Event: a mover has read under the ticket, which stood."""

    ticket: int


SourceEvent = (
    PeerAsked | LendOpened | LendNotOpened | TurnGrew | TurnOver | DigestsMade | TicketStands
    | TicketOver | TicketRead | WakeUp
)  # fmt: skip

# ---- effects of S


class OpenLend(msgspec.Struct, frozen=True):
    """Effect: lend it, with `idle_s` as the ticket's. LendOpened or LendNotOpened follows."""

    number: int
    reader: RoutingUnit
    lend: Lend
    idle_s: float


class EndLend(msgspec.Struct, frozen=True, gc=False):
    """Effect: end the ticket; one that is over already is no error."""

    ticket: int


class MakeDigests(msgspec.Struct, frozen=True):
    """Effect: make the digests of these pieces' bytes. DigestsMade follows, or TicketOver."""

    ticket: int
    batch: int
    pieces: tuple[FramePiece, ...]


class CheckTicket(msgspec.Struct, frozen=True, gc=False):
    """Effect: ask whether the ticket stands, which puts off its end. TicketStands or TicketOver
    follows."""

    ticket: int
    check: int


class AnswerPeer(msgspec.Struct, frozen=True):
    """Effect: send the answer to a question."""

    question: int
    answer: PeerAnswer


SourceEffect = OpenLend | EndLend | MakeDigests | CheckTicket | AnswerPeer

# ---- events of T, who reads


class BringEnd(StrEnum):
    """A `BringEnd` says why a bring brought no more. Labels of metrics."""

    BROUGHT = "brought"  # all of it
    SHORT = "short"  # the peer had no more
    REFUSED = "refused"  # no peer lent it
    NO_PEER = "no_peer"  # none may be asked now, or none answered
    NO_ROOM = "no_room"  # its memory for what comes is taken
    MISMATCH = "mismatch"  # the ranks do not serve each other, or what was said was not asked for
    GONE = "gone"  # the ticket ended first
    SILENT = "silent"  # the peer says nothing any more
    SLOW = "slow"  # computing the rest is faster
    FAILED = "failed"  # a piece could not be read
    UNABLE = "unable"  # no road is open
    UNWANTED = "unwanted"


class PeerLink(msgspec.Struct, frozen=True):
    """A `PeerLink` is a way to ask a peer: one life of a unit, and its address."""

    unit: RoutingUnit
    address: str


class WantedArtifact(msgspec.Struct, frozen=True, gc=False):
    """A `WantedArtifact` is what is to come of an artifact of `component`, over all heads."""

    component: str
    piece: FramePiece
    bytes: int


class BringWanted(msgspec.Struct, frozen=True):
    """Event: bring this from one of `peers`, asked in that order.

    `parts` are reserved, read and committed one after another, so that what came of a bring that
    ends early is in the tree. `ranks` are this side's; all of them get their bytes, or none counts.
    `roads` in order of preference. `compute_ms`: what computing all of it here would take.
    """

    number: int
    nonce: Nonce
    parts: tuple[tuple[WantedArtifact, ...], ...]
    peers: tuple[PeerLink, ...]
    ranks: tuple[ReaderRank, ...]
    roads: tuple[Road, ...]
    compute_ms: float
    turn_id: TurnId = NO_TURN


class BringUnwanted(msgspec.Struct, frozen=True, gc=False):
    """Event: the bring is not wanted any more: its turn went, or a new one wins."""

    number: int


class PeerAnswered(msgspec.Struct, frozen=True):
    """Event: a peer has answered a question."""

    question: int
    answer: PeerAnswer


class QuestionLost(msgspec.Struct, frozen=True, gc=False):
    """Event: a question could not be sent, or its link broke: no answer comes."""

    question: int


class PeerReplaced(msgspec.Struct, frozen=True):
    """Event: a unit's life is over: it left, or another life of it was heard of."""

    unit: RoutingUnit


class RoomReserved(msgspec.Struct, frozen=True, gc=False):
    """Event: a `ReserveRoom` is done: the part's slots are reserved under that ticket of ours."""

    number: int
    part: int
    reservation: int


class RoomRefused(msgspec.Struct, frozen=True, gc=False):
    """Event: a `ReserveRoom` came to nothing: there is no room."""

    number: int
    part: int


class RoomCommitted(msgspec.Struct, frozen=True, gc=False):
    """Event: the part is in the tree."""

    reservation: int


class ReadEnded(msgspec.Struct, frozen=True):
    """Event: what a mover said of a read."""

    ended: Ended


class ArenaCopied(msgspec.Struct, frozen=True, gc=False):
    """Event: a `CopyFromArena` is done."""

    number: int


TargetEvent = (
    BringWanted | BringUnwanted | PeerAnswered | QuestionLost | PeerReplaced | RoomReserved
    | RoomRefused | RoomCommitted | ReadEnded | ArenaCopied | WakeUp
)  # fmt: skip

# ---- effects of T


class AskPeer(msgspec.Struct, frozen=True):
    """Effect: ask a peer, or ask it again. PeerAnswered or QuestionLost may follow; after `until_s`
    nobody waits for it."""

    question: int
    peer: PeerLink
    message: PeerQuestion
    until_s: float


class TellPeer(msgspec.Struct, frozen=True):
    """Effect: tell a peer what needs no answer."""

    peer: PeerLink
    message: PeerQuestion


class ReserveRoom(msgspec.Struct, frozen=True, gc=False):
    """Effect: reserve slots for a part, on all ranks. RoomReserved or RoomRefused follows."""

    number: int
    part: int


class ReadGoal(StrEnum):
    """A `ReadGoal` is where a read may write: `blocks` only by a mover that is fenced."""

    BLOCKS = "blocks"
    ARENA = "arena"


class StartRead(msgspec.Struct, frozen=True):
    """Effect: have the road's mover read one piece, on `rank.reader_rank`, into the slots of the
    reservation or into an arena. ReadEnded follows, by `deadline_s`."""

    number: int
    reservation: int
    peer: PeerLink
    road: str
    ticket: int
    piece: FramePiece
    rank: LentRank
    digest: bytes
    goal: ReadGoal
    deadline_s: float


class CancelRead(msgspec.Struct, frozen=True, gc=False):
    """Effect: have the read end soon."""

    number: int


class CopyFromArena(msgspec.Struct, frozen=True, gc=False):
    """Effect: copy a read that landed in an arena into the slots. ArenaCopied follows."""

    number: int
    reservation: int


class FreeArena(msgspec.Struct, frozen=True, gc=False):
    """Effect: a read's part of the arena may be used again: it is over, and its writer is quiet.
    Comes once for each read with that goal."""

    number: int


class CommitRoom(msgspec.Struct, frozen=True):
    """Effect: put the part in the tree. `verified` has the digests of each artifact's pieces, as
    they were checked here. RoomCommitted follows."""

    reservation: int
    verified: Mapping[bytes, tuple[bytes, ...]]


class HoldRoom(msgspec.Struct, frozen=True, gc=False):
    """Effect: give the reservation up; its slots stay held, since somebody may still write."""

    reservation: int


class FreeRoom(msgspec.Struct, frozen=True, gc=False):
    """Effect: free the slots of a reservation that was given up: nobody writes there any more."""

    reservation: int


class BringOver(msgspec.Struct, frozen=True):
    """Effect: tell what came of a bring: its first `parts` are in the tree. `read_bytes` landed, by
    road, whatever came of them, `early_bytes` of them before the peer said that nothing more comes;
    `failures` counts reads that did not. What is held still is freed later, without it."""

    number: int
    end: BringEnd
    parts: int
    took_ms: float
    read_bytes: Mapping[str, int]
    early_bytes: int
    failures: Mapping[ReadFailure, int]


TargetEffect = (
    AskPeer | TellPeer | ReserveRoom | StartRead | CancelRead | CopyFromArena | FreeArena
    | CommitRoom | HoldRoom | FreeRoom | BringOver
)  # fmt: skip
