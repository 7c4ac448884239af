"""A worker brings a session's state from the worker that holds it, over real processes: the right
bytes, or it computes. What a gateway does of it: test_bringing_fleet.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import Incarnation, SessionId  # noqa: E402
from ownerserve.kv.messages import RoutingUnit  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.fleet_rig import WAIT_S  # noqa: E402
from tests.support.hf.worker_process import Answers, WorkerProcess  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

FAMILIES = ("tiny-qwen3", "tiny-v4", "tiny-gemma3", "tiny-gptoss", "tiny-qwen3next")
AGENT = SessionId("a" * 32)
KEPT = ("--host-cache", "64MiB", "--dear")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Any]:
    started: list[WorkerProcess] = []

    def start(name: str, *flags: str) -> WorkerProcess:
        started.append(WorkerProcess(tmp_path, name, None, *KEPT, *flags))
        return started[-1]

    yield start
    for worker in started:
        worker.stop()


def lender(worker: WorkerProcess, unit: RoutingUnit | None = None) -> LenderAddress:
    return LenderAddress(unit or worker.unit, worker.rpc)


@pytest.mark.parametrize("road", ["shm", "readv", "tcp"])
def test_each_road_brings_the_same(road: str, workers: Any) -> None:
    near, far = workers("near"), workers("far", "--transfer-roads", road)
    prompt = text(900, seed=3)
    near.serve(prompt, AGENT)
    answer = far.serve(prompt, AGENT, bring_from=lender(near))
    assert_cold("tiny-qwen3", prompt, answer)
    assert answer["cached"] >= 800
    assert far.metric(f'ownerserve_brought_bytes_total{{road="{road}"}}') > 0


def brought(worker: WorkerProcess) -> float:
    return worker.metric('ownerserve_brought_total{end="brought"}')


@pytest.mark.parametrize("model", FAMILIES)
def test_a_turn_elsewhere_reads_what_the_session_left_and_answers_alike(
    model: str, workers: Any
) -> None:
    near, far = workers("near", "--model", model), workers("far", "--model", model)
    prompt = text(900, seed=3)
    first = near.serve(prompt, AGENT)
    longer = [*prompt, *first["tokens"], *text(40, seed=9)]
    answer = far.serve(longer, AGENT, bring_from=lender(near))
    assert brought(far) == 1, far.http.get("/metrics").text
    assert answer["cached"] >= 800
    assert_cold(model, longer, answer)
    # What was brought is its own now: the next turn asks nobody.
    last = far.serve([*longer, *answer["tokens"], *text(40, seed=10)], AGENT)
    assert last["cached"] >= len(longer) // 64 * 64 - 64
    assert brought(far) == 1


def test_who_holds_nothing_is_frozen_or_gone_costs_time_and_no_answer(workers: Any) -> None:
    near, far = workers("near"), workers("far")
    prompt = text(900, seed=3)

    unknown = far.serve(prompt, SessionId("b" * 32), bring_from=lender(near))
    assert_cold("tiny-qwen3", prompt, unknown)

    first = near.serve(prompt, AGENT)
    longer = [*prompt, *first["tokens"], *text(40, seed=9)]
    other_life = RoutingUnit(near.unit.worker, 0, Incarnation(near.unit.incarnation + 1))
    late = far.serve(longer, AGENT, bring_from=lender(near, other_life))
    assert_cold("tiny-qwen3", longer, late)

    near.freeze()
    frozen = far.serve(text(500, seed=5), AGENT, bring_from=lender(near))
    assert_cold("tiny-qwen3", text(500, seed=5), frozen)
    near.process.send_signal(signal.SIGKILL)
    near.process.wait(300)
    gone = far.serve(text(500, seed=6), AGENT, bring_from=lender(near))
    assert_cold("tiny-qwen3", text(500, seed=6), gone)
    assert brought(far) == 0


def test_what_comes_of_a_frozen_lender_is_seen_and_goes(workers: Any) -> None:
    near, far = workers("near"), workers("far", "--transfer-roads", "tcp")
    prompt, bytes_, age = (
        text(900, seed=3),
        "ownerserve_landing_bytes",
        "ownerserve_landing_oldest_seconds",
    )
    near.serve(prompt, AGENT)
    # It says what may be read, and is frozen before the other hears that.
    answers = Answers(near.rpc, b"grown", near.freeze)
    with ThreadPoolExecutor(1) as asking:
        from_near = LenderAddress(near.unit, answers.address)
        turn = asking.submit(far.serve, prompt, AGENT, bring_from=from_near)
        seen_bytes = seen_s = 0.0
        while not turn.done():
            seen_bytes = max(seen_bytes, far.metric(bytes_))
            seen_s = max(seen_s, far.metric(age))
        assert_cold("tiny-qwen3", prompt, turn.result())
    answers.close()
    assert answers.is_told.is_set() and seen_bytes > 0 and seen_s > 0
    until(lambda: not far.metric(bytes_) and not far.metric(age), what="its memory is let go of")
    assert brought(far) == 0


def test_a_turn_that_waits_for_room_takes_it_from_a_frozen_reader(workers: Any) -> None:
    """Its lend stood until nobody had read for 5 s, and the turn stood in line as long."""
    near, far = workers("near", "--kv-memory", "1MiB"), workers("far", "--transfer-roads", "tcp")
    prompt, other = text(900, seed=3), text(900, seed=4)
    near.serve(prompt, AGENT)
    answers = Answers(near.rpc, b"grown", far.freeze)
    with ThreadPoolExecutor(1) as asking:
        from_near = LenderAddress(near.unit, answers.address)
        turn = asking.submit(far.serve, prompt, AGENT, bring_from=from_near)
        assert answers.is_told.wait(WAIT_S)
        assert_cold("tiny-qwen3", other, near.serve(other, SessionId("b" * 32)))
        revoked = near.metric('ownerserve_lends_total{end="revoked"}')
        far.thaw()
        assert_cold("tiny-qwen3", prompt, turn.result())
    answers.close()
    assert revoked == 1


def test_a_worker_without_room_for_what_comes_computes_it(workers: Any) -> None:
    near, far = workers("near"), workers("far", "--landing-memory", "1KiB")
    prompt = text(900, seed=3)
    near.serve(prompt, AGENT)
    assert_cold("tiny-qwen3", prompt, far.serve(prompt, AGENT, bring_from=lender(near)))
    assert far.metric('ownerserve_brought_total{end="no_room"}') > 0 and brought(far) == 0
    assert far.metric("ownerserve_peer_read_bytes_total") == 0


def test_a_fork_elsewhere_reads_its_parents_prefix(workers: Any) -> None:
    near, far = workers("near"), workers("far")
    prompt = text(900, seed=3)
    near.serve(prompt, AGENT)
    branch = [*prompt, *text(60, seed=11)]
    fork = SessionId("c" * 32)
    answer = far.serve(branch, fork, parent=AGENT, bring_from=lender(near))
    assert brought(far) == 1
    assert answer["cached"] >= 800
    assert_cold("tiny-qwen3", branch, answer)


@pytest.mark.parametrize("model", FAMILIES)
def test_a_fork_that_shares_the_beginning_alone_reads_that(model: str, workers: Any) -> None:
    """Many agents begin with one system prompt, and each goes its own way from there. State that is
    kept at points alone is where the parent's turn ended, which is of no use here."""
    near, far = workers("near", "--model", model), workers("far", "--model", model)
    prompt = text(900, seed=3)
    near.serve(prompt, AGENT)
    branch = [*prompt[:600], *text(360, seed=11)]
    fork = SessionId("c" * 32)
    answer = far.serve(branch, fork, parent=AGENT, bring_from=lender(near))
    assert_cold(model, branch, answer)
    here = near.serve(branch, fork, parent=AGENT)
    assert answer["cached"] == here["cached"], "as where its parent ran"
    assert brought(far) == (answer["cached"] > 0)
    if model == "tiny-qwen3":
        assert answer["cached"] == 592
