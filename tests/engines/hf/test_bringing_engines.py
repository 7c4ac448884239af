"""Workers bring from each other over Mooncake and over NIXL, between real processes: the bytes of a
cold engine, by way of the arena. More of their hazards: transfer/movers/test_engines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from tests.support.children import importing  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.worker_process import Answers, WorkerProcess  # noqa: E402
from tests.support.transfer.engines.environments import SETTINGS, packages_of  # noqa: E402
from tests.support.waits import WAIT_S, until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

AGENT = SessionId("a" * 32)
KEPT = ("--host-cache", "64MiB", "--dear")
Start = Callable[..., WorkerProcess]


@pytest.fixture(params=SETTINGS)
def engine(request: pytest.FixtureRequest) -> str:
    if packages_of(request.param) is None:
        pytest.skip(f"needs {request.param}'s environment: make test-engines")
    return str(request.param)


@pytest.fixture
def start(engine: str, tmp_path: Path) -> Iterator[Start]:
    started: list[WorkerProcess] = []
    packages = packages_of(engine)
    assert packages is not None
    env = importing(packages, **SETTINGS[engine])

    def worker(name: str) -> WorkerProcess:
        roads = ("--transfer-roads", engine, "--allow-remote", "--transfer-arena", "8MiB")
        started.append(WorkerProcess(tmp_path, name, None, *KEPT, *roads, env=env))
        return started[-1]

    yield worker
    for one in started:
        one.stop()


def test_a_worker_brings_by_an_engine_what_another_computed(engine: str, start: Start) -> None:
    near, far = start("near"), start("far")
    prompt = text(900, seed=3)
    near.serve(prompt, AGENT)
    answer = far.serve(prompt, AGENT, bring_from=LenderAddress(near.unit, near.rpc))
    assert_cold("tiny-qwen3", prompt, answer)
    assert answer["cached"] >= 800, far.http.get("/metrics").text
    assert far.metric(f'ownerserve_brought_bytes_total{{road="{engine}"}}') > 0
    assert far.metric('ownerserve_transfer_arena_bytes{state="free"}') == 8 << 20
    assert far.metric("ownerserve_transfer_arena_abandoned_total") == 0


def test_a_worker_killed_amid_a_read_costs_the_arena_its_part_and_the_turn_nothing(
    engine: str, start: Start
) -> None:
    near, far = start("near"), start("far")
    prompt = text(900, seed=3)
    near.serve(prompt, AGENT)
    # It says what may be read, and is frozen before the other hears that, so that nothing is sent.
    answers = Answers(near.rpc, b"grown", near.freeze)
    arena = "ownerserve_transfer_arena_bytes"
    with ThreadPoolExecutor(1) as asking:
        from_near = LenderAddress(near.unit, answers.address)
        turn = asking.submit(far.serve, prompt, AGENT, bring_from=from_near)
        until(
            lambda: any(far.metric(f'{arena}{{state="{s}"}}') for s in ("reserved", "abandoned")),
            what="a read of a worker that is frozen",
        )
        near.process.kill()
        near.process.wait(WAIT_S)
        answer = turn.result(WAIT_S)
    answers.close()
    assert_cold("tiny-qwen3", prompt, answer)
    assert answers.is_told.is_set() and answer["cached"] == 0
    assert far.metric('ownerserve_brought_total{end="brought"}') == 0
    assert far.metric("ownerserve_transfer_arena_abandoned_total") > 0
    assert far.metric(f'{arena}{{state="abandoned"}}') > 0
