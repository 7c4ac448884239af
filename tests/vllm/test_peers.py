"""A vLLM engine goes on from what another one has stored: found by a gateway's word, read from
there, verified, and a cold engine's answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import AskLine, LineIs, RpcRequest, Said, Status, StatusIs
from ownerserve.node.rpc.server import RpcClient
from ownerserve.node.transfers.counting import parse_name
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.rig import Rig, next_turn, settle
from tests.support.waits import until

pytestmark = pytest.mark.vllm

AGENT = SessionId("a" * 32)
B = 32


def asked(store: Path, request: RpcRequest) -> Said:
    """What the engine core over that store answers."""
    client = RpcClient((store / "rpc.address").read_text())
    try:
        return client.ask(request)
    finally:
        client.close()


def lender(store: Path) -> LenderAddress:
    """As a gateway names the worker over that store."""
    said = asked(store, Status())
    assert isinstance(said, StatusIs) and said.profile is not None
    assert said.profile.lends == ("disk",) and said.profile.rpc is not None
    return LenderAddress(said.status.unit, said.profile.rpc)


def named(store: Path, holder: LenderAddress) -> None:
    """The gateway says who holds more of the session's coming turn."""
    assert isinstance(asked(store, AskLine(AGENT, bring_from=holder)), LineIs)


def looks(worker: VllmWorker) -> set[str]:
    """What the engine counts of its looks at peers, by how they ended."""
    names = map(parse_name, worker.hook("connector_status"))
    return {end for metric, end in names if metric == "ownerserve_peer_looks"}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_turn_elsewhere_goes_on_from_what_was_stored_here(
    rig: Rig, family: str, tmp_path: Path
) -> None:
    near_store, far_store = tmp_path / "near", tmp_path / "far"
    near = rig.worker(family, connectors.ours(near_store))
    far = rig.worker(family, connectors.ours(far_store))
    prompt = tiny.prompt(500, seed=91)
    first = near.generate(prompt, session=AGENT)
    settle(near)
    following = next_turn(prompt, first, seed=9)

    named(far_store, lender(near_store))
    brought = far.generate(following, session=AGENT)
    assert brought.cached >= 500 // B * B, "what was stored elsewhere is not computed again"
    oracle.assert_same(family, rig.cold(family, following), brought)

    # What came is stored here now: whoever had it may go.
    settle(far)
    near.kill()
    far.ask("reset")
    settle(far)
    last = next_turn(following, brought, seed=10)
    again = far.generate(last, session=AGENT)
    assert again.cached >= len(following) // B * B
    oracle.assert_same(family, rig.cold(family, last), again)


def test_who_is_gone_or_holds_nothing_costs_time_and_no_answer(rig: Rig, tmp_path: Path) -> None:
    near_store, far_store = tmp_path / "near", tmp_path / "far"
    near = rig.worker("qwen3", connectors.ours(near_store))
    far = rig.worker("qwen3", connectors.ours(far_store))
    prompt = tiny.prompt(500, seed=92)
    until((near_store / "rpc.address").exists, within_s=60, what="it answers")
    holder = lender(near_store)
    named(far_store, holder)
    unknown = far.generate(prompt, session=AGENT)
    assert unknown.cached == 0
    assert looks(far) == {"nothing"}
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), unknown)

    near.kill()
    named(far_store, holder)
    other = tiny.prompt(500, seed=93)
    gone = far.generate(other, session=AGENT)
    assert gone.cached == 0
    assert looks(far) == {"nothing", "silent"}
    oracle.assert_same("qwen3", rig.cold("qwen3", other), gone)
