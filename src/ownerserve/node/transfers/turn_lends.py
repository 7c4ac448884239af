"""Turn lends are lends of prompts that a turn here computes: what of them is sealed may be read,
and more of it after each step, or within it after each layer.

    prompt     | cell | cell | cell | cell .. |        cut as its records will be
    covered    |=============|                         told to who reads: TurnGrew
    sealed     |==================|                    computed, and in the tree
    step       .              |--------|               of the step under way some layers were told

Layers are told once a component's new ones are PIECE_BYTES: smaller ones wait for those behind
them, the last of a step for its end. What a step has told stays where it was told to be, also where
the tree has another's copy by the step's end: the turn's own waits for the ticket (cache.lends).

Owns which cells of a prompt were told; the cache owns the blocks, and the ticket that keeps them.
All calls are made on the engine's thread. One peer reads a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.node.transfers.lending import (
    FoundRecord,
    Lending,
    LentArtifact,
    layer_bytes,
    piece_bytes,
    serves,
)
from ownerserve.node.vocabulary.engine_port import LayerProgress, LayersTold
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
from ownerserve.transfer.control.pieces import PIECE_BYTES, SizedPiece
from ownerserve.transfer.vocabulary import FramePiece

NO_TICKET = 0
NO_BLOCKS = np.zeros(0, np.int64)


class LayersWatched(Protocol):
    """`LayersWatched` say how far a forward is, layer by layer (node.vocabulary.engine_port)."""

    def watch_layers(self, turn_id: TurnId, told: LayersTold) -> None:
        """Have `told` called within the turn's forwards."""
        ...

    def unwatch_layers(self, turn_id: TurnId) -> None:
        """End that; no error where nobody watches."""
        ...


class StepUnderWay(msgspec.Struct, eq=False):
    """A `StepUnderWay` is what a step has told of its layers: of how many of each component, and in
    which `slots` its blocks lie, the first of them the prompt's first that is not covered."""

    slots: list[int]
    layers: dict[str, int] = {}


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
    step: StepUnderWay | None = None
    is_over: bool = False


class TurnLends:
    """`TurnLends` lends the prompts that a node computes for others. `tell` takes what the source
    side is to know; `told_bytes` counts what it was told, by after what: a layer, or a step."""

    def __init__(
        self,
        lending: Lending,
        cache: HeteroCache,
        names: RecordNames,
        *,
        tell: Callable[[SourceEvent], None],
        layers: LayersWatched,
    ) -> None:
        self.told_bytes: Counter[str] = Counter()
        self._layers = layers
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
            self._layers.unwatch_layers(turn_id)
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
        ranks = (LentRank(lend.ranks[0].rank, self._lending.address),)
        return LendOpened(asked.number, prompt.ticket, ranks, pieces, follows=prompt.turn_id)

    # -- the turn ------------------------------------------------------------------------------

    def began(self, turn_id: TurnId, sealed_tokens: int) -> None:
        """Note that the turn has begun, or begins again, with so many tokens at hand."""
        prompt = self._prompts[turn_id]
        # What it had computed before it was preempted, and was not told, is computed again.
        prompt.step = None
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

    def layers_done(self, turn_id: TurnId, done: LayerProgress) -> None:
        """Note, within a step, of how many layers what it computes is in its slots."""
        prompt = self._prompts.get(turn_id)
        if prompt is not None and prompt.ticket and not prompt.is_over:
            self._told(prompt, tuple(self._layers_grown(prompt, done)), after="layer")

    def over(self, turn_id: TurnId) -> None:
        """Note that the turn has ended: nothing is added to what is told."""
        prompt = self._prompts[turn_id]
        if not prompt.is_over:
            prompt.is_over = True
            self._layers.unwatch_layers(turn_id)
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
        self._layers.watch_layers(prompt.turn_id, partial(self.layers_done, prompt.turn_id))
        return tuple(self._grown(prompt))

    def _told(
        self, prompt: ComingPrompt, pieces: tuple[SizedPiece, ...], *, after: str = "step"
    ) -> None:
        if pieces:
            self.told_bytes[after] += sum(one.bytes for one in pieces)
            self._tell(TurnGrew(prompt.turn_id, pieces))

    def _grown(self, prompt: ComingPrompt) -> Iterator[SizedPiece]:
        """Yield what is sealed and was not told, once it can be read under the ticket."""
        first, end = prompt.covered, prompt.sealed
        if first == end:
            return
        slots = self._cache.lends.places.blocks_of(prompt.ticket, first, end)
        if len(slots) < end - first:
            return  # the ticket is over, or the turn was preempted: it begins again
        step, prompt.step = prompt.step or StepUnderWay([]), None
        slots[: len(step.slots)] = step.slots
        prompt.covered = end
        added: dict[bytes, LentArtifact] = {}
        for id_, found in self._records(prompt, first, end):
            if found.is_point:
                point = self._cache.lends.places.points_of(prompt.ticket).get(found.end)
                if point is not None:
                    ids = np.array([point[found.component]], np.int64)
                    added[id_] = self._lending.placed(found.component, ids)
                    yield _sized(FramePiece(id_, 0, 1, 0, _layers(added[id_])), added[id_])
                continue
            added[id_] = self._lent(prompt, id_, found, first=first, slots=slots)
            told = step.layers.get(found.component, 0)
            if told < _layers(added[id_]):
                units = _units(found, first, end)
                yield _sized(FramePiece(id_, *units, told, _layers(added[id_])), added[id_])
        self._lending.cover(prompt.ticket, added)

    def _layers_grown(self, prompt: ComingPrompt, done: LayerProgress) -> Iterator[SizedPiece]:
        """Yield what of the step under way is whole blocks, in layers that are done and were not
        told, as far as it is worth a piece."""
        first, end = prompt.covered, min(done.end // self._block, len(prompt.digests))
        slots = self._cache.lends.places.blocks_of(prompt.ticket, first, end)
        if first >= end or len(slots) < end - first:
            return
        step = prompt.step = prompt.step or StepUnderWay(slots)
        told, count = step.layers, end - first
        new = {
            name: layers
            for name, layers in done.layers.items()
            if (layers - told.get(name, 0)) * count * self._layer_bytes(name) >= PIECE_BYTES
        }
        added: dict[bytes, LentArtifact] = {}
        for id_, found in self._records(prompt, first, end) if new else ():
            if not found.is_point and (layers := new.get(found.component)) is not None:
                added[id_] = self._lent(prompt, id_, found, first=first, slots=slots)
                before, units = told.get(found.component, 0), _units(found, first, end)
                yield _sized(FramePiece(id_, *units, before, layers), added[id_])
        step.layers = {**told, **new}
        self._lending.cover(prompt.ticket, added)

    def _layer_bytes(self, component: str) -> int:
        return layer_bytes(self._lending.placed(component, NO_BLOCKS).places.region.section)

    def _lent(
        self, prompt: ComingPrompt, id_: bytes, found: FoundRecord, *, first: int, slots: list[int]
    ) -> LentArtifact:
        """Return where a record lies whose blocks from the prompt's `first` on are in `slots`, as
        far as those go, and what of it is before them where it was."""
        before = self._lending.lent(prompt.ticket, id_)
        ids = np.zeros(found.end - found.first, np.int64)
        if before is not None:
            ids = before.blocks.copy()
        low, high = _units(found, first, first + len(slots))
        skipped = found.first + low - first
        ids[low:high] = slots[skipped : skipped + high - low]
        return self._lending.placed(found.component, ids)

    def _records(
        self, prompt: ComingPrompt, first: int, end: int
    ) -> Iterator[tuple[bytes, FoundRecord]]:
        """Yield the ids of the records that the prompt is cut into, of those with any of its blocks
        [first, end), and of the point at its own end where that is `end`."""
        names, digests, depth = self._names, prompt.digests, len(prompt.digests)
        cells = [(stop, names.cell_ending_at(stop).first) for stop in names.ends(depth)]
        starts = {stop: start for stop, start in cells if stop > first and start < end}
        for stop, ids in zip(starts, names.range_ids(list(starts), digests), strict=True):
            for name, id_ in zip(names.range_names, ids, strict=True):
                yield id_, FoundRecord(name, starts[stop], stop)
        if end == depth:
            for name in names.point_names:
                yield names.point_id(name, depth, digests), FoundRecord(name, depth, depth)

    def _is_cut_so(self, prompt: ComingPrompt, wanted: Sequence[FramePiece]) -> bool:
        """Tell whether the prompt will have all that is wanted."""
        records = dict(self._records(prompt, 0, len(prompt.digests)))
        return all(
            (found := records.get(piece.artifact)) is not None
            and 0 <= piece.first_unit < piece.end_unit <= max(1, found.end - found.first)
            for piece in wanted
        )


def _units(found: FoundRecord, first: int, end: int) -> tuple[int, int]:
    """Return which of a record's units are among the prompt's blocks [first, end)."""
    return max(first, found.first) - found.first, min(end, found.end) - found.first


def _layers(artifact: LentArtifact) -> int:
    return artifact.places.region.section.layers


def _sized(piece: FramePiece, artifact: LentArtifact) -> SizedPiece:
    return SizedPiece(piece, piece_bytes(piece, artifact))
