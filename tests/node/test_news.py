"""Who has read an inventory to its end waits for the next word."""

from __future__ import annotations

import threading

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.news import NEWS_WAITERS, NewsWaiters
from tests.support.waits import WAIT_S

S = SessionId("s")


def test_a_word_ends_all_waiting_and_one_that_was_said_is_no_reason_to_wait() -> None:
    inventory = Inventory()
    waiters = NewsWaiters(inventory)
    early, other = waiters.wait(0), waiters.wait(0)
    assert not early.done() and len(waiters) == 2
    inventory.has(S, Tier.DEVICE, 32, digest=None)
    assert early.done() and other.done() and not len(waiters)
    assert waiters.wait(0).done(), "word 1 is above 0"
    late = waiters.wait(1)
    inventory.has(S, Tier.DEVICE, 32, digest=None)
    assert not late.done(), "it says nothing new"
    inventory.gone(S, Tier.DEVICE)
    assert late.done()


def test_one_who_read_a_former_life_does_not_wait() -> None:
    assert NewsWaiters(Inventory()).wait(9).done()


def test_no_more_wait_than_may_and_who_gives_up_makes_room() -> None:
    waiters = NewsWaiters(Inventory())
    waiting = [waiters.wait(0) for _ in range(NEWS_WAITERS)]
    assert waiters.wait(0).done(), "one too many is answered at once"
    waiting[0].cancel()
    assert not waiters.wait(0).done()
    assert len(waiters) == NEWS_WAITERS


def test_no_word_is_slept_over_by_one_who_asks_as_it_is_said() -> None:
    inventory, rounds = Inventory(), 2000
    waiters = NewsWaiters(inventory)

    def say() -> None:
        for tokens in range(1, rounds + 1):
            inventory.has(S, Tier.DEVICE, tokens, digest=None)

    speaker = threading.Thread(target=say)
    speaker.start()
    after = 0
    while after < rounds:
        waiters.wait(after).result(WAIT_S)
        after = inventory.last
    speaker.join()
