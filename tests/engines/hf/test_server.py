"""The worker over HTTP, asked by the openai client: a real uvicorn on a free port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ownerserve.engines.hf.model.runner import ModelRunner
from tests.support.metric_lines import summed
from tests.support.waits import until

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import uvicorn  # noqa: E402

from ownerserve.engines.hf.build import HfWorker, WorkerOptions, build_worker  # noqa: E402
from ownerserve.engines.hf.engine.commands import TurnAdmission  # noqa: E402
from ownerserve.engines.hf.http import server  # noqa: E402
from ownerserve.engines.hf.http.serve import listen, url_of  # noqa: E402
from ownerserve.engines.hf.http.server import make_app  # noqa: E402
from ownerserve.kv.ids import TurnId  # noqa: E402
from ownerserve.kv.wire.refusals import WorkerRefusal  # noqa: E402
from ownerserve.kv.wire.rpc import Reject, Release, Reserve, Reserved, Seed  # noqa: E402
from ownerserve.kv.wire.status import read_status  # noqa: E402

pytestmark = pytest.mark.engine
MEASURES = True
"""Prices are what this machine measures."""

MODEL = "tiny-v4"
CHAT = [{"role": "user", "content": "Tell me what you know about rivers, please."}]
WAIT_S = 300.0
START_S = 300.0
"""Until a process of its own serves: it reads torch and transformers first."""


class Served:
    """A worker behind uvicorn in a thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.worker: HfWorker = build_worker(
            WorkerOptions(model=MODEL, kv_bytes=16 << 20, max_running=4)
        )
        bound: socket.socket = listen("127.0.0.1", 0)
        self.url = url_of(bound)
        config = uvicorn.Config(
            make_app(self.worker), log_level="error", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([bound],))
        self._thread.start()
        until(lambda: self._server.started)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)

    def close(self) -> None:
        self.client.close()
        self.http.close()
        self._server.should_exit = True
        self._thread.join(WAIT_S)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.http.get("/ownerserve/status").raise_for_status().json()
        return status

    def metric(self, name: str) -> float:
        return summed(self.http.get("/metrics").text, name)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def ask(served: Served, **fields: Any) -> Any:
    given = {"model": MODEL, "messages": CHAT, "max_tokens": 12, "temperature": 0, **fields}
    return served.client.chat.completions.create(**given)


def test_models(served: Served) -> None:
    [model] = served.client.models.list().data
    assert model.id == MODEL


def test_chat_streamed_and_whole_say_the_same(served: Served) -> None:
    whole = ask(served, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert len(choice.message.content) == 12  # one byte a token, all ASCII
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (47, 12)

    chunks = list(ask(served, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (47, 12)
    assert usage.prompt_tokens_details.cached_tokens == 32
    assert all(c.usage is None for c in chunks[:-1])

    logprobs = choice.logprobs.content
    assert [p.token for p in logprobs] == list(choice.message.content)
    assert all(p.logprob == p.top_logprobs[0].logprob <= 0 for p in logprobs)
    assert [bytes(p.bytes) for p in logprobs] == [c.encode() for c in choice.message.content]
    assert len(logprobs[0].top_logprobs) == 2


def test_completions_with_text_and_with_tokens(served: Served) -> None:
    create = served.client.completions.create
    by_text = create(model=MODEL, prompt="once upon a time", temperature=0, logprobs=1, seed=1)
    by_tokens = create(
        model=MODEL, prompt=list(b"once upon a time"), temperature=0, logprobs=1, seed=1
    )
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_text.usage.completion_tokens == 16
    logprobs = by_text.choices[0].logprobs
    assert "".join(logprobs.tokens) == by_text.choices[0].text
    assert logprobs.text_offset == list(range(16))
    assert [list(top.values()) for top in logprobs.top_logprobs] == [
        [value] for value in logprobs.token_logprobs
    ]


def test_a_session_appends_to_its_last_turn(served: Served) -> None:
    headers = {"x-session-id": "river-talk"}
    body = {"prompt": "x" * 100, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    first = served.http.post("/v1/completions", json=body, headers=headers)
    assert first.headers["x-ownerserve-mode"] == "cold_prefill"
    tokens = first.json()["choices"][0]["token_ids"]
    body["prompt"] = [*b"x" * 100, *tokens, *b"and then?"]
    second = served.http.post("/v1/completions", json=body, headers=headers)
    assert second.headers["x-ownerserve-mode"] == "direct_append"
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert int(second.headers["x-ownerserve-cached-tokens"]) == cached == 128
    assert served.status()["device"]["sessions"] >= 1
    assert served.metric('ownerserve_cached_tokens_total{component="csa_main"}') >= 128


def test_the_status_is_the_record_that_gateways_read_with_what_was_measured(
    served: Served,
) -> None:
    ask(served, max_tokens=20)
    read = read_status(served.http.get("/ownerserve/status").content)
    assert (read.status is not None, read.problems) == (True, ())
    assert read.status is not None
    load, profile, worker = read.status.load, read.status.profile, served.worker
    assert profile.models == (MODEL,)
    assert profile.actions == ("colocated_prefill", "decode_continuation"), "it has no store"
    assert profile.sequence_tokens == worker.facts.sequence_tokens
    device = served.status()["device"]
    block_bytes = load.kv_bytes_free // device["free_slots"]["csa_main"]
    blocks = (load.kv_bytes_free + load.kv_bytes_evictable) // block_bytes
    assert blocks == device["slots"]["csa_main"], "nothing runs: each is free or may be evicted"
    assert load.kv_bytes_total // block_bytes >= blocks, "point state has what is beyond"
    assert load.kv_bytes_evictable > 0, "sessions that are idle hold it"
    assert profile.kv_bytes_per_token > 0 < profile.kv_bytes_per_sequence
    speed = profile.speed
    assert speed is not None and speed.step_ms + speed.step_ms_per_sequence > 0
    for measured_s in (speed.prefill_measured_s, speed.step_measured_s):
        assert measured_s is not None and abs(time.time() - measured_s) < 2 * WAIT_S


def test_choices_seeds_and_stop(served: Served) -> None:
    one = ask(served, n=2, temperature=1.0, seed=7)
    two = ask(served, n=2, temperature=1.0, seed=7)
    texts = [choice.message.content for choice in one.choices]
    assert [choice.message.content for choice in two.choices] == texts
    assert texts[0] != texts[1]
    assert one.usage.completion_tokens == 24

    text = ask(served).choices[0].message.content
    stop = text[5:8]
    stopped = ask(served, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == text[: text.index(stop)]
    streamed = ask(served, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == text[: text.index(stop)]

    by_id = ask(served, extra_body={"stop_token_ids": [ord(text[4])]}).choices[0]
    assert (by_id.message.content, by_id.finish_reason) == (text[: text.index(text[4])], "stop")


def test_a_turns_line_in_the_log_has_the_gateways_ids(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ownerserve.engines.hf.http.server")
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    told = {"x-request-id": "mine-1", "traceparent": trace}
    answer = ask(served, extra_headers=told)
    (line,) = [one for one in caplog.messages if "mine-1" in one]
    assert line == f"turn {answer.id.removeprefix('chatcmpl-')}: request 'mine-1', trace '{trace}'"


def test_two_streamed_choices_keep_apart(served: Served) -> None:
    whole = ask(served, n=2, temperature=1.0, seed=7)
    texts = ["", ""]
    for chunk in ask(served, n=2, temperature=1.0, seed=7, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("chat/completions", {"messages": CHAT, "max_tokens": -1}, 400, "max_tokens"),
        ("chat/completions", {"messages": CHAT, "response_format": {"type": "x"}}, 400, None),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ("chat/completions", {"messages": CHAT, "model": "gpt-9"}, 404, "model"),
        ("completions", {"prompt": [9999]}, 400, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 10**6}, 400, None),
        ("completions", {"prompt": "a", "echo": True}, 400, "echo"),
        ("chat/completions", {"messages": [{"role": "user", "content": [1]}]}, 400, None),
        ("embeddings", {}, 404, None),
    ],
)
def test_client_errors_in_openai_form(
    served: Served, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = served.http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert error["message"]
    if param is not None:
        assert error["param"] == param


def test_a_session_named_twice_must_be_the_same(served: Served) -> None:
    body = {"prompt": "a", "session_id": "one"}
    answer = served.http.post("/v1/completions", json=body, headers={"x-session-id": "two"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "session_id"


def test_the_context_limit_is_an_error_with_its_code(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(served, max_tokens=10**6, stream=True)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_frees_what_it_held(served: Served, streamed: bool) -> None:
    idle = served.status()["device"]
    aborted = served.metric('ownerserve_requests_total{outcome="aborted"}')
    body = {"prompt": "y" * 200, "max_tokens": 5000, "stream": streamed, "ignore_eos": True}
    host = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host[0], int(host[1]))) as line:
        data = json.dumps(body).encode()
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
            + data
        )
        until(lambda: served.status()["load"]["running_sequences"] == 1)
    until(lambda: served.status()["load"]["running_sequences"] == 0)
    after = served.status()["device"]
    # what it had sealed stays in the cache, evictable; nothing else does
    free, was = after["free_slots"], idle["free_slots"]
    assert free["state"] == after["slots"]["state"]
    kept = after["evictable_blocks"] - idle["evictable_blocks"]
    assert was["csa_main"] - free["csa_main"] == kept
    assert served.metric('ownerserve_requests_total{outcome="aborted"}') == aborted + 1


def test_metrics_name_every_component(served: Served) -> None:
    ask(served)
    text = served.http.get("/metrics").text
    for component in ("csa_main", "csa_index", "hca", "swa", "csa_overlap", "state"):
        assert f'ownerserve_pool_slots_used{{component="{component}"}}' in text
    assert served.metric("ownerserve_ttft_seconds_count") > 0
    assert served.metric("ownerserve_step_seconds_count") > 0


def test_health_fails_with_the_engine_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    try:
        assert served.http.get("/health").status_code == 200

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("device lost")

        stream = ask(served, stream=True, max_tokens=5000)
        next(stream)
        monkeypatch.setattr(ModelRunner, "decode", broken)
        with pytest.raises(openai.APIError, match="device lost"):
            list(stream)
        answer = served.http.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        with pytest.raises(openai.InternalServerError, match="device lost"):
            ask(served)
    finally:
        served.close()


def test_the_command_serves_says_so_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    ready = tmp_path / "url"
    arguments = ["--port", "0", "--kv-memory", "8MiB", "--ready-file", str(ready), "--json", "-"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ownerserve.cli.main", "worker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until(lambda: ready.exists() or process.poll() is not None, within_s=START_S)
        url = ready.read_text().strip()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:
            answer = client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=3, temperature=0
            )
        assert answer.usage.completion_tokens == 3
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate()
    report = json.loads(out)
    assert (report["schema"], report["url"]) == ("ownerserve.worker/1", url)
    assert b"Traceback" not in errors
    assert process.returncode == 0


# ---- an engine thread that is stuck


@pytest.mark.parametrize("path", ["/health", "/ownerserve/status", "/ownerserve/cache"])
def test_a_stuck_engine_thread_is_503_and_recovers(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def hang(desk: TurnAdmission, request: object) -> Reject:
        stuck.set()
        go_on.wait(WAIT_S)
        return Reject(WorkerRefusal.ENGINE_BUSY)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(TurnAdmission, "answer", hang)
            patch.setattr(server, "HEALTH_TIMEOUT_S", 0.2)
            hung = served.worker.engine.call(Release(1))
            assert stuck.wait(WAIT_S)
            answer = served.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stuck")
    finally:
        go_on.set()
    hung.result(WAIT_S)
    assert served.http.get(path).status_code == 200


# ---- reservations


def place(served: Served, name: str) -> int:
    """A reserved place's number, as the RPC port gives it."""
    wanted = Reserve(TurnId(name), Seed(10))
    answer = served.worker.engine.call(wanted).result(WAIT_S)
    assert isinstance(answer, Reserved)
    return answer.reservation


def complete(served: Served, reservation: object) -> httpx.Response:
    body = {"prompt": [40, 41, 42], "max_tokens": 2}
    headers = {"x-ownerserve-reservation": str(reservation)}
    return served.http.post("/v1/completions", json=body, headers=headers)


def test_a_request_uses_its_reservation_up(served: Served) -> None:
    number = place(served, "a")
    assert complete(served, number).status_code == 200
    again = complete(served, number)
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "unknown_reservation"
    assert served.metric('ownerserve_requests_total{outcome="unknown_reservation"}') == 1
    assert served.worker.engine.call(Release(number)).result(WAIT_S) == Reject(
        WorkerRefusal.UNKNOWN_RESERVATION
    )


def test_a_reservation_that_was_given_up_or_never_made_is_refused(served: Served) -> None:
    number = place(served, "b")
    served.worker.engine.call(Release(number)).result(WAIT_S)
    assert complete(served, number).status_code == 409
    assert complete(served, 10**9).status_code == 409
    assert ask(served).choices, "one without a reservation needs none"


@pytest.mark.parametrize("number", ["", "x", "-1", "1.0", "9" * 30])
def test_a_reservation_that_is_no_number_is_a_wrong_field(served: Served, number: str) -> None:
    answer = complete(served, number)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-ownerserve-reservation"
