"""A stream whose worker is killed in its middle is carried on by another: in a running gateway,
over processes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway.talker import WORDS, TalkerProcess, words_of
from tests.support.gateway.talking import MESSAGES, TalkingFleet, talking_fleet, text_in
from tests.support.waits import until

pytestmark = pytest.mark.slow

SEED = 7
TEXT = "".join(words_of(MESSAGES, SEED))
HELD_AT = 9


@contextmanager
def fleet(folder: Path, *more: str) -> Iterator[TalkingFleet]:
    with talking_fleet(folder, ["", ""], "--carry-on", *more) as world:
        yield world


class Reader:
    """The client of a stream that has come to the word at which its worker holds."""

    def __init__(self, world: TalkingFleet, **fields: Any) -> None:
        for one in world.talkers:
            one.tell(holds_at=HELD_AT, go=False)
        self.client = world.begin(stream=True, **fields)
        self.answer = self.client.getresponse()
        self.text = ""
        while self.text.count(" ") < "".join(self.words(fields)).count(" "):
            self.text += text_of_line(self.answer.readline().decode())
        self.first = world.who_has().index(1)
        self.seen = [world.talkers[self.first], world.talkers[1 - self.first]]

    def words(self, fields: dict[str, Any]) -> list[str]:
        return words_of(MESSAGES, fields.get("seed"))[:HELD_AT]

    def rest(self) -> str:
        """All that comes until the connection ends, as events."""
        try:
            return self.answer.read().decode()
        except http.client.IncompleteRead as error:
            return error.partial.decode()


class OldConnection(http.client.HTTPConnection):
    """A client that speaks HTTP/1.0."""

    _http_vsn = 10
    _http_vsn_str = "HTTP/1.0"


def text_of_line(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line[6:])["choices"]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def ids_in(stream: str) -> set[str]:
    lines = [line for line in stream.splitlines() if line.startswith("data: {")]
    return {json.loads(line[6:])["id"] for line in lines}


@pytest.mark.parametrize("together", [1, 4, WORDS])
def test_a_stream_goes_on_where_its_worker_was_killed(tmp_path: Path, together: int) -> None:
    """Whatever number of words the other says at once."""
    with fleet(tmp_path) as world:
        reader = Reader(world, seed=SEED, stream_options={"include_usage": True})
        first, other = reader.seen
        other.tell(holds_at=None, together=together)
        first.kill()
        rest = reader.rest()
        assert reader.text + text_in(rest) == TEXT
        assert ids_in(rest) == {f"id-{first.port}-1"}
        assert rest.count('"usage"') == 1
        reader.client.close()
        assert world.legs("carry_on") == {"begun": 1, "done": 1}
        assert world.live() == 0
        [(_, again)] = other.tell()["seen"]
        assert (again["seed"], again["messages"]) == (SEED, MESSAGES)


@pytest.mark.parametrize(
    ("fields", "does", "outcome"),
    [
        ({"seed": SEED}, {"other_from": HELD_AT - 2}, {"begun": 1, "differs": 1}),
        ({"seed": SEED}, {"ends_at": HELD_AT - 2}, {"begun": 1, "differs": 1}),
        ({"seed": SEED}, {"refuses": 503}, {"nobody": 1}),
        ({"seed": SEED}, {"refuses": 400}, {"nobody": 1}),
        ({}, {}, {}),
        ({"temperature": 0.7}, {}, {}),
    ],
)
def test_what_is_not_the_same_ends_as_any_stream_that_stops(
    tmp_path: Path, fields: dict[str, Any], does: dict[str, Any], outcome: dict[str, int]
) -> None:
    with fleet(tmp_path) as world:
        reader = Reader(world, **fields)
        first, other = reader.seen
        other.tell(holds_at=None, **does)
        first.kill()
        rest = reader.rest()
        [error] = [json.loads(line[6:]) for line in rest.splitlines() if '"error"' in line]
        assert error["error"]["code"] == "worker_lost"
        assert "[DONE]" not in rest
        assert text_of_line(rest) == ""
        reader.client.close()
        assert (world.legs("carry_on"), world.live()) == (outcome, 0)


def test_a_greedy_stream_is_carried_on_too_and_the_next_worker_may_die(tmp_path: Path) -> None:
    """Three workers: two are killed in the middle of one stream."""
    with talking_fleet(tmp_path, ["", "", ""], "--carry-on") as world:
        reader = Reader(world, temperature=0)
        killed: list[TalkerProcess] = []
        for _ in range(2):
            seen = [len(one.tell()["seen"]) if one not in killed else 0 for one in world.talkers]
            running = world.talkers[seen.index(1)]
            left = [one for one in world.talkers if one not in (running, *killed)]
            killed.append(running)
            running.kill()
            until(lambda: any(one.tell()["seen"] for one in left), within_s=30)  # noqa: B023
        left[-1 if left[-1].tell()["seen"] else 0].tell(go=True)
        assert reader.text + text_in(reader.rest()) == "".join(words_of(MESSAGES, None))
        reader.client.close()
        until(lambda: world.legs("carry_on") == {"begun": 2, "done": 1}, within_s=30)
        assert world.live() == 0


def test_a_client_that_hangs_up_while_another_catches_up_ends_it(tmp_path: Path) -> None:
    with fleet(tmp_path) as world:
        reader = Reader(world, seed=SEED)
        first, other = reader.seen
        other.tell(holds_at=3)  # before what the client has
        first.kill()
        until(lambda: other.tell()["seen"], within_s=30)
        reader.answer.close()
        reader.client.close()
        until(lambda: other.tell()["hung_up"] == 1, within_s=30)
        until(lambda: world.live() == 0, within_s=30)


def test_a_stream_of_completions_goes_on_for_a_client_too_old_for_chunks(tmp_path: Path) -> None:
    with fleet(tmp_path) as world:
        for one in world.talkers:
            one.tell(holds_at=HELD_AT)
        where = world.gateway.data_url.removeprefix("http://")
        client = OldConnection(where, timeout=30)
        body = json.dumps({"prompt": "go on", "seed": SEED, "stream": True})
        client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = client.getresponse()
        lines = [answer.readline() for _ in range(2 * HELD_AT)]
        first = world.who_has().index(1)
        world.talkers[1 - first].tell(holds_at=None, together=5)
        world.talkers[first].kill()
        stream = (b"".join(lines) + answer.read()).decode()
        events = [json.loads(one[6:]) for one in stream.split("\n\n") if one.startswith("data: {")]
        said = "".join(choice["text"] for event in events for choice in event["choices"])
        assert said == "".join(words_of("go on", SEED))
        assert stream.endswith("data: [DONE]\n\n")
        client.close()
