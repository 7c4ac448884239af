"""Stated ranks: each rank of an engine core leaves in its store's directory who it is, where it
lends, and what it keeps; the scheduler's process, and nobody else, reads that.

It can be asked for at any time, also of an engine that takes no steps, and does not go through
vLLM's hand-shake, of which several connectors share one word. Nothing of a rank that is gone is
believed: whoever asks there hears nobody, or another life.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.wire.holders import LendingRank

STATED = "rank.lends"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LendingRank)


def state_rank(directory: Path, rank: LendingRank) -> None:
    """Leave what the rank states. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    beside = directory / f"{STATED}.new"
    beside.write_bytes(_encoder.encode(rank))
    beside.replace(directory / STATED)


def withdraw_rank(directory: Path) -> None:
    """Take away what the rank stated; nothing is no error."""
    with suppress(OSError):
        (directory / STATED).unlink()


def stated_ranks(directories: Sequence[Path]) -> tuple[LendingRank, ...]:
    """Return what all ranks state; none, where one of them has not stated itself."""
    try:
        return tuple(_decoder.decode((at / STATED).read_bytes()) for at in directories)
    except (OSError, *UNREADABLE):
        return ()
