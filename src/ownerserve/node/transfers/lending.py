"""Lending finds what a peer asks for among the sessions on this device, and lends it.

    engine's thread   prefix, open, touch, end      what the cache and its lends are asked
    any thread        runs, stands                  what movers ask (transfer.movers.port.Lender)

The class owns which artifacts each ticket covers, and in which blocks they lie. The cache owns the
blocks; a ticket (cache.lends) keeps them as they are while it stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.kv.regions import Region
from ownerserve.kv.wire.rpc import AskPrefix, PrefixIs
from ownerserve.node.transfers.memory import BlocksOfArtifact, LentMemory, encode_memory
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.transfer.control.events import LendNotOpened, LendOpened, OpenLend
from ownerserve.transfer.control.messages import NO_TURN, LendRefusal, LentRank, ReaderRank
from ownerserve.transfer.control.pieces import SizedPiece
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.movers.peers import own_name
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.vocabulary import FramePiece, Runs

ONE_TOKEN = bytes(TOKEN_BYTES)
ALL_HEADS = (0, 0)
ENDS_TOLD = 64
"""So many beginnings of a prefix are told, and so many more of those with point state: who shares
less than all of it brings up to one of them."""


class SessionHint(NamedTuple):
    """A session hint says where artifacts are looked for: among the first `tokens` tokens of a
    session, or of the one that it was forked from."""

    session_id: SessionId | None
    parent: SessionId | None
    tokens: int


class LentArtifact(msgspec.Struct, frozen=True, eq=False):
    """A `LentArtifact` is where an artifact lies under a ticket: the ids of its blocks [units], in
    their order, in one component's region."""

    places: RegionPlaces
    blocks: NDArray[np.int64]


class FoundRecord(NamedTuple):
    """A `FoundRecord` is what an id stands for: blocks [first, end) of a component, or its point at
    `end`."""

    component: str
    first: int
    end: int

    @property
    def is_point(self) -> bool:
        return self.first == self.end


class TurnsLent(Protocol):
    """`TurnsLent` lends what turns compute (turn_lends.py)."""

    def open(self, asked: OpenLend, now: float) -> LendOpened | LendNotOpened:
        """Lend what the turn computes that the lend names."""
        ...


class Lending:
    """`Lending` lends what one node's device has of its sessions."""

    def __init__(
        self,
        cache: HeteroCache,
        names: RecordNames,
        chains: Chains,
        *,
        regions: Callable[[], tuple[Region, ...]],
    ) -> None:
        self.room = cache.lends.room
        """What lends keep from turns here, until one needs it."""
        self._cache = cache
        self._names = names
        self._chains = chains
        self.regions = regions
        """Where the components lie now, as the engine's thread may ask."""
        self._known: tuple[Region, ...] = ()
        self._places: dict[str, RegionPlaces] = {}
        self._lent: dict[int, Mapping[bytes, LentArtifact]] = {}
        self._process = own_name()
        self.address = ""
        """Where this process's mover serves, as lends say it."""
        self.engines: Mapping[str, str] = {}
        """How its engines are reached, by which readers of other hosts read by address too."""
        self.lends: Callable[[], None] = lambda: None
        self.rests: Callable[[], None] = lambda: None
        """Hear when something is lent, and when nothing is any more."""
        self.turns: TurnsLent | None = None
        """What is computed here for others; None: nothing is."""
        self.ended: Callable[[int], None] = lambda ticket: None
        """Hears of each ticket that a reader has no more use for."""

    # -- on the engine's thread ----------------------------------------------------------------

    def prefix(self, asked: AskPrefix) -> PrefixIs:
        """Tell what of a session could be lent now; holds nothing."""
        tokens, digests = self._prefix(SessionHint(asked.session_id, asked.parent, asked.tokens))
        if not digests:
            return PrefixIs(0)
        depths, block = sorted(self._points(tokens)), self._block
        points = tuple(depth * block for depth in depths)
        step = -(-len(digests) // ENDS_TOLD)
        told = sorted({
            *range(step, len(digests), step), *depths[-ENDS_TOLD:],
            *self._left_before(asked.session_id, tokens),
        })  # fmt: skip
        ends = tuple((depth * block, digests[depth - 1]) for depth in told)
        return PrefixIs(len(digests) * block, points, digests[-1], ends=ends)

    def begins(self, asked: AskPrefix, ends: Mapping[int, PrefixHash]) -> bool:
        """Tell whether what is resident of a session begins the text that has these digests at the
        ends of some of its blocks; nothing begins each."""
        _, digests = self._prefix(SessionHint(asked.session_id, asked.parent, asked.tokens))
        known = max((block for block in ends if block < len(digests)), default=None)
        return known is None or digests[known] == ends[known]

    def open(self, asked: OpenLend, hint: SessionHint, now: float) -> LendOpened | LendNotOpened:
        """Lend all that is wanted, or nothing: what is not here is known before a byte moves. What
        a turn computes is lent as it comes."""
        if asked.lend.turn_id == NO_TURN:
            tokens, digests = self._prefix(hint)
            return self.open_prefix(asked, tokens, digests, now=now)
        if self.turns is None:
            return LendNotOpened(asked.number, LendRefusal.NOT_HELD)
        return self.turns.open(asked, now)

    def open_prefix(
        self, asked: OpenLend, tokens: Packed, digests: Sequence[PrefixHash], *, now: float
    ) -> LendOpened | LendNotOpened:
        """Lend all that is wanted of these whole blocks, or nothing where some of it is not
        resident."""
        lend = asked.lend
        if not serves(lend.ranks):
            return LendNotOpened(asked.number, LendRefusal.MISMATCH)
        named = dict(self._named(tokens, digests))
        found = [(piece, named[piece.artifact]) for piece in lend.wanted if piece.artifact in named]
        artifacts = self._artifacts(tokens, found)
        sized = tuple(
            SizedPiece(piece, piece_bytes(piece, artifact))
            for piece, _ in found
            if (artifact := artifacts.get(piece.artifact)) is not None and _has(artifact, piece)
        )
        if not sized or len(sized) < len(lend.wanted):
            return LendNotOpened(asked.number, LendRefusal.NOT_HELD)
        size = self._cache.layout.packed_block_bytes
        ends = sorted({one.end for _, one in found}, reverse=True)
        kept = [tokens[: end * size] for end in ends if self._needs_lock(end, found, ends[0])]
        ticket = self._cache.lends.lend(kept, now, idle_s=asked.idle_s)
        self._forget_ended()
        self.cover(ticket, artifacts)
        ranks = (LentRank(lend.ranks[0].rank, self.address),)
        return LendOpened(asked.number, ticket, ranks, sized)

    def touch(self, ticket: int) -> None:
        """Put off the ticket's end: somebody reads."""
        self._cache.lends.read(ticket, time.monotonic())

    def end(self, ticket: int) -> None:
        """End the ticket; one that is over is no error."""
        was_lent = self._lent.pop(ticket, None) is not None
        self._cache.lends.end(ticket)
        self.ended(ticket)
        if was_lent and not self._lent:
            self.rests()

    def cover(self, ticket: int, artifacts: Mapping[bytes, LentArtifact]) -> None:
        """Let these be read under the ticket too."""
        self._lent[ticket] = {**self._lent.get(ticket, {}), **artifacts}
        self.lends()

    def lent(self, ticket: int, artifact: bytes) -> LentArtifact | None:
        """Return where an artifact lies that may be read under the ticket; None: it may not be."""
        return self._lent.get(ticket, {}).get(artifact)

    def placed(self, component: str, blocks: NDArray[np.int64]) -> LentArtifact:
        """Return where an artifact lies that has those blocks."""
        return LentArtifact(self._places_now()[component], blocks)

    # -- on any thread -------------------------------------------------------------------------

    def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
        """Return where the piece lies; None: it is not lent under that ticket."""
        return runs_of(self._lent.get(ticket, {}).get(piece.artifact), piece)

    def stands(self, ticket: int) -> bool:
        """Tell whether the ticket stands; False before any block of it is used again."""
        return self._cache.lends.stands(ticket)

    def memory(self, ticket: int, ids: Iterable[bytes] | None = None) -> bytes:
        """Return where what the ticket covers lies, or those of `ids`, for a reader by address;
        empty: nowhere."""
        lent = self._lent.get(ticket, {})
        return memory_of(self._process, self._known, lent, ids, engines=self.engines)

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _block(self) -> int:
        return self._cache.layout.block_tokens

    def _prefix(self, hint: SessionHint) -> tuple[Packed, Sequence[PrefixHash]]:
        """Return the whole blocks that are resident of what was asked about, with their digests;
        nothing where neither session is known."""
        size = self._cache.layout.packed_block_bytes
        for session_id in (hint.session_id, hint.parent):
            if session_id is None:
                continue
            resident = tokens_to_lend(self._cache, session_id)
            blocks = min(len(resident) // size, hint.tokens // self._block)
            if blocks:
                tokens = resident[: blocks * size]
                return tokens, self._chains.peek(tokens, (session_id,))
        return b"", ()

    def _left_before(self, session_id: SessionId, tokens: Packed) -> tuple[int, ...]:
        """Return the depth, in blocks, at which the session's last turn ended, where one that runs
        goes on from there; who runs another beside it shares so much."""
        left = self._cache.residents.tokens_of(session_id)
        goes_on = 0 < len(left) < len(tokens) and tokens.startswith(left)
        return (len(left) // self._cache.layout.packed_block_bytes,) if goes_on else ()

    def _points(self, tokens: Packed) -> list[int]:
        """List the depths, in blocks, at which all point state is resident."""
        if not self._names.point_names:
            return []
        match = self._cache.match(tokens + ONE_TOKEN)  # a match leaves the last token out
        return [point.position // self._block for point in match.points if not point.lacks]

    def _named(
        self, tokens: Packed, digests: Sequence[PrefixHash]
    ) -> Iterator[tuple[bytes, FoundRecord]]:
        """Yield the ids of the artifacts that the prefix is cut into, and of its points."""
        if not digests:
            return
        ends = self._names.ends(len(digests))
        for end, ids in zip(ends, self._names.range_ids(ends, digests), strict=True):
            first = self._names.cell_ending_at(end).first
            for name, id_ in zip(self._names.range_names, ids, strict=True):
                yield id_, FoundRecord(name, first, end)
        for depth in self._points(tokens):
            for name in self._names.point_names:
                yield self._names.point_id(name, depth, digests), FoundRecord(name, depth, depth)

    def _artifacts(
        self, tokens: Packed, found: Sequence[tuple[FramePiece, FoundRecord]]
    ) -> dict[bytes, LentArtifact]:
        """Return where each artifact lies; one whose state has gone is left out."""
        prefix, lent = self._cache.residents.prefix(tokens), dict[bytes, LentArtifact]()
        places = self._places_now()
        for piece, (component, first, end) in found:
            slots: tuple[int, ...] = ()
            if first < end <= prefix.blocks:
                slots = prefix.range_slots(first, end)
            elif first == end and (point := prefix.point_slots(end)) is not None:
                slots = (point[component],)
            if slots and component in places:
                lent[piece.artifact] = LentArtifact(places[component], np.array(slots, np.int64))
        return lent

    def _needs_lock(
        self, end: int, found: Sequence[tuple[FramePiece, FoundRecord]], deepest: int
    ) -> bool:
        """Tell whether a lock of its own is needed there: the deepest keeps the path of all, and
        each point is kept by one that ends at it."""
        return end == deepest or any(one.end == end and one.is_point for _, one in found)

    def _places_now(self) -> dict[str, RegionPlaces]:
        """Return each component's places, as the borders between pools stand."""
        regions = self.regions()
        if regions != self._known:
            self._known = regions
            self._places = {region.section.name: RegionPlaces(region) for region in regions}
        return self._places

    def _forget_ended(self) -> None:
        """Forget what ended by itself: it expired, or a turn needed the room."""
        for ticket in [one for one in self._lent if not self.stands(one)]:
            del self._lent[ticket]


def tokens_to_lend(cache: HeteroCache, session_id: SessionId) -> Packed:
    """Return the whole blocks, as tokens, that can be lent of a session by its name: what its last
    turn left, or what a turn of it that runs has sealed by now, where that is more."""
    left, sealed = cache.residents.tokens_of(session_id), cache.lends.places.sealed_of(session_id)
    return max(left, sealed, key=len)


def serves(ranks: Sequence[ReaderRank]) -> bool:
    """Tell whether one rank here serves them: one too. Which heads it reads its pieces say."""
    return len(ranks) == 1 and (ranks[0].first_head, ranks[0].end_head) == ALL_HEADS


def _has(artifact: LentArtifact, piece: FramePiece) -> bool:
    """Tell whether the artifact has the piece's units and layers."""
    layers = artifact.places.region.section.layers
    return (
        0 <= piece.first_unit < piece.end_unit <= len(artifact.blocks)
        and 0 <= piece.first_layer < piece.end_layer <= layers
    )


def runs_of(artifact: LentArtifact | None, piece: FramePiece) -> Runs | None:
    """Return where a piece of the artifact lies; None: it is not lent, or has no such piece."""
    try:
        return None if artifact is None else artifact.places.runs(piece, (artifact.blocks,))
    except InvalidInput:
        return None


def memory_of(
    process: ProcessName,
    regions: tuple[Region, ...],
    lent: Mapping[bytes, LentArtifact],
    ids: Iterable[bytes] | None,
    *,
    engines: Mapping[str, str],
) -> bytes:
    """Return where the artifacts lie, or those of `ids`, in these regions of the process, which
    `engines` read too; empty: there are none."""
    index = {region.section.name: n for n, region in enumerate(regions)}
    wanted = lent if ids is None else {id_: lent[id_] for id_ in ids if id_ in lent}
    blocks = {
        id_: BlocksOfArtifact(index[one.places.region.section.name], one.blocks.tobytes())
        for id_, one in wanted.items()
    }
    return encode_memory(LentMemory(process, regions, blocks, engines)) if blocks else b""


def piece_bytes(piece: FramePiece, artifact: LentArtifact) -> int:
    """Count the bytes of a piece, over all heads."""
    units = piece.end_unit - piece.first_unit
    layers = piece.end_layer - piece.first_layer
    return units * layers * layer_bytes(artifact.places.region.section)


def layer_bytes(section: PayloadSection) -> int:
    """Count the bytes of one layer of a unit, over all heads."""
    return sum(part.payload_bytes // part.shape[0] for part in section.parts)
