"""A fork whose owner finished no turn of it moves to a worker that had one: that worker lives, and
counts from there. Over real processes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

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
from tests.support.kills.processes import Fleet, Worker
from tests.support.kills.wires import WAIT_S
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

PARENT, FORK = SessionId("a" * 32), SessionId("b" * 32)
PROMPT = [*range(5, 70)]
HANG_UP_S = 0.5
BOUND = 'ownerserve_directory_answers_total{answer="bound"}'


def record(fleet: Fleet, name: SessionId) -> ask.SessionIs | None:
    client = DirectoryClient(fleet.directory)
    try:
        (found,) = client.execute([ask.FindSession(name)])
    finally:
        client.close()
    return found if isinstance(found, ask.SessionIs) else None


def turn(
    worker: Worker,
    prompt: list[int],
    line: TurnLine,
    *,
    max_tokens: int = 4,
    within_s: float = WAIT_S,
) -> AnswerLine:
    """A turn as a gateway sends it; what its answer's line says."""
    headers = {TURN_HEADER: encode_turn_line(line).decode()}
    url = f"http://127.0.0.1:{worker.port}/v1/completions"
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(url, json=body, headers=headers, timeout=within_s)
    assert answer.status_code == 200, answer.text
    return read_answer_line(answer.headers[ANSWER_HEADER].encode()).line


def test_who_is_given_a_fork_of_which_no_turn_is_counted_serves_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, policy="round_robin")
    try:
        fleet.begin()
        source, target = fleet.workers
        turn(source, PROMPT, TurnLine(name=PARENT))
        until(lambda: (found := record(fleet, PARENT)) and found.version == 1, what=fleet.said())
        parent = record(fleet, PARENT)
        assert parent is not None

        fork = TurnLine(name=FORK, parent=PARENT)
        with suppress(httpx.TimeoutException):  # its first turn is given up
            turn(source, PROMPT, fork, max_tokens=4000, within_s=HANG_UP_S)
        until(lambda: record(fleet, FORK), what="the fork to be bound")
        bound = record(fleet, FORK)
        assert bound is not None and (bound.version, bound.tokens) == (0, parent.tokens)

        prompt = PROMPT[: parent.tokens]
        unit = turn(target, prompt, TurnLine(name=FORK), max_tokens=2).unit  # a guest's
        assert unit is not None
        granted = target.metric(BOUND)
        asking = RpcClient(source.rpc)
        try:
            let_go = rpc.ReleaseSession(FORK, bound.epoch, unit)
            until(lambda: asking.ask(let_go) == rpc.Released(), what="it to be let go")
        finally:
            asking.close()
        until(lambda: (now := record(fleet, FORK)) and now.owner == unit, what=fleet.said())
        until(lambda: target.metric(BOUND) > granted, what="its new owner to hear of it")
        until(lambda: is_its_own(fleet, target, prompt, unit.worker), what=fleet.said())
        assert not fleet.violations()
    finally:
        fleet.close()


def is_its_own(fleet: Fleet, worker: Worker, prompt: list[int], name: str) -> bool:
    """The worker serves it, and counts turns."""
    turn(worker, prompt, TurnLine(name=FORK), max_tokens=2)
    time.sleep(0.2)
    found = record(fleet, FORK)
    return found is not None and found.version > 0 and found.owner.worker == name
