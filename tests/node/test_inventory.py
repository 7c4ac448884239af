"""What a node tells that it holds: numbered words, and what stands behind them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.inventory import Has, Lost, Page
from ownerserve.node.ownership.inventory import Inventory, Residency
from ownerserve.node.vocabulary.events import (
    Locate,
    Located,
    RecordsLost,
    Remembered,
    SessionOver,
    Tick,
)
from ownerserve.node.vocabulary.operations import Operations
from tests.support.node.node_driver import B, NodeDriver

TOKENS = list(range(1000, 1000 + 10 * B))
S = SessionId("s")


def held(inventory: Inventory) -> dict[tuple[str, str], int]:
    return {(word.session, word.tier): word.tokens for word in inventory}


# ---- the words


def test_a_later_word_replaces_the_earlier_one() -> None:
    inventory = Inventory()
    inventory.has(S, Tier.DISK, 16, digest=None)
    inventory.has(S, Tier.DISK, 32, digest=None)
    inventory.has(S, Tier.DISK, 32, digest=None)  # no news
    inventory.has(S, Tier.DEVICE, 48, digest=None)
    assert inventory.page(0, incarnation=7).words == (
        Has(2, "s", "disk", 32), Has(3, "s", "device", 48),
    )  # fmt: skip
    inventory.gone(S, Tier.DISK)
    inventory.gone(S, Tier.HOST)  # nothing was there
    assert inventory.page(3, incarnation=7) == Page(7, 0, 0, 4, (Lost(4, "s", "disk"),))


def test_pages_are_bounded_and_go_on_where_the_last_one_ended() -> None:
    inventory = Inventory()
    for number in range(25):
        inventory.has(SessionId(f"s{number}"), Tier.DISK, 16, digest=None)
    after, words = 0, []
    while True:
        page = inventory.page(after, incarnation=1, words=10)
        if not page.words:
            break
        assert len(page.words) <= 10
        words += page.words
        after = page.words[-1].number
    assert [word.number for word in words] == list(range(1, 26))


def test_words_are_bounded_the_oldest_is_told_as_gone() -> None:
    inventory = Inventory(has_kept=3, gone_kept=2)
    for number in range(8):
        inventory.has(SessionId(f"s{number}"), Tier.DISK, 16, digest=None)
        inventory.check()
    assert [session for session, _ in held(inventory)] == ["s5", "s6", "s7"]
    assert inventory.page(0, incarnation=1).floor > 0, "gone words were forgotten"


OPS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(list(Tier)), st.integers(0, 3)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(OPS, st.integers(1, 5))
def test_a_reader_that_follows_the_words_knows_what_is_held(
    ops: list[tuple[str, Tier, int]], words: int
) -> None:
    inventory, known, after = Inventory(gone_kept=1000), dict[tuple[str, str], int](), 0
    for session, tier, tokens in ops:
        inventory.has(SessionId(session), tier, tokens, digest=None)
        for word in inventory.page(after, incarnation=1, words=words).words:
            after = word.number
            if isinstance(word, Has):
                known[word.session, word.tier] = word.tokens
            else:
                known.pop((word.session, word.tier), None)
    while (page := inventory.page(after, incarnation=1)).words:
        for word in page.words:
            after = word.number
            if isinstance(word, Has):
                known[word.session, word.tier] = word.tokens
            else:
                known.pop((word.session, word.tier), None)
    assert known == held(inventory)
    inventory.check()


# ---- a node's own


def test_a_turn_is_told_on_the_device_and_once_idle_below_it() -> None:
    driver = NodeDriver()
    driver.turn(TOKENS)
    inventory = driver.state.inventory
    assert held(inventory) == {("s", "device"): len(TOKENS)}
    driver.idle()
    assert held(inventory) == {("s", "device"): len(TOKENS), ("s", "disk"): len(TOKENS)}
    assert driver.file[S].depth == len(TOKENS) // B
    driver.check()


def test_what_leaves_the_device_is_withdrawn_there_alone() -> None:
    driver = NodeDriver()
    driver.turn(TOKENS)
    driver.idle()
    driver.forget_device()
    driver.handle(Tick())
    assert held(driver.state.inventory) == {("s", "disk"): len(TOKENS)}


def test_a_record_that_went_shortens_what_is_told_and_all_of_them_end_it() -> None:
    driver = NodeDriver()
    driver.turn(TOKENS)
    driver.idle()
    last = [m for m in driver.metas.values() if m.end_token == len(TOKENS) and m.boundaries]
    for meta in last:
        del driver.stored[meta.id]
    driver.handle(RecordsLost(tuple(meta.prefix_hash for meta in last)))  # type: ignore[misc]
    driver.idle()
    assert driver.state.inventory.tokens(S, Tier.DISK) == 8 * B
    lost = tuple(meta.prefix_hash for meta in driver.metas.values())
    driver.stored.clear()
    driver.handle(RecordsLost(lost))  # type: ignore[arg-type]
    driver.idle()
    assert held(driver.state.inventory) == {("s", "device"): len(TOKENS)}
    assert not driver.file, "and a later life is not told of it"


def next_is_backed(driver: NodeDriver) -> bool:
    """Whether what the device would evict next can be loaded again, as its order knows."""
    rooms = driver.cache.occupancy
    return rooms.shortage(rooms.blocks.free + 1).victims[0].is_backed


def test_the_device_knows_what_lies_below_it_until_that_is_lost() -> None:
    driver = NodeDriver()
    driver.turn(TOKENS)
    assert not next_is_backed(driver)
    driver.idle()
    assert next_is_backed(driver)
    driver.turn([*TOKENS, *range(900, 900 + B)])
    assert not next_is_backed(driver), "what the turn added is nowhere else"
    driver.idle()
    assert next_is_backed(driver)
    lost = tuple(meta.prefix_hash for meta in driver.metas.values())
    driver.stored.clear()
    driver.handle(RecordsLost(lost))  # type: ignore[arg-type]
    driver.idle()
    assert not next_is_backed(driver)
    driver.check()


def test_nobody_is_told_of_a_session_that_is_over() -> None:
    driver = NodeDriver()
    driver.turn(TOKENS)
    driver.idle()
    driver.handle(SessionOver(S))
    assert not held(driver.state.inventory)
    assert not driver.file
    driver.check()


def test_a_restore_that_missed_is_looked_into() -> None:
    driver = NodeDriver()
    driver.turn(TOKENS)
    driver.idle()
    driver.forget_device()
    driver.stored.clear()  # and nobody says so
    turn = driver.arrive([*TOKENS, 1])
    driver.settle()
    driver.run(turn)
    driver.idle(0.0)
    assert driver.state.inventory.tokens(S, Tier.DISK) == 0


def test_the_next_life_tells_what_the_file_says_and_the_store_has() -> None:
    former = NodeDriver()
    former.turn(TOKENS)
    former.turn([7, *TOKENS], "other")
    former.idle()
    driver = NodeDriver()
    driver.stored, driver.metas = dict(former.stored), dict(former.metas)
    driver.file = dict(former.file)
    other = former.file[SessionId("other")]
    for id_, meta in former.metas.items():
        if meta.prefix_hash in other.ends.values():
            del driver.stored[id_]
    driver.handle(Remembered(tuple(former.file.values())))
    assert not held(driver.state.inventory), "nothing is told unseen"
    residency = driver.state.residency
    assert residency.restorable(S) is None, "nor that nothing is there"
    driver.idle(0.0)
    sessions = (S, SessionId("other"), SessionId("nobody's"))
    assert [residency.restorable(one) for one in sessions] == [len(TOKENS), 0, 0]
    assert held(driver.state.inventory) == {("s", "disk"): len(TOKENS)}


def test_where_a_former_tip_lies_is_not_told_of_the_present_one() -> None:
    driver = NodeDriver()
    driver.turn(TOKENS)
    driver.idle()
    former = driver.file[S]
    driver.turn([*TOKENS, *range(5000, 5000 + 4 * B)])
    driver.idle()
    present = driver.file[S]
    inventory = Inventory()
    residency = Residency(driver.names, inventory, Operations(), can_replay=True)
    residency.copied(former, 0.0)
    [look] = residency.tick(0.0)
    residency.copied(present, 0.1)
    assert isinstance(look, Locate)
    found = Located(look.operation_id, {Tier.DISK: frozenset(look.ids)})
    assert not list(residency.completed(found, 0.2))
    assert not held(inventory)
    [look] = residency.tick(0.3)
    assert isinstance(look, Locate)
    found = Located(look.operation_id, {Tier.DISK: frozenset(look.ids)})
    assert not list(residency.completed(found, 0.4))
    assert held(inventory) == {("s", "disk"): present.depth * B}
