"""A worker brings what another has put away into its host memory or its store, over real processes:
the right bytes, and none computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from ownerserve.kv.wire.rpc import Admit, Probe, Seed  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

AGENT, OTHER = SessionId("a" * 32), SessionId("b" * 32)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Any]:
    started: list[WorkerProcess] = []

    def start(name: str, *flags: str) -> WorkerProcess:
        started.append(WorkerProcess(tmp_path, name, None, "--dear", *flags))
        return started[-1]

    yield start
    for worker in started:
        worker.stop()


def held(worker: WorkerProcess) -> Admit:
    """What the worker says that it has of the session."""
    said = worker.asked(Probe(Seed(1000), AGENT))
    assert isinstance(said, Admit)
    return said


def put_away(worker: WorkerProcess) -> None:
    """The session is copied below the device, and others take its room there."""
    until(lambda: (held(worker).restorable_tokens or 0) >= 800, within_s=300, what="it is copied")
    number = 0
    while held(worker).resident_tokens:
        assert number < 64, "others take the device's room"
        number += 1
        worker.serve(text(2000, seed=1000 + number), SessionId(f"{number:032x}"))


@pytest.mark.parametrize(
    ("model", "tier"),
    [("tiny-qwen3", "host"), ("tiny-qwen3", "disk"), ("tiny-gemma3", "disk")],
)
def test_a_turn_elsewhere_reads_what_was_put_away_and_computes_none_of_it(
    model: str, tier: str, workers: Any, tmp_path: Path
) -> None:
    below = ("--host-cache", "64MiB") if tier == "host" else ("--store", str(tmp_path / "kv"))
    near = workers("near", "--model", model, *below)
    far = workers("far", "--model", model, "--host-cache", "64MiB")
    lender, prompt = LenderAddress(near.unit, near.rpc), text(900, seed=3)
    other = text(300, seed=4)
    near.serve(other, OTHER)
    far.serve(other, OTHER, bring_from=lender)  # from the device: another memory of the same peer
    assert near.metric("ownerserve_staged_bytes_total") == 0
    first = near.serve(prompt, AGENT)
    put_away(near)

    longer = [*prompt, *first["tokens"], *text(40, seed=9)]
    answer = far.serve(longer, AGENT, bring_from=lender)
    assert far.metric('ownerserve_brought_total{end="brought"}') == 2, far.http.get("/metrics").text
    assert answer["cached"] >= 800, "what was put away is not computed again"
    assert near.metric("ownerserve_staged_bytes_total") > 0
    by_road = far.metric("ownerserve_brought_bytes_total")
    assert far.metric('ownerserve_brought_bytes_total{road="shm"}') == by_road, "the first road"
    assert_cold(model, longer, answer)
    until(
        lambda: near.metric("ownerserve_stage_used_bytes") == 0, within_s=300, what="room is back"
    )
