"""What ended turns left is saved from blocks that nobody owns, and nobody waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ownerserve.engines.vllm.layout.shape import StateShape, describe
from ownerserve.engines.vllm.scheduler_side.device import Holds
from ownerserve.engines.vllm.scheduler_side.late_turns import LateTurns
from ownerserve.engines.vllm.turns.turn import TrackedRequest
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import Identity, Numerics, PrefixChain, pack
from ownerserve.node.retention.saves import Capture, SaveLimits, Saves
from ownerserve.node.vocabulary.events import Computing, Copied, Kept, StoreCopy, TurnEnded
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import Cell, RecordNames
from ownerserve.plan.swa.checkpoints import TurnEnd
from tests.support.vllm_parts import specs
from tests.support.vllm_parts.soft_play import ModelPool

pytestmark = pytest.mark.engine

B, CELL, TURN = 32, 2, TurnId("t")
STEP_TOKENS = 4 * B
UNTOUCHED = 20
"""Free blocks beside those of the turn."""


def full_attention() -> StateShape:
    group = specs.Group(["model.layers.0.attn"], specs.FullAttentionSpec(B, 2, 8))
    return describe(specs.Config([group]))


class Played:
    """A turn of `cells` cells that has ended, of which one was asked for."""

    def __init__(self, cells: int) -> None:
        identity = Identity(
            model_id="m",
            weights="w",
            tokenizer="t",
            spec_digest=b"",
            numerics=Numerics(dtype="float32"),
            tenant_salt=bytes(32),
        )
        shape, blocks = full_attention(), cells * CELL
        names = RecordNames(identity, shape.layout(), engine="test/1", blocks=CELL)
        self.shape = shape
        self.saves = Saves(
            names,
            Operations(),
            policy=TurnEnd(),
            capture=Capture(exact_end=False),
            limits=SaveLimits(copy_bytes=1, buffer_bytes=1),
        )
        self.pool = ModelPool(1 + blocks + UNTOUCHED)
        self.blocks = self.pool.take(blocks)
        for index, block in enumerate(self.blocks):
            self.pool.fill(block, index)
        self.table = [block.block_id for block in self.blocks]
        self.late = LateTurns(shape, record_blocks=CELL, step_tokens=STEP_TOKENS)
        self.late.bind(self.pool)
        self.holds = Holds()
        self.holds.bind(self.pool)
        self.turn = TrackedRequest(SimpleNamespace(num_preemptions=0), b"", tables=[self.table])
        self._compute(blocks * B)

    def _compute(self, tokens: int) -> None:
        chain = PrefixChain(B)
        chain.extend(pack(list(range(tokens))))
        self.saves.arrived(TURN, chain, prompt=tokens, session_id=None, tenant=b"")
        [first] = self.saves.computing(Computing(TURN, 0, tokens))
        assert self.saves.ended(TurnEnded(TURN, 0, tokens, tokens)) == []
        cell = self.saves.late.cell(TURN)
        assert cell is not None
        self.late.ended(TURN, self.turn, cell)
        self.pool.free_blocks(reversed(self.blocks))
        assert isinstance(first, StoreCopy)
        self.answer(first)

    def answer(self, copy: StoreCopy) -> None:
        self.saves.completed(Copied(copy.operation_id), 0.0)
        self.saves.completed(Kept(copy.operation_id), 0.0)
        self.holds.release(copy.operation_id)

    def place(self, copy: StoreCopy) -> Any:
        start, end = copy.slots[0] * B, (copy.slots[-1] + 1) * B
        return self.shape.place(copy.component, self.turn.tables, start, end)

    def step(self, scheduled: int) -> list[StoreCopy]:
        """The copies of one step; they hold their blocks."""
        copies = []
        for turn, copy in self.late.copies(self.saves, {}, scheduled=scheduled):
            assert turn is self.turn
            self.holds.hold(copy.operation_id, (self.place(copy),))
            copies.append(copy)
        return copies


def test_an_idle_engine_saves_one_cell_after_another() -> None:
    played = Played(4)
    for cell in range(1, 4):
        [copy] = played.step(0)
        assert copy.slots == (cell * CELL, cell * CELL + 1)
        assert played.late.holds(TURN, played.place(copy))
        played.answer(copy)
    assert played.step(0) == [] and len(played.late) == 0
    assert len(played.pool.order) == len(played.pool.blocks) - 1, "nothing is held"


def test_a_block_that_was_taken_holds_it_no_more_whatever_is_in_it_now() -> None:
    played = Played(3)
    place = played.place(played.step(0)[0])
    assert played.late.holds(TURN, place)
    [taken] = [played.pool.blocks[place.blocks[0][0]]]
    taken.block_hash = "another prompt"
    assert not played.late.holds(TURN, place)
    taken.block_hash = None
    assert not played.late.holds(TURN, place)


def test_what_was_never_cached_is_not_taken_for_what_was_computed() -> None:
    """Without a prefix cache a block has no hash, before or after others wrote to it."""
    played = Played(2)
    place = played.place(played.step(0)[0])
    for block in played.blocks:
        block.block_hash = None
    cell = played.saves.late.cell(TURN)
    assert cell is None
    played.late.ended(TURN, played.turn, Cell(CELL, 2 * CELL))
    assert not played.late.holds(TURN, place)


@pytest.mark.parametrize("who", ["a step", "who waits"])
def test_blocks_are_held_only_where_the_pool_can_spare_them(who: str) -> None:
    played = Played(4)
    free = len(played.pool.order)
    tokens = (free - 1) * B  # one block less than is free, and one more for the part that is begun
    if who == "who waits":
        played.late.asks("waiting", tokens)
    assert played.step(tokens if who == "a step" else 0) == []
    assert len(played.pool.order) == free
    played.late.asked()
    played.late.asks("waiting", tokens)
    played.late.has_blocks("waiting")
    fewer = tokens - CELL * B
    assert len(played.step(fewer)) == 1
    assert len(played.pool.order) >= played.shape.blocks_for(fewer, step_tokens=STEP_TOKENS)


def test_a_running_request_that_found_no_block_is_not_made_to_wait_by_more_copies() -> None:
    """Nothing is scheduled in that step: not because nobody wants anything."""
    played = Played(4)
    [copy] = played.step(0)
    assert played.holds.is_releasing(), "worth a moment, before somebody is preempted"
    played.answer(copy)
    played.late.is_short()
    assert played.step(0) == [] and not played.holds.is_releasing()
    played.late.asked()
    assert len(played.step(0)) == 1


def test_copies_of_a_running_turn_give_no_block_back() -> None:
    """The turn goes on with them: nobody who finds no block may wait for that."""
    played = Played(4)
    played.pool.touch(played.blocks)
    assert len(played.step(0)) == 1
    assert not played.holds.is_releasing()


def test_a_running_turns_blocks_are_spared_by_nobody() -> None:
    """They are its own already."""
    played = Played(4)
    played.late.forget(TURN)
    running, scheduled = {TURN: played.turn}, len(played.pool.blocks) * B
    assert len(list(played.late.copies(played.saves, running, scheduled=scheduled))) == 1


def test_a_running_turn_that_was_preempted_is_not_copied_from_blocks_that_others_have() -> None:
    """vLLM gives them to others in the same step, and asks us about the request later."""
    played = Played(4)
    played.late.forget(TURN)
    played.turn.request.num_preemptions = 1
    running = {TURN: played.turn}
    assert list(played.late.copies(played.saves, running, scheduled=0)) == []
    assert TURN in played.saves.late, "what is left is asked for when it has blocks again"
    played.turn.preemptions = 1
    assert len(list(played.late.copies(played.saves, running, scheduled=0))) > 0
