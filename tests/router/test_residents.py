"""A worker's words, page by page, as news: lives, pages that are missed, what is said no more."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.inventory import Has, Lost, Page, decode_page
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.router.messages import Gone, Reported
from ownerserve.router.policies import make_policy
from ownerserve.router.residents import News, Residents
from ownerserve.router.state import RouterState
from tests.support.examples import examples
from tests.support.router.fleets import dispatched, raise_up, served

W = WorkerId("w:1")


def apply(news: list[News], known: dict[tuple[str, Tier], int]) -> None:
    for one in news:
        assert one.session is not None
        if isinstance(one, Reported):
            known[one.session, one.tier] = one.tokens
        else:
            known.pop(
                (one.session, one.tier), None
            )  # what a turn had left, as far as is known here


def read(residents: Residents, inventory: Inventory, known: dict[tuple[str, Tier], int],
         *, life: int = 1, pages: int = 1000, words: int = 3) -> None:  # fmt: skip
    for _ in range(pages):
        asked = residents.after
        page = inventory.page(asked, incarnation=life, words=words)
        apply(residents.take(page, asked=asked), known)
        if residents.is_caught_up and residents.after == asked:
            return


def test_a_later_life_replaces_what_the_former_said() -> None:
    residents, known = Residents(W), dict[tuple[str, Tier], int]()
    first = Inventory()
    for name in "abc":
        first.has(SessionId(name), Tier.DISK, 64, digest=None)
        first.has(SessionId(name), Tier.DEVICE, 80, digest=None)
    read(residents, first, known)
    assert len(known) == len(residents) == 6
    second = Inventory()
    second.has(SessionId("b"), Tier.DISK, 64, digest=None)
    read(residents, second, known, life=2)
    assert known == {("b", Tier.DISK): 64}


def test_what_came_and_went_between_two_readings_is_told_as_gone() -> None:
    """A router that saw the turn believes that its worker's device has it."""
    state = RouterState(make_policy("ownerserve"))
    raise_up(state, "w0")
    served(state, "s", 1.0, tokens=5000)
    residents, inventory = Residents(WorkerId("w0")), Inventory()
    inventory.has(SessionId("s"), Tier.DEVICE, 4992, digest=None)
    inventory.gone(SessionId("s"), Tier.DEVICE)
    for news in residents.take(inventory.page(0, incarnation=1), asked=0):
        state.handle(news, 3.0)
    assert dispatched(state, "s", 4.0, prompt_bytes=4 * 5100).decision.cached_tokens == 0


def test_who_missed_that_something_went_begins_anew() -> None:
    residents, known = Residents(W), dict[tuple[str, Tier], int]()
    inventory = Inventory(gone_kept=1)
    for name in "abcd":
        inventory.has(SessionId(name), Tier.DISK, 64, digest=None)
    read(residents, inventory, known)
    for name in "abc":
        inventory.gone(SessionId(name), Tier.DISK)
    read(residents, inventory, known)
    assert known == {("d", Tier.DISK): 64}


def test_a_worker_that_falls_silent_holds_nothing() -> None:
    residents = Residents(W)
    page = Page(5, 0, 0, 2, (Has(1, "a", "disk", 64), Has(2, "a", "remote", 64)))
    residents.take(page, asked=0)
    news = residents.silent(6)  # type: ignore[arg-type]
    assert [(type(one), one.tier) for one in news] == [(Gone, Tier.DISK), (Gone, Tier.REMOTE)]
    assert [one.unit and one.unit.incarnation for one in news] == [6, None], "shared is nobody's"


def test_words_of_unknown_tiers_are_passed_over() -> None:
    residents = Residents(W)
    page = Page(5, 0, 0, 2, (Has(1, "a", "tape", 64), Lost(2, "a", "peer")))
    assert residents.take(page, asked=0) == []
    assert (residents.ignored, residents.after) == (2, 2)


def test_bad_pages_are_no_pages() -> None:
    for data in (
        b"", b"{}", b"[]", b"\xff", b'{"incarnation": -1}', b'{"incarnation": 1, "words": 3}',
        b'{"incarnation": 1, "words": [{"is": "has", "number": 1}]}',
        b'{"incarnation":1,"words":[{"is":"has","number":1,"session":"s","tier":"disk",'
        b'"tokens":-5}]}',
        b'{"incarnation":1,"words":[{"is":"has","number":1,"session":"s","tier":"disk",'
        b'"tokens":5,"prefix_hash":"zz"}]}',
        b'{"incarnation":1,"words":[{"is":"has","number":1,"session":"s","tier":"disk",'
        b'"tokens":5,"prefix_hash":"' + b"ab" * 32 + b'\\n"}]}',
    ):  # fmt: skip
        assert decode_page(data) is None, data
    assert decode_page(b'{"incarnation": 1, "more": 2}') == Page(1)


def test_a_page_whose_numbers_do_not_grow_from_what_was_asked_is_none() -> None:
    def page(*numbers: int) -> bytes:
        return msgspec.json.encode(
            Page(5, 0, 0, 9, tuple(Lost(number, "s", "disk") for number in numbers))
        )

    assert decode_page(page(4, 6, 9), after=3) is not None
    for numbers in ((4, 6, 5), (4, 4), (3, 4), (9, 1)):
        assert decode_page(page(*numbers), after=3) is None, numbers


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from([Tier.DISK, Tier.DEVICE]),
                  st.integers(0, 3)),
        st.sampled_from(["page", "restart"]),
    ),
    max_size=80,
)  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(STEPS)
def test_whatever_happens_between_pages_the_reader_ends_with_what_is_held(
    steps: list[object],
) -> None:
    residents, known, life = Residents(W), dict[tuple[str, Tier], int](), 1
    inventory = Inventory(has_kept=5, gone_kept=2)
    for step in steps:
        if step == "page":
            read(residents, inventory, known, life=life, pages=1)
        elif step == "restart":
            inventory, life = Inventory(has_kept=5, gone_kept=2), life + 1
        else:
            assert isinstance(step, tuple)
            inventory.has(SessionId(step[0]), step[1], step[2], digest=None)
    read(residents, inventory, known, life=life)
    assert known == {(word.session, Tier(word.tier)): word.tokens for word in inventory}


WIRE = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from([Tier.HOST, Tier.DEVICE]),
                  st.integers(0, 3)),
        st.sampled_from(["asked", "arrives", "arrives last", "twice", "lost", "restart"]),
    ),
    max_size=80,
)  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(WIRE)
def test_pages_that_are_lost_late_swapped_or_repeated_cost_a_miss_and_nothing_else(
    steps: list[object],
) -> None:
    """Answers lie on a wire of their own: they come in any order, twice, or not at all. Once one
    reading goes well the reader knows what is held."""
    residents, known, life = Residents(W), dict[tuple[str, Tier], int](), 1
    inventory = Inventory(has_kept=5, gone_kept=2)
    wire: list[tuple[int, Page]] = []
    for step in steps:
        if isinstance(step, tuple):
            inventory.has(SessionId(step[0]), step[1], step[2], digest=None)
        elif step == "restart":
            inventory, life = Inventory(has_kept=5, gone_kept=2), life + 1
        elif step == "asked":
            asked = residents.after
            wire.append((asked, inventory.page(asked, incarnation=life, words=3)))
        elif wire:
            asked, page = wire[0 if step == "arrives" else -1]
            if step != "lost":
                apply(residents.take(page, asked=asked), known)
            if step != "twice":
                wire.remove((asked, page))
    read(residents, inventory, known, life=life)
    assert known == {(word.session, Tier(word.tier)): word.tokens for word in inventory}
