"""A link that failed rests, longer each time; what it answers makes it good again."""

from __future__ import annotations

from ownerserve.transfer.control.links import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    KNOWN_MAX,
    ROAD_CLOSED_S,
    PeerLinks,
)
from tests.support.transfer_control.one_target import FIRST, READV, SECOND, TCP


def test_a_link_rests_twice_as_long_with_each_failure() -> None:
    links, now, rests = PeerLinks(), 0.0, []
    for _ in range(8):
        links.failed(FIRST, now)
        links.failed(FIRST, now)  # another bring saw the same
        began = now
        while not links.may_ask(FIRST, now):
            now += BACKOFF_S / 2
        rests.append(now - began)
    assert rests == [min(BACKOFF_S * 2**count, BACKOFF_MAX_S) for count in range(8)]
    assert links.may_ask(SECOND, 0.0)
    links.failed(FIRST, now)
    links.answered(FIRST)
    assert links.may_ask(FIRST, now)


def test_a_closed_road_is_tried_again_later() -> None:
    links = PeerLinks()
    links.close(FIRST, READV, 5.0)
    assert not links.is_open(FIRST, READV, 5.0)
    assert links.is_open(FIRST, TCP, 5.0) and links.is_open(SECOND, READV, 5.0)
    assert links.is_open(FIRST, READV, 5.0 + ROAD_CLOSED_S)


def test_what_is_remembered_is_bounded_and_forgotten_with_a_life() -> None:
    links = PeerLinks()
    links.failed(FIRST, 0.0)
    links.close(FIRST, TCP, 0.0)
    links.forget(FIRST.unit)
    assert links.may_ask(FIRST, 0.0) and links.is_open(FIRST, TCP, 0.0)
    links.failed(FIRST, 0.0)
    for number in range(KNOWN_MAX):
        links.failed(type(FIRST)(FIRST.unit, f"address {number}"), 0.0)
    assert links.may_ask(FIRST, 0.0), "the oldest made room"
