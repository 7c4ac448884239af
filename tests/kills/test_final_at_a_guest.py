"""A session's last turn runs at a guest: its owner ends it all the same. Over real processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.router.requests.identity import Scope
from tests.support.kills.processes import SESSION_HEADER, Fleet
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

NAME = Scope("-", "tiny-qwen3").name(SESSION_HEADER, "a")


def is_known(fleet: Fleet) -> bool:
    client = DirectoryClient(fleet.directory)
    try:
        (found,) = client.execute([ask.FindSession(NAME)])
    finally:
        client.close()
    return isinstance(found, ask.SessionIs)


def test_a_last_turn_at_a_guest_ends_the_session_at_its_owner(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, policy="round_robin")  # no turn is where the one before was
    try:
        fleet.begin()
        prompt = [*range(5, 60)]
        until(lambda: fleet.turn("warm", prompt), what="workers to be probed")
        for number in range(4):  # before the last the gateway has heard whose it is
            answer = fleet.turn("a", prompt, final=number == 3)
            assert answer is not None
            prompt += [*answer, *range(70, 90)]
            if number < 3:
                until(lambda: is_known(fleet), what=fleet.said())
                time.sleep(1.0)  # owners finish telling
        until(lambda: not is_known(fleet), what=fleet.said())
    finally:
        fleet.close()
