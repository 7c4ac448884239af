"""Residency events tell in vLLM's KV event stream what our store has: BlockStored when a record is
READY, BlockRemoved when it turned out to be gone. Blocks carry vLLM's own hashes, so that whoever
follows its events needs nothing of ours; the medium is STORAGE, the `ownership` (an identifier of
the tier) ours.

Owns what was told and not yet taken. Says nothing of GPU blocks: vLLM does, and is right.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.turns.turn import session_of

OWNERSHIP = "ownerserve"
MOST_FOLLOWED = 10_000
"""Most records whose removal can be told. Older ones are forgotten: a listener keeps them."""


class BlockSpan(msgspec.Struct, frozen=True):
    """A `BlockSpan` is blocks [first, last) of a request, as vLLM's events name them."""

    block_hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    block_tokens: int
    session_id: str | None


def span_of(request: Any, start: int, end: int, *, hash_block_tokens: int) -> BlockSpan | None:
    """Return the whole blocks in tokens [start, end) of a vLLM request; None: there is none."""
    first, last = -(-start // hash_block_tokens), end // hash_block_tokens
    last = min(last, len(request.block_hashes))
    if first >= last:
        return None
    return BlockSpan(
        block_hashes=tuple(request.block_hashes[first:last]),
        parent=request.block_hashes[first - 1] if first else None,
        tokens=tuple(request.all_token_ids[first * hash_block_tokens : last * hash_block_tokens]),
        block_tokens=hash_block_tokens,
        session_id=session_of(request),
    )


class ResidencyEvents:
    """`ResidencyEvents` are the KV events of one engine core's store; used on the scheduler's
    thread."""

    def __init__(self) -> None:
        self._pending: dict[int, BlockSpan] = {}
        self._stored: dict[bytes, BlockSpan] = {}
        self._events: list[Any] = []

    def ordered(self, operation_id: int, span: BlockSpan | None) -> None:
        """Remember that a record of this span is being written."""
        if span is not None:
            self._pending[operation_id] = span

    def kept(self, operation_id: int) -> None:
        """Tell the blocks of a record that was ordered as stored: it is READY."""
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored

        span = self._pending.pop(operation_id, None)
        if span is None:
            return
        self._stored[span.block_hashes[-1]] = span
        if len(self._stored) > MOST_FOLLOWED:
            del self._stored[next(iter(self._stored))]
        event = BlockStored(
            block_hashes=[compat.external_hash(block) for block in span.block_hashes],
            parent_block_hash=None if span.parent is None else compat.external_hash(span.parent),
            token_ids=list(span.tokens),
            block_size=span.block_tokens,
            lora_id=None,
            medium=MEDIUM_STORAGE,
            lora_name=None,
        )
        _tell(event, ownership=OWNERSHIP, session_id=span.session_id)
        self._events.append(event)

    def not_kept(self, operation_id: int) -> None:
        """Forget a record that was ordered and given up: nothing is told of it."""
        self._pending.pop(operation_id, None)

    def lost(self, span: BlockSpan) -> None:
        """Tell as removed what was told of `span`, which could not be served from the store."""
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved

        for block in span.block_hashes:
            gone = self._stored.pop(block, None)
            if gone is not None:
                hashes = [compat.external_hash(each) for each in gone.block_hashes]
                event = BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE)
                _tell(event, ownership=OWNERSHIP)
                self._events.append(event)

    @property
    def is_waiting(self) -> bool:
        """`is_waiting` tells whether a record is being written."""
        return bool(self._pending)

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def _tell(event: Any, **fields: Any) -> None:
    """Set those fields that this version's events have."""
    for name, value in fields.items():
        if hasattr(event, name):
            setattr(event, name, value)
