"""What a worker's store holds of each session is told, as it comes and goes, over its lives."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from ownerserve.kv.wire.inventory import Has, Page
from ownerserve.kv.wire.rpc import ListHeld, PageIs
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.service.runtime import WallClock
from tests.support.vllm import connectors, tiny
from tests.support.vllm.asking import ask
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.rig import Rig, next_turn, settle
from tests.support.waits import until

pytestmark = pytest.mark.vllm

B = 32
ONE, TWO, THREE = "1" * 32, "2" * 32, "3" * 32
"""As a gateway names sessions."""


def page(store: Path, after: int = 0) -> Page:
    answer = ask(store, ListHeld(after))
    assert isinstance(answer, PageIs)
    return answer.page


def on_disk(store: Path) -> dict[str, int]:
    """Tokens of each session, as the worker says."""
    return {
        word.session: word.tokens
        for word in page(store).words
        if isinstance(word, Has) and word.tier == "disk"
    }


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3next"])
def test_what_each_turn_leaves_is_told_and_a_later_life_tells_it_again(
    rig: Rig, family: str, store: Path
) -> None:
    worker = rig.worker(family, connectors.ours(store))
    block = worker.ask("pool")["block_tokens"]
    prompt = tiny.prompt(700, seed=71)
    for turn in range(3):
        answer = worker.generate(prompt, session=ONE)
        end = (len(prompt) + len(answer.tokens) - 1) // block * block
        until(lambda end=end: on_disk(store) == {ONE: end})
        prompt = next_turn(prompt, answer, seed=turn)
    assert on_device(store) == {ONE: end}
    life = page(store).incarnation
    worker.kill()
    worker = rig.worker(family, connectors.ours(store))
    until(lambda: on_disk(store) == {ONE: end})
    assert page(store).incarnation > life
    assert on_device(store) == {}
    restored = worker.generate(prompt, session=ONE)
    assert end - block <= restored.cached <= end, "as it was told"


def test_an_idle_worker_tells_of_its_last_turn(rig: Rig, store: Path) -> None:
    """No request follows, and its scheduler sleeps; what it copied is durable only later."""
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.hook("slow_commits", seconds=0.5)
    worker.generate(tiny.prompt(1900, seed=72), session=ONE, max_tokens=1)
    until(lambda: on_disk(store) == {ONE: 1900 // B * B})


def test_a_session_that_ended_is_told_no_more(rig: Rig, store: Path) -> None:
    worker = rig.worker("qwen3", connectors.ours(store))
    prompt = tiny.prompt(300, seed=73)
    answer = worker.generate(prompt, session=ONE)
    worker.generate(tiny.prompt(300, seed=74), session=TWO)
    until(lambda: on_disk(store).keys() == {ONE, TWO})
    worker.generate(next_turn(prompt, answer, seed=0), session=f"{ONE};final")
    settle(worker)
    until(lambda: on_disk(store).keys() == {TWO})
    worker.kill()
    rig.worker("qwen3", connectors.ours(store))
    until(lambda: on_disk(store).keys() == {TWO})


def test_what_the_store_gave_up_is_withdrawn(rig: Rig, store: Path) -> None:
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.generate(tiny.prompt(1000, seed=75), session=ONE)
    until(lambda: ONE in on_disk(store))
    assert worker.hook("empty_store") > 0
    worker.generate(tiny.prompt(1000, seed=76), session=TWO)
    until(lambda: on_disk(store).keys() == {TWO})


def test_what_went_while_the_worker_was_away_is_not_told(rig: Rig, store: Path) -> None:
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.generate(tiny.prompt(300, seed=77), session=ONE)
    worker.generate(tiny.prompt(300, seed=78), session=TWO, salt="tenant")
    until(lambda: on_disk(store).keys() == {ONE, TWO})
    worker.shutdown()
    shared = DiskTier(store, WallClock())
    entries = [entry for entry in shared.core.index.walk() if not any(entry.meta.tenant)]
    shared.core.evict([entry.meta.id for entry in entries])
    shared.close()
    rig.worker("qwen3", connectors.ours(store))
    until(lambda: on_disk(store).keys() == {TWO})


def test_with_other_weights_nothing_from_before_is_told(rig: Rig, store: Path) -> None:
    """A reset alone leaves it all standing."""
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.generate(tiny.prompt(300, seed=79), session=ONE)
    until(lambda: on_disk(store).keys() == {ONE})
    worker.hook("reset_connector")
    worker.generate(tiny.prompt(300, seed=81), session=THREE)
    until(lambda: on_disk(store).keys() == {ONE, THREE})
    worker.hook("double_weights")
    until(lambda: not on_disk(store))
    worker.generate(tiny.prompt(300, seed=80), session=TWO)
    until(lambda: on_disk(store).keys() == {TWO})


def on_device(store: Path) -> dict[str, int]:
    """Tokens of each session in vLLM's pool, as the worker says."""
    return {
        word.session: word.tokens
        for word in page(store).words
        if isinstance(word, Has) and word.tier == "device"
    }


def names(count: int) -> list[str]:
    """As a gateway names sessions."""
    return [f"{number:032x}" for number in range(1, count + 1)]


LONG = int(os.environ.get("OWNERSERVE_RESIDENCY_TURNS", "0"))
"""Turns of the long form, by hand; docs/evidence/vllm.md has its figures."""


class Told(NamedTuple):
    """What a turn was told to find on the device, and what it found."""

    prompt: int
    told: int
    cached: int


def turns_under_pressure(worker: VllmWorker, store: Path, turns: int) -> list[Told]:
    """Twelve sessions at random over a pool too small for them, and nothing in the store, so that
    what a turn finds is the pool's."""
    draw = Random(3)
    prompts = {name: tiny.prompt(600 + 80 * at, seed=at) for at, name in enumerate(names(12))}
    found = []
    for number in range(turns):
        name = draw.choice(list(prompts))
        settle(worker)
        worker.hook("empty_store")
        told = on_device(store).get(name, 0)
        if len(prompts[name]) > 1800:
            prompts[name], told = tiny.prompt(600, seed=1000 + number), 0
        answer = worker.generate(prompts[name], session=name)
        found.append(Told(len(prompts[name]), told, answer.cached))
        prompts[name] = next_turn(prompts[name], answer, seed=number)
    return found


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "gptoss", "qwen3next"] if LONG else ["gptoss"]
)
def test_what_is_on_the_device_is_told_as_vllm_finds_it(rig: Rig, family: str, store: Path) -> None:
    """A reset leaves nothing, and is known without a step; a later life begins with nothing."""
    worker = rig.worker(family, connectors.ours(store))
    block = worker.ask("pool")["block_tokens"]
    found = turns_under_pressure(worker, store, LONG or 17)
    errors = sorted(abs(turn.cached - turn.told) for turn in found)
    if LONG:
        held = sum(turn.told > 0 for turn in found)
        print(f"{family}: {len(found)} turns, {held} with something, {block=}, {errors=}")
    assert errors[-1] <= block
    assert any(turn.told for turn in found) and any(not turn.told for turn in found)
    assert on_device(store)
    settle(worker)  # a reset is refused while blocks are held for copies
    assert worker.ask("reset")
    assert on_device(store) == {}
