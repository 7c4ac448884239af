"""A worker has another one compute a turn's prompt, and reads it as it is computed, over real
processes: the right bytes, or it computes itself. What a gateway does of it: test_prefill_fleet.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.wire.headers import (  # noqa: E402
    TURN_HEADER,
    LenderAddress,
    TurnLine,
    encode_turn_line,
)
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.fleet_rig import WAIT_S  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
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


def address(worker: WorkerProcess) -> LenderAddress:
    return LenderAddress(worker.unit, worker.rpc)


def prefills(worker: WorkerProcess, end: str) -> float:
    return worker.metric(f'ownerserve_prefills_for_peers_total{{end="{end}"}}')


@pytest.mark.parametrize("model", FAMILIES)
def test_a_prompt_is_computed_elsewhere_and_answered_here(model: str, workers: Any) -> None:
    p, d = workers("p", "--model", model), workers("d", "--model", model)
    prompt = text(900, seed=3)
    answer = d.serve(prompt, AGENT, decode_from=address(p))
    assert answer["mode"] == "remote_prefill", d.http.get("/metrics").text
    assert answer["cached"] >= 832  # but for the last block, which is never sent
    assert_cold(model, prompt, answer)
    assert prefills(p, "accepted") == prefills(p, "read") == 1
    # The next turn's prompt too: what was generated here is not computed again there.
    longer = [*prompt, *answer["tokens"], *text(500, seed=9)]
    again = d.serve(longer, AGENT, decode_from=address(p))
    assert again["mode"] == "remote_prefill"
    assert_cold(model, longer, again)


def test_a_prompt_computed_elsewhere_comes_part_by_part(workers: Any) -> None:
    """Four parts of one lend; the recurrent state comes with the last one."""
    model = "tiny-qwen3next"
    p, d = workers("p", "--model", model), workers("d", "--model", model, "--part-tokens", "256")
    prompt = text(900, seed=3)
    answer = d.serve(prompt, AGENT, decode_from=address(p))
    assert answer["mode"] == "remote_prefill", d.http.get("/metrics").text
    assert answer["cached"] >= 832
    assert_cold(model, prompt, answer)
    assert prefills(p, "accepted") == prefills(p, "read") == 1
    assert d.metric('ownerserve_brought_total{end="brought"}') == 1


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3next"])
def test_layers_are_read_while_their_step_goes_on(model: str, workers: Any) -> None:
    """What the lend has missed of the prompt's first steps comes as it stands, all else by layers;
    points with the last step.
    """
    p, d = workers("p", "--model", model, "--layers"), workers("d", "--model", model)
    prompt = text(3000, seed=4)
    answer = d.serve(prompt, AGENT, decode_from=address(p))
    assert answer["mode"] == "remote_prefill", d.http.get("/metrics").text
    assert_cold(model, prompt, answer)
    assert p.metric('ownerserve_prefill_told_bytes_total{after="layer"}') > 0


def test_whoever_stops_amid_a_prefill_costs_time_and_no_answer(workers: Any) -> None:
    p, d = (workers(name, "--kv-memory", "64MiB") for name in ("p", "d"))
    begun = 0

    def amid(seed: int, stop: Callable[[], None]) -> tuple[list[int], dict[str, Any]]:
        """A turn whose prompt is being read of P when that stops. D asks nothing of who was silent
        a moment ago: then it computes, and there is another turn."""
        nonlocal begun
        before, is_read = d.metric("ownerserve_peer_read_bytes_total"), False
        while not is_read:
            seed += 100
            prompt, answers = text(5000, seed=seed), list[dict[str, Any]]()
            line = {"name": SessionId(f"{seed:032x}"), "decode_from": address(p)}
            turn = threading.Thread(
                target=lambda prompt=prompt, line=line, answers=answers: answers.append(
                    d.serve(prompt, **line)
                )
            )
            turn.start()
            until(
                lambda turn=turn: (
                    d.metric("ownerserve_peer_read_bytes_total") > before or not turn.is_alive()
                ),
                within_s=WAIT_S,
                what="D reads",
            )
            is_read = d.metric("ownerserve_peer_read_bytes_total") > before
        stop()
        turn.join(WAIT_S)
        begun += 1
        return prompt, answers[0]

    prompt, answer = amid(21, p.freeze)
    assert_cold("tiny-qwen3", prompt, answer)
    p.thaw()
    over = ("read", "left", "called_off")
    until(
        lambda: sum(prefills(p, end) for end in over) == begun,
        within_s=WAIT_S,
        what="P gives the prompt up",
    )
    until(lambda: p.metric("ownerserve_cache_held_blocks") == 0, within_s=WAIT_S, what="no lend")

    prompt, answer = amid(22, p.process.kill)
    assert_cold("tiny-qwen3", prompt, answer)
    assert d.metric("ownerserve_cache_held_blocks") == 0
    # Who is gone from the beginning costs the wait for a lend.
    late = d.serve(text(500, seed=23), AGENT, decode_from=address(p))
    assert late["mode"] == "cold_prefill"
    assert_cold("tiny-qwen3", text(500, seed=23), late)


def test_a_client_that_hangs_up_and_a_reader_that_dies_stop_the_prefill(workers: Any) -> None:
    p, d = (workers(name, "--kv-memory", "64MiB") for name in ("p", "d"))

    def order(seed: int, timeout_s: float) -> None:
        """A turn at D whose client waits so long, and gets no answer."""
        line = TurnLine(name=SessionId(f"{seed:032x}"), target=d.unit, decode_from=address(p))
        with pytest.raises(httpx.TransportError):
            httpx.post(
                f"{d.url}/v1/completions",
                json={"prompt": text(8000, seed=seed), "max_tokens": 4},
                headers={TURN_HEADER: encode_turn_line(line).decode()},
                timeout=timeout_s,
            )

    def over() -> float:
        return sum(prefills(p, end) for end in ("read", "left", "called_off"))

    order(31, 0.5)
    until(lambda: prefills(p, "accepted") == over() == 1, within_s=WAIT_S, what="P hears of it")
    turn = threading.Thread(target=order, args=(32, WAIT_S))
    turn.start()
    until(lambda: prefills(p, "accepted") == 2, within_s=WAIT_S, what="P computes")
    d.process.kill()
    turn.join(WAIT_S)
    until(lambda: over() + prefills(p, "unasked") == 2, within_s=WAIT_S, what="the lend expires")
    until(lambda: p.metric("ownerserve_cache_held_blocks") == 0, within_s=WAIT_S, what="no lend")


def test_where_no_gateway_names_one_a_known_peer_computes_long_prompts(workers: Any) -> None:
    p = workers("p")
    d = workers("d", "--prefill-peer", p.rpc, "--prefill-tokens", "512")
    short, long = text(300, seed=41), text(900, seed=42)
    assert d.serve(short, AGENT)["mode"] == "cold_prefill"
    answer = d.serve(long, SessionId("b" * 32))
    assert answer["mode"] == "remote_prefill"
    assert_cold("tiny-qwen3", long, answer)
    # What a session's next turn adds is short again, and computed where its state is.
    longer = [*long, *answer["tokens"], *text(60, seed=43)]
    assert d.serve(longer, SessionId("b" * 32))["mode"] == "direct_append"
    assert prefills(p, "accepted") == 1
    p.process.kill()
    alone = d.serve(text(900, seed=44), SessionId("c" * 32))
    assert alone["mode"] == "cold_prefill"
