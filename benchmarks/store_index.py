"""The store's index with many records, and how fast it comes back from the segments.

    python benchmarks/store_index.py                     10^7 rows: minutes, 2 GB of disk
    python benchmarks/store_index.py --rows 1000000 --records 20000

Build: groups of 10,000 rows, as a rebuild adds them. Re-open: a fresh process opens the index for
writing (which reads the accounts and the last sequence) and looks up 256 keys; its peak memory is
the process's. Rebuild: the index of a real store is deleted and the store opened; beside it, in
turns, the bare read of the same headers: 4 KiB each, O_DIRECT, one after another, at the offsets
the index knew. A rebuild also checks each header, verifies the payloads of the last segment, and
writes the index.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec

from ownerserve.kv.units import KIB
from ownerserve.store.disk.recover import discard_index
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.segment import segment_path
from ownerserve.store.index.reader import Change, IndexEntry
from ownerserve.store.index.writer import IndexWriter
from ownerserve.store.service.measure import OPTIONS, bench_entry, bench_meta
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import Reservation
from result import Row, larger_is_better, report, smaller_is_better

GROUP = 10_000
PAYLOAD = 60 * KIB


def digest(number: int) -> bytes:
    """Ids are SHA-256 digests: they come in no order."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def entry(number: int) -> IndexEntry:
    """An index row as real artifacts make them."""
    plain = bench_entry(number)
    meta = msgspec.structs.replace(
        plain.meta, id=digest(number), prefix_hash=digest(~number % 2**63)
    )
    return msgspec.structs.replace(plain, meta=meta, segment=1 + number // 3700)


def build(path: Path, rows: int) -> float:
    """Rows a second."""
    index = IndexWriter(path, bytes(16))
    spent_s = 0.0
    for at in range(0, rows, GROUP):
        group = [entry(number) for number in range(at, min(at + GROUP, rows))]
        started = time.perf_counter()
        index.apply(Change(add=group))
        spent_s += time.perf_counter() - started
    index.close()
    return rows / spent_s


def peak_memory_bytes() -> int:
    """Of this program alone: getrusage would count what its parent was before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reopen(path: Path, rows: int) -> dict[str, float]:
    """In a fresh process: seconds to open, microseconds a key, rows a second, peak bytes."""
    started = time.perf_counter()
    index = IndexWriter(path, bytes(16))
    highest = index.highest_sequence()
    index.get_many([digest(number) for number in range(256)])
    open_s = time.perf_counter() - started
    assert highest == rows
    opened_bytes = peak_memory_bytes()
    keys = [digest(number) for number in random.Random(2).sample(range(rows), 25_600)]
    cpu_s, started = time.process_time(), time.perf_counter()
    for at in range(0, len(keys), 256):
        assert len(index.get_many(keys[at : at + 256])) == 256
    key_us = (time.perf_counter() - started) / len(keys) * 1e6
    key_cpu_us = (time.process_time() - cpu_s) / len(keys) * 1e6
    groups = [[entry(rows + at + n) for n in range(100)] for at in range(0, 10_000, 100)]
    started = time.perf_counter()
    for group in groups:
        index.apply(Change(add=group))
    rows_s = 10_000 / (time.perf_counter() - started)
    index.close()
    return {
        "open_s": open_s,
        "opened_bytes": opened_bytes,
        "key_us": key_us,
        "key_cpu_us": key_cpu_us,
        "rows_s": rows_s,
        "peak_bytes": peak_memory_bytes(),
    }


def fill(directory: Path, records: int) -> list[tuple[int, int]]:
    """A store with `records` records; where each lies."""
    tier = DiskTier(directory, WallClock(), options=OPTIONS)
    for at in range(0, records, 256):
        held = []
        for number in range(at, min(at + 256, records)):
            item = tier.reserve(bench_meta(number), PAYLOAD)
            assert isinstance(item, Reservation)
            item.payload[:8] = number.to_bytes(8, "little")
            held.append(item)
        tier.commit(held)
    places = [(row.segment, row.offset) for row in tier.core.index.walk()]
    tier.close()
    return places


def rebuild(directory: Path, records: int) -> float:
    """Records a second, from no index to an open store."""
    home = DiskTier(directory, WallClock(), options=OPTIONS)
    home.close()
    discard_index(home.core.home)
    started = time.perf_counter()
    tier = DiskTier(directory, WallClock(), options=OPTIONS)
    took_s = time.perf_counter() - started
    assert tier.recovery.adopted == records
    tier.close()
    return records / took_s


def bare_headers(directory: Path, places: list[tuple[int, int]]) -> float:
    """Records a second of reading nothing but the first 4 KiB of each."""
    page = mmap.mmap(-1, BLOCK)
    files: dict[int, int] = {}
    started = time.perf_counter()
    for segment, offset in places:
        if segment not in files:
            files[segment] = os.open(segment_path(directory, segment), os.O_RDONLY | os.O_DIRECT)
        os.preadv(files[segment], [page], offset)
    took_s = time.perf_counter() - started
    for fd in files.values():
        os.close(fd)
    return len(places) / took_s


def rows_of(root: Path, rows: int) -> Iterator[Row]:
    """The big index against its goals."""
    path = root / "index.sqlite"
    built = build(path, rows)
    yield larger_is_better(
        f"bulk build of {rows:,} rows", "rows/s", built, other=20_000, other_name="goal",
        goal=">= 20,000",
    )  # fmt: skip
    size = path.stat().st_size / 1e9
    yield smaller_is_better("file", "GB", size, other=2.0, other_name="goal", goal="<= 2 GB")
    command = [sys.executable, __file__, "--reopen", str(path), "--rows", str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    for metric, unit, value, goal in (
        ("re-open and first 256 keys", "s", found["open_s"], 10.0),
        ("peak memory after re-open", "GB", found["opened_bytes"] / 1e9, 2.0),
        ("peak memory after 25,600 look-ups and 10,000 rows", "GB", found["peak_bytes"] / 1e9, 2.0),
        ("cold key, batches of 256", "us", found["key_us"], 3.0),
        ("cold key, batches of 256, CPU", "us", found["key_cpu_us"], 3.0),
    ):
        yield smaller_is_better(
            metric, unit, value, other=goal, other_name="goal", goal=f"<= {goal:g}"
        )
    yield larger_is_better(
        "rows in groups of 100 at that size", "rows/s", found["rows_s"], other=20_000,
        other_name="goal", goal=">= 20,000",
    )  # fmt: skip


def rebuild_row(root: Path, records: int, rounds: int) -> Row:
    """From the segments, beside the bare read of their headers."""
    places = fill(root / "store", records)
    pairs = [
        (bare_headers(root / "store", places), rebuild(root / "store", records))
        for _ in range(rounds)
    ]
    return Row(
        f"rebuild from segments, {records:,} records", "records/s",
        median(mine for _, mine in pairs), median(its for its, _ in pairs), "bare header reads",
        median(mine / its for its, mine in pairs), ">= 1",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, help="On the medium to measure. Default: $TMPDIR.")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--records", type=int, default=16_000, help="In the store to rebuild.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reopen", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reopen is not None:
        print(json.dumps(reopen(options.reopen, options.rows)))
        return
    root = Path(tempfile.mkdtemp(prefix="store-index-", dir=options.dir))
    try:
        rows = [*rows_of(root, options.rows), rebuild_row(root, options.records, options.rounds)]
    finally:
        shutil.rmtree(root)
    report("store_index", rows, others={"load average at end": f"{os.getloadavg()[0]:.1f}"})


if __name__ == "__main__":
    main()
