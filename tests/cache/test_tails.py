"""Tails: what an append closes, what waits, what is kept; and the cache's books of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.cache.layout import Layout, Tail, TailBook, TailStep, tail_step
from ownerserve.cache.metrics import snapshot
from ownerserve.cache.outcomes import Replay
from ownerserve.kv.descriptor import TailForm
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import pack
from tests.support.cache.cache_driver import DENSE, HYBRID, B, Driver, blocks_of

CSA = Tail("csa_tail", 4, overlap=4)
HCA = Tail("hca_tail", 128)


class Naive:
    """A tail that sees one token at a time and keeps each: what `step` must agree with."""

    def __init__(self, period: int, overlap: int) -> None:
        self.period, self.overlap = period, overlap
        self.waiting: list[int] = []
        self.entries: list[list[int]] = []

    def append(self, position: int) -> None:
        self.waiting.append(position)
        if len(self.waiting) == self.period:  # the finalize trigger
            self.entries.append(self.waiting)
            self.waiting = []

    def carried(self) -> list[int]:
        last = self.entries[-1] if self.entries else []
        return last[len(last) - self.overlap :] if self.overlap else []


def test_an_append_in_mid_window() -> None:
    """The picture in the module: two of four wait, two entries close, three are left."""
    assert CSA.step(10, 9) == TailStep(
        waiting=2, first_entry=2, entries=2, taken=6, left=3, carried=range(12, 16)
    )


@pytest.mark.parametrize(
    ("tail", "start", "tokens", "entries", "left"),
    [
        (CSA, 0, 3, 0, 3),
        (CSA, 3, 1, 1, 0),  # m
        (HCA, 0, 127, 0, 127),
        (HCA, 127, 1, 1, 0),  # m'
        (HCA, 128, 1, 0, 1),
        (HCA, 100, 300, 3, 16),
        (HCA, 5, 0, 0, 5),
    ],
)
def test_the_finalize_trigger(tail: Tail, start: int, tokens: int, entries: int, left: int) -> None:
    done = tail.step(start, tokens)
    assert (done.entries, done.left) == (entries, left)
    assert done.taken == (tokens - left if entries else 0)


@given(
    period=st.integers(1, 20),
    start=st.integers(0, 100),
    tokens=st.integers(0, 100),
    data=st.data(),
)
def test_a_step_is_what_keeping_every_token_gives(
    period: int, start: int, tokens: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, period))
    naive = Naive(period, overlap)
    for position in range(start):
        naive.append(position)
    waiting, before = list(naive.waiting), len(naive.entries)
    for position in range(start, start + tokens):
        naive.append(position)

    done = tail_step(start, tokens, period=period, overlap=overlap)

    assert done.waiting == len(waiting)
    assert (done.first_entry, done.end_entry) == (before, len(naive.entries))
    new = list(range(start, start + tokens))
    closing = waiting + new[: done.taken] if done.entries else []
    assert closing == [at for entry in naive.entries[before:] for at in entry]
    left = new[done.taken :] if done.entries else waiting + new
    assert left == naive.waiting and len(left) == done.left
    assert list(done.carried) == naive.carried()


@given(st.lists(st.integers(0, 300), max_size=20))
def test_appending_in_chunks_is_appending_at_once(chunks: list[int]) -> None:
    tails = (CSA, HCA)
    book, naive = TailBook.at(tails, 0), {tail.name: Naive(tail.period, 0) for tail in tails}
    steps = {tail.name: 0 for tail in tails}
    for tokens in chunks:
        for tail in tails:
            done = tail.step(book.position, tokens)
            assert done.first_entry == steps[tail.name] == book.entries[tail.name]
            assert done.waiting == book.waiting[tail.name]
            steps[tail.name] = done.end_entry
        for position in range(book.position, book.position + tokens):
            for one in naive.values():
                one.append(position)
        book.advance(tokens)
    whole = TailBook.at(tails, 0)
    whole.advance(sum(chunks))
    assert book == whole
    assert book.waiting == {name: len(one.waiting) for name, one in naive.items()}
    assert book.entries == {name: len(one.entries) for name, one in naive.items()}


def test_a_book_opens_where_nothing_waits() -> None:
    assert TailBook.at((CSA,), 132).entries == {"csa_tail": 33}
    with pytest.raises(InvariantViolated, match="invariant 12: hca_tail waits at 132"):
        TailBook.at((CSA, HCA), 132)


def test_an_engine_that_computes_elsewhere_is_stopped() -> None:
    book = TailBook.at((HCA,), 128)
    book.require_at(128)
    with pytest.raises(InvariantViolated, match="computing from 127, but the tails are at 128"):
        book.require_at(127)


def test_at_a_boundary_only_point_components_are_needed() -> None:
    """None of a tail whose m divides it; overlap rows (a point component) yes."""
    for depth in range(1, 5):
        assert HYBRID.needed_at(depth * B) == ("swa", "overlap")
    assert HYBRID.needed_at(0) == ()
    assert HYBRID.needed_at(8) == ("swa", "overlap")
    assert HYBRID.needed_at(12) == ("swa", "overlap", "index_tail")
    assert HYBRID.needed_at(13) == ("swa", "overlap", "main_tail", "index_tail")


@pytest.mark.parametrize(
    ("tails", "problem"),
    [
        ((Tail("t", 24),), r"block_tokens: 16 cuts a window of t.*multiple of 24"),
        ((Tail("swa", 4),), "repeated name"),
    ],
)
def test_a_layout_whose_boundaries_cut_a_window_is_refused(
    tails: tuple[Tail, ...], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        Layout(B, HYBRID.components, tails=tails)


@pytest.mark.parametrize(("period", "overlap"), [(0, 0), (4, 5), (4, -1)])
def test_a_tail_that_makes_no_sense_is_refused(period: int, overlap: int) -> None:
    with pytest.raises(InvalidInput, match=r"tails\.t: windows of"):
        Tail("t", period, overlap)


@pytest.mark.parametrize(
    ("form", "rows"), [(TailForm.RAW_ROWS, [0, 1, 7]), (TailForm.ONLINE, [0, 1, 1])]
)
def test_online_holds_one_row_whatever_waits(form: TailForm, rows: list[int]) -> None:
    tail = Tail("t", 8, form=form)
    assert [tail.rows_held(waiting) for waiting in (0, 1, 7)] == rows


# -- the cache knows


def waiting(driver: Driver, name: str) -> dict[str, int]:
    return driver.cache.table(TurnId(name)).tails.waiting


def test_a_running_turns_tails_are_known() -> None:
    driver = Driver()
    driver.begin("t", blocks_of(1, tail=13))
    assert waiting(driver, "t") == {"main_tail": 0, "index_tail": 0}
    assert driver.prefill("t")
    assert waiting(driver, "t") == {"main_tail": 1, "index_tail": 5}
    assert driver.decode("t", pack([9] * 3))
    assert waiting(driver, "t") == {"main_tail": 0, "index_tail": 0}
    driver.finish("t")


def test_a_fork_has_tails_of_its_own() -> None:
    driver = Driver()
    driver.begin("t", blocks_of(1, tail=5))
    assert driver.prefill("t") and driver.fork("t", "child")
    assert driver.decode("t", pack([9] * 2))
    assert waiting(driver, "t") == {"main_tail": 3, "index_tail": 7}
    assert waiting(driver, "child") == {"main_tail": 1, "index_tail": 5}
    assert driver.decode("child", pack([8]))
    assert snapshot(driver.cache, 0.0).tail_tokens == {"main_tail": 5, "index_tail": 13}


def test_a_restored_turn_starts_with_empty_tails() -> None:
    """Also in a state block in which another turn's rows still lie, and in a replay."""
    driver = Driver(states=1)
    driver.turn("one", blocks_of(1, 2, tail=7))
    begun = driver.begin("two", blocks_of(1, 2, tail=3))
    assert getattr(begun, "restored", None) == 2 * B
    assert waiting(driver, "two") == {"main_tail": 0, "index_tail": 0}
    assert driver.prefill("two")
    driver.abort("two")
    driver.begin("three", blocks_of(1, 2, tail=3), resume=Replay(B, 2 * B))
    assert driver.cache.table(TurnId("three")).tails.entries == {"main_tail": 4, "index_tail": 2}
    assert driver.prefill("three")
    assert waiting(driver, "three") == {"main_tail": 3, "index_tail": 3}


def test_metrics_tell_waiting_tokens_and_the_rows_that_hold_none() -> None:
    driver = Driver()
    assert snapshot(driver.cache, 0.0).tail_tokens == {"main_tail": 0, "index_tail": 0}
    driver.begin("t", blocks_of(1, tail=6))
    assert driver.prefill("t")
    seen = snapshot(driver.cache, 0.0)
    assert seen.tail_tokens == {"main_tail": 2, "index_tail": 6}
    # a row a token: 100 - 2 * 30; online: one row for all six, 60 - 50
    assert seen.fragmentation.internal_bytes["main_tail"] == 40
    assert seen.fragmentation.internal_bytes["index_tail"] == 10
    driver.finish("t")
    assert snapshot(driver.cache, 0.0).tail_tokens == {"main_tail": 0, "index_tail": 0}


def test_a_layout_without_tails_has_no_books() -> None:
    driver = Driver(DENSE)
    driver.begin("t", blocks_of(1, tail=6))
    assert driver.prefill("t") and waiting(driver, "t") == {}
    assert snapshot(driver.cache, 0.0).tail_tokens == {}


@pytest.mark.parametrize(
    ("tail", "waiting_by", "entries_by", "position_by", "problem"),
    [
        ("main_tail", 1, 0, 0, "23 tokens of 22"),
        ("index_tail", 0, -1, 0, "14 tokens of 22"),
        ("main_tail", 4, -1, 0, "6 tokens wait"),
        ("index_tail", -8, 1, 0, "-2 tokens wait"),
        ("main_tail", 0, 0, 1, "the tails are elsewhere"),
    ],
)
def test_books_that_are_off_violate_invariant_12(
    tail: str, waiting_by: int, entries_by: int, position_by: int, problem: str
) -> None:
    driver = Driver()
    driver.begin("t", blocks_of(1, tail=6))
    assert driver.prefill("t")
    book = driver.cache.table(TurnId("t")).tails
    book.waiting[tail] += waiting_by
    book.entries[tail] += entries_by
    book.position += position_by
    with pytest.raises(InvariantViolated, match=f"invariant 12: .*{problem}"):
        driver.cache.check()


def test_a_snapshot_that_would_lack_a_tail_violates_invariant_12() -> None:
    """Layout refuses such a block length; forged, so that the check has something to find."""
    driver = Driver()
    driver.turn("t", blocks_of(1, 2))
    forged = msgspec.structs.replace(HYBRID)
    msgspec.structs.force_setattr(forged, "tails", (Tail("long_tail", 24),))
    driver.cache.layout = forged
    with pytest.raises(InvariantViolated, match=r"invariant 12: .*long_tail.*at a boundary"):
        driver.cache.check()
