"""vLLM's workers with the connector's worker side: memory that steps, loads and copies share, a
store of each rank, and answers that come when the test says so.

The oracle stands here: whatever a step reads, and whatever a copy takes, is compared with what the
model computes for those tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ownerserve.engines.vllm.layout.shape import StateShape
from ownerserve.engines.vllm.worker_commands import (
    BlockPlace,
    LoadInto,
    LoadResult,
    SaveCommand,
    WorkerCommands,
    WorkerStepReport,
)
from ownerserve.kv.frame import LEAD, WINDOW
from ownerserve.store.format.model import ArtifactKind, Meta, MissReason
from tests.support.vllm_parts.fake_vllm.request import BLOCK, Weights
from tests.support.vllm_parts.fake_vllm.scheduler import Scheduled, SchedulerOutput, StepOutput

Row = tuple[int, int]
"""A KV cache group, and what the model computes for a token."""
GARBAGE = -1
"""What a wrong draft leaves."""
GARBAGE_ROW = (GARBAGE, GARBAGE)


class Named(Protocol):
    """Who knows what records are named."""

    def check(self, save: SaveCommand, rows: Sequence[Sequence[Row]]) -> None: ...


def span(shape: StateShape, meta: Meta) -> tuple[int, int]:
    """The tokens of which a record has rows."""
    if meta.component == LEAD:
        before = shape.payload.window_tokens - 1
        return meta.first_token - before, meta.end_token - before
    if meta.kind is ArtifactKind.POINT:
        return shape.span(meta.component, meta.end_token)
    return meta.first_token, meta.end_token


@dataclass
class Loading:
    load: LoadInto
    until_s: float
    reason: str = ""


@dataclass
class Stored:
    meta: Meta
    rows: list[list[Row]]


@dataclass
class Running:
    """What a worker knows of a request: so many tokens have rows, so many are there."""

    computed: int
    length: int


@dataclass(eq=False)
class Rank:
    """One worker. `uncopied` and `unsaved` are saves that it has not copied, and not made
    durable."""

    shape: StateShape
    named: Named
    memory: dict[int, list[Row | None]] = field(default_factory=dict)
    store: dict[bytes, Stored] = field(default_factory=dict)
    lent: dict[bytes, Stored] = field(default_factory=dict)
    """What a peer holds, which a load may bring that has its offer."""
    loading: dict[int, Loading] = field(default_factory=dict)
    uncopied: list[SaveCommand] = field(default_factory=list)
    unsaved: list[tuple[SaveCommand, list[list[Row]]]] = field(default_factory=list)
    kept: dict[int, bytes] = field(default_factory=dict)
    """Saves that were made durable, with the records' ids, also of those that are gone since."""
    report: WorkerStepReport = field(default_factory=WorkerStepReport)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    # -- a step --------------------------------------------------------------------------------

    def begin(self, commands: WorkerCommands, now: float) -> None:
        """Take a step's loads, and those that nobody waits for."""
        for load in commands.loads:
            self.loading[load.operation_id] = Loading(load, now + load.deadline_s)
        for operation_id in commands.drops:
            loading = self.loading.get(operation_id)
            if loading is not None and not loading.reason:
                loading.reason = MissReason.CANCELLED
        self.received.update(commands.failures)
        self.failed.update(commands.failures)

    def forward(self, row: Scheduled, rows: Sequence[int], start: int, end: int) -> None:
        """Compute tokens [start, end) of a request, whose rows these are, from those before."""
        windows = self.shape.group_windows
        for group, (window, table) in enumerate(zip(windows, row.tables, strict=True)):
            first = max(0, start - window + 1) if window else 0
            for at in range(first, start):
                read = self._block(table[at // BLOCK])[at % BLOCK]
                assert read == (group, rows[at]), f"{row.request} reads {read} as token {at}"
            for at in range(start, end):
                self._block(table[at // BLOCK])[at % BLOCK] = (group, rows[at])

    def _block(self, block_id: int) -> list[Row | None]:
        assert block_id > 0, "the null block has nothing"
        return self.memory.setdefault(block_id, [None] * BLOCK)

    # -- what it does beside steps -------------------------------------------------------------

    def _cells(self, place: BlockPlace) -> Iterator[list[tuple[int, list[Row | None] | None]]]:
        """Yield, for each group of a place, every token with the block that it is in; None: one not
        to be written."""
        firsts = self.shape.components[place.component].firsts(place.start, place.end)
        for ids, first in zip(place.blocks, firsts, strict=True):
            tokens = range(max(place.start, first * BLOCK), place.end)
            own = [ids[at // BLOCK - first] for at in tokens]
            yield [
                (at, None if id_ < 0 else self._block(id_))
                for at, id_ in zip(tokens, own, strict=True)
            ]

    def copy(self, at: int) -> None:
        """Copy what stands in a save's blocks now."""
        save = self.uncopied.pop(at)
        rows: list[list[Row]] = []
        for cells in self._cells(save.place):
            found = [block[token % BLOCK] for token, block in cells if block is not None]
            rows.append([GARBAGE_ROW if row is None else row for row in found])
        self.named.check(save, rows)
        self.unsaved.append((save, rows))
        self._tell(WorkerStepReport(copied=(save.operation_id,)))

    def settle(self, at: int, *, keeps: bool) -> None:
        """Answer for a save that is copied: its record is durable, or it is not kept."""
        save, rows = self.unsaved.pop(at)
        if keeps:
            self.store[save.meta.id] = Stored(save.meta, rows)
            self.kept[save.operation_id] = save.meta.id
            self._tell(WorkerStepReport(kept=(save.operation_id,)))
        else:
            self._tell(WorkerStepReport(not_kept=(save.operation_id,)))

    def bring(self, operation_id: int, now: float, *, reason: str) -> None:
        """End a load: by `reason`, by what became of it, or well. One that fails has written a part
        of what it found."""
        loading = self.loading.pop(operation_id)
        load, failed_id = loading.load, b""
        reason = loading.reason or (MissReason.DEADLINE if now > loading.until_s else reason)
        for want, place in zip(load.wants, load.places, strict=True):
            stored = self.store.get(want.id)
            if stored is None and want.id in load.offers:
                stored = self.lent.get(want.id)
            if stored is None:
                reason, failed_id = reason or MissReason.ABSENT, want.id
                break
            self._write(stored, place)
            if reason:
                failed_id = want.id
                break
        ids = () if reason else tuple(want.id for want in load.wants)
        done = LoadResult(operation_id, load.request_id, ids, reason, failed_id)
        self._tell(WorkerStepReport(loads=(done,)))
        self.received.add(load.request_id)
        if reason:
            self.failed.add(load.request_id)

    def _write(self, stored: Stored, place: BlockPlace) -> None:
        first, end = span(self.shape, stored.meta)
        assert first <= place.start and place.end <= end, "more than the record has"
        kept = self.shape.components[WINDOW if place.component == LEAD else place.component]
        assert len(kept.groups) == len(stored.rows)
        for rows, cells in zip(stored.rows, self._cells(place), strict=True):
            for at, block in cells:
                if block is not None:
                    block[at % BLOCK] = rows[at - first]

    def _tell(self, told: WorkerStepReport) -> None:
        self.report = self.report.joined(told)


class Workers:
    """All ranks of an engine core: they compute the same steps, and do all else when they like."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.epoch = 0
        self._running: dict[str, Running] = {}
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()

    def execute(self, step: SchedulerOutput, now: float, *, accepted: int) -> StepOutput:
        """Run a step; of each request's drafts the first `accepted` are right."""
        for rank in self.ranks:
            rank.begin(step.commands, now)
        sampled = {row.request.request_id: self._forward(row, accepted) for row in step.rows}
        report = WorkerStepReport()
        for rank in self.ranks:
            rank.uncopied += step.commands.saves
            report = report.joined(rank.report)
            rank.report = WorkerStepReport()
            self._received.update(rank.received)
            self._failed |= rank.failed
            rank.received, rank.failed = set(), set()
        received = {name for name, n in self._received.items() if n == len(self.ranks)}
        failed = received & self._failed
        for name in received:
            del self._received[name]
        self._failed -= failed
        told = None if report == WorkerStepReport() else report
        return StepOutput(sampled, frozenset(received), frozenset(failed), told)

    def _forward(self, row: Scheduled, accepted: int) -> list[int]:
        """Compute a request's part of a step on all ranks; return the tokens that it samples."""
        request = row.request
        if row.begins:
            self._running[request.request_id] = Running(row.start, row.known)
        known = self._running[request.request_id]
        start, end = known.computed, known.computed + row.count
        right = min(end, known.length + min(accepted, row.drafted))
        weights = Weights(self.epoch, request.cache_salt)
        tokens = request.tokens_to(max(end, right) + 1)
        rows = weights.rows(tokens[:right]) + [GARBAGE] * (end - right)
        for rank in self.ranks:
            rank.forward(row, rows, start, end)
        known.computed = right
        if end < known.length:
            return []
        fresh = tokens[known.length : right + 1]
        known.length = right + 1
        return fresh
