"""Late turns have ended before all of their range state was asked for: what is left is saved from
blocks that nobody owns.

Owns a note of what each of those blocks held, and no reference. vLLM takes such a block whenever it
likes: before a copy the note is compared with the block, and the copy then holds it. That must
never keep a request from running, so copies are asked for only where the pool can spare their
blocks: it has what the requests here want of it beside them.

    free blocks    [ for the next step and who waits | held by copies of late turns ]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import msgspec

from ownerserve.engines.vllm.layout.shape import StateShape
from ownerserve.engines.vllm.turns.turn import TrackedRequest
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.kv.ids import TurnId
from ownerserve.node.retention.saves import Saves
from ownerserve.node.vocabulary.events import StoreCopy
from ownerserve.node.vocabulary.records import Cell

UNSAVED_LEVELS = ("unsaved_held", "unsaved_buffered", "unsaved_late")
"""Bytes that are computed and not durable: in blocks that a copy holds, copied to host memory, or
in vLLM's pool alone."""


class LateTurn(msgspec.Struct, frozen=True):
    """A `LateTurn` is the request of a turn that has ended, and what each block of it held that is
    still to be copied."""

    turn: TrackedRequest
    contents: dict[int, Hashable]


class LateTurns:
    """`LateTurns` are the ended turns whose range state is still to be saved."""

    def __init__(self, shape: StateShape, *, record_blocks: int, step_tokens: int) -> None:
        self._shape = shape
        self._step_tokens = step_tokens
        self._ranges = shape.layout().range_names
        self._block = shape.payload.block_tokens
        self._cell_blocks = sum(
            -(-record_blocks * self._block // size)
            for name in self._ranges
            for size in shape.components[name].block_tokens
        )
        self._pool: Any = None
        self._turns: dict[TurnId, LateTurn] = {}
        self._asking: dict[str, int] = {}
        self._is_short = False

    def bind(self, pool: Any) -> None:
        """Use vLLM's block pool."""
        self._pool = pool

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._turns

    # -- who wants blocks ----------------------------------------------------------------------

    def asks(self, request_id: str, tokens: int) -> None:
        """Note that a request that waits wants blocks for so many tokens."""
        self._asking[request_id] = tokens

    def has_blocks(self, request_id: str) -> None:
        """Note that a request has got its blocks, or wants none any more."""
        self._asking.pop(request_id, None)

    def is_short(self) -> None:
        """Note that a running request has found no block in the step that is being scheduled."""
        self._is_short = True

    # -- turns ---------------------------------------------------------------------------------

    def ended(self, turn_id: TurnId, turn: TrackedRequest, cell: Cell) -> None:
        """Note what the blocks of a late turn hold; the state of `cell` is still to be saved."""
        blocks = self._pool.blocks
        start, end = cell.first * self._block, cell.end * self._block
        places = [self._shape.place(name, turn.tables, start, end) for name in self._ranges]
        ids = [block for place in places for group in place.blocks for block in group]
        self._turns[turn_id] = LateTurn(turn, {id_: blocks[id_].block_hash for id_ in ids})

    def holds(self, turn_id: TurnId, place: BlockPlace) -> bool:
        """Return whether the blocks of a late turn still hold what they held when it ended; True
        for a turn that is none."""
        late = self._turns.get(turn_id)
        if late is None:
            return True
        blocks, contents = self._pool.blocks, late.contents
        return all(
            (content := contents.get(id_)) is not None and blocks[id_].block_hash == content
            for group in place.blocks
            for id_ in group
        )

    def copies(
        self, saves: Saves, running: Mapping[TurnId, TrackedRequest], *, scheduled: int
    ) -> Iterator[tuple[TrackedRequest, StoreCopy]]:
        """Yield the copies that can be made now beside a step of `scheduled` tokens, of turns that
        have ended and then of running ones, whose blocks are held anyway. The copies that were
        yielded hold their blocks before the next ones are asked for."""
        for turn_id in saves.late.due():
            ended = self._turns.get(turn_id)
            turn = ended.turn if ended is not None else running.get(turn_id)
            if ended is None and turn is not None and turn.is_preempted:
                continue  # others have its blocks; it is offered anew when it has some again
            if turn is None:  # nobody knows its blocks
                saves.late.lost(turn_id)
            while turn is not None and (ended is None or self._can_spare(scheduled)):
                copies = saves.late.resume(turn_id)
                if not copies:
                    break
                for copy in copies:
                    yield turn, copy
        if self._turns:
            self._turns = {at: one for at, one in self._turns.items() if at in saves.late}

    def asked(self) -> None:
        """Note that a step was built: who still wants blocks asks again."""
        self._asking.clear()
        self._is_short = False

    def forget(self, turn_id: TurnId) -> None:
        """Forget a turn whose name a new one has."""
        self._turns.pop(turn_id, None)

    def clear(self) -> None:
        """Forget every turn."""
        self._turns.clear()

    def _can_spare(self, scheduled: int) -> bool:
        """Return whether the pool has the blocks for the next step and for who waits, beside those
        of one more cell. Where nobody wants any, it has."""
        if self._is_short:
            return False
        tokens = max([scheduled, *self._asking.values()])
        if not tokens:
            return True
        wanted = self._shape.blocks_for(tokens, step_tokens=self._step_tokens)
        return int(self._pool.get_num_free_blocks()) - self._cell_blocks >= wanted
