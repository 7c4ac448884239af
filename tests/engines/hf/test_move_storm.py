"""Every session moves after every turn, all at once, over three workers that own: each answer is a
cold engine's, each session is owned once, the books agree after each event, and no block is left
behind. Real workers and a directory's service, in threads of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from ownerserve.kv.wire.rpc import RpcAnswer, SessionTaken, Take  # noqa: E402
from ownerserve.node.runtime.node_runtime import Calibration  # noqa: E402
from ownerserve.node.state import NodeState  # noqa: E402
from ownerserve.node.transfers.opening import TransferPlace  # noqa: E402
from tests.support.hf.assumed import DEAR, pass_over  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.fleet_rig import ServedWorker  # noqa: E402
from tests.support.hf.owning_fleet import Fleet, asked, serve_at  # noqa: E402
from tests.support.kills.checked import check_after  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = "tiny-qwen3"
SESSIONS, ROUNDS = 5, 5


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Three workers that own and lend, and check themselves; computing is dear, so that what can be
    brought is."""
    monkeypatch.setattr(Calibration, "observe", pass_over)
    monkeypatch.setattr(Calibration.__init__, "__defaults__", (DEAR,))
    monkeypatch.setattr(NodeState, "handle", NodeState.handle)  # undone in the end
    check_after(NodeState, "handle")
    one = Fleet(3, gateways=0, host_cache_bytes=64 << 20, transfer=TransferPlace())
    leased = 'ownerserve_directory_answers_total{answer="leased"}'
    until(lambda: all(worker.metric(leased) for worker in one.workers))
    yield one
    one.close()


class Moving:
    """A session whose turns run at its owner, and that moves after each of them."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.name = SessionId(f"{number:032x}")
        self.at = number % len(fleet.workers)
        self.turns: list[tuple[list[int], dict[str, Any]]] = []
        self.refused: list[RpcAnswer] = []
        self._prompt = text(200 + 16 * number, seed=number)

    @property
    def owner(self) -> ServedWorker:
        return self.fleet.workers[self.at]

    def run(self) -> None:
        for number in range(ROUNDS):
            said = serve_at(self.owner, self._prompt, name=self.name)
            self.turns.append((self._prompt, said))
            self._prompt = [*self._prompt, *said["tokens"], *text(17, seed=100 + number)]
            self._move(turns=number + 1)

    def _move(self, turns: int) -> None:
        """Have the next worker take it over, however often that has to be asked."""
        until(lambda: self.fleet.version(self.name) == turns, what="the turn to be counted")
        here, self.at = self.owner, (self.at + 1) % len(self.fleet.workers)
        source = LenderAddress(here.unit, here.rpc.address)

        def is_taken() -> bool:
            said = asked(self.owner, Take(self.name, source))
            if isinstance(said, SessionTaken):
                return True
            self.refused.append(said)
            return self.fleet.owner(self.name) == self.owner.unit

        until(is_taken, what=f"{self.name} to move: {self.refused}")

    def has_gone_on(self) -> bool:
        """Whether no turn but the first computed what was there."""
        lengths = [len(prompt) for prompt, _ in self.turns[:-1]]
        cached = [said["cached"] for _, said in self.turns[1:]]
        return all(
            count >= length // 16 * 16 for count, length in zip(cached, lengths, strict=True)
        )


def is_at_rest(worker: ServedWorker) -> bool:
    """Whether each block is free or may go: nobody runs, reads, writes or waits."""
    told = worker.http.get("/ownerserve/cache").json()
    pools = told["pools"].values()
    return told["running"] == 0 and all(
        pool["free"] + pool["evictable"] == pool["capacity"] for pool in pools
    )


def test_every_session_moves_after_every_turn(fleet: Fleet) -> None:
    sessions = [Moving(fleet, number) for number in range(SESSIONS)]
    threads = [threading.Thread(target=one.run) for one in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in sessions:
        assert len(one.turns) == ROUNDS, "a turn failed"
        for prompt, said in one.turns:
            assert_cold(MODEL, prompt, said)
        assert one.has_gone_on(), one.turns
        until(lambda one=one: fleet.owner(one.name) == one.owner.unit)
        assert fleet.version(one.name) == ROUNDS

    def owned() -> float:
        return sum(worker.metric("ownerserve_sessions_owned") for worker in fleet.workers)

    until(lambda: owned() == SESSIONS, what="each to be owned once")
    until(lambda: all(map(is_at_rest, fleet.workers)), what="no block to be left")
    taken = 'ownerserve_session_moves_total{end="taken",way="came"}'
    moves = sum(worker.metric(taken) for worker in fleet.workers)
    assert SESSIONS * ROUNDS - sum(len(one.refused) for one in sessions) <= moves
