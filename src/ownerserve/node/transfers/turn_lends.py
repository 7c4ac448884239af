"""Turn lends are lends of prompts that a turn here computes: what of them is sealed may be read,
and more of it after each step.

    prompt     | cell | cell | cell | cell .. |        cut as its records will be
    covered    |=============|                         told to who reads: TurnGrew
    sealed     |==================|                    computed, and in the tree

Owns which cells of a prompt were told; the cache owns the blocks, and the ticket that keeps them.
All calls are made on the engine's thread. One peer reads a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.node.transfers.lending import (
    FoundRecord,
    Lending,
    LentArtifact,
    piece_bytes,
    serves,
)
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.transfer.control.events import (
    LendNotOpened,
    LendOpened,
    OpenLend,
    SourceEvent,
    TurnGrew,
    TurnOver,
)
from ownerserve.transfer.control.messages import LendRefusal, LentRank
from ownerserve.transfer.control.pieces import SizedPiece
from ownerserve.transfer.vocabulary import FramePiece

NO_TICKET = 0


class ComingPrompt(msgspec.Struct, eq=False):
    """A `ComingPrompt` is whole blocks that a turn computes: their packed `tokens` and `digests`.
    In blocks: the first `found` were here before it, the first `sealed` are computed, of which the
    first `covered` were told to who reads them under `ticket`. It `is_over` when the turn adds
    nothing any more."""

    turn_id: TurnId
    tokens: Packed
    digests: Sequence[PrefixHash]
    ticket: int = NO_TICKET
    found: int = 0
    sealed: int = 0
    covered: int = 0
    is_over: bool = False


class TurnLends:
    """`TurnLends` lends the prompts that a node computes for others. `tell` takes what the source
    side is to know."""

    def __init__(
        self,
        lending: Lending,
        cache: HeteroCache,
        names: RecordNames,
        *,
        tell: Callable[[SourceEvent], None],
    ) -> None:
        self._lending = lending
        self._cache = cache
        self._names = names
        self._tell = tell
        self._prompts: dict[TurnId, ComingPrompt] = {}
        self._by_ticket: dict[int, ComingPrompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: ComingPrompt) -> None:
        """Lend a prompt to who asks for its turn, from now on."""
        self._prompts[prompt.turn_id] = prompt

    def remove(self, turn_id: TurnId) -> ComingPrompt | None:
        """Lend it no more; who reads it is told that nothing comes behind what there is. Returns
        the prompt; None: there is none."""
        prompt = self._prompts.pop(turn_id, None)
        if prompt is not None:
            self._by_ticket.pop(prompt.ticket, None)
            if prompt.ticket and not prompt.is_over:
                self._tell(TurnOver(turn_id))
        return prompt

    def of(self, turn_id: TurnId) -> ComingPrompt | None:
        """Return the prompt that the turn computes; None: it computes none for others."""
        return self._prompts.get(turn_id)

    def read_under(self, ticket: int) -> TurnId | None:
        """Return the turn whose prompt is read under that ticket."""
        prompt = self._by_ticket.get(ticket)
        return None if prompt is None else prompt.turn_id

    def open(self, asked: OpenLend, now: float) -> LendOpened | LendNotOpened:
        """Lend what a turn computes: what of it is sealed now, and more with each step. Nothing is
        lent of what its prompt is not cut into."""
        lend = asked.lend
        prompt = self._prompts.get(lend.turn_id)
        if not serves(lend.ranks):
            return LendNotOpened(asked.number, LendRefusal.MISMATCH)
        if prompt is None or not self._is_cut_so(prompt, lend.wanted):
            return LendNotOpened(asked.number, LendRefusal.NOT_HELD)
        if prompt.ticket:
            return LendNotOpened(asked.number, LendRefusal.BUSY)
        if prompt.is_over:
            opened = self._lending.open_prefix(asked, prompt.tokens, prompt.digests, now=now)
            if isinstance(opened, LendOpened):
                self._read_by(prompt, opened.ticket)
            return opened
        self._read_by(prompt, self._cache.lends.lend((), now, idle_s=asked.idle_s))
        pieces = self._follow(prompt)
        ranks = (LentRank(0, lend.ranks[0].rank, self._lending.address),)
        return LendOpened(asked.number, prompt.ticket, ranks, pieces, follows=prompt.turn_id)

    # -- the turn ------------------------------------------------------------------------------

    def began(self, turn_id: TurnId, sealed_tokens: int) -> None:
        """Note that the turn has begun, or begins again, with so many tokens at hand."""
        prompt = self._prompts[turn_id]
        # What it had computed before it was preempted, and was not told, is computed again.
        prompt.sealed = max(prompt.covered, sealed_tokens // self._block)
        if prompt.ticket:
            self._told(prompt, self._follow(prompt))

    def computed(self, turn_id: TurnId, tokens: int) -> None:
        """Note that the prompt's first so many tokens are computed, and what is kept is in its
        slots."""
        prompt = self._prompts[turn_id]
        prompt.sealed = max(prompt.sealed, tokens // self._block)
        if prompt.ticket:
            self._told(prompt, tuple(self._grown(prompt)))

    def over(self, turn_id: TurnId) -> None:
        """Note that the turn has ended: nothing is added to what is told."""
        prompt = self._prompts[turn_id]
        if not prompt.is_over:
            prompt.is_over = True
            if prompt.ticket:
                self._tell(TurnOver(turn_id))

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _block(self) -> int:
        return self._cache.layout.block_tokens

    def _read_by(self, prompt: ComingPrompt, ticket: int) -> None:
        prompt.ticket = ticket
        self._by_ticket[ticket] = prompt

    def _follow(self, prompt: ComingPrompt) -> tuple[SizedPiece, ...]:
        """Have the ticket follow the turn, if that runs, and return what of it was not told."""
        if prompt.turn_id not in self._cache.running:
            return ()
        self._cache.lends.follow(prompt.ticket, prompt.turn_id)
        return tuple(self._grown(prompt))

    def _told(self, prompt: ComingPrompt, pieces: tuple[SizedPiece, ...]) -> None:
        if pieces:
            self._tell(TurnGrew(prompt.turn_id, pieces))

    def _grown(self, prompt: ComingPrompt) -> Iterator[SizedPiece]:
        """Yield what is sealed and was not told, once it can be read under the ticket."""
        first, end = prompt.covered, prompt.sealed
        if first == end:
            return
        slots = self._cache.lends.places.blocks_of(prompt.ticket, first, end)
        if len(slots) < end - first:
            return  # the ticket is over, or the turn was preempted: it begins again
        prompt.covered = end
        added: dict[bytes, LentArtifact] = {}
        for id_, found in self._records(prompt, first):
            if found.is_point:
                point = self._cache.lends.places.points_of(prompt.ticket).get(found.end)
                if point is not None and first < found.end <= end:
                    ids = np.array([point[found.component]], np.int64)
                    added[id_] = self._lending.placed(found.component, ids)
                    yield _sized(id_, (0, 1), added[id_])
                continue
            low, high = max(found.first, first), min(found.end, end)
            if low >= high:
                continue
            before = self._lending.lent(prompt.ticket, id_)
            size = found.end - found.first
            ids = np.zeros(size, np.int64) if before is None else before.blocks.copy()
            ids[low - found.first : high - found.first] = slots[low - first : high - first]
            added[id_] = self._lending.placed(found.component, ids)
            yield _sized(id_, (low - found.first, high - found.first), added[id_])
        self._lending.cover(prompt.ticket, added)

    def _records(self, prompt: ComingPrompt, first: int) -> Iterator[tuple[bytes, FoundRecord]]:
        """Yield the ids of the records that the prompt is cut into, of those that end behind its
        first `first` blocks, and of the point at its end."""
        names, digests, depth = self._names, prompt.digests, len(prompt.digests)
        ends = [end for end in names.ends(depth) if end > first]
        for end, ids in zip(ends, names.range_ids(ends, digests), strict=True):
            start = names.cell_ending_at(end).first
            for name, id_ in zip(names.range_names, ids, strict=True):
                yield id_, FoundRecord(name, start, end)
        for name in names.point_names:
            yield names.point_id(name, depth, digests), FoundRecord(name, depth, depth)

    def _is_cut_so(self, prompt: ComingPrompt, wanted: Sequence[FramePiece]) -> bool:
        """Tell whether the prompt will have all that is wanted."""
        records = dict(self._records(prompt, 0))
        return all(
            (found := records.get(piece.artifact)) is not None
            and 0 <= piece.first_unit < piece.end_unit <= max(1, found.end - found.first)
            for piece in wanted
        )


def _sized(id_: bytes, units: tuple[int, int], artifact: LentArtifact) -> SizedPiece:
    layers = artifact.places.region.section.layers
    piece = FramePiece(id_, units[0], units[1], 0, layers)
    return SizedPiece(piece, piece_bytes(piece, artifact))
