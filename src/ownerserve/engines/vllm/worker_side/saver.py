"""The saver stores what a step left in blocks: one thread copies, one makes durable.

Owns the saves of one rank that are not answered for. Copying goes on while the drive is written,
so that no block waits for the drive: how much lies between the two threads is bounded by who orders
the saves (`save_buffer_bytes`), and held in the store's own buffers.

    copier       reserve, copy out of blocks: the blocks are free
    committer    commit what has gathered with one sync: the records are durable
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from threading import Condition, Thread
from typing import Any

import msgspec

from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.worker_commands import SaveCommand
from ownerserve.engines.vllm.worker_side.streams import CopyStream
from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.units import MIB
from ownerserve.node.storage.backing import NodeTiers
from ownerserve.store.format.model import AlreadyStored, WriteDone
from ownerserve.store.tiers.backend import Reservation

log = logging.getLogger("vllm.ownerserve")

COMMIT_RECORDS = 64
COMMIT_BYTES = 64 * MIB
"""Records and bytes that are worth a sync: with so many the committer begins, whatever follows."""
CLOSE_S = 30.0


class CopiedSave(msgspec.Struct, frozen=True):
    """A `CopiedSave` is a save whose bytes are in the store's buffer, and not durable."""

    save: SaveCommand
    reserved: Reservation


class SaveReport(msgspec.Struct):
    """A `SaveReport` tells the operations whose blocks are free (`copied`), and what came of
    records."""

    copied: list[int] = []
    kept: list[int] = []
    not_kept: list[int] = []
    stored_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        """Return whether the report tells nothing."""
        return not (self.copied or self.kept or self.not_kept)


class Saver:
    """A `Saver` saves for one rank. `changed` guards what is reported, and is notified of it."""

    def __init__(
        self, tiers: NodeTiers | None, codec: PageCodec, stream: CopyStream, *, changed: Condition
    ) -> None:
        """Start the threads. `tiers` None: there is no medium, and nothing is kept."""
        self._tiers = tiers
        self._codec = codec
        self._stream = stream
        self._changed = changed
        self._uncopied: set[int] = set()
        self._unsaved: set[int] = set()
        self._is_over = False
        self._report = SaveReport()
        self._ordered: queue.SimpleQueue[tuple[SaveCommand, Any] | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[list[CopiedSave] | None] = queue.SimpleQueue()
        self._threads = [
            Thread(target=self._root, args=(work,), name=f"ownerserve-{name}", daemon=True)
            for name, work in (("copy", self._copy_all), ("commit", self._commit_all))
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine's thread -------------------------------------------------------------------

    def order(self, saves: tuple[SaveCommand, ...]) -> None:
        """Save these places as the work that is queued on the engine's stream leaves them."""
        ready = self._stream.mark()
        with self._changed:
            operation_ids = [save.operation_id for save in saves]
            self._uncopied.update(operation_ids)
            self._unsaved.update(operation_ids)
            if self._is_over:
                self._give_up()
                return
        for save in saves:
            self._ordered.put((save, ready))

    def refuse(self, saves: Sequence[SaveCommand]) -> None:
        """Tell of saves that can't be made here: their blocks are free, and nothing is kept."""
        operation_ids = [save.operation_id for save in saves]
        with self._changed:
            self._report.copied += operation_ids
            self._report.not_kept += operation_ids

    @property
    def is_busy(self) -> bool:
        """`is_busy` tells whether an answer is still to come."""
        return bool(self._unsaved)

    @property
    def has_news(self) -> bool:
        """`has_news` tells whether something is to be reported."""
        return not self._report.is_empty

    def take(self) -> SaveReport:
        """Return what was done since the last call. The caller has the condition."""
        report, self._report = self._report, SaveReport()
        return report

    def close(self) -> None:
        """Finish what was ordered, as far as the medium answers in time."""
        self._ordered.put(None)
        for thread in self._threads:
            thread.join(timeout=CLOSE_S)

    # -- the threads ---------------------------------------------------------------------------

    def _root(self, work: Any) -> None:
        try:
            work()
        except Exception:  # the root of a thread: the engine goes on, and stores nothing more
            log.exception("OwnerServe saves nothing any more; please report this")
            with self._changed:
                self._is_over = True
                self._give_up()

    def _give_up(self) -> None:
        """Give the blocks of all saves back to the engine. The caller has the condition."""
        self._report.copied += self._uncopied
        self._report.not_kept += self._unsaved
        self._uncopied.clear()
        self._unsaved.clear()
        self._changed.notify_all()

    def _copy_all(self) -> None:
        """Copy one save after another; hand on what has gathered when nothing follows, or enough
        has."""
        gathered: list[CopiedSave] = []
        size = 0
        try:
            while (item := self._ordered.get()) is not None and not self._is_over:
                copied = self._copy(*item)
                if copied is not None:
                    gathered.append(copied)
                    size += copied.reserved.stored_bytes
                is_enough = len(gathered) >= COMMIT_RECORDS or size >= COMMIT_BYTES
                if gathered and (is_enough or self._ordered.empty()):
                    self._filled.put(gathered)
                    gathered, size = [], 0
        finally:
            if gathered:
                self._filled.put(gathered)
            self._filled.put(None)

    def _copy(self, save: SaveCommand, ready: Any) -> CopiedSave | None:
        """Copy a place into the store's own buffer; None: the record stands there already, or can't
        be taken, which is told at once."""
        copied = None
        is_kept = False
        try:
            reserved = self._reserve(save, ready)
            if isinstance(reserved, Reservation):
                copied = CopiedSave(save, reserved)
            is_kept = isinstance(reserved, AlreadyStored)
        except (OwnerServeError, OSError, RuntimeError) as error:  # torch raises RuntimeError
            log.warning("save of %s failed: %s", save.meta.component, error)
        with self._changed:
            if save.operation_id not in self._unsaved:  # given up meanwhile
                return None
            self._uncopied.discard(save.operation_id)
            self._report.copied.append(save.operation_id)
            if copied is None:
                self._unsaved.discard(save.operation_id)
                told = self._report.kept if is_kept else self._report.not_kept
                told.append(save.operation_id)
            self._changed.notify_all()
        return copied

    def _reserve(self, save: SaveCommand, ready: Any) -> object:
        if self._tiers is None:
            return None
        reserved = self._tiers.reserve(save.meta, self._codec.size(save.place))
        if not isinstance(reserved, Reservation):
            return reserved
        try:
            with self._stream.copying_out(ready):
                self._codec.read(save.place, reserved.payload)
        except BaseException:
            self._tiers.abort(reserved)
            raise
        return reserved

    def _commit_all(self) -> None:
        """Make durable what has gathered, each time with one sync for all of it."""
        while (filled := self._filled.get()) is not None:
            self._commit(filled)

    def _commit(self, filled: list[CopiedSave]) -> None:
        assert self._tiers is not None
        kept, not_kept, count = list[int](), list[int](), 0
        try:
            outcomes = self._tiers.commit([copied.reserved for copied in filled])
            self._tiers.settle()
        except (OwnerServeError, OSError) as error:
            log.warning("commit of %d records failed: %s", len(filled), error)
            not_kept = [copied.save.operation_id for copied in filled]
        else:
            for copied, outcome in zip(filled, outcomes, strict=True):
                stands = isinstance(outcome, WriteDone | AlreadyStored)
                (kept if stands else not_kept).append(copied.save.operation_id)
                count += outcome.stored_bytes if isinstance(outcome, WriteDone) else 0
        with self._changed:
            self._report.kept += [id_ for id_ in kept if id_ in self._unsaved]
            self._report.not_kept += [id_ for id_ in not_kept if id_ in self._unsaved]
            self._report.stored_bytes += count
            self._unsaved.difference_update(kept, not_kept)
            self._changed.notify_all()
