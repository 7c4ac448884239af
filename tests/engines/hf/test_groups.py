"""What sessions begin with alike is their group at the directory: gateway, workers, directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from tests.support.hf.owning_fleet import Fleet, name_of
from tests.support.waits import until

pytestmark = pytest.mark.engine

SYSTEM = {"role": "system", "content": "You are an agent of a repository. " * 40}


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    one = Fleet(2)
    yield one
    one.close()


def test_the_tips_of_sessions_that_share_a_head_are_one_group(fleet: Fleet) -> None:
    gateway = fleet.gateways[0]
    for number in range(3):
        messages = [SYSTEM, {"role": "user", "content": f"task {number} " * 20}]
        answer = gateway.http.post(
            "/v1/chat/completions",
            json={"messages": messages, "max_tokens": 2, "temperature": 0},
            headers={"x-session-id": f"s{number}"},
        )
        assert answer.status_code == 200, answer.text
    name = name_of(gateway)
    group = gateway.read(lambda: gateway.gateway.turns.asking.chain.group(name))  # type: ignore[arg-type]
    assert group is not None
    client = DirectoryClient(fleet.server.address)

    def members() -> int:
        (found,) = client.execute([ask.FindGroup(group)])
        return len(found.members) if isinstance(found, ask.GroupIs) else 0

    try:
        until(lambda: members() >= 2)  # the first session came before there was a group
    finally:
        client.close()
