"""A turn moves amid its answer, and whoever takes part dies or stands still as a message of it
passes: one worker goes on with it, or its client hears that nobody does. Over real processes.

    OWNERSERVE_ALL_KILLS=1 python -m pytest tests/kills/test_turns_killed.py
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.kills.processes import SESSION_HEADER, Fleet
from tests.support.kills.wires import WAIT_S, At, Lane, Trap
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

TOKENS = 700
"""Over a second of a tiny model's on a quiet machine: longer than an order takes."""
ANSWER_S = 10 * WAIT_S
"""Longer than so many take on a busy one."""
MOVES_AFTER = 20


class Case(NamedTuple):
    """`victim` is killed, or stands still, as the message passes or its answer does; `is_whole`:
    whether the client has its answer all the same. None: it may, since it races with the end of the
    leg at the source."""

    tag: str
    at: At
    victim: str
    is_whole: bool | None

    def __str__(self) -> str:
        return f"{self.tag}-{self.at.value}-{self.victim}"


CASES = [
    Case("take", At.REQUEST, "target", is_whole=True),
    Case("take", At.REQUEST, "source", is_whole=False),
    Case("take", At.ANSWER, "target", is_whole=None),
    Case("ask_tokens", At.REQUEST, "target", is_whole=True),
    Case("ask_tokens", At.REQUEST, "frozen target", is_whole=True),
    Case("ask_tokens", At.REQUEST, "source", is_whole=False),
    Case("ask_tokens", At.ANSWER, "target", is_whole=True),
    Case("ask_tokens", At.ANSWER, "frozen target", is_whole=True),
    Case("ask_tokens", At.ANSWER, "source", is_whole=False),
    Case("ask_prefix", At.ANSWER, "target", is_whole=True),
    Case("ask_prefix", At.ANSWER, "frozen target", is_whole=True),
    Case("ask_prefix", At.ANSWER, "source", is_whole=False),
    Case("stop_turn", At.REQUEST, "target", is_whole=True),
    Case("stop_turn", At.REQUEST, "source", is_whole=False),
    Case("stop_turn", At.ANSWER, "target", is_whole=None),
    Case("stop_turn", At.ANSWER, "source", is_whole=None),
    Case("move_turn", At.REQUEST, "target", is_whole=True),
    Case("move_turn", At.REQUEST, "frozen target", is_whole=True),
    Case("move_turn", At.REQUEST, "source", is_whole=False),
    Case("move_turn", At.ANSWER, "target", is_whole=True),
    Case("move_turn", At.ANSWER, "frozen target", is_whole=True),
    Case("move_turn", At.ANSWER, "source", is_whole=False),
    *(Case(tag, at, "gateway", is_whole=False)
      for tag in ("take", "ask_tokens", "stop_turn", "move_turn") for at in At),
]  # fmt: skip
TO_SOURCE = {"ask_tokens", "ask_prefix", "stop_turn"}
"""Said by the target to the source: the first two as it brings state, while the turn runs on."""
IN_CI = [
    Case("ask_tokens", At.ANSWER, "target", is_whole=True),
    Case("stop_turn", At.ANSWER, "target", is_whole=None),
    Case("move_turn", At.REQUEST, "frozen target", is_whole=True),
    Case("move_turn", At.ANSWER, "target", is_whole=True),
    Case("move_turn", At.ANSWER, "source", is_whole=False),
    Case("move_turn", At.ANSWER, "gateway", is_whole=False),
]
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), policy="ownerserve")
    try:
        made.begin()
        until(lambda: made.turn("warm", [*range(5, 60)]), what="workers to be probed")
        yield made
    finally:
        made.close()


def body_of(prompt: list[int]) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.8, "seed": 3}
    return asked | {"return_token_ids": True, "ignore_eos": True}


class Client:
    """It reads a stream: `tokens` came, `error` ended it, or it `is_cut` off."""

    def __init__(self, fleet: Fleet, session: str, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self.error: dict[str, Any] | None = None
        self.is_whole = self.is_cut = False
        self.at = ""
        url = f"http://127.0.0.1:{fleet.ports[0]}/v1/completions"
        given = (url, {**body_of(prompt), "stream": True}, {SESSION_HEADER: session})
        self._thread = threading.Thread(target=self._read, args=given)
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=ANSWER_S) as answer:
                self.at = answer.headers["x-ownerserve-worker"]
                for line in answer.iter_lines():
                    self._hear(line)
        except httpx.HTTPError:
            self.is_cut = True

    def _hear(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_whole = True
        elif line.startswith("data: {"):
            event = json.loads(line[6:])
            self.error = event.get("error", self.error)
            for choice in event.get("choices", ()):
                self.tokens += choice["token_ids"]

    def wait(self) -> None:
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive()


@pytest.mark.parametrize(
    "case", CASES if os.environ.get("OWNERSERVE_ALL_KILLS") else IN_CI, ids=str
)
def test_one_worker_goes_on_or_the_client_hears_that_nobody_does(case: Case, fleet: Fleet) -> None:
    number = next(_NUMBERS)
    prompt = [3 + number, *range(5, 90)]
    client = Client(fleet, f"turn{number}", prompt)
    until(lambda: len(client.tokens) >= MOVES_AFTER or client.is_cut, what=fleet.said())
    (source,) = [one for one in fleet.workers if one.url.endswith(client.at)]
    (target,) = [one for one in fleet.workers if one is not source]
    members = {"source": source, "target": target, "gateway": fleet.members["gateway"]}
    victim = members[case.victim.removeprefix("frozen ")]
    act = victim.freeze if case.victim.startswith("frozen") else victim.kill
    lane = Lane("gateway", (source if case.tag in TO_SOURCE else target).name)
    fleet.wires.trap = trap = Trap(case.tag, case.at, act, lane=lane)
    try:
        fleet.drain(source.name)
        assert trap.sprung.wait(WAIT_S), f"{case.tag} was never said\n{fleet.said()}"
        client.wait()
    finally:
        fleet.wires.trap = None
        victim.thaw()
        fleet.mend()
    fleet.undrain(source.name)
    asked = httpx.post(
        f"{source.url}/v1/completions", json=body_of(prompt), timeout=ANSWER_S
    ).json()
    alone = asked["choices"][0]["token_ids"]
    assert client.tokens == alone[: len(client.tokens)], "a gap, or something twice"
    ends = (client.is_whole, client.error is not None, client.is_cut)
    assert client.is_whole == (len(client.tokens) == TOKENS), ends
    if case.is_whole is not None:
        assert client.is_whole == case.is_whole, ends
    if not client.is_whole:
        assert client.error is not None or case.victim == "gateway", ends
    until(fleet.at_rest, what=f"every request to end\n{fleet.said()}")
    held = "ownerserve_cache_held_blocks"
    until(lambda: not any(one.metric(held) for one in fleet.workers), what="writers to end")
    assert not fleet.violations()


def test_the_cases_of_ci_are_some_of_all() -> None:
    assert set(IN_CI) <= set(CASES)
