"""A turn of which nothing comes is asked of a second worker too: in a running gateway, over
processes that hang and are killed."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.gateway.talker import TalkerProcess, words_of
from tests.support.gateway.talking import MESSAGES, TalkingFleet, talking_fleet, text_in
from tests.support.waits import until

pytestmark = pytest.mark.slow

TEXT = "".join(words_of(MESSAGES, None))


@contextmanager
def hung(folder: Path, *more: str) -> Iterator[TalkingFleet]:
    """Two workers that say nothing of a turn until they are told to."""
    with talking_fleet(folder, ["", ""], "--hedge-after", "0.2", *more) as world:
        for one in world.talkers:
            one.tell(mute=True)
        yield world


def both_have_it(world: TalkingFleet) -> tuple[http.client.HTTPConnection, list[TalkerProcess]]:
    """The client of a turn that both have; the talkers, the one that was asked first in front."""
    client = world.begin(stream=True)
    until(lambda: sum(world.who_has()) > 0, within_s=30)
    first = world.who_has().index(1)
    until(lambda: world.who_has() == [1, 1], within_s=30)
    return client, [world.talkers[first], world.talkers[1 - first]]


def test_the_first_that_begins_is_passed_on_and_the_other_is_hung_up_on(tmp_path: Path) -> None:
    with hung(tmp_path) as world:
        for number, outcome in enumerate(("won", "outrun")):
            for one in world.talkers:
                one.tell(mute=True, go=False)
            before, hung_up = world.who_has(), [one.tell()["hung_up"] for one in world.talkers]
            client = world.begin(stream=True)
            until(lambda: sum(world.who_has()) > sum(before), within_s=30)  # noqa: B023
            first = [now - then for now, then in zip(world.who_has(), before, strict=True)].index(1)
            until(lambda: sum(world.who_has()) == sum(before) + 2, within_s=30)  # noqa: B023
            winner = 1 - first if outcome == "won" else first
            world.talkers[winner].tell(go=True)
            answer = client.getresponse()
            assert answer.headers["x-ownerserve-reason"] == "hedged" or outcome == "outrun"
            assert text_in(answer.read().decode()) == TEXT
            client.close()
            loser = world.talkers[1 - winner]
            until(lambda: loser.tell()["hung_up"] == hung_up[1 - winner] + 1, within_s=30)  # noqa: B023
            counted = world.legs("hedge")
            assert (counted["sent"], counted[outcome]) == (number + 1, 1)
            until(lambda: world.live() == 0, within_s=30)


def test_either_worker_is_killed_while_both_have_the_turn(tmp_path: Path) -> None:
    for killed, outcome in ((0, "instead"), (1, "failed")):
        folder = tmp_path / outcome
        folder.mkdir()
        with hung(folder) as world:
            client, talkers = both_have_it(world)
            talkers[killed].kill()
            until(lambda: world.legs("hedge").get(outcome) == 1, within_s=30)  # noqa: B023
            talkers[1 - killed].tell(go=True)
            assert text_in(client.getresponse().read().decode()) == TEXT
            client.close()
            until(lambda: world.live() == 0, within_s=30)


def test_a_client_that_hangs_up_ends_both(tmp_path: Path) -> None:
    with hung(tmp_path) as world:
        client, talkers = both_have_it(world)
        client.close()
        for one in talkers:
            until(lambda: one.tell()["hung_up"] == 1, within_s=30)  # noqa: B023
        until(lambda: world.live() == 0, within_s=30)
        assert world.legs("hedge") == {"sent": 1, "aborted": 1}


def test_what_may_not_run_twice_is_asked_of_one(tmp_path: Path) -> None:
    with hung(tmp_path) as world:
        clients = [world.begin(), world.begin(stream=True, previous_response_id="r")]
        until(lambda: sum(world.who_has()) == 2, within_s=30)
        late = world.begin(stream=True)  # once this one is at both, the time of those is over too
        until(lambda: sum(world.who_has()) == 4, within_s=30)
        assert world.legs("hedge") == {"sent": 1}
        for client in (*clients, late):
            client.close()
