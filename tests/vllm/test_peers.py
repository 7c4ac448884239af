"""A vLLM engine goes on from what another one has stored: found by a gateway's word, read from
there, verified, and a cold engine's answer."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from ownerserve.engines.vllm.stated_ranks import stated_ranks
from ownerserve.kv.addresses import parse_endpoint
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import AskLine, LineIs, RpcRequest, Said, Status, StatusIs
from ownerserve.node.rpc.server import RpcClient
from ownerserve.node.transfers.counting import parse_name
from tests.support.net import listening
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


def answers(holder: LenderAddress) -> bool:
    """Whether somebody takes connections where it answered."""
    host, port = holder.address.removeprefix("tcp://").rsplit(":", 1)
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0


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


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [("qwen3", 2, 2), ("gemma3", 2, 2), ("qwen3", 1, 2), ("gemma3", 2, 1)],
)
def test_each_rank_brings_its_heads_of_what_ranks_elsewhere_have_stored(
    rig: Rig, family: str, theirs: int, ours: int, tmp_path: Path
) -> None:
    near_store, far_store = tmp_path / "near", tmp_path / "far"
    near = rig.worker(family, connectors.ours(near_store), tensor_parallel_size=theirs)
    far = rig.worker(family, connectors.ours(far_store), tensor_parallel_size=ours)
    prompt = tiny.prompt(500, seed=94)
    first = near.generate(prompt, session=AGENT)
    settle(near)
    following = next_turn(prompt, first, seed=11)
    named(far_store, lender(near_store))
    brought = far.generate(following, session=AGENT)
    assert brought.cached >= 500 // B * B, "what was stored elsewhere is not computed again"
    oracle.assert_same(family, rig.cold(family, following), brought)


def rank_process(worker: VllmWorker, shard: Path) -> int:
    """The process of the worker's rank whose store that is."""
    (stated,) = stated_ranks([shard])
    _, port = parse_endpoint(stated.lender.address, field="rank", mend="")
    return min(one.pid for one in listening(worker.pid) if one.port == port)


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_one_rank_that_is_silent_or_dead_costs_time_and_no_answer(
    rig: Rig, sent: signal.Signals, tmp_path: Path
) -> None:
    near_store, far_store = tmp_path / "near", tmp_path / "far"
    near = rig.worker("qwen3", connectors.ours(near_store), tensor_parallel_size=2)
    far = rig.worker("qwen3", connectors.ours(far_store), tensor_parallel_size=2)
    prompt = tiny.prompt(500, seed=95)
    first = near.generate(prompt, session=AGENT)
    settle(near)
    following = next_turn(prompt, first, seed=12)
    holder, silent = lender(near_store), rank_process(near, near_store / "shard-1-of-2")
    os.kill(silent, sent)
    try:
        named(far_store, holder)
        computed = far.generate(following, session=AGENT)
        assert computed.cached == 0, "one rank's part is no state"
        oracle.assert_same("qwen3", rig.cold("qwen3", following), computed)
        settle(far)
        if sent == signal.SIGSTOP:  # who is killed ends its whole engine, at once or a bit later
            assert far.hook("connector_status")["restore_miss"] == 1, "all was offered, and tried"
        far.ask("reset")  # which vLLM refuses while a block is held
    finally:
        with suppress(ProcessLookupError):
            os.kill(silent, signal.SIGCONT)


def test_who_is_gone_or_holds_nothing_costs_time_and_no_answer(rig: Rig, tmp_path: Path) -> None:
    near_store, far_store = tmp_path / "near", tmp_path / "far"
    near = rig.worker("qwen3", connectors.ours(near_store))
    far = rig.worker("qwen3", connectors.ours(far_store))
    until((near_store / "rpc.address").exists, within_s=60, what="it answers")
    holder = lender(near_store)

    def looked_at(ends: set[str], seeds: range) -> None:
        """Until prompts have ended all of `ends`; on a busy machine one may run unlooked for."""
        for seed in seeds:
            named(far_store, holder)
            prompt = tiny.prompt(500, seed=seed)
            answer = far.generate(prompt, session=AGENT)
            assert answer.cached == 0
            oracle.assert_same("qwen3", rig.cold("qwen3", prompt), answer)
            settle(far)
            if ends <= looks(far):
                break
        assert looks(far) == ends

    looked_at({"nothing"}, range(80, 110))
    near.kill()
    until(lambda: not answers(holder), what="its engine core is gone too")
    looked_at({"nothing", "silent"}, range(110, 140))
