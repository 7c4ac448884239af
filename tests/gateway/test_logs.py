"""The gateway's log: what happens to workers, directory and turns, told once and with its cause."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ownerserve.gateway.logs import DirectoryLog, JsonLines, TextLines, WorkerLog, tell
from ownerserve.kv.ids import WorkerId
from tests.support.gateway.process import gateway_process, worker_process
from tests.support.gateway.world import World
from tests.support.waits import until

Play = Callable[..., None]
CHAT = "/v1/chat/completions"
USAGE = (
    b'{"prompt_tokens": 90, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}'
)


def named(said: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [one for one in said if one["event"] == event]


@pytest.mark.slow
def test_a_killed_worker_is_in_the_log_with_its_cause(tmp_path: Path) -> None:
    """The process of a gateway, in JSON: each line is an object, and both workers are told of."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker_process()) for _ in range(2)]
        ports = [worker.port for worker in workers]
        options = ("--log-format", "json", "--access-log")
        running = stack.enter_context(gateway_process(tmp_path, ports, *options))

        def said() -> list[dict[str, Any]]:
            lines = running.said.read_text().splitlines()
            return [json.loads(line) for line in lines if line.startswith("{")]

        up = named(said(), "worker_up")
        assert {one["worker"] for one in up} == {f"127.0.0.1:{port}" for port in ports}
        workers[0].kill()
        until(lambda: named(said(), "worker_down"))
        (down,) = named(said(), "worker_down")
        assert (down["worker"], down["level"]) == (f"127.0.0.1:{ports[0]}", "warning")
        assert down["why"] == "unreachable" and "listens" in down["cause"]


@pytest.mark.slow
def test_the_log_is_quiet_where_the_operator_says_so(tmp_path: Path) -> None:
    with worker_process() as worker:
        options = ("--log-level", "error")
        with gateway_process(tmp_path, [worker.port], *options) as running:
            assert running.said.read_text().count("\n") == 1, "where it is, and no more"


def test_a_worker_is_told_of_when_it_changes_and_not_with_each_probe(
    entries: list[dict[str, Any]],
) -> None:
    log, worker = WorkerLog(), WorkerId("w")
    log.down(worker, why="unreachable", cause="never there")
    for _ in range(3):
        log.up(worker, models="m")
    for _ in range(3):
        log.down(worker, why="unhealthy", cause="no answer in 3 s")
    assert [(one["event"], one.get("cause")) for one in entries] == [
        ("worker_down", "never there"),
        ("worker_up", None),
        ("worker_down", "no answer in 3 s"),
    ]


def test_a_worker_that_a_turn_finds_gone_is_told_of_at_once(
    play: Play, entries: list[dict[str, Any]]
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        await world.engines[0].kill()
        assert (await client.post(CHAT)).status == 503
        (down,) = named(entries, "worker_down")
        assert down["why"] == "unreachable"

    play(scenario, engines=1, health_interval_s=60.0)


def test_a_worker_that_is_not_well_is_told_of_with_what_it_said(
    play: Play, entries: list[dict[str, Any]]
) -> None:
    async def scenario(world: World) -> None:
        (monitor,) = world.gateway.monitors.values()
        world.engines[0].is_hung = True
        for _ in range(2):
            await monitor.probe()
        assert monitor.cause == "no answer in 0.5 s"

    play(scenario, engines=1, health_interval_s=60.0, health_timeout_s=0.5)


def test_the_directory_is_told_of_when_its_kind_changes(entries: list[dict[str, Any]]) -> None:
    log, answers = DirectoryLog(), Counter[str]()
    for new in ("miss", "miss", "unreachable", "unreachable", "too_slow", "busy", "session_is"):
        answers[new] += 1
        log.look(answers)
        log.look(answers)
    assert [one["event"] for one in entries] == [
        "directory_lost",
        "directory_slow",
        "directory_refuses",
        "directory_back",
    ]
    assert entries[2]["busy"] == 1


def test_the_access_log_has_a_line_for_each_turn(play: Play, entries: list[dict[str, Any]]) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.usage = USAGE
        answer = await client.post(CHAT, x__session__id="secret-name", x__request__id="r1")
        (turn,) = named(entries, "turn")
        assert turn["end"] == "finished" and turn["status"] == 200
        assert turn["worker"] == answer["x-ownerserve-worker"]
        assert turn["reason"] == answer["x-ownerserve-reason"]
        assert (turn["prompt_tokens"], turn["cached_tokens"], turn["output_tokens"]) == (90, 64, 3)
        assert 0 <= turn["first_byte_s"] <= turn["duration_s"] < 60  # and no milliseconds
        assert turn["request_id"] == "r1" and len(turn["session"]) == 32
        assert "secret-name" not in json.dumps(entries)
        leaver = await world.client()
        await leaver.begin(f"{CHAT}?slow", b"{}")
        leaver.hang_up()
        await world.settled()
        await engine.kill()
        assert (await client.post(CHAT, x__session__id="b")).status == 503
        assert [one["end"] for one in named(entries, "turn")] == ["finished", "aborted", "refused"]

    play(scenario, engines=1, access_log=True, health_interval_s=60.0)


def test_without_it_no_turn_is_in_the_log(play: Play, entries: list[dict[str, Any]]) -> None:
    async def scenario(world: World) -> None:
        assert (await (await world.client()).post(CHAT)).status == 200
        assert not named(entries, "turn")

    play(scenario, engines=1)


def test_an_entry_is_one_line_whatever_is_in_it() -> None:
    record = logging.makeLogRecord({"msg": "worker_down", "levelname": "WARNING", "created": 0.0})
    record.event = "worker_down"
    record.fields = {"worker": "w:1", "cause": 'a "b"\nc', "none": None, "s": 0.25}
    line = TextLines().format(record)
    said_of_it = 'worker=w:1 cause="a \\"b\\"\\nc" s=0.25'
    assert line == f"1970-01-01T00:00:00.000Z WARNING worker_down {said_of_it}"
    said = json.loads(JsonLines().format(record))
    assert said["cause"] == 'a "b"\nc' and said["event"] == "worker_down"


def test_below_the_level_nothing_is_written(entries: list[dict[str, Any]]) -> None:
    tell(logging.DEBUG, "nothing")
    tell(logging.INFO, "something", number=1)
    assert [(one["event"], one.get("number")) for one in entries] == [("something", 1)]


def test_a_message_that_quotes_a_peer_is_one_line() -> None:
    text = "worker says é: %s"
    told = "no\r\n2026-01-01T00:00:00.000Z WARNING forged\x1b[2J"
    record = logging.LogRecord("other", logging.WARNING, "f", 1, text, (told,), None)
    line = TextLines().format(record)
    assert line.isprintable()
    assert line.endswith(
        r"WARNING worker says é: no\r\n2026-01-01T00:00:00.000Z WARNING forged\x1b[2J"
    )
