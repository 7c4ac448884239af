"""Forks wait for a busy worker that has their parent's prefix, since bringing it would take each of
them longer: the prefix is copied beside them, and the next ones run where it went. Real workers,
gateways and a directory's service, in threads of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.directory import messages as ask  # noqa: E402
from ownerserve.directory.rpc.client import DirectoryClient  # noqa: E402
from ownerserve.gateway import wishes  # noqa: E402
from ownerserve.gateway.asking import SessionFinder  # noqa: E402
from ownerserve.gateway.moves import Moves  # noqa: E402
from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.messages import Tier  # noqa: E402
from ownerserve.node.runtime import node_runtime  # noqa: E402
from ownerserve.node.runtime.node_runtime import Calibration  # noqa: E402
from ownerserve.node.transfers.opening import TransferPlace  # noqa: E402
from ownerserve.plan.cost.model import Defaults  # noqa: E402
from ownerserve.plan.cost.prices import Coefficients, Medium  # noqa: E402
from ownerserve.router.hot_prefixes import HotPrefixes  # noqa: E402
from ownerserve.router.settings import DEFAULTS, by_hand  # noqa: E402
from tests.support.hf.assumed import pass_over  # noqa: E402
from tests.support.hf.busy_worker import Busy, queue_ms  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.fleet_rig import ServedGateway, ServedWorker  # noqa: E402
from tests.support.hf.owning_fleet import Fleet, name_of  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
SHARED, CACHED = 520, 512
"""What forks begin with of their parent's prompt, and the whole blocks of that."""
FORKS, SOME = 40, 12
"""More than pay for the way: each is spared a third of a second or more, and the way takes two."""


def priced(*, peer_ms: float) -> Defaults:
    return msgspec.structs.replace(
        node_runtime.UNMEASURED,
        prefill=Coefficients(0.0, 5.0, 0.0),
        tiers={**node_runtime.UNMEASURED.tiers, Tier.PEER: Medium(peer_ms, 1e6)},
    )


FAR, NEAR = priced(peer_ms=2000.0), priced(peer_ms=10.0)
"""A queue of 100 tokens takes half a second, the prefix takes two and a half to compute and two to
bring from afar."""


def wide(length: int, seed: int) -> list[int]:
    """Tokens of three figures: a router takes a token for four bytes of a body."""
    return [100 + token % 27 for token in text(length, seed=seed)]


PROMPT = wide(600, seed=3)


@pytest.fixture(params=[FAR], ids=["far"])
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Two workers that own and lend, and computing takes long by their prices."""
    monkeypatch.setattr(Calibration, "observe", pass_over)
    monkeypatch.setattr(Calibration.__init__, "__defaults__", (request.param,))
    options: dict[str, Any] = {"host_cache_bytes": 64 << 20, "chunk_tokens": 16}
    one = Fleet(2, gateways=0, transfer=TransferPlace(), **options)
    leased = 'ownerserve_directory_answers_total{answer="leased"}'
    until(lambda: all(worker.metric(leased) for worker in one.workers))
    yield one
    one.close()


def one_more_gateway(fleet: Fleet) -> ServedGateway:
    made = ServedGateway(
        *fleet.workers,
        directory=fleet.server.address,
        policy="ownerserve",
        settings=by_hand(DEFAULTS, hot_ms=100.0, cool_s=0.0),
    )
    fleet.gateways.append(made)
    return made


def turn(gateway: ServedGateway, session: str, prompt: list[int]) -> tuple[dict[str, Any], str]:
    """A turn of the session; what came, and from where."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    body |= {"return_token_ids": True}
    headers = {"x-session-id": session}
    answer = gateway.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    said = {
        "tokens": choice["token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"],
        "cached": int(answer.headers["x-ownerserve-cached-tokens"]),
        "mode": answer.headers["x-ownerserve-mode"],
        "reason": answer.headers["x-ownerserve-reason"],
    }
    return said, answer.headers["x-ownerserve-worker"]


def copies(worker: ServedWorker) -> float:
    """How many replicas the worker has made."""
    return worker.metric('ownerserve_replicas_total{end="taken"}')


class World:
    """A fleet of which one worker has the parent's prefix and is busy, and a gateway that has sent
    it there."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.gateway = one_more_gateway(fleet)
        self._forks = 0
        _, home = turn(self.gateway, "parent", PROMPT)
        self.here = next(one for one in self.fleet.workers if one.name == home)
        (self.there,) = [one for one in self.fleet.workers if one is not self.here]
        until(lambda: self.here.metric("ownerserve_sessions_owned") == 1)
        self.parent = SessionId(name_of(self.gateway))
        self.busy = Busy(self.here, at_once=1, tokens=100)
        self.wait_until_busy(self.gateway)

    def wait_until_busy(self, gateway: ServedGateway) -> None:
        until(lambda: 200.0 < queue_ms(gateway, self.here) < 1200.0)

    def fork(self, gateway: ServedGateway) -> tuple[list[int], dict[str, Any], str]:
        """The first turn of a new fork: its prompt, what came, and from where."""
        self._forks += 1
        prompt = [*PROMPT[:SHARED], *wide(8, seed=50 + self._forks)]
        said, at = turn(gateway, f"fork{self._forks}", prompt)
        return prompt, said, at

    def steps(self, step: str) -> float:
        return self.gateway.metric("ownerserve_gateway_replicas_total", step=step)

    def fork_until_copied(self, most: int = FORKS) -> None:
        for _ in range(most):
            self.wait_until_busy(self.gateway)
            prompt, said, at = self.fork(self.gateway)
            if at != self.here.name:
                assert copies(self.there), f"it goes elsewhere for another reason: {said}"
                return
            assert said["cached"] == CACHED
            assert_cold(MODEL, prompt, said)
        raise AssertionError(f"{most} forks were not enough")


@pytest.fixture
def world(fleet: Fleet) -> Iterator[World]:
    one = World(fleet)
    yield one
    one.busy.end()


def test_forks_run_where_their_prefix_was_copied_to(world: World) -> None:
    world.fork_until_copied()
    until(lambda: world.steps("made") == 1)
    moved = world.there.metric("ownerserve_replica_bytes_total")
    assert moved > 0 and world.gateway.metric("ownerserve_gateway_replica_bytes_total") == moved
    world.wait_until_busy(world.gateway)
    prompt, said, at = world.fork(world.gateway)
    assert (at, said["cached"], said["mode"]) == (world.there.name, CACHED, "seed")
    assert_cold(MODEL, prompt, said)
    assert world.there.metric('ownerserve_brought_total{end="brought"}') == 1, "with no turn"
    assert world.fleet.owner(world.parent) == world.here.unit


def test_a_gateway_that_did_not_order_it_hears_of_it_as_resident(world: World) -> None:
    other = one_more_gateway(world.fleet)
    world.fork_until_copied()
    until(lambda: world.steps("made") == 1)

    def is_known() -> bool:
        session = other.gateway.state.sessions.get(world.parent)
        holders = () if session is None else session.copies()
        return any(one.worker is not None and one.worker.id == world.there.name for one in holders)

    until(lambda: other.read(is_known))
    world.wait_until_busy(other)
    prompt, said, at = world.fork(other)
    assert (at, said["cached"], said["mode"]) == (world.there.name, CACHED, "seed")
    assert_cold(MODEL, prompt, said)


@pytest.mark.parametrize("fleet", [NEAR], indirect=True, ids=["near"])
def test_a_fork_that_is_better_elsewhere_at_once_brings_its_prefix_itself(world: World) -> None:
    """It leaves the replica there that the next one finds."""
    brought = 'ownerserve_brought_total{end="brought"}'
    for _ in range(2):
        world.wait_until_busy(world.gateway)
        prompt, said, at = world.fork(world.gateway)
        assert (at, said["cached"]) == (world.there.name, CACHED)
        assert_cold(MODEL, prompt, said)
        assert world.there.metric(brought) == 1
    assert not copies(world.there) and not world.steps("wanted")


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_what_an_operator_wishes_is_copied_for_no_gain(
    fleet: Fleet, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ownerserve directory replicate`: a gateway reads it, and the worker's word takes it back."""
    asked = []

    async def nothing(self: SessionFinder, sessions: list[SessionId]) -> list[Any]:
        asked.append(sessions)
        return []

    monkeypatch.setattr(wishes, "WISHES_S", 0.2)
    if is_cut:
        monkeypatch.setattr(SessionFinder, "wishes", nothing)
    gateway = one_more_gateway(fleet)
    _, home = turn(gateway, "parent", PROMPT)
    here = next(one for one in fleet.workers if one.name == home)
    (there,) = [one for one in fleet.workers if one is not here]
    parent = SessionId(name_of(gateway))
    until(lambda: fleet.version(parent) == 1)
    record = fleet.record(parent)
    assert isinstance(record, ask.SessionIs) and record.prefix_hash is not None
    client = DirectoryClient(fleet.server.address)
    try:
        wish = ask.ReplicateReadonly(record.prefix_hash, there.unit.worker)
        (wished,) = client.execute([wish])
        assert wished == ask.Wished((there.unit,))
        if is_cut:
            seen = len(asked)
            until(lambda: len(asked) >= seen + 10)
            assert not copies(there)
            return
        until(lambda: copies(there) == 1)
        until(lambda: client.execute([wish]) == [ask.Wished(())], what="the wish is met")
    finally:
        client.close()
    assert fleet.owner(parent) == here.unit


@pytest.mark.parametrize("wire", ["counted", "ordered"])
def test_without_the_copy_forks_wait_where_their_prefix_lies(
    world: World, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []
    if wire == "counted":
        monkeypatch.setattr(HotPrefixes, "sent", lambda self, sent, now: wanted.append(sent))
    else:
        monkeypatch.setattr(Moves, "_copy", lambda self, copy: wanted.append(copy))
    with pytest.raises(AssertionError, match="were not enough"):
        world.fork_until_copied(SOME)
    assert wanted and not copies(world.there)
