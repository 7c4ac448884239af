"""A turn that runs moves to another worker amid its answer, as its own is drained: its client reads
one answer, the one that a worker alone would have given. Real workers, a directory and a gateway,
in threads of one process; processes of their own, killed and frozen: test_turns_move_cut_short.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import WorkerId  # noqa: E402
from ownerserve.node.runtime.node_runtime import Calibration  # noqa: E402
from ownerserve.node.transfers.opening import TransferPlace  # noqa: E402
from tests.support.hf.assumed import DEAR, pass_over, slow_steps  # noqa: E402
from tests.support.hf.engine_rig import text  # noqa: E402
from tests.support.hf.fleet_rig import WAIT_S, ServedGateway, ServedWorker  # noqa: E402
from tests.support.hf.moving_turns import TOKENS, WORDS, Read, chat  # noqa: E402
from tests.support.hf.owning_fleet import Fleet  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = pytest.mark.engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Two workers that own and lend, and a gateway. Computing is dear, so that what can be brought
    is; steps take their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "observe", pass_over)
        patch.setattr(Calibration.__init__, "__defaults__", (DEAR,))
        slow_steps(patch.setattr)
        one = Fleet(2, gateways=1, host_cache_bytes=64 << 20, transfer=TransferPlace())
        leased = 'ownerserve_directory_answers_total{answer="leased"}'
        until(lambda: all(worker.metric(leased) for worker in one.workers))
        yield one
        one.close()


def moves(worker: ServedWorker, way: str, end: str) -> float:
    return worker.metric(f'ownerserve_turn_moves_total{{end="{end}",way="{way}"}}')


def came(worker: ServedWorker) -> tuple[float, float]:
    """Bytes of state that came of turns before they were stopped, and for turns that are there."""
    return (
        worker.metric("ownerserve_turn_state_bytes_total"),
        worker.metric("ownerserve_restored_bytes_total"),
    )


class Drained:
    """The worker that ran a turn when it was drained (`here`), and the other one."""

    def __init__(self, fleet: Fleet) -> None:
        self.workers = fleet.workers
        self.gateway: ServedGateway = fleet.gateways[0]
        self.here = self.there = fleet.workers[0]
        self._before: tuple[float, float] = (0.0, 0.0)

    def drain(self, name: str) -> None:
        (self.here,) = [worker for worker in self.workers if worker.name == name]
        (self.there,) = [worker for worker in self.workers if worker is not self.here]
        self._before = self._counts()
        self.gateway.read(lambda: self.gateway.gateway.roster.drain(WorkerId(name)))

    def _counts(self) -> tuple[float, float]:
        return moves(self.here, "went", "moved"), moves(self.there, "came", "went_on")

    @property
    def moved(self) -> tuple[float, float]:
        """How many turns went from here and to there since it was drained."""
        went, came = self._counts()
        return went - self._before[0], came - self._before[1]

    def undrain(self) -> None:
        name = WorkerId(self.here.name)
        self.gateway.run(self.gateway.gateway.roster.undrain(name))
        until(lambda: len(self.gateway.read(lambda: self.gateway.gateway.state.fleet.up)) == 2)


@pytest.fixture
def drained(fleet: Fleet) -> Iterator[Drained]:
    one = Drained(fleet)
    yield one
    one.undrain()
    one.gateway.read(one.gateway.gateway.state.check)
    for worker in fleet.workers:
        until(lambda worker=worker: not worker.metric("ownerserve_cache_held_blocks"))


def test_a_streamed_answer_goes_on_where_its_worker_is_drained(drained: Drained) -> None:
    gateway = drained.gateway
    read = Read(gateway.http, chat(), drained.drain, session="first")
    assert not read.errors, read.errors
    here, there = drained.here, drained.there
    assert drained.moved == (1, 1)
    assert there.metric('ownerserve_brought_total{end="brought"}') >= 1
    assert gateway.metric("ownerserve_gateway_legs_total", leg="move", outcome="joined") == 1
    assert 0 < gateway.metric("ownerserve_gateway_turn_move_longest_pause_seconds") < WAIT_S
    assert gateway.metric("ownerserve_gateway_turn_moves_total", end="sent") == 1

    alone = Read(there.http, chat())
    assert len(alone.tokens) == TOKENS and alone.finish == ["length"]
    assert (read.tokens, read.said, read.finish) == (alone.tokens, alone.said, alone.finish)
    assert len({event["id"] for event in read.events}) == 1
    assert read.is_whole and read.lines.count("data: [DONE]") == 1
    (usage,), (before,) = read.usage, alone.usage
    assert usage["prompt_tokens"] == before["prompt_tokens"]
    assert usage["completion_tokens"] == TOKENS
    said = [line for line in read.lines if line.startswith(":")]
    assert any("x-ownerserve-reason: moved" in line for line in said), said
    assert not any(line.startswith(": moved ") for line in said)
    # The session follows, as after any turn that another than its owner has served: with its next
    # one at the latest, which says whose it is.
    Read(gateway.http, chat(max_tokens=2), session="first")
    until(lambda: there.metric("ownerserve_sessions_owned") == 1)
    until(lambda: here.metric("ownerserve_sessions_owned") == 0)


def test_most_of_its_state_comes_while_it_is_written_on(drained: Drained) -> None:
    """Its client waits for the rest alone: what was sealed since, and less than a block."""
    asked = {"role": "user", "content": f"None of them has this. {WORDS}"}
    body, before = chat(messages=[asked]), {one.name: came(one) for one in drained.workers}
    read = Read(drained.gateway.http, body, drained.drain, session="ahead")
    there = drained.there
    assert drained.moved == (1, 1)
    assert there.metric('ownerserve_turn_states_total{end="brought"}') >= 1
    ahead, rest = (now - was for now, was in zip(came(there), before[there.name], strict=True))
    assert ahead > 0 and rest < ahead / 2, (ahead, rest)
    alone = Read(there.http, body)
    assert (read.tokens, read.said, read.finish) == (alone.tokens, alone.said, alone.finish)


SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"temperature": 0}),
    "with logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "with penalties": (CHAT, {"presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 90}),
    "text": (COMPLETIONS, {"prompt": text(200, seed=5), "logprobs": 1}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_is_the_answer_that_a_worker_alone_gives(scenario: str, drained: Drained) -> None:
    path, more = SCENARIOS[scenario]
    body = chat(**more)
    if path == COMPLETIONS:
        del body["messages"]
    read = Read(drained.gateway.http, body, drained.drain, path=path, session=scenario)
    assert drained.moved == (1, 1), read.lines[-4:]
    alone = Read(drained.there.http, body, path=path)
    assert len(alone.tokens) == TOKENS
    assert (read.tokens, read.said, read.finish) == (alone.tokens, alone.said, alone.finish)
    assert len(read.logprobs) == len(alone.logprobs) == (TOKENS if "logprobs" in body else 0)
    for one, other in zip(read.logprobs, alone.logprobs, strict=True):
        if path == COMPLETIONS:
            (token, logprob, offset), (token_alone, logprob_alone, offset_alone) = one, other
            assert (token, offset) == (token_alone, offset_alone)
        else:
            logprob, logprob_alone = one["logprob"], other["logprob"]
            assert one["token"] == other["token"]
        assert logprob == pytest.approx(logprob_alone, abs=1e-4)


def test_it_moves_on_as_often_as_its_workers_leave(drained: Drained) -> None:
    """Here and back, over what it has said at each."""

    def back(_: str) -> None:
        here, there = drained.here, drained.there
        assert drained.moved == (1, 1)
        drained.undrain()
        drained.drain(there.name)
        assert drained.there is here

    body = chat(seed=17, frequency_penalty=0.3)
    read = Read(drained.gateway.http, body, drained.drain, back, session="back")
    assert not read.errors and drained.moved == (1, 1)
    alone = Read(drained.there.http, body)
    assert (read.tokens, read.said, read.finish) == (alone.tokens, alone.said, alone.finish)
    assert [one["completion_tokens"] for one in read.usage] == [TOKENS]


def test_a_client_that_does_not_ask_for_the_usage_does_not_get_it(drained: Drained) -> None:
    """The gateway asks for it, and learns of both legs as of one turn."""
    body = chat(seed=19)
    del body["stream_options"]
    output = "ownerserve_gateway_output_tokens_total"
    before = drained.gateway.metric(output)
    read = Read(drained.gateway.http, body, drained.drain, session="unasked")
    assert drained.moved == (1, 1) and read.is_whole and not read.usage
    assert len(read.tokens) == TOKENS
    assert drained.gateway.metric(output) - before == TOKENS


def test_a_stop_string_that_comes_after_the_move_ends_it(drained: Drained) -> None:
    """Its text is that of both legs."""
    whole = Read(drained.there.http, chat(seed=5))
    stop = whole.said[len(whole.said) * 2 // 3 :][:6]
    body = chat(seed=5, stop=[stop, "never said"])
    read = Read(drained.gateway.http, body, drained.drain, session="stops")
    assert drained.moved == (1, 1)
    assert read.said == whole.said[: whole.said.find(stop)]
    assert read.finish == ["stop"] and stop not in read.said


def test_an_answer_that_is_not_streamed_moves_too(drained: Drained) -> None:
    """Nobody has got anything of it: the whole is said where it ends, with what was said before."""
    body = chat(stream=False, logprobs=True)
    del body["stream_options"]
    answers = []

    def ask() -> None:
        headers = {"x-session-id": "whole"}
        answers.append(drained.gateway.http.post(CHAT, json=body, headers=headers))

    asking = threading.Thread(target=ask)
    asking.start()
    gateway = drained.gateway.gateway

    def running() -> list[str]:
        return [str(one.id) for one in gateway.state.fleet if one.requests]

    until(lambda: drained.gateway.read(running), what="the turn to be sent")
    drained.drain(drained.gateway.read(running)[0])
    asking.join(WAIT_S)
    (answer,) = answers
    assert answer.status_code == 200, answer.text
    assert drained.moved == (1, 1)
    assert answer.headers["x-ownerserve-worker"] == drained.there.name
    assert answer.headers["x-ownerserve-reason"] == "moved"
    assert answer.headers["x-ownerserve-mode"] == "migrate"
    alone = drained.there.http.post(CHAT, json=body).json()
    (said,), (wanted,) = answer.json()["choices"], alone["choices"]
    assert said["token_ids"] == wanted["token_ids"]
    assert said["message"] == wanted["message"]
    logprobs = [one["logprob"] for one in said["logprobs"]["content"]]
    expected = [one["logprob"] for one in wanted["logprobs"]["content"]]
    assert logprobs == pytest.approx(expected, abs=1e-4)
    assert answer.json()["usage"]["completion_tokens"] == TOKENS


def test_several_choices_stay_and_end_where_they_run(drained: Drained) -> None:
    read = Read(drained.gateway.http, chat(n=2), drained.drain, session="two")
    assert drained.moved == (0, 0)
    assert read.finish == ["length", "length"] and read.is_whole
    assert drained.gateway.metric("ownerserve_gateway_turn_moves_total", end="not_movable") == 1
