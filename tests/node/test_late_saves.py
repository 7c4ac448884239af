"""Turns that compute more than may be copied at once: the rest is saved later, or counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.cache.layout import Component, Layout
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import Identity, Numerics, PrefixChain, pack
from ownerserve.kv.specs import Coverage
from ownerserve.node.retention.saves import LATE_TURNS, Capture, SaveLimits, Saves
from ownerserve.node.vocabulary.events import (
    Computing,
    Copied,
    Effect,
    Kept,
    NotKept,
    Pin,
    StoreCopy,
    TurnEnded,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import RecordNames, records_of
from ownerserve.plan.swa.checkpoints import TurnEnd
from tests.support.examples import examples

B, CELL = 16, 4
CELL_TOKENS, CELL_BYTES = CELL * B, CELL * 64
POINTS_BYTES = 2 * 32
"""Points count, and wait for no room."""
TURN, OTHER, SESSION = TurnId("t"), TurnId("u"), SessionId("s")
LAYOUT = Layout(
    B,
    (
        Component(name="dense", coverage=Coverage.RANGE, slot_bytes=64, payload_bytes=64),
        Component(name="swa", coverage=Coverage.POINT, slot_bytes=32, payload_bytes=32),
    ),
)
LONG = list(range(1, 40 * CELL_TOKENS + 1))
"""40 cells."""


class Engine:
    """Saves beside an engine that computes and copies; `stored` is what was kept, in order."""

    def __init__(self, *, copy_cells: int = 2, buffer_cells: int = 8) -> None:
        identity = Identity(
            model_id="m",
            weights="w",
            tokenizer="t",
            spec_digest=b"",
            numerics=Numerics(dtype="float32"),
            tenant_salt=bytes(32),
        )
        self.limits = SaveLimits(
            copy_bytes=copy_cells * CELL_BYTES + POINTS_BYTES,
            buffer_bytes=buffer_cells * CELL_BYTES + POINTS_BYTES,
        )
        self.saves = Saves(
            RecordNames(identity, LAYOUT, engine="test/1", blocks=CELL),
            Operations(),
            policy=TurnEnd(),
            capture=Capture(exact_end=False),
            limits=self.limits,
        )
        self.stored: list[StoreCopy] = []
        self.uncopied: list[StoreCopy] = []
        self.undurable: list[StoreCopy] = []

    def arrive(
        self, tokens: Sequence[int], turn: TurnId = TURN, session: SessionId | None = SESSION
    ) -> None:
        chain = PrefixChain(B)
        chain.extend(pack(list(tokens)))
        self.saves.arrived(turn, chain, prompt=len(tokens), session_id=session, tenant=b"")

    def run(self, tokens: Sequence[int], turn: TurnId = TURN) -> list[Effect]:
        """A turn that computes its prompt in one step, and ends."""
        self.arrive(tokens, turn)
        return self.compute(0, len(tokens), turn) + self.end(len(tokens), turn)

    def compute(self, start: int, end: int, turn: TurnId = TURN) -> list[Effect]:
        return self.order(self.saves.computing(Computing(turn, start, end)))

    def end(self, tokens: int, turn: TurnId = TURN) -> list[Effect]:
        return self.order(self.saves.ended(TurnEnded(turn, 0, tokens, tokens)))

    def order(self, effects: Iterable[Effect]) -> list[Effect]:
        ordered = list(effects)
        self.uncopied += [effect for effect in ordered if isinstance(effect, StoreCopy)]
        return ordered

    def copied(self, count: int = 1 << 20) -> None:
        """The first `count` copies are made."""
        made, self.uncopied = self.uncopied[:count], self.uncopied[count:]
        for copy in made:
            self.saves.completed(Copied(copy.operation_id), 0.0)
        self.undurable += made

    def kept(self, count: int = 1 << 20) -> None:
        """The first `count` of what is copied become durable."""
        done, self.undurable = self.undurable[:count], self.undurable[count:]
        for copy in done:
            self.saves.completed(Kept(copy.operation_id), 0.0)
        self.stored += done

    def resume(self) -> list[Effect]:
        """What a step asks for that computes nothing."""
        effects: list[Effect] = []
        for turn in self.saves.late.due():
            while copies := self.saves.late.resume(turn):
                effects += self.order(copies)
        return effects

    def drain(self) -> int:
        """Steps without work until nothing is left; how many."""
        steps = 0
        while len(self.saves.late) or len(self.saves):
            self.resume()
            self.copied()
            self.kept()
            steps += 1
            assert steps < 1000
        return steps


def ranges(effects: Iterable[Effect]) -> list[tuple[int, int]]:
    found = [effect.meta for effect in effects if isinstance(effect, StoreCopy)]
    return [(m.first_token, m.end_token) for m in found if m.component == "dense"]


def whole(tokens: int) -> list[tuple[int, int]]:
    return [(at, at + CELL_TOKENS) for at in range(0, tokens, CELL_TOKENS)]


def test_a_prompt_of_twenty_budgets_is_saved_whole_after_its_turn() -> None:
    engine = Engine(copy_cells=2)
    first = engine.run(LONG)
    assert ranges(first) == whole(2 * CELL_TOKENS), "what fits goes at once"
    assert engine.saves.late.bytes == 38 * CELL_BYTES
    engine.drain()
    assert ranges(engine.stored) == whole(len(LONG))
    assert engine.saves.late.bytes == 0 and not engine.saves.unsaved
    [tip] = engine.saves.left
    stored = {copy.meta.id for copy in engine.stored}
    assert (tip.depth, set(records_of(engine.saves.names, tip).ids)) == (len(LONG) // B, stored)


def test_in_flight_ends_at_the_copy_not_at_the_drive() -> None:
    engine = Engine(copy_cells=2, buffer_cells=100)
    engine.run(LONG)
    for _ in range(10):
        engine.copied()
        engine.resume()
    assert len(ranges(engine.undurable)) == 20, "nothing is durable, and copying goes on"


def test_what_is_copied_and_not_durable_has_a_bound_of_its_own() -> None:
    engine = Engine(copy_cells=2, buffer_cells=6)
    engine.run(LONG)
    for _ in range(10):
        engine.copied()
        engine.resume()
    assert engine.saves.room.held_bytes == 0
    assert engine.limits.buffer_bytes - CELL_BYTES < engine.saves.room.open_bytes
    assert engine.saves.room.open_bytes <= engine.limits.buffer_bytes
    engine.kept(4)
    assert len(ranges(engine.resume())) > 0


def test_a_record_larger_than_both_budgets_goes_alone() -> None:
    engine = Engine()
    engine.saves.room.limits = SaveLimits(copy_bytes=1, buffer_bytes=1)
    engine.run(LONG)
    assert engine.resume() == []
    assert engine.drain() == 41
    assert ranges(engine.stored) == whole(len(LONG))


def test_points_go_in_their_step_whatever_is_under_way() -> None:
    engine = Engine(copy_cells=1, buffer_cells=1)
    engine.arrive(LONG)
    engine.compute(0, CELL_TOKENS)
    effects = engine.compute(CELL_TOKENS, len(LONG))
    assert engine.saves.room.held_bytes + CELL_BYTES > engine.limits.copy_bytes
    copies = [effect for effect in effects if isinstance(effect, StoreCopy)]
    assert [copy.component for copy in copies] == ["swa", "swa"]
    assert copies[-1].meta.end_token == len(LONG)


def test_a_running_turn_that_is_late_goes_on_with_any_step() -> None:
    """Decoding crosses a boundary once in B tokens: copies do not wait for it."""
    engine = Engine(copy_cells=2)
    engine.arrive(LONG)
    engine.compute(0, len(LONG))
    engine.copied()
    assert ranges(engine.resume()) == whole(4 * CELL_TOKENS)[2:]


def test_turns_that_have_ended_go_first() -> None:
    """Their blocks are nobody's any more."""
    engine = Engine(copy_cells=1)
    engine.arrive(LONG)
    engine.compute(0, len(LONG))
    engine.run([7, *LONG], OTHER)
    engine.copied()
    assert engine.saves.late.due() == [OTHER, TURN]


def test_the_begun_cell_of_a_late_turn_is_its_last_copy() -> None:
    engine = Engine(copy_cells=2)
    tokens = LONG[: 5 * CELL_TOKENS + 2 * B + 3]
    engine.run(tokens)
    engine.drain()
    last = (5 * CELL_TOKENS, 5 * CELL_TOKENS + 2 * B)
    assert ranges(engine.stored) == [*whole(5 * CELL_TOKENS), last]


def test_lost_blocks_are_counted_and_the_session_is_told() -> None:
    engine = Engine(copy_cells=2)
    engine.run(LONG)
    engine.saves.late.lost(TURN)
    assert engine.saves.unsaved == {"tokens": 38 * CELL_TOKENS, "bytes": 38 * CELL_BYTES}
    assert engine.saves.counts["shed"] == 1 and len(engine.saves.late) == 0
    assert engine.saves.left == []
    engine.drain()
    assert [tip.session_id for tip in engine.saves.left] == [SESSION]


def test_what_the_store_refuses_is_counted() -> None:
    engine = Engine()
    engine.run(LONG[:CELL_TOKENS])
    dense = [copy for copy in engine.uncopied if copy.component == "dense"]
    engine.saves.completed(NotKept(dense[0].operation_id), 0.0)
    assert engine.saves.unsaved == {"tokens": CELL_TOKENS, "bytes": CELL_BYTES}


def test_a_copy_under_way_is_not_made_for_another_turn_and_both_wait_for_it() -> None:
    engine = Engine(copy_cells=100)
    engine.run(LONG[: 2 * CELL_TOKENS])
    assert ranges(engine.run(LONG[: 3 * CELL_TOKENS], OTHER)) == whole(3 * CELL_TOKENS)[2:]
    engine.copied()
    engine.kept()
    assert [tip.depth for tip in engine.saves.left] == [2 * CELL, 3 * CELL]


def test_the_next_turn_of_a_session_takes_over_what_the_last_one_left() -> None:
    engine = Engine(copy_cells=1)
    engine.run(LONG[: 20 * CELL_TOKENS])
    engine.run(LONG, OTHER)
    assert len(engine.saves.late) == 1 and not engine.saves.unsaved
    engine.drain()
    assert sorted(ranges(engine.stored)) == whole(len(LONG))
    assert [tip.depth for tip in engine.saves.left] == [len(LONG) // B]


def test_a_fork_takes_nothing_over() -> None:
    engine = Engine(copy_cells=1)
    engine.run(LONG[: 20 * CELL_TOKENS])
    engine.run([*LONG[: 10 * CELL_TOKENS], *LONG[20 * CELL_TOKENS :]], OTHER)
    assert len(engine.saves.late) == 2
    engine.drain()
    assert len({copy.meta.id for copy in engine.stored if copy.component == "dense"}) == 40


def test_a_preempted_turn_offers_its_state_again() -> None:
    engine = Engine(copy_cells=2)
    engine.arrive(LONG)
    engine.compute(0, len(LONG))
    engine.saves.again(TURN)
    assert len(engine.saves.late) == 0
    engine.compute(0, len(LONG))
    engine.end(len(LONG))
    engine.drain()
    assert ranges(engine.stored) == whole(len(LONG))


def test_giving_up_counts_what_was_late() -> None:
    engine = Engine(copy_cells=2)
    engine.run(LONG)
    engine.saves.give_up()
    assert engine.saves.unsaved["tokens"] == 38 * CELL_TOKENS
    assert (len(engine.saves.late), len(engine.saves), engine.saves.room.open_bytes) == (0, 0, 0)
    engine.copied()
    engine.kept()
    assert engine.saves.room.held_bytes == 0, "late answers mean nothing"


def test_a_turn_that_comes_again_under_its_name_ends_the_late_one() -> None:
    engine = Engine(copy_cells=2)
    engine.run(LONG)
    engine.arrive([9, 9])
    assert len(engine.saves.late) == 0 and engine.saves.unsaved["tokens"] > 0


def test_late_turns_are_bounded() -> None:
    engine = Engine(copy_cells=1)
    for number in range(LATE_TURNS + 3):
        engine.arrive([number + 2, *LONG[: 2 * CELL_TOKENS]], TurnId(f"{number}"), None)
        engine.compute(0, 2 * CELL_TOKENS, TurnId(f"{number}"))
        engine.end(2 * CELL_TOKENS, TurnId(f"{number}"))
    assert len(engine.saves.late) == LATE_TURNS
    assert engine.saves.counts["shed"] == 3


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_what_is_computed_is_stored_or_counted_and_budgets_hold(data: st.DataObject) -> None:
    engine = Engine(
        copy_cells=data.draw(st.integers(1, 4)), buffer_cells=data.draw(st.integers(1, 6))
    )
    saves, limits = engine.saves, engine.limits
    computed, number = dict[TurnId, int](), 0
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["run", "resume", "copy", "keep", "lose"])):
            case "run":
                number += 1
                turn, length = TurnId(f"{number}"), data.draw(st.integers(1, 8 * CELL)) * B
                engine.arrive([number, *LONG[: length - 1]], turn, None)
                engine.compute(0, length, turn)
                engine.end(length, turn)
                computed[turn] = length
            case "resume":
                engine.resume()
            case "copy":
                engine.copied(data.draw(st.integers(1, 4)))
            case "keep":
                engine.kept(data.draw(st.integers(1, 4)))
            case "lose" if saves.late.due():
                saves.late.lost(saves.late.due()[-1])
        points = [copy for copy in engine.uncopied if copy.component == "swa"]
        open_points = [c for c in (*engine.uncopied, *engine.undurable) if c.component == "swa"]
        assert saves.room.held_bytes - 32 * len(points) <= max(CELL_BYTES, limits.copy_bytes)
        assert saves.room.open_bytes - 32 * len(open_points) <= max(CELL_BYTES, limits.buffer_bytes)
    engine.drain()
    tokens = sum(end - start for start, end in ranges(engine.stored))
    assert tokens + saves.unsaved["tokens"] == sum(computed.values())
    assert (saves.room.held_bytes, saves.room.open_bytes, saves.late.bytes) == (0, 0, 0)


def test_what_was_not_kept_is_asked_for_again_when_it_is_computed_again() -> None:
    engine = Engine()
    engine.arrive(LONG[:CELL_TOKENS])
    first = ranges(engine.compute(0, CELL_TOKENS))
    for copy in engine.uncopied:
        engine.saves.completed(NotKept(copy.operation_id), 0.0)
    engine.saves.again(TURN)  # preempted
    assert first and ranges(engine.compute(0, CELL_TOKENS)) == first


def test_the_point_at_the_end_of_an_answer_is_kept() -> None:
    """Its place is pinned as it is passed, for nobody knows yet that the answer ends there."""
    engine = Engine()
    engine.arrive(LONG[:CELL_TOKENS])
    engine.compute(0, CELL_TOKENS)
    end = CELL_TOKENS + B
    added = pack(LONG[CELL_TOKENS:end])
    assert Pin(TURN, end) in engine.saves.computing(Computing(TURN, CELL_TOKENS, end, added))
    kept = [copy for copy in engine.end(end) if isinstance(copy, StoreCopy)]
    assert ("swa", end) in {(copy.component, copy.meta.end_token) for copy in kept}


def test_nothing_is_told_of_a_session_that_is_over() -> None:
    engine = Engine()
    engine.run(LONG[:CELL_TOKENS])
    engine.drain()
    assert [tip.session_id for tip in engine.saves.left] == [SESSION]
    engine.saves.left.clear()
    engine.arrive(LONG[: 2 * CELL_TOKENS])
    engine.compute(0, 2 * CELL_TOKENS)
    engine.saves.over(SESSION)
    engine.end(2 * CELL_TOKENS)
    engine.drain()
    assert not engine.saves.left


def test_a_turn_given_up_while_its_step_is_under_way_is_told_as_what_was_copied() -> None:
    """The step fills a record; the turn ends with a token less, for nobody has its answer. It was
    told as ending in a shorter record, which nobody had made: the session had nothing."""
    engine = Engine()
    engine.arrive(LONG[:CELL_TOKENS])
    engine.compute(0, CELL_TOKENS)
    engine.end(CELL_TOKENS - 1)
    engine.drain()
    (tip,) = engine.saves.left
    stored = {copy.meta.id for copy in engine.stored}
    assert set(records_of(engine.saves.names, tip).ids) <= stored, "a record that nobody made"
