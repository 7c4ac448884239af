"""Why so little state is brought back ahead of need: what looks at idle sessions found, and what a
session had at its node when its next turn came.

    python benchmarks/prefetch_looks.py --traces FOLDER [--draw 302 303]

Simulated: one worker with V4-Flash in 4 GB, 200 GB of host memory, `sticky`, 24 Claude-Code
sessions drawn by seed, closed loop. Counts, by draw: turns that came to state of which something
was gone from the device, by what a prefetch had come to by then; looks that found state gone, by
what became of them; the free share of range blocks at those without room and the share missing
(medians); and of first tokens and of bringing state back the mean ms a turn.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

from ownerserve.cache.sessions import restorable_tokens
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.node.retention.policy import Prefetches
from ownerserve.sim.config.setup import SimSetup, Tiers
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.base import Scale
from ownerserve.sim.suites.traces import find
from ownerserve.sim.workload import Sample, WorkloadShape

UNKNOWN, LEVEL = "its gaps are not known", "loading on demand is as good"
EARLY, THERE = "it came before the look", "the last look found all there"
NO_ROOM, BEGUN, LANDED = "no room at the look", "begun, not there yet", "brought, and gone again"


class Seen:
    """What happened to the idle sessions of one run: hears what `Prefetches` is told and says."""

    def __init__(self) -> None:
        self.came: Counter[str] = Counter()
        self.looks: Counter[str] = Counter()
        self.free: list[float] = []
        self.missing: list[float] = []
        self._state: dict[SessionId, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of every prefetch while this lasts."""
        ended, missing = Prefetches.ended, Prefetches._missing
        resumed, landed = Prefetches.resumed, Prefetches.landed

        def has_ended(one: Prefetches, session_id: SessionId, now: float) -> None:
            ended(one, session_id, now)
            known = one._gaps.known(session_id) is not None
            planned = session_id in one._due
            self._state[session_id] = EARLY if planned else LEVEL if known else UNKNOWN

        def is_missing(one: Prefetches, session_id: SessionId) -> Packed | None:
            found = missing(one, session_id)
            self._looked(one, session_id, NO_ROOM if found is None else BEGUN)
            return found

        def has_resumed(one: Prefetches, session_id: SessionId) -> None:
            if gone_tokens(one, session_id) > 0:
                self.came[self._state.get(session_id, UNKNOWN)] += 1
            resumed(one, session_id)

        def has_landed(one: Prefetches, turn_id: TurnId) -> bool:
            is_prefetch = landed(one, turn_id)
            if is_prefetch:
                self._state[SessionId(turn_id.removeprefix("prefetch/"))] = LANDED
            return is_prefetch

        with (
            patch.object(Prefetches, "ended", has_ended),
            patch.object(Prefetches, "_missing", is_missing),
            patch.object(Prefetches, "resumed", has_resumed),
            patch.object(Prefetches, "landed", has_landed),
        ):
            yield

    def _looked(self, one: Prefetches, session_id: SessionId, outcome: str) -> None:
        gone, blocks = gone_tokens(one, session_id), one._cache.occupancy.blocks
        if gone <= 0:
            self._state[session_id] = THERE
            return
        self._state[session_id] = outcome
        self.looks[outcome] += 1
        if outcome == NO_ROOM:
            self.free.append(blocks.free / blocks.capacity)
            self.missing.append(gone / one._model.block_tokens / blocks.capacity)


def gone_tokens(one: Prefetches, session_id: SessionId) -> int:
    """Return how much of a session's state is not on the device."""
    session = one._cache.sessions.get(session_id)
    known = one._chains.known_tokens(session_id)
    return known - restorable_tokens(session, one._cache.layout)


def main() -> None:
    """Run the draws and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--draw", type=int, nargs="*", default=(302, 303))
    options = parser.parse_args()
    trace, _ = find("claude_code", options.traces, Scale.FULL)
    for draw in options.draw:
        setup = SimSetup(
            policy="sticky",
            workers=1,
            pace="deepseek-v4-flash@h200",
            kv_bytes=4_000_000_000,
            running=32,
            tiers=Tiers(host_bytes=200_000_000_000),
            shape=WorkloadShape(sessions=Sample(24), seed=draw),
        )
        seen = Seen()
        with seen.watching():
            table = simulate(trace, setup).rows.table()
        served = table[table["reason"] == 0]
        ttft_ms = float((served["first_token_s"] - served["arrived_s"]).mean()) * 1e3
        print(f"draw {draw}: {len(table)} turns, {seen.came.total()} came to state that was gone")
        print("   ", ", ".join(f"{why}: {count}" for why, count in seen.came.most_common()))
        print(f"    looks that found it gone: {seen.looks.total()},", dict(seen.looks))
        if seen.free:
            print(f"    free {median(seen.free):.1%}, missing {median(seen.missing):.1%}")
        load_ms = float(served["restore_load_ms"].mean() + served["restore_queue_ms"].mean())
        print(f"    first token after {ttft_ms:,.0f} ms, of which loads {load_ms:.1f}")


if __name__ == "__main__":
    main()
