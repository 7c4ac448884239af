"""Data parallelism: each engine core has a store, a name and sessions of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ownerserve.directory.messages import SessionIs
from ownerserve.directory.rules import TierCode
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Released, ReleaseSession, Status, StatusIs
from tests.support.vllm import connectors, tiny
from tests.support.vllm.asking import ask as ask_worker
from tests.support.vllm.ownerships import Directory, directory_process
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import WarmServers
from tests.support.waits import until

pytestmark = pytest.mark.vllm

FAMILIES = ["qwen3"] + (["gptoss"] if os.environ.get("OWNERSERVE_LONG") else [])
"""Dense, whose engine cores know nothing of each other; long: experts, which step together."""
TWO = ("--data-parallel-size", "2")
B, ANSWER = 32, 8


class Session:
    """A conversation whose turns go to one rank, as vLLM's own header says, and are answered as an
    engine that never saw it answers them."""

    def __init__(self, rig: Rig, family: str, digit: str, *, rank: int) -> None:
        self.name = SessionId(digit * 32)
        self.rank = rank
        self.prompt = tiny.prompt(400, seed=160 + int(digit))
        self._rig, self._family = rig, family

    def turn(self, url: str) -> int:
        """How many tokens of the prompt were cached."""
        body = {
            "model": "tiny", "prompt": self.prompt, "max_tokens": ANSWER, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        headers = {"x-data-parallel-rank": str(self.rank), "x-session-id": self.name}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        read = answer.json()
        said = read["choices"][0]["token_ids"]
        cold = self._rig.cold(self._family, self.prompt, max_tokens=ANSWER)
        assert said == cold.tokens
        self.prompt = [*self.prompt, *said, *tiny.prompt(40, seed=len(self.prompt))]
        details = read["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with directory_process(tmp_path) as one:
        yield one


def home(store: Path, rank: int) -> Path:
    return store / f"dp-{rank}" if rank else store


def unit_of(url: str, store: Path, rank: int) -> RoutingUnit:
    """Who a rank says it is, to the server's clients and to a gateway."""
    answer = ask_worker(home(store, rank), Status())
    assert isinstance(answer, StatusIs)
    assert answer.profile is not None and answer.profile.owns_sessions
    told = httpx.get(f"{url}/ownerserve/status?rank={rank}", timeout=30).json()
    unit = answer.status.unit
    assert told["unit"] == {"worker": "w", "rank": rank, "incarnation": unit.incarnation}
    assert told["ranks"] == {"data_parallel": 2, "pipeline": 1, "tensor": 1}
    return unit


def owned_by(directory: Directory, session: Session, unit: RoutingUnit, version: int) -> SessionIs:
    """The session's record, once the unit owns it and so many turns of it are over and stored."""
    until(lambda: directory.version(session.name) == version, what=f"turn {version}")
    record = directory.known(session.name)
    assert record.owner == unit and record.owner_live
    until(lambda: TierCode.DISK in directory.tiers(record.prefix_hash), what="it to be stored")
    return record


@pytest.mark.parametrize("family", FAMILIES)
def test_each_engine_core_restores_and_owns_its_sessions(
    rig: Rig, warm: WarmServers, store: Path, tmp_path: Path, directory: Directory, family: str
) -> None:
    """A rank owns the sessions whose turns it does, hands one over to the other rank, and in its
    life after `kill -9` restores and owns again what it had."""
    model = rig.checkpoint(family)
    connector = connectors.ours(store, worker_id="w", directory=directory.address)
    first, second, moved = (
        Session(rig, family, digit, rank=rank) for digit, rank in (("1", 0), ("2", 1), ("3", 0))
    )
    with warm.serve(model, connector, tmp_path / "1.log", *TWO) as server:
        units = [unit_of(server.url, store, rank) for rank in range(2)]
        refused = httpx.get(f"{server.url}/ownerserve/status?rank=2", timeout=30)
        assert refused.status_code == 400
        for session in (first, second, moved):
            assert session.turn(server.url) == 0
            owned_by(directory, session, units[session.rank], 1)

        before, moved.rank = directory.known(moved.name), 1
        moved.turn(server.url)
        assert directory.known(moved.name) == before, "served as a guest"
        asked = ReleaseSession(moved.name, before.epoch, units[1])
        assert ask_worker(home(store, 0), asked) == Released()
        until(lambda: directory.known(moved.name).owner == units[1])
        assert moved.turn(server.url) > 0
        owned = {
            session: owned_by(directory, session, units[session.rank], version)
            for session, version in ((first, 1), (second, 1), (moved, 2))
        }
        assert owned[moved].epoch > before.epoch
        server.kill()
    with warm.serve(model, connector, tmp_path / "2.log", *TWO) as server:
        again = [unit_of(server.url, store, rank) for rank in range(2)]
        for session, record in owned.items():
            assert session.turn(server.url) >= record.tokens - B
            after = owned_by(directory, session, again[session.rank], record.version + 1)
            assert after.owner.incarnation > record.owner.incarnation
            assert after.epoch > record.epoch
