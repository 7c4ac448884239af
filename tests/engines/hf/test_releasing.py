"""A session moves because its turns are sent elsewhere: its owner is asked to release it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ownerserve.directory import messages as ask
from tests.support.hf.fleet_rig import ServedGateway
from tests.support.hf.owning_fleet import PROMPT, Fleet, name_of
from tests.support.waits import until

pytestmark = pytest.mark.engine


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    one = Fleet(2)
    yield one
    one.close()


@pytest.fixture
def gateway(fleet: Fleet) -> Iterator[ServedGateway]:
    """Sends the turns of every session to one worker after the other."""
    one = ServedGateway(*fleet.workers, directory=fleet.server.address, policy="round_robin")
    yield one
    one.close()


def test_who_serves_a_turn_that_another_owns_owns_the_next_one(
    fleet: Fleet, gateway: ServedGateway
) -> None:
    prompt = PROMPT

    def turn() -> str:
        nonlocal prompt
        answer = gateway.complete(prompt, "s")
        assert answer.status_code == 200
        prompt = prompt + answer.json()["choices"][0]["token_ids"] + [11, 12, 13]
        return str(answer.headers["x-ownerserve-worker"])

    def released() -> float:
        return gateway.metric("ownerserve_gateway_releases_total", outcome="released")

    def running() -> float:
        return gateway.metric("ownerserve_gateway_releases_total", outcome="session_is_running")

    def until_said(refused: float) -> None:
        until(lambda: released() == 2 or running() > refused)

    first = turn()
    name = name_of(gateway)
    until(lambda: fleet.version(name) == 1)
    record = fleet.record(name)
    assert isinstance(record, ask.SessionIs)
    source = next(one for one in fleet.workers if one.name == first)
    target = next(one for one in fleet.workers if one is not source)
    assert record.owner == source.unit
    assert [turn(), turn()] == [target.name, source.name]  # now the gateway knows who owns it
    until(lambda: fleet.version(name) == 2)
    assert released() == 0 and "Transfer" not in fleet.directory.asked
    assert turn() == target.name
    until(lambda: released() == 1)
    until(lambda: fleet.owner(name) == target.unit)
    moved = fleet.record(name)
    assert isinstance(moved, ask.SessionIs) and moved.epoch > record.epoch
    assert moved.version == 2  # a guest's turns are no record
    assert [turn(), turn()] == [source.name, target.name]  # which binds now
    until(lambda: fleet.version(name) == 3)
    assert [turn(), turn()] == [source.name, target.name]  # which says that it owns
    refused = running()
    assert turn() == source.name
    until_said(refused)
    while released() != 2:  # asked as the owner's own turn ended: again after the next
        refused = running()
        assert [turn(), turn()] == [target.name, source.name]
        until_said(refused)
    until(lambda: fleet.owner(name) == source.unit)
    assert fleet.directory.asked["Transfer"] == 2
    ended = gateway.read(lambda: dict(gateway.gateway.turns.releasing.counts))
    ended.pop("let_go")  # one read for all: the last turn's may be answered just now
    ended.pop("session_is_running", 0)
    assert ended == {"released": 2}


def test_a_gateway_hears_from_a_guest_that_another_moved_the_session(
    fleet: Fleet, gateway: ServedGateway
) -> None:
    keeps = fleet.gateways[0]

    def turn(by: ServedGateway) -> str:
        answer = by.complete(PROMPT, "s")
        assert answer.status_code == 200
        return str(answer.headers["x-ownerserve-worker"])

    home = turn(keeps)
    name = name_of(keeps)
    until(lambda: fleet.version(name) == 1)
    assert turn(keeps) == home
    source = next(one for one in fleet.workers if one.name == home)
    target = next(one for one in fleet.workers if one is not source)

    def is_moved() -> bool:
        return turn(gateway) == target.name and fleet.owner(name) == target.unit

    until(is_moved)
    assert turn(keeps) == source.name  # by what it knows; a guest's answer
    assert turn(keeps) == target.name
    assert keeps.metric("ownerserve_gateway_releases_total") == 0
