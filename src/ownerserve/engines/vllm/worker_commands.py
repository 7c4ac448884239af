"""Worker commands go from the scheduler side to the worker side in a step, and results come back.
Data only.

vLLM carries both (as metadata of a step and of its output), also between processes. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ownerserve.node.transfers.bringing import BringNews
from ownerserve.node.transfers.offers import PeerOffer
from ownerserve.node.vocabulary.events import RecordsLost
from ownerserve.store.format.model import Meta, Want

Tables = Sequence[Sequence[int]]
"""A request's block ids, one list a KV group; 0 is vLLM's null block."""


STORED_BY = "stored_by:"
"""Stands before the name of a rank where the bytes that it has stored are counted."""


class BlockPlace(msgspec.Struct, frozen=True):
    """A `BlockPlace` is the place of tokens [start, end) of one component: for each KV group that
    holds layers of it, the ids of the blocks from the one with token `start` on; -1: not to be
    written."""

    component: str
    blocks: tuple[tuple[int, ...], ...]
    start: int
    end: int


class LoadInto(msgspec.Struct, frozen=True):
    """Command: read and verify every want, and write it to the place beside it."""

    request_id: str
    operation_id: int
    wants: tuple[Want, ...]
    places: tuple[BlockPlace, ...]
    deadline_s: float
    """Seconds from now."""
    offers: Mapping[bytes, PeerOffer] = {}
    """Offers name who is to lend which of them, by id, since they are not here."""


class SaveCommand(msgspec.Struct, frozen=True):
    """Command: copy this place, as it is after the step, and store it as `meta`."""

    operation_id: int
    meta: Meta
    place: BlockPlace


class WorkerCommands(msgspec.Struct, frozen=True):
    """`WorkerCommands` are the commands of one step. `is_idle`: the step computes nothing, so to
    wait a moment is free."""

    loads: tuple[LoadInto, ...] = ()
    saves: tuple[SaveCommand, ...] = ()
    drops: tuple[int, ...] = ()
    failures: tuple[str, ...] = ()
    """Requests whose load can't be begun; they are reported as failed."""
    is_idle: bool = False
    pads: tuple[int, ...] = ()
    """Window blocks of rows that are replayed in this step: they write no other KV."""


class LoadResult(msgspec.Struct, frozen=True):
    """A `LoadResult` says that a load is over. `ids` are the records written, in order; none when
    it failed by `reason`."""

    operation_id: int
    request_id: str
    ids: tuple[bytes, ...] = ()
    reason: str = ""
    failed_id: bytes = b""
    bytes: int = 0
    ms: float = 0.0


class WorkerStepReport(msgspec.Struct, frozen=True):
    """A `WorkerStepReport` is the report of one worker on one step.

    `copied` operations need their blocks no more; `kept` are durable; `lost`: what the store of
    each worker gave up; `can_pad`: whether each that says so for the first time can keep rows from
    being written; `unable`: why a worker can read and write no pages at all; `by_rank`: the stored
    bytes again, by the name of the rank, where there are several; `brought`: what came of brings
    from peers.
    """

    loads: tuple[LoadResult, ...] = ()
    copied: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    not_kept: tuple[int, ...] = ()
    stored_bytes: int = 0
    lost: tuple[RecordsLost, ...] = ()
    can_pad: tuple[bool, ...] = ()
    unable: tuple[str, ...] = ()
    by_rank: tuple[tuple[str, int], ...] = ()
    brought: tuple[BringNews, ...] = ()

    def joined(self, other: WorkerStepReport) -> WorkerStepReport:
        """Return the reports of two workers as one: an operation stands in it once for each."""
        return WorkerStepReport(
            loads=self.loads + other.loads,
            copied=self.copied + other.copied,
            kept=self.kept + other.kept,
            not_kept=self.not_kept + other.not_kept,
            stored_bytes=self.stored_bytes + other.stored_bytes,
            lost=self.lost + other.lost,
            can_pad=self.can_pad + other.can_pad,
            unable=self.unable + other.unable,
            by_rank=self.by_rank + other.by_rank,
            brought=self.brought + other.brought,
        )

    @property
    def is_empty(self) -> bool:
        """Return whether the report tells nothing."""
        saved = (self.copied, self.kept, self.not_kept)
        return not any((self.loads, *saved, self.lost, self.can_pad, self.unable, self.brought))
