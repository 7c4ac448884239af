"""A worker with an online HCA tail answers as the bare Runner (engine_rig), which has raw rows."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.cache.metrics import snapshot  # noqa: E402
from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.engines.hf.metrics.prometheus import render  # noqa: E402
from ownerserve.engines.hf.node.port import identity_of  # noqa: E402
from ownerserve.engines.hf.scheduling.requests import Sampling  # noqa: E402
from ownerserve.engines.hf.state.layers import OnlineTail  # noqa: E402
from ownerserve.engines.hf.state.states import HCA_TAIL  # noqa: E402
from ownerserve.kv.descriptor import TailForm  # noqa: E402
from ownerserve.kv.messages import ExecutionMode  # noqa: E402
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from tests.support.hf.engine_rig import (  # noqa: E402
    TOLERANCE,
    Answer,
    Rig,
    assert_right,
    request,
    text,
    worst_error,
)

pytestmark = pytest.mark.engine

RAW, ONLINE = TailForm.RAW_ROWS, TailForm.ONLINE
WAIT_S = 300.0


def test_alone_and_in_batches() -> None:
    rig = Rig(hca_tail=ONLINE)
    lengths = (5, 150, 33, 64)

    async def scenario() -> list[Answer]:
        [alone] = await rig.ask(request("alone", text(90), new=20))
        loaded = [request(f"r{n}", text(n, seed=n), new=18 + n % 5) for n in lengths]
        return [alone, *await rig.ask(*loaded)]

    for answer in rig.play(scenario):
        assert_right(answer)


def test_preempted_and_resumed() -> None:
    rig = Rig(blocks=9, hca_tail=ONLINE)
    requests = [request(f"r{i}", text(60, seed=i), new=30) for i in range(3)]
    answers = rig.play(lambda: rig.ask(*requests))
    assert rig.scheduler.counts.preemptions > 0
    for answer in answers:
        assert_right(answer)


def test_choices_fork_in_mid_window() -> None:
    rig = Rig(max_running=3, hca_tail=ONLINE)
    sampling = Sampling(temperature=1.0, seed=3, logprobs=0)
    ask = request("n", text(55), sampling=sampling, choices=4)
    [answer] = rig.play(lambda: rig.ask(ask))
    assert len({tuple(answer.tokens(choice)) for choice in range(4)}) == 4
    for choice in range(4):
        assert_right(answer, choice=choice)


def test_conversations_stay_right_while_others_evict_them() -> None:
    rig = Rig(blocks=24, max_running=3, hca_tail=ONLINE)
    prompts = [text(50, seed=i) for i in range(4)]
    answers: list[Answer] = []

    async def scenario() -> None:
        for turn in range(4):
            asked = [
                request(f"{turn}.{i}", prompt, new=9, session=f"s{i}")
                for i, prompt in enumerate(prompts)
            ]
            for answer, prompt in zip(await rig.ask(*asked), prompts, strict=True):
                answers.append(answer)
                prompt += [*answer.tokens(), *text(11, seed=turn)]

    rig.play(scenario)
    assert rig.cache.counters.evicted_tokens > 0
    assert any(answer.finished and answer.finished.cached_tokens for answer in answers)
    for answer in answers:
        assert_right(answer)


def test_corruption_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above see a fold that loses its tokens' weights."""
    folded = OnlineTail.folded

    def flat(self: OnlineTail, waiting: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv, gate = folded(self, waiting)
        return kv, gate.clamp(max=0.0)

    monkeypatch.setattr(OnlineTail, "folded", flat)
    rig = Rig(hca_tail=ONLINE)
    [answer] = rig.play(lambda: rig.ask(request("one", text(90), new=20)))
    assert not worst_error(answer) <= TOLERANCE


@pytest.mark.parametrize(("before", "after"), [(RAW, ONLINE), (ONLINE, RAW)])
def test_stored_state_is_restored_by_a_worker_of_the_other_form(
    tmp_path: Path, before: TailForm, after: TailForm
) -> None:
    """A tail is no artifact: at a boundary it is empty."""
    settings = NodeSettings(spill_after_s=0.02)
    options = WorkerOptions(model="tiny-v4", store=tmp_path, node=settings)
    first = Rig(max_running=4, options=options, hca_tail=before)

    async def one() -> Answer:
        [answer] = await first.ask(request("one", text(500, seed=1), session="s"))
        assert first.node is not None
        spills, until = first.node.state.idle_spills, time.monotonic() + WAIT_S
        while spills.counts["sessions"] < 1 or spills.is_busy:
            assert time.monotonic() < until, "never spilled"
            await asyncio.sleep(0.01)
        return answer

    said = first.play(one)
    second = Rig(max_running=4, options=options, hca_tail=after)
    prompt = [*said.request.prompt, *said.tokens(), *text(25, seed=2)]
    [two] = second.play(lambda: second.ask(request("two", prompt, session="s")))
    assert two.admitted is not None and two.admitted.mode is ExecutionMode.FETCH
    assert two.admitted.cached_tokens == 512
    assert_right(two)


def test_identity_is_one_and_state_blocks_are_two() -> None:
    from tests.support.hf.engine_rig import checkpoint

    raw, online = Rig(), Rig(hca_tail=ONLINE)
    loaded = checkpoint("tiny-v4")
    assert identity_of(loaded, raw.runner).digest() == identity_of(loaded, online.runner).digest()
    assert raw.runner.layout.components == online.runner.layout.components
    # 1 layer: 15 rows of (kv, gate) against one of (maximum, sum, value), of 32 floats
    shrunk = raw.runner.layout.state_bytes - online.runner.layout.state_bytes
    assert shrunk == 15 * 2 * 32 * 4 - 3 * 32 * 4


def test_waiting_tokens_are_metrics() -> None:
    rig = Rig(hca_tail=ONLINE)

    async def scenario() -> None:
        stream = rig.engine.submit(request("r", text(40), new=60))
        await stream.next()
        seen = (await rig.engine.cache(5.0)).tail_tokens
        assert set(seen) == {"csa_tail", HCA_TAIL} and seen["csa_tail"] == seen[HCA_TAIL] % 4
        rig.engine.abort("r")

    rig.play(scenario)
    exposed = render(snapshot(rig.cache, 0.0)).decode()
    assert 'ownerserve_cache_tail_tokens{component="hca_tail"} 0.0' in exposed
