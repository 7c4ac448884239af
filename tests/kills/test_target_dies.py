"""The worker that a session moves to dies alone, once the owner has let the session go: the next
turn is served, and the session comes to one owner. Over real processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire import rpc
from ownerserve.kv.wire.headers import (
    ANSWER_HEADER,
    TURN_HEADER,
    AnswerLine,
    TurnLine,
    encode_turn_line,
    read_answer_line,
)
from ownerserve.node.rpc.server import RpcClient
from ownerserve.router.requests.identity import Scope
from tests.support.kills.processes import SESSION_HEADER, Fleet, Worker
from tests.support.kills.wires import WAIT_S
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

PROMPT = [*range(5, 60)]
REFUSED = 'ownerserve_owner_refusals_total{reason="target_not_live",verb="hand_over"}'


def name_of(session: str) -> SessionId:
    return Scope("-", "tiny-qwen3").name(SESSION_HEADER, session)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), policy="ownerserve")
    try:
        made.begin()
        until(lambda: made.turn("warm", PROMPT), what="workers to be probed")
        yield made
    finally:
        made.close()


def record(fleet: Fleet, name: SessionId) -> ask.SessionIs | None:
    client = DirectoryClient(fleet.directory)
    try:
        (found,) = client.execute([ask.FindSession(name)])
    finally:
        client.close()
    return found if isinstance(found, ask.SessionIs) else None


def owner(fleet: Fleet, name: SessionId) -> tuple[str, int] | None:
    """Who lives and owns it by the directory's word, and the version; None: nobody."""
    found = record(fleet, name)
    return (found.owner.worker, found.version) if found and found.owner_live else None


def served(worker: Worker, name: SessionId) -> AnswerLine:
    """A turn at one worker, as a gateway sends it; what its answer's line says."""
    headers = {TURN_HEADER: encode_turn_line(TurnLine(name=name)).decode()}
    url = f"http://127.0.0.1:{worker.port}/v1/completions"
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_S)
    return read_answer_line(answer.headers[ANSWER_HEADER].encode()).line


def let_go(fleet: Fleet, name: SessionId) -> None:
    """w0 owns the session, w1 has served a turn of it as a guest: w0 answers that it lets it go."""
    source, target = fleet.workers
    served(source, name)
    until(lambda: owner(fleet, name) == ("w0", 1), what=fleet.said())
    found, unit = record(fleet, name), served(target, name).unit
    assert found is not None and unit is not None
    client = RpcClient(source.rpc)
    try:
        asked = rpc.ReleaseSession(name, found.epoch, unit)
        assert client.ask(asked) == rpc.Released()
    finally:
        client.close()


def moves_to_one_that_dies(fleet: Fleet, session: str, *, until_it: str) -> ask.SessionIs:
    """The session's record as it is when the directory may hear of the move: w1 is dead, and its
    lease `runs` or is `over`."""
    name, its_own, cuts = name_of(session), name_of(f"{session}'s other"), fleet.cuts
    served(fleet.workers[1], its_own)
    until(lambda: owner(fleet, its_own), what="the target to own something")
    cuts.wire = "directory transfer"
    try:
        let_go(fleet, name)
        until(lambda: cuts.wire in cuts.taken, what="the move to be told")
        fleet.members["w1"].kill()
        if until_it == "over":
            until(lambda: owner(fleet, its_own) is None, what="its lease to be over")
        before = record(fleet, name)
    finally:
        cuts.wire = ""
        cuts.taken.clear()
    assert before is not None and before.owner.worker == "w0", "nobody has moved it"
    return before


def is_owned_anew(fleet: Fleet, name: SessionId, before: ask.SessionIs) -> bool:
    found = record(fleet, name)
    assert found is not None and found.version >= before.version
    return found.owner_live and found.owner.worker == "w0" and found.epoch > before.epoch


def test_the_owner_binds_anew_what_nobody_lives_to_take(fleet: Fleet) -> None:
    session, refused = "over", fleet.workers[0].metric(REFUSED)
    name = name_of(session)
    before = moves_to_one_that_dies(fleet, session, until_it="over")
    until(lambda: is_owned_anew(fleet, name, before), what=fleet.said())
    assert fleet.workers[0].metric(REFUSED) > refused
    until(partial(fleet.turn, session, PROMPT), what="the next turn")
    until(lambda: owner(fleet, name) == ("w0", before.version + 1), what=fleet.said())
    fleet.mend()


def test_a_dead_target_owns_until_its_lease_is_over(fleet: Fleet) -> None:
    """The next turns are a guest's, and answered; then who serves them owns."""
    session = "runs"
    name = name_of(session)
    before = moves_to_one_that_dies(fleet, session, until_it="runs")

    def is_served_and_owned() -> bool:
        assert fleet.turn(session, PROMPT) is not None, fleet.said()
        return is_owned_anew(fleet, name, before)

    until(is_served_and_owned, what=fleet.said())
    fleet.mend()
