"""Many fault schedules by command: on several cores, with a line of progress and a summary.

    python -m tests.directory.test_faults LOW HIGH [--processes N]

Each schedule is its seed's alone, so the summary (and its digest) is the same on any number of
processes. Ctrl-C ends it with the summary of what was done so far. A violation is printed with its
seed, counted, and the run goes on; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ownerserve.kv.errors import OwnerServeError
from tests.support.directory.fault_net import DoubleOwner, Late, LostRequest
from tests.support.directory.fault_world import World

CHUNK = 20
"""Schedules that a process takes at a time."""
TOLD_EVERY_S = 10.0
DIGEST_LIMIT = 1 << 64
FAILURES_TOLD = 10


class Tally(msgspec.Struct):
    """What was done and seen. Sums only, so that the order of schedules does not count."""

    schedules: int = 0
    events: int = 0
    cpu_s: float = 0.0
    digest: int = 0
    counts: Counter[str] = msgspec.field(default_factory=Counter)
    """Faults by kind, and what was served."""
    owned: dict[bool, tuple[float, int]] = msgspec.field(default_factory=dict)
    """With and without a term file: the longest wait for an owner in good health, and its seed."""
    answered: dict[bool, tuple[float, int]] = msgspec.field(default_factory=dict)
    """The same for a first answer."""
    double_owners: int = 0
    lost_requests: int = 0
    late: int = 0
    failures: list[tuple[int, str]] = msgspec.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.events += other.events
        self.cpu_s += other.cpu_s
        self.digest = (self.digest + other.digest) % DIGEST_LIMIT
        self.counts.update(other.counts)
        for mine, others in ((self.owned, other.owned), (self.answered, other.answered)):
            for has_file, slow in others.items():
                mine[has_file] = max(mine.get(has_file, slow), slow)
        self.double_owners += other.double_owners
        self.lost_requests += other.lost_requests
        self.late += other.late
        self.failures = sorted([*self.failures, *other.failures])

    def played(self, seed: int, world: World) -> None:
        """One schedule more, to its end or to its violation."""
        self.schedules += 1
        self.events += world.net.events
        self.counts.update(world.counts)
        self.counts["messages lost"] += world.net.lost
        self.counts["messages doubled"] += world.net.doubled
        self.counts["turns served"] += sum(len(one.done) for one in world.journals.values())
        for slowest, waited_s in ((self.owned, world.owned_s), (self.answered, world.answered_s)):
            slow = (waited_s, seed)
            slowest[world.has_term_file] = max(slowest.get(world.has_term_file, slow), slow)
        told = repr((seed, world.net.events, [one.done for one in world.journals.values()]))
        number = int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little")
        self.digest = (self.digest + number) % DIGEST_LIMIT

    def failed(self, seed: int, error: Exception) -> None:
        self.double_owners += isinstance(error, DoubleOwner)
        self.lost_requests += isinstance(error, LostRequest)
        self.late += isinstance(error, Late)
        self.failures.append((seed, f"{type(error).__name__}: {error}"))

    def told(self) -> str:
        """The summary: what was played, how long it was waited, what was in it, what went wrong."""
        counts = ", ".join(f"{name} {number:,}" for name, number in sorted(self.counts.items()))
        lines = [
            f"{self.schedules:,} fault schedules, {self.events:,} events, {self.cpu_s:,.0f} s CPU: "
            f"{self.double_owners} double owners, {self.lost_requests} lost requests, "
            f"{self.late} served too late, "
            f"{len(self.failures)} violations in all; digest {self.digest:016x}",
            f"once all was well, waited at most: for an owner {_told(self.owned)}; "
            f"for a first answer {_told(self.answered)}",
            f"in them: {counts}",
        ]
        lines += [f"schedule {seed}: {what}" for seed, what in self.failures[:FAILURES_TOLD]]
        return "\n".join(lines)


def _told(slowest: dict[bool, tuple[float, int]]) -> str:
    return ", ".join(
        f"{'with' if has_file else 'without'} a term file {slow_s:.2f} s (schedule {seed})"
        for has_file, (slow_s, seed) in sorted(slowest.items(), reverse=True)
    )


def play_all(seeds: Iterable[int]) -> Tally:
    """One after another, in this process."""
    tally, began_s = Tally(), time.process_time()
    for seed in seeds:
        world = World(seed)
        try:
            world.play()
        except (AssertionError, OwnerServeError) as error:
            tally.failed(seed, error)
        except BaseException as error:
            error.add_note(f"fault schedule {seed}")
            raise
        tally.played(seed, world)
    tally.cpu_s = time.process_time() - began_s
    return tally


def run(low: int, high: int, *, processes: int = 1) -> Tally:
    """All schedules of [low, high), or those before Ctrl-C."""
    whole = Tally()
    began_s = told_s = time.monotonic()
    try:
        for part in _parts(low, high, processes):
            whole.add(part)
            now_s = time.monotonic()
            if now_s - told_s >= TOLD_EVERY_S:
                told_s = now_s
                _tell(whole, high - low, now_s - began_s)
    except KeyboardInterrupt:
        print("stopped: what was done so far", file=sys.stderr)
    return whole


def _parts(low: int, high: int, processes: int) -> Iterator[Tally]:
    chunks = [range(at, min(at + CHUNK, high)) for at in range(low, high, CHUNK)]
    if processes == 1:
        yield from map(play_all, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(processes, _prepare_child) as pool:
        yield from pool.imap_unordered(play_all, chunks)


def _prepare() -> None:
    # A schedule is one heap of cycles that ends at once: looking for garbage in it costs a third.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def _prepare_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells what was done, and ends us
    _prepare()


def _tell(tally: Tally, wanted: int, passed_s: float) -> None:
    rate = tally.schedules / passed_s
    left_s = (wanted - tally.schedules) / rate
    print(
        f"{tally.schedules:,} of {wanted:,} fault schedules, {rate:.1f} a second, "
        f"{left_s / 60:.0f} min left, {len(tally.failures)} violations",
        file=sys.stderr,
        flush=True,
    )


def main(words: Sequence[str]) -> int:
    """The command; 1 when anything was violated."""
    parser = argparse.ArgumentParser(prog="test_faults.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("low", type=int, help="the first seed")
    parser.add_argument("high", type=int, help="the one after the last")
    parser.add_argument("--processes", type=int, default=1, help="cores to use (default 1)")
    found = parser.parse_args(words)
    if not 0 <= found.low < found.high or found.processes < 1:
        parser.error("use 0 <= LOW < HIGH and at least one process")
    if found.processes == 1:
        _prepare()
    whole = run(found.low, found.high, processes=found.processes)
    print(whole.told(), flush=True)
    return 1 if whole.failures else 0
