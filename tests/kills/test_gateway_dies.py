"""The gateway that ordered a session to move dies amid it, and another serves the session on: each
answer is right, and one worker owns it. Over real processes; who else dies:
test_killed_at_messages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ownerserve.directory import messages as ask
from tests.kills.test_killed_at_messages import is_owned_once, name_of, record
from tests.support.kills.processes import Fleet
from tests.support.kills.wires import WAIT_S, At, Lane, Trap
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

OTHER = 1
"""The gateway that goes on."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), policy="ownerserve", gateways=2)
    try:
        made.begin()
        for through in range(2):
            warm = partial(made.turn, f"warm{through}", [*range(5, 60)], through=through)
            until(warm, what="workers to be probed")
        yield made
    finally:
        made.close()


def owner(fleet: Fleet, session: str) -> str | None:
    found = record(fleet, name_of(session))
    is_known = isinstance(found, ask.SessionIs) and found.owner_live and found.version > 0
    return found.owner.worker if is_known and isinstance(found, ask.SessionIs) else None


@pytest.mark.parametrize(
    ("tag", "at"),
    [
        ("take", At.REQUEST),
        ("ask_session", At.REQUEST),
        ("hand_over", At.REQUEST),
        ("transfer", At.REQUEST),
        ("transfer", At.ANSWER),
        ("take", At.ANSWER),
    ],
    ids=[
        "before_it_is_heard",
        "before_the_state_comes",
        "before_the_hand_over",
        "before_the_directory_is_asked",
        "before_the_directory_answers",
        "after_it",
    ],
)
def test_the_other_gateway_serves_the_session_on(
    fleet: Fleet, cold: Callable[[list[int]], list[int]], tag: str, at: At
) -> None:
    session, prompt = f"{tag} {at.value}", [len(tag), *range(5, 90)]

    def turn(through: int) -> bool:
        answer = fleet.turn(session, prompt, through=through)
        if answer is None:
            return False
        assert answer == cold(prompt), "a wrong answer"
        prompt.extend([*answer, *range(70, 90)])
        return True

    until(partial(turn, 0), what="a turn of a fleet that is well")
    until(lambda: owner(fleet, session), what="the session to be owned")
    source = owner(fleet, session)
    assert source is not None
    (target,) = {worker.name for worker in fleet.workers} - {source}
    lanes = {
        "take": Lane("gateway", target),
        "ask_session": Lane("gateway", source),
        "hand_over": Lane("gateway", source),
        "transfer": Lane(source, "directory"),
    }
    trap = Trap(tag, at, fleet.members["gateway"].kill, lane=lanes[tag])
    fleet.wires.trap = trap
    try:
        fleet.drain(source)
        assert trap.sprung.wait(WAIT_S), f"{tag} was never said\n{fleet.said()}"
        for _ in range(3):
            until(partial(turn, OTHER), what=f"the other gateway to serve on\n{fleet.said()}")
    finally:
        fleet.wires.trap = None
        fleet.mend()

    def is_one_owners() -> bool:
        return is_owned_once(fleet, name_of(session)) or (turn(OTHER) and False)

    until(is_one_owners, what=fleet.said())
    until(partial(turn, 0), what="a turn through the one that began anew")
    until(fleet.at_rest, what=f"every request to end\n{fleet.said()}")
    held = "ownerserve_cache_held_blocks"
    until(lambda: not any(one.metric(held) for one in fleet.workers), what="writers to end")
    assert not fleet.violations()
