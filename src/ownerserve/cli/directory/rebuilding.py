"""This module waits for a directory that has forgotten all to be filled again by its workers."""

from __future__ import annotations

import time

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ownerserve.directory.port import DirectoryStatus
from ownerserve.directory.rpc.client import DirectoryClient

POLL_S = 0.1
QUIET_S = 1.0
"""A directory that makes new owners again and has heard of nothing new for so long is filled."""


class DirectorySize(msgspec.Struct, frozen=True):
    """The size is how much a directory knows. A shared backend tells `records` alone."""

    records: int
    sessions: int | None = None
    prefixes: int | None = None


class Rebuilt(msgspec.Struct, frozen=True):
    """A rebuilt directory is described before and after. `took_s`: until the last record came.
    `is_open`: it makes new owners again."""

    before: DirectorySize
    after: DirectorySize
    took_s: float
    is_open: bool


def known(status: DirectoryStatus) -> DirectorySize:
    """Return how much a directory knows, by its status."""
    records = status.records
    if records is None:
        return DirectorySize(status.keys or 0)
    every = records.holders + records.sessions + records.prefixes + records.groups
    return DirectorySize(every, records.sessions, records.prefixes)


def rebuild(
    client: DirectoryClient, status: DirectoryStatus, *, wait_s: float, console: Console
) -> tuple[DirectoryStatus, Rebuilt]:
    """Have the directory, which was as `status` says, forget all, and follow how it is filled.

    Waits at most `wait_s`. Raises PeerLost where it does not answer.
    """
    before = known(status)
    began_s = last_s = time.monotonic()
    status = client.forget()
    after = known(status)
    with _bar(console) as bar:
        task = bar.add_task("records", total=max(before.records, 1), completed=after.records)
        while (now_s := time.monotonic()) < began_s + wait_s:
            if status.opens_in_s <= 0 and now_s > last_s + QUIET_S:
                break
            time.sleep(POLL_S)
            status = client.status()
            if known(status).records > after.records:
                last_s = time.monotonic()
            after = known(status)
            bar.update(task, completed=after.records, total=max(before.records, after.records, 1))
    return status, Rebuilt(before, after, last_s - began_s, status.opens_in_s <= 0)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("rebuilding"), BarColumn(), MofNCompleteColumn(),
        TextColumn("records of before"), TimeElapsedColumn(), console=console,
    )  # fmt: skip
