"""A real gateway asks real workers before it sends: places, refusals, and silence."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import zmq

from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.engines.hf.engine.commands import TurnAdmission
from ownerserve.engines.hf.http import server
from ownerserve.gateway import turns
from ownerserve.gateway.workers.rpc import ASK_S, REPEAT_S, Places
from ownerserve.kv.ids import TurnId, WorkerId
from ownerserve.kv.wire.rpc import (
    Cancel,
    Cancelled,
    Commit,
    Release,
    Reserve,
    Reserved,
    Seed,
    decode_answer,
    decode_request,
    encode,
    new_nonce,
)
from ownerserve.node import admission
from ownerserve.node.rpc.server import RpcClient
from tests.support.hf.fleet_rig import WAIT_S, ServedGateway, ServedWorker
from tests.support.waits import until

pytestmark = pytest.mark.engine


def text(tokens: int, seed: int) -> list[int]:
    return [(seed * 37 + i * i) % 240 + 5 for i in range(tokens)]


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[ServedWorker, ServedWorker]]:
    options = WorkerOptions(model="tiny-qwen3", kv_bytes=3 << 20, max_running=4)
    pair = ServedWorker(options), ServedWorker(options)
    yield pair
    for worker in pair:
        worker.close()


@pytest.fixture
def gateway(
    workers: tuple[ServedWorker, ServedWorker], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServedGateway]:
    """One whose workers' words come in time and whose places stay, however loaded the machine is:
    a word that is late lets the turn be sent unasked."""
    for bound in ("RESERVE_MIN_S", "RESERVE_MAX_S"):
        monkeypatch.setattr(f"ownerserve.node.rpc.server.{bound}", WAIT_S)
    monkeypatch.setattr("ownerserve.node.admission.RESERVED_FOR_S", 1e4)
    monkeypatch.setattr(turns, "Places", partial(Places, ask_s=WAIT_S))
    gateway = ServedGateway(*workers, health_interval_s=WAIT_S)
    yield gateway
    gateway.close()


def filled(worker: ServedWorker) -> int:
    """Take what room the worker has by a reservation; its number."""
    client = RpcClient(worker.rpc.address)
    try:
        most = worker.http.get("/v1/models").json()["data"][0]["max_model_len"]
        answer = client.ask(Reserve(TurnId("test"), Seed(most - 64)))
        assert isinstance(answer, Reserved), answer
        return answer.reservation
    finally:
        client.close()


def emptied(worker: ServedWorker, reservation: int) -> None:
    client = RpcClient(worker.rpc.address)
    client.ask(Release(reservation))
    client.close()


def test_a_new_session_comes_with_a_place_and_its_next_turn_without(
    workers: tuple[ServedWorker, ServedWorker], gateway: ServedGateway
) -> None:
    before = sum(w.metric('ownerserve_reservations_total{outcome="reserved"}') for w in workers)
    first = gateway.complete(text(300, 1), "a")
    assert first.status_code == 200
    assert gateway.metric("ownerserve_gateway_places_total", outcome="reserved") == 1
    after = sum(w.metric('ownerserve_reservations_total{outcome="reserved"}') for w in workers)
    assert after - before == 1
    answer = first.json()["choices"][0]["token_ids"]
    second = gateway.complete([*text(300, 1), *answer, *text(20, 2)], "a")
    assert second.headers["x-ownerserve-mode"] == "direct_append"
    assert gateway.metric("ownerserve_gateway_places_total", outcome="reserved") == 1, (
        "sent unasked"
    )
    assert not gateway.read(lambda: dict(gateway.gateway.turns.observer.pressure))


def test_who_has_no_room_is_not_sent_the_turn(
    workers: tuple[ServedWorker, ServedWorker], gateway: ServedGateway
) -> None:
    """The worker that new sessions go to first is filled: on a busy machine the two have measured
    unlike speeds, and the other one would be asked by nobody."""
    first = gateway.complete(text(300, 9), "first").headers["x-ownerserve-worker"]
    asked, other = workers if workers[0].name == first else reversed(workers)
    full = filled(asked)
    try:
        for number in range(4):
            answer = gateway.complete(text(300, 10 + number), f"new {number}")
            assert answer.headers["x-ownerserve-worker"] == other.name
        assert (
            gateway.metric("ownerserve_gateway_pressure_total", kind="refused", reason="no_room")
            > 0
        )
    finally:
        emptied(asked, full)


def test_where_nobody_has_room_a_turn_waits_in_a_queue(
    workers: tuple[ServedWorker, ServedWorker], gateway: ServedGateway
) -> None:
    full = [filled(worker) for worker in workers]

    def relieve() -> None:
        time.sleep(0.3)
        for worker, number in zip(workers, full, strict=True):
            emptied(worker, number)

    thread = threading.Thread(target=relieve)
    thread.start()
    answer = gateway.complete(text(300, 20), "waits")
    thread.join()
    assert answer.status_code == 200
    assert gateway.metric("ownerserve_gateway_pressure_total", kind="unasked") == 1


def test_a_silent_admission_delays_a_turn_by_the_deadline_and_no_more(
    workers: tuple[ServedWorker, ServedWorker],
) -> None:
    gateway = ServedGateway(*workers, health_interval_s=60.0)
    silent = zmq.Context.instance().socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    lines = gateway.gateway.turns.lines
    names = [WorkerId(worker.name) for worker in workers]
    try:
        address = f"tcp://127.0.0.1:{port}"
        gateway.read(lambda: [lines.learn(name, "127.0.0.1", address) for name in names])
        answer = gateway.complete(text(100, 30), "patient")
        assert answer.status_code == 200
        heard = []
        while not heard or not isinstance(heard[-1][0], Cancel):
            assert silent.poll(WAIT_S * 1000)
            heard.append(decode_request(silent.recv_multipart()[-1]))
        assert len(heard) == math.ceil(ASK_S / REPEAT_S) + 1, "said again, then called off"
        assert len({nonce for _, nonce in heard[:-1]}) == 1
        assert gateway.metric("ownerserve_gateway_places_total", outcome="no_answer") == 1
        assert (
            gateway.metric("ownerserve_gateway_pressure_total", kind="unasked", reason="no_word")
            == 1
        )
    finally:
        silent.close(0)
        gateway.close()


def test_an_append_that_would_wait_is_refused_before_work_and_goes_to_the_next_worker(
    workers: tuple[ServedWorker, ServedWorker], gateway: ServedGateway
) -> None:
    first = gateway.complete(text(300, 40), "grows")
    (owner,) = [one for one in workers if one.name == first.headers["x-ownerserve-worker"]]
    (other,) = [one for one in workers if one is not owner]
    full = filled(owner)
    try:
        prompt = [*text(300, 40), *first.json()["choices"][0]["token_ids"], *text(200, 41)]
        answer = gateway.complete(prompt, "grows")
    finally:
        emptied(owner, full)
    assert answer.headers["x-ownerserve-worker"] == other.name
    assert answer.headers["x-ownerserve-reason"] == "retry_other_worker"
    assert (
        gateway.metric("ownerserve_gateway_pressure_total", kind="refused", reason="no_room") == 1
    )
    assert gateway.metric("ownerserve_gateway_places_total", outcome="no_room") == 0, "nobody asked"


def test_a_place_is_kept_for_a_turn_that_is_on_its_way(
    workers: tuple[ServedWorker, ServedWorker],
    gateway: ServedGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its Commit has come, and the worker reads the prompt for longer than a place is held."""
    held_s, ends_s = 5.0, list[float]()
    monkeypatch.setattr(admission, "RESERVED_FOR_S", held_s)
    answer, prompt = TurnAdmission.answer, server.completion_prompt

    def answered(desk: TurnAdmission, request: Any) -> Any:
        if isinstance(request, Commit):
            monkeypatch.setattr(admission, "RESERVED_FOR_S", 1e4)
        said = answer(desk, request)
        if isinstance(request, Reserve):
            ends_s.append(time.monotonic() + held_s)
        return said

    def read(*arguments: Any) -> list[int]:
        time.sleep(max(0.0, ends_s[-1] + 0.2 - time.monotonic()))
        return prompt(*arguments)

    monkeypatch.setattr(TurnAdmission, "answer", answered)
    monkeypatch.setattr(server, "completion_prompt", read)
    assert gateway.complete(text(300, 60), "slow to read").status_code == 200
    assert gateway.metric("ownerserve_gateway_places_total", outcome="reserved") == 1
    assert not gateway.read(lambda: dict(gateway.gateway.turns.observer.pressure))


def test_a_client_that_hangs_up_gives_its_place_back(
    workers: tuple[ServedWorker, ServedWorker],
    gateway: ServedGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The turn has its place at a worker, and no connection to it yet."""

    def held() -> int:
        return sum(worker.worker.engine.standing.places for worker in workers)

    never = asyncio.Event()
    for pool in gateway.gateway.turns.pools.values():
        gateway.read(pool.close_idle)
        monkeypatch.setattr(pool, "connect", never.wait)
    body = json.dumps({"prompt": text(300, 50), "max_tokens": 4}).encode()
    with socket.create_connection(("127.0.0.1", gateway.gateway.port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nx-session-id: leaves\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        until(held)
    until(lambda: not held())
    assert gateway.read(lambda: gateway.gateway.state.live) == 0


def test_a_cancel_overtakes_what_waits_for_a_long_step(
    workers: tuple[ServedWorker, ServedWorker],
) -> None:
    """The engine is in a step; a place was asked for, and is not wanted any more."""
    worker = workers[0]
    step, in_step, is_over = threading.Event(), threading.Event(), threading.Event()

    def long_step(_: object) -> None:
        in_step.set()
        step.wait(WAIT_S)
        is_over.set()

    def reservations() -> float:
        return worker.metric("ownerserve_reservations_total")

    before, nonce = reservations(), new_nonce()
    worker.worker.engine.call(Release(10**6)).add_done_callback(long_step)
    assert in_step.wait(WAIT_S)
    line = zmq.Context.instance().socket(zmq.DEALER)
    line.connect(worker.rpc.address)
    try:
        line.send_multipart([b"1", encode(Reserve(TurnId("t"), Seed(100)), nonce)])
        line.send_multipart([b"2", encode(Cancel(nonce))])
        assert line.poll(WAIT_S * 1000)
        number, data = line.recv_multipart()
        assert (number, decode_answer(data)) == (b"2", Cancelled())
        assert not is_over.is_set()
    finally:
        step.set()
        line.close(0)
    until(lambda: worker.metric('ownerserve_rpc_requests_total{what="cancelled"}') == 1)
    client = RpcClient(worker.rpc.address)
    client.ask(Release(10**6))  # the engine has looked at all that came before it
    client.close()
    assert reservations() == before


def test_a_place_is_given_back_by_a_release_that_waited_for_a_long_step(
    workers: tuple[ServedWorker, ServedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than an answer is waited for: nobody says it again, and the place must not stay."""
    worker = workers[0]
    # It does not run out.
    monkeypatch.setattr("ownerserve.node.admission.RESERVED_FOR_S", 1e4)
    full, in_step = filled(worker), threading.Event()

    def long_step(_: object) -> None:
        in_step.set()
        time.sleep(2.5)

    worker.worker.engine.call(Release(10**6)).add_done_callback(long_step)
    assert in_step.wait(WAIT_S)
    emptied(worker, full)
    until(lambda: worker.worker.engine.standing.places == 0)


def test_a_client_that_hangs_up_calls_off_what_its_gateway_asked_of_a_busy_worker(
    workers: tuple[ServedWorker, ServedWorker],
    gateway: ServedGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All three are real; the engines are in a step from before the question to after the end."""
    monkeypatch.setattr("ownerserve.node.rpc.server.RESERVE_MIN_S", 0.5)
    step, in_step = threading.Event(), threading.Semaphore(0)

    def long_step(_: object) -> None:
        in_step.release()
        step.wait(10.0)

    def cancelled() -> float:
        return sum(w.metric('ownerserve_rpc_requests_total{what="cancelled"}') for w in workers)

    before = cancelled()
    body = json.dumps({"prompt": text(300, 60), "max_tokens": 4}).encode()
    try:
        for worker in workers:
            worker.worker.engine.call(Release(10**6)).add_done_callback(long_step)
            assert in_step.acquire(timeout=WAIT_S)
        with socket.create_connection(("127.0.0.1", gateway.gateway.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nx-session-id: hangs up\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            until(lambda: gateway.read(lambda: gateway.gateway.state.live))
        until(lambda: cancelled() == before + 1)
        assert not step.is_set()
    finally:
        step.set()
    until(lambda: gateway.read(lambda: gateway.gateway.turns.places.counts["cancelled"]))
    assert gateway.read(lambda: gateway.gateway.state.live) == 0
