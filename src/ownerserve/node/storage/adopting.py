"""A worker's store is taken over by another: its records, and the list of whose state lies in them.

The store's own adoption copies records. This one is its caller: it opens both stores, and merges
the journals (`sessions-*.jsonl`), by which the next worker tells gateways what it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ownerserve.kv.durable import sync_directory
from ownerserve.kv.errors import OwnerServeError
from ownerserve.node.storage.journal import tips_in, write_tips
from ownerserve.node.vocabulary.records import TIPS_KEPT
from ownerserve.store.disk.adopt import Adoption, TakenStore, adopt, mark_of, set_mark, taken
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.header import MAX_PAYLOAD
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.policy import by_age

log = logging.getLogger("ownerserve.node")

JOURNALS = "sessions-*.jsonl"


class Takeover(msgspec.Struct):
    """A takeover counts what came of a dead worker's store: its `records`, the `sessions` that its
    journals know, and how many of them are new to the other store.
    """

    records: Adoption
    sessions: int = 0
    sessions_added: int = 0
    was_done: bool = False


OnProgress = Callable[[Adoption], None]


def take_over(
    source: Path,
    into: Path,
    options: DiskOptions,
    *,
    key_file: Path | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Takeover:
    """Adopt the dead store at `source` into the one at `into`, which is opened by `options` and
    closed, and made where there is none; durable when this returns. A write budget does not count
    here. The key of `source` is in `key_file` (None: its own).

    Killed at any point, the same call goes on. Done before: nothing is done. Raises InvalidInput
    for what the operator can mend, OSError and StoreUnavailable for a medium that fails.
    """
    options = msgspec.structs.replace(options, order=by_age, write_budget=None)
    with taken(source, key_file) as dead:
        tier = DiskTier(into, WallClock(), options=options, landing=BufferPool(4 * MAX_PAYLOAD))
        try:
            mark = mark_of(dead)
            if mark is not None and mark.into == tier.core.home.store_id.hex():
                return Takeover(Adoption(is_marked=True), was_done=True)
            done = Takeover(adopt(dead, tier, on_progress))
            _merge_journals(dead, into, done)
            set_mark(dead, tier, done.records)
            return done
        finally:
            tier.close()


def _merge_journals(dead: TakenStore, into: Path, done: Takeover) -> None:
    """Write the dead store's sessions into the other's journals: of a session that both know the
    longer tip stays. What stood there counts as newer.
    """
    for path in sorted(dead.home.directory.glob(JOURNALS)):
        tips, _ = tips_in(path)
        own, _ = tips_in(into / path.name)
        done.sessions += len(tips)
        for session_id, tip in own.items():
            if session_id in tips and tips[session_id].depth > tip.depth:
                continue
            tips.pop(session_id, None)
            tips[session_id] = tip
        done.sessions_added += len(tips) - len(own)
        if tips != own:
            write_tips(into / path.name, dict(list(tips.items())[-TIPS_KEPT:]))
    sync_directory(into)


def take_over_at_start(sources: Sequence[Path], into: Path, options: DiskOptions) -> None:
    """Adopt each of `sources` before the worker opens its own store. One that can't be is one
    warning: the worker serves without it, and tries again at its next start.
    """
    for source in sources:
        try:
            done = take_over(source, into, options)
        except (OwnerServeError, OSError) as error:
            log.warning("%s is not adopted: %s", source, error)
            continue
        if done.was_done:
            log.info("%s was adopted before", source)
        else:
            log.warning(
                "%s is adopted: %d records, %d sessions; it may be removed",
                source,
                done.records.adopted,
                done.sessions_added,
            )
