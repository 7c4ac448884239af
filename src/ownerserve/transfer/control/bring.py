"""A bring has state come from a peer: these are its records, as `TransferTarget` keeps them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from math import inf

import msgspec

from ownerserve.transfer.control.events import BringEnd, BringWanted, PeerLink, WantedArtifact
from ownerserve.transfer.control.messages import LentRank, More, PeerQuestion, PublishedPiece
from ownerserve.transfer.control.pieces import Cover, cells
from ownerserve.transfer.control.rooms import PartRoom, PieceTask
from ownerserve.transfer.vocabulary import FramePiece, ReadFailure

SLOW_FIRST_SHARE = 0.1
"""A rate is judged by what has landed, and as if this share had."""


class BringPart:
    """A `BringPart` is what one part of a bring wants, and what its peer has published of it."""

    def __init__(self, wanted: Iterable[WantedArtifact]) -> None:
        self.wanted = {one.piece.artifact: one for one in wanted}
        self.cover = Cover(one.piece for one in self.wanted.values())
        self.waiting: deque[PieceTask] = deque()
        self.open_tasks = 0
        """Tasks of what is published that have not landed, `waiting` or being read."""
        self.digests: dict[bytes, list[bytes]] = {name: [] for name in self.wanted}

    @property
    def has_all(self) -> bool:
        """Tell whether all that was wanted has been published and has landed."""
        return not self.cover.missing and not self.open_tasks

    def publish(self, published: PublishedPiece, ranks: Iterable[LentRank]) -> bool:
        """Take what the peer says of a piece; False, and nothing changes, where it is not what was
        asked for: another artifact, units or layers that are not wanted or are there already, other
        heads or another form, more or fewer digests than ranks that read it."""
        piece = published.piece
        wanted = self.wanted.get(piece.artifact)
        if wanted is None or _kind(piece) != _kind(wanted.piece):
            return False
        reading = [rank for rank in ranks if rank.component in ("", wanted.component)]
        if len(reading) != len(published.digests) or not self.cover.takes(piece):
            return False
        size = wanted.bytes * cells(piece) // cells(wanted.piece) // len(reading)
        for rank, digest in zip(reading, published.digests, strict=True):
            self.waiting.append(PieceTask(piece, rank, digest, size))
        self.open_tasks += len(reading)
        self.digests[piece.artifact] += published.digests
        return True


def _kind(piece: FramePiece) -> tuple[int, int]:
    """Return what all pieces of an artifact have in common, as it was asked for."""
    return piece.first_head, piece.end_head


class OpenQuestion(msgspec.Struct, eq=False):
    """An `OpenQuestion` is what a peer was asked: it is asked again at `again_s`, each `every_s`,
    and given up at `until_s`."""

    number: int
    message: PeerQuestion
    every_s: float
    again_s: float
    until_s: float

    @property
    def is_more(self) -> bool:
        """Tell whether it asks for more, under a ticket."""
        return isinstance(self.message, More)

    @property
    def is_held(self) -> bool:
        """Tell whether its answer may be long in coming."""
        return isinstance(self.message, More) and self.message.wait_ms > 0


class OpenBring(msgspec.Struct, eq=False):
    """An `OpenBring` is a bring under way: with `peer`, the last that was asked, under `ticket`, in
    its part `index`. `ending`: it ends so when the cache has answered.

    `known` pieces are published; `heard_s` is when the peer last gave a sign of life, `answered_s`
    when it last answered. `landed_bytes` are counted as `wanted` counts them, since `reading_s`;
    `early_bytes` of them landed before the peer said that nothing more comes.
    """

    wanted: BringWanted
    begun_s: float
    parts: list[BringPart]
    peers: deque[PeerLink]
    wanted_bytes: int
    peer: PeerLink | None = None
    ticket: int | None = None
    ranks: tuple[LentRank, ...] = ()
    question: OpenQuestion | None = None
    known: int = 0
    is_final: bool = False
    brought_pieces: bool = False
    heard_s: float = inf
    answered_s: float = inf
    index: int = 0
    room: PartRoom | None = None
    reading_s: float = inf
    landed_bytes: int = 0
    early_bytes: int = 0
    read_bytes: Counter[str] = msgspec.field(default_factory=Counter)
    failures: Counter[ReadFailure] = msgspec.field(default_factory=Counter)
    refusal: BringEnd = BringEnd.NO_PEER
    ending: BringEnd | None = None

    @property
    def part(self) -> BringPart:
        """Return the part that is brought now."""
        return self.parts[self.index]

    def publish(self, published: PublishedPiece) -> bool:
        """Take what the peer says of a piece; False where it is not what was asked for."""
        name = published.piece.artifact
        part = next((part for part in self.parts if name in part.wanted), None)
        return part is not None and part.publish(published, self.ranks)

    def slow_s(self) -> float:
        """Return the instant from which computing the rest would be faster than what the measured
        rate promises, if nothing lands until then.

            rest / rate = rest * elapsed / landed  >  compute * rest / all
            so it goes on while  elapsed <= compute * landed / all

        Before anything has landed there is no rate, and it may take what computing would. Of a
        large piece nothing is heard before it has landed: while it is read, it counts as if it had.
        """
        compute_s = self.wanted.compute_ms / 1000
        if not self.landed_bytes:
            return self.begun_s + compute_s
        large_bytes = 0 if self.room is None else self.room.large_bytes
        landed_bytes = self.landed_bytes + large_bytes
        share = max(landed_bytes / self.wanted_bytes, SLOW_FIRST_SHARE)
        return self.reading_s + compute_s * share
