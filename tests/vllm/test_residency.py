"""What a worker's store holds of each session is told, as it comes and goes, over its lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownerserve.engines.vllm.plugin import ask
from ownerserve.kv.wire.inventory import Has, Page
from ownerserve.kv.wire.rpc import ListHeld, PageIs
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.service.runtime import WallClock
from tests.support.vllm import connectors, tiny
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
    life = page(store).incarnation
    worker.kill()
    worker = rig.worker(family, connectors.ours(store))
    until(lambda: on_disk(store) == {ONE: end})
    assert page(store).incarnation > life
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
