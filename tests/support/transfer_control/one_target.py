"""One target whose peer, movers and cache a test plays by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Nonce
from ownerserve.transfer.control.events import (
    AskPeer,
    BringOver,
    BringWanted,
    PeerAnswered,
    PeerLink,
    ReadEnded,
    RoomReserved,
    StartRead,
    TargetEffect,
    TargetEvent,
    WakeUp,
    WantedArtifact,
)
from ownerserve.transfer.control.messages import (
    Grown,
    Lent,
    LentRank,
    PeerAnswer,
    PublishedPiece,
    ReaderRank,
)
from ownerserve.transfer.control.target import TransferTarget
from ownerserve.transfer.vocabulary import FramePiece, ReadLanded, Road

HERE = RoutingUnit(WorkerId("t"), 0, Incarnation(1))
FIRST = PeerLink(RoutingUnit(WorkerId("s"), 0, Incarnation(1)), "s")
SECOND = PeerLink(RoutingUnit(WorkerId("u"), 0, Incarnation(1)), "u")
TCP = Road("tcp", is_fenced=True, is_signed=True)
READV = Road("readv", is_fenced=True, is_signed=False)
RDMA = Road("rdma", is_fenced=False, is_signed=False)
RANKS = (LentRank(0, "s"),)
TICKET, RESERVATION = 9, 70

E = TypeVar("E")


def wanted(name: bytes, units: int = 2, size: int = 100) -> WantedArtifact:
    return WantedArtifact("dense", FramePiece(name, 0, units, 0, 1), size)


def published(name: bytes, first: int = 0, end: int = 2, ranks: int = 1) -> PublishedPiece:
    digests = tuple(b"%b %d %d" % (name, first, rank) for rank in range(ranks))
    return PublishedPiece(FramePiece(name, first, end, 0, 1), digests)


def bring_of(
    parts: Iterable[tuple[WantedArtifact, ...]],
    roads: Sequence[Road],
    *,
    compute_s: float,
    ranks: int = 1,
    number: int,
) -> BringWanted:
    return BringWanted(
        number=number,
        nonce=Nonce(5),
        parts=tuple(parts),
        peers=(FIRST, SECOND),
        ranks=tuple(ReaderRank(rank, rank, rank + 1) for rank in range(ranks)),
        roads=tuple(roads),
        compute_ms=compute_s * 1000,
    )


class OneTarget:
    """A target, its clock, and what it did last."""

    def __init__(self) -> None:
        self.target = TransferTarget(HERE)
        self.now = 0.0
        self.done: list[TargetEffect] = []

    def tell(self, event: TargetEvent) -> list[TargetEffect]:
        self.done = self.target.handle(event, self.now)
        self.target.check()
        return self.done

    def of(self, kind: type[E]) -> list[E]:
        """The effects of a kind among what it did last."""
        return [effect for effect in self.done if isinstance(effect, kind)]

    def one(self, kind: type[E]) -> E:
        [effect] = self.of(kind)
        return effect

    def want(
        self,
        *parts: tuple[WantedArtifact, ...],
        roads: Sequence[Road] = (TCP,),
        compute_s: float = 100.0,
        ranks: int = 1,
        number: int = 1,
    ) -> list[TargetEffect]:
        return self.tell(bring_of(parts, roads, compute_s=compute_s, ranks=ranks, number=number))

    def answer(self, answer: PeerAnswer) -> list[TargetEffect]:
        """The peer answers what it was just asked."""
        return self.tell(PeerAnswered(self.one(AskPeer).question, answer))

    def open(
        self, *pieces: PublishedPiece, is_final: bool = True, ranks: tuple[LentRank, ...] = RANKS
    ) -> list[TargetEffect]:
        """It is lent, these pieces are published, and there is room: reads begin."""
        self.answer(Lent(TICKET, ranks))
        self.answer(Grown(0, pieces, is_final))
        return self.tell(RoomReserved(1, 0, RESERVATION))

    def land(self, read: StartRead) -> list[TargetEffect]:
        return self.tell(ReadEnded(ReadLanded(read.number, 100)))

    def wait(self, seconds: float) -> list[TargetEffect]:
        """Time passes, and each timer rings."""
        done: list[TargetEffect] = []
        until = self.now + seconds
        while self.target.next_deadline() <= until:
            self.now = max(self.now, self.target.next_deadline())
            done += self.tell(WakeUp())
        self.now, self.done = until, done
        return done

    def over(self) -> BringOver:
        return self.one(BringOver)
