"""vLLM's MultiConnector: ours beside its own offloading and one that sends, in each order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import WorkerFailed
from tests.support.vllm.rig import Rig, next_turn, settle

pytestmark = pytest.mark.vllm

B = 32


NOT_NAMED = {"VLLM_PLUGINS": "another"}


@pytest.mark.parametrize("order", ["ours, offloading", "sending, ours", "offloading, ours"])
def test_a_session_goes_on_beside_another_connector(
    rig: Rig, store: Path, tmp_path: Path, order: str
) -> None:
    """A restart with nothing but our store; vLLM asks for our counts by our connector's name."""
    prompt = tiny.prompt(700, seed=131)
    before = rig.worker("qwen3", multi(order, store, tmp_path / "one"))
    answer = before.generate(prompt, session="s", max_tokens=40)
    settle(before)
    before.shutdown()
    following = next_turn(prompt, answer, seed=13)
    after = rig.worker("qwen3", multi(order, store, tmp_path / "two"))
    restored = after.generate(following, session="s")
    assert restored.cached == (700 + 39) // B * B
    oracle.assert_same("qwen3", rig.cold("qwen3", following), restored)
    if "sending" in order:
        assert restored.kv == {"sent_from": "here"}
    settle(after)


def test_it_lives_where_our_plugin_is_not_allowed(rig: Rig, store: Path) -> None:
    """VLLM_PLUGINS is a list for all plug-ins; whoever forgets ours gets counts all the same."""
    connector = connectors.multi(connectors.sending(), connectors.ours(store))
    worker = rig.worker("qwen3", connector, env=NOT_NAMED)
    assert worker.generate(tiny.prompt(300, seed=132)).tokens
    settle(worker)


def test_the_name_is_enough_where_our_plugin_is_allowed(rig: Rig, store: Path) -> None:
    connector = connectors.ours(store)
    del connector["kv_transfer_config"]["kv_connector_module_path"]
    worker = rig.worker("qwen3", connector, env={"VLLM_PLUGINS": "ownerserve"})
    assert worker.generate(tiny.prompt(300, seed=133)).tokens
    settle(worker)
    with pytest.raises(WorkerFailed, match="Unsupported connector type: OwnerServeConnector"):
        rig.worker("qwen3", connector, env=NOT_NAMED)


def multi(order: str, store: Path, folder: Path) -> dict[str, object]:
    """The connectors of `order`; vLLM's offloading keeps its files in `folder`, for one life."""
    made = {
        "ours": lambda: connectors.ours(store),
        "offloading": lambda: connectors.offloading(folder),
        "sending": connectors.sending,
    }
    return connectors.multi(*(made[name]() for name in order.split(", ")))
