"""What goes from a worker's device is heard by the gateway as it goes, and turns go by it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.waits import until

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.engines.hf.node.restoring import WithoutNode
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import SchedulerLimits
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import PrefixChain, pack
from ownerserve.kv.wire.inventory import Has, decode_page
from tests.support.cache.cache_driver import DENSE, Driver, blocks_of
from tests.support.hf.engine_rig import Rig, request, text
from tests.support.hf.fleet_rig import WAIT_S, ServedGateway, ServedWorker

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
PROMPT_TOKENS = 900
BLOCK = 16
LIMITS = SchedulerLimits(
    chunk_tokens=64, prefill_tokens_a_step=64, max_running=2, max_waiting=4, sequence_tokens=128
)


@contextmanager
def fleet(news_ms: float | None) -> Iterator[tuple[ServedGateway, list[ServedWorker]]]:
    """Two workers with room for two sessions each, behind a gate that goes by who holds a prompt.
    No probe comes after the first: what is heard later is heard by the news alone."""
    options = WorkerOptions(model=MODEL, kv_bytes=2 << 20, max_running=4)
    workers = [ServedWorker(options) for _ in range(2)]
    gateway = ServedGateway(
        *workers, policy="lmetric_gate", health_interval_s=3600.0, news_ms=news_ms
    )
    try:
        yield gateway, workers
    finally:
        gateway.close()
        for worker in workers:
            worker.close()


def turn(gateway: ServedGateway, prompt: list[int]) -> tuple[httpx.Headers, list[int]]:
    answer = gateway.complete(prompt, "a")
    assert answer.status_code == 200, answer.text
    return answer.headers, answer.json()["choices"][0]["token_ids"]


def on_device(gateway: ServedGateway) -> int:
    """Tokens that the gateway believes to lie on a device of the one session that it served."""

    def tokens() -> int:
        sessions = gateway.gateway.state.sessions.items()
        (session,) = (one for _, one in sessions if one.prompt_tokens)
        return max((c.tokens for c in session.copies() if c.tier is Tier.DEVICE), default=0)

    return gateway.read(tokens)


def evict(worker: ServedWorker) -> None:
    """Fill the worker's device with what its gateway does not hear of."""
    for seed in (7, 8, 9):  # sessions, or they would make room for each other
        body = {"prompt": text(PROMPT_TOKENS, seed=seed), "max_tokens": 4}
        body |= {"model": MODEL, "session_id": f"other-{seed}"}
        answer = worker.http.post("/v1/completions", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text


def test_an_eviction_changes_the_next_decision() -> None:
    with fleet(50.0) as (gateway, workers):
        prompt = text(PROMPT_TOKENS, seed=1)
        first, said = turn(gateway, prompt)
        (home,) = (one for one in workers if one.name == first["x-ownerserve-worker"])
        prompt += said + text(40, seed=2)
        again, said = turn(gateway, prompt)
        assert again["x-ownerserve-worker"] == home.name
        assert again["x-ownerserve-reason"] == "cached", "it is held: the gate goes by that"
        assert on_device(gateway) > PROMPT_TOKENS - BLOCK
        evict(home)
        until(lambda: on_device(gateway) == 0)
        prompt += said + text(40, seed=3)
        after, _ = turn(gateway, prompt)
        assert after["x-ownerserve-reason"] == "score", "nobody holds it any more"
        expected = int(after["x-ownerserve-expected-cached-tokens"])
        assert abs(expected - int(after["x-ownerserve-cached-tokens"])) <= BLOCK


def test_without_news_it_goes_where_nothing_is_left() -> None:
    with fleet(None) as (gateway, workers):
        prompt = text(PROMPT_TOKENS, seed=1)
        first, said = turn(gateway, prompt)
        (home,) = (one for one in workers if one.name == first["x-ownerserve-worker"])
        evict(home)
        after, _ = turn(gateway, prompt + said + text(40, seed=3))
        assert after["x-ownerserve-reason"] == "cached"
        assert int(after["x-ownerserve-cached-tokens"]) < PROMPT_TOKENS // 2


@pytest.mark.parametrize("has_store", [False, True], ids=["without a store", "with one"])
def test_words_name_the_prefix_of_prompt_and_answer(has_store: bool, tmp_path: Path) -> None:
    """Also of what an eviction leaves."""
    store = tmp_path / "store" if has_store else None
    worker = ServedWorker(WorkerOptions(model=MODEL, kv_bytes=2 << 20, max_running=4, store=store))
    try:
        body = {"prompt": text(PROMPT_TOKENS, seed=1), "max_tokens": 3 * BLOCK, "temperature": 0}
        body |= {"session_id": "a", "return_token_ids": True, "model": MODEL}
        answer = worker.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = [*body["prompt"], *answer.json()["choices"][0]["token_ids"]]
        until(lambda: "a" in device_words(worker))
        whole = device_words(worker)["a"]
        assert whole.tokens > PROMPT_TOKENS + BLOCK, "the answer too"
        assert whole.prefix_hash == digest(said, whole.tokens)
        evict(worker)
        until(lambda: tokens_of(device_words(worker).get("a")) < whole.tokens)
        less = device_words(worker).get("a")
        assert less is None or less.prefix_hash == digest(said, less.tokens)
    finally:
        worker.close()


def device_words(worker: ServedWorker) -> dict[str, Has]:
    page = decode_page(worker.http.get("/ownerserve/inventory?after=0").content)
    assert page is not None
    words = [word for word in page.words if isinstance(word, Has)]
    return {word.session: word for word in words if word.tier == "device"}


def tokens_of(word: Has | None) -> int:
    return 0 if word is None else word.tokens


def digest(tokens: list[int], count: int) -> str:
    return PrefixChain(BLOCK).extend(pack(tokens[:count]))[-1].hex()


def test_an_idle_loop_goes_round_at_once_for_what_its_last_step_evicted() -> None:
    driver = Driver(DENSE, blocks=8)
    driver.now = time.monotonic()
    node = WithoutNode(driver.cache, Scheduler(driver.cache, LIMITS))
    driver.turn("1", blocks_of(0, 1, 2), session="a")
    node.inventory.has(SessionId("a"), Tier.DEVICE, 48, digest=None)
    assert node.wait_s() != 0.0
    driver.evict(1)
    assert node.wait_s() == 0.0
    node.poll()
    assert node.inventory.tokens(SessionId("a"), Tier.DEVICE) == 32
    assert node.wait_s() != 0.0


def test_a_turn_that_waits_keeps_what_is_resident_of_it() -> None:
    """`a` was used before `b`, and its turn waits behind `long`, which needs room: `b` makes it."""
    rig = Rig(MODEL, blocks=16, max_running=1)
    block = rig.cache.layout.block_tokens
    prompts = {name: text(5 * block, seed=seed) for seed, name in enumerate("ab")}

    async def scenario() -> None:
        for name, prompt in prompts.items():
            await rig.ask(request(name, prompt, new=2, session=name))
        long = request("long", text(9 * block, seed=5), new=2, session="c")
        waits = request("waits", [*prompts["a"], *text(block, seed=6)], new=2, session="a")
        _, answer = await rig.ask(long, waits)
        assert answer.admitted is not None
        assert answer.admitted.cached_tokens == 5 * block
        assert len(rig.cache.sessions.expected) == 0, "nothing is kept for a turn that is over"

    rig.play(scenario)
