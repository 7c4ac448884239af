"""What lies below a worker's device, at a gateway: which tiers it knows of, that a turn whose state
lies there is sent for it and loaded, and that it is priced as the worker's own planner does."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from tests.support.waits import until

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.router.decision import Decision
from ownerserve.router.messages import Dispatch
from tests.support.hf.engine_rig import text
from tests.support.hf.fleet_rig import ServedGateway, ServedWorker

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
TOKENS = 900
DEVICE_BYTES = 2 << 20
"""Room for two such sessions."""


class Came(NamedTuple):
    """What was decided of a turn, and what its worker then did."""

    decision: Decision
    mode: str
    cached: int
    plan: str


class Rig:
    """A worker with host memory and a disk below a small device, behind a gateway."""

    def __init__(self, store: Path) -> None:
        options = WorkerOptions(
            model=MODEL,
            kv_bytes=DEVICE_BYTES,
            max_running=2,
            store=store,
            host_cache_bytes=64 << 20,
            node=NodeSettings(spill_after_s=0.05),
        )
        self.worker = ServedWorker(options)
        self.gateway = ServedGateway(
            self.worker, health_interval_s=0.05, receipts=ReceiptForm.OPEN, seats=None
        )
        self.talks = {name: text(TOKENS, seed=n) for n, name in enumerate("abc")}

    def turn(self, name: str) -> Came:
        body = {
            "model": MODEL, "prompt": self.talks[name], "max_tokens": 4, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        headers = {"x-session-id": name}
        answer = self.gateway.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        told = answer.json()["choices"][0]["token_ids"]
        self.talks[name] += told + text(20, seed=len(self.talks[name]))
        outcome = self.gateway.read(
            lambda: self.gateway.gateway.turns.observer.decisions[-1].outcome
        )
        assert isinstance(outcome, Dispatch)
        return Came(
            outcome.decision,
            answer.headers["x-ownerserve-mode"],
            int(answer.headers["x-ownerserve-cached-tokens"]),
            answer.headers.get("x-ownerserve-plan", ""),
        )

    def tiers(self) -> list[set[Tier]]:
        """The tiers in which the gateway knows at least a turn's tokens of each session."""

        def look() -> list[set[Tier]]:
            sessions = self.gateway.gateway.state.sessions.items()
            return [
                {copy.tier for copy in session.copies() if copy.tokens >= TOKENS // 16 * 16}
                for _, session in sessions
            ]

        return self.gateway.read(look)

    def begin(self) -> None:
        """Have each session's first turn. What one left lies below before the next one comes: that
        may evict it, and what has no copy then is computed, not loaded."""
        for number, name in enumerate(self.talks, 1):
            self.turn(name)
            self.below(number)

    def below(self, sessions: int) -> None:
        """Wait until so many sessions are known to lie in host memory and on the disk."""
        wanted = {Tier.HOST, Tier.DISK}
        until(lambda: [wanted <= known for known in self.tiers()] == [True] * sessions)

    def close(self) -> None:
        self.gateway.close()
        self.worker.close()


def test_a_turn_is_sent_for_what_lies_below_and_priced_as_its_worker_prices_it(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path / "store")
    try:
        rig.begin()
        loads: list[tuple[float, float]] = []
        for round_ in range(4):
            for name in rig.talks:
                came = rig.turn(name)
                chosen = came.decision.alternatives[0]
                if came.decision.action is not PlacementAction.TAIL_RECOMPUTE:
                    continue
                assert came.decision.source is not None
                assert came.decision.source.tier in (Tier.HOST, Tier.DISK)
                assert came.mode == "fetch", (round_, name, came)
                assert abs(came.cached - came.decision.cached_tokens) <= 48, came
                planned = re.search(r"load ([0-9.]+), recompute ([0-9.]+)", came.plan)
                assert planned is not None, came.plan
                loads.append((chosen.restore_ms, float(planned[1])))
            rig.below(len(rig.talks))
        assert loads, "three sessions on a device for two: some turns find theirs below"
        off = [max(mine, 0.1) / max(its, 0.1) for mine, its in loads]
        assert 1 / 3 < median(off) < 3, loads
    finally:
        rig.close()


def test_a_real_workers_shares_reach_the_router(tmp_path: Path) -> None:
    """Three sessions on a device for two: it has evicted, so taking more displaces somebody."""
    rig = Rig(tmp_path / "store")
    try:
        for name in rig.talks:
            rig.turn(name)
        (worker,) = rig.gateway.gateway.state.fleet
        until(lambda: rig.gateway.read(lambda: (worker.load.refill_share(0) or 0.0) > 0.0))
        shares = rig.gateway.read(lambda: worker.load.refill_shares)
        assert [one.tokens for one in shares] == sorted({one.tokens for one in shares})
        busy = rig.gateway.read(lambda: worker.load.busy_share)
        assert busy is not None and 0.0 < busy <= 1.0
    finally:
        rig.close()
