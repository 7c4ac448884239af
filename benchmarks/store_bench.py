"""The artifact store on disk against fio and against a file for each artifact.

    python benchmarks/store_bench.py                    about a minute on a quiet machine
    python benchmarks/store_bench.py --load             with a second process writing and syncing
    python benchmarks/store_bench.py --dir /mnt/nvme --size 4GiB --rounds 7

Ours and the others take turns, round by round, so that what else the machine does falls on both;
a ratio is the median of the rounds' ratios. Verified read: lookup, O_DIRECT read, header and every
digest checked, bytes in fresh memory. fio: the same size and depth, O_DIRECT, nothing checked.
Durable write: digests, append, fdatasync each 32 MiB; fio: sequential O_DIRECT with the same
syncs; files: one a record, fdatasync, rename, fsync of the directory, as a careful writer does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from ownerserve.kv.units import KIB, MIB, parse_bytes
from ownerserve.store.measure import GROUP_BYTES, DiskBench, measure_index
from ownerserve.store.segment import sync_directory
from result import Row, larger_is_better, report, smaller_is_better

GOALS = {
    "verified read 1 MiB x4": ">= 0.7",
    "verified read 64 KiB x4": ">= 0.8",
    "verified restore of 16 x 64 KiB": ">= 0.8",
    "verified restore of 16 x 1 MiB": ">= 0.7",
    "durable write 1 MiB": ">= 0.9 quiet",
}


def fio(root: Path, *, mode: str, block: int, depth: int, total: int) -> float:
    """MB/s of one fio job."""
    command = [
        "fio", "--name=job", f"--filename={root / mode}.dat", f"--rw={mode}", f"--bs={block}",
        f"--size={total}", "--direct=1", "--ioengine=libaio", f"--iodepth={depth}",
        "--output-format=json", "--randrepeat=0", "--fallocate=posix",
    ]  # fmt: skip
    if mode == "write":
        # A fresh file each time, as ours are: rewriting written blocks spares the file system work.
        command += ["--unlink=1", f"--fdatasync={max(1, GROUP_BYTES // block)}", "--end_fsync=1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout)["jobs"][0]["write" if mode == "write" else "read"]
    return float(job["bw_bytes"]) / 1e6


def write_files(root: Path, block: int, total: int) -> float:
    """MB/s of a careful file-per-artifact writer."""
    import time

    folder = root / "files"
    folder.mkdir()
    data = os.urandom(block)
    started = time.perf_counter()
    for number in range(total // block):
        temporary = folder / f".{number}.tmp"
        with temporary.open("xb", buffering=0) as file:
            file.write(data)
            os.fdatasync(file.fileno())
        temporary.rename(folder / str(number))
        sync_directory(folder)
    took_s = time.perf_counter() - started
    shutil.rmtree(folder)
    return total / 1e6 / took_s


@contextmanager
def load(root: Path, *, wanted: bool) -> Iterator[None]:
    """A neighbour that writes buffered and syncs, for as long as the block runs."""
    if not wanted:
        yield
        return
    command = [
        "fio", "--name=neighbour", f"--filename={root / 'neighbour.dat'}", "--rw=randwrite",
        "--bs=256k", "--size=512m", "--fsync=16", "--time_based", "--runtime=3600",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def turns(
    metric: str, rounds: int, *, ours: Callable[[], float], other: Callable[[], float], name: str
) -> Row:
    """One row: medians of each side, ratio of the medians' turns."""
    pairs = [(other(), ours()) for _ in range(rounds)]
    row = larger_is_better(
        metric, "MB/s", median(mine for _, mine in pairs),
        other=median(its for its, _ in pairs), other_name=name, goal=GOALS.get(metric, ""),
    )  # fmt: skip
    ratio = median(mine / its for its, mine in pairs)
    return Row(row.metric, row.unit, row.ours, row.other, row.other_name, ratio, row.goal)


def disk_rows(root: Path, total: int, rounds: int) -> Iterator[Row]:
    """Reads and writes at three sizes."""
    for block in (64 * KIB, MIB, 16 * MIB):
        bench = DiskBench(root / f"store-{block}", block, total)
        name = bench.label
        yield turns(
            f"durable write {name}", rounds, ours=bench.write_round, name="fio",
            other=lambda block=block: fio(root, mode="write", block=block, depth=1, total=total),
        )  # fmt: skip
        files = min(total, 256 * block)
        yield turns(
            f"durable write {name} vs files", rounds, ours=bench.write_round, name="file each",
            other=lambda block=block, files=files: write_files(root, block, files),
        )  # fmt: skip
        for depth in (1, 4):
            yield turns(
                f"verified read {name} x{depth}", rounds, name=f"fio QD{depth}",
                ours=lambda bench=bench, depth=depth: bench.read_round(depth),
                other=lambda block=block, depth=depth: fio(
                    root, mode="randread", block=block, depth=depth, total=total
                ),
            )  # fmt: skip
        if block <= MIB:
            yield turns(
                f"verified restore of 16 x {name}", rounds, name="fio QD4",
                ours=bench.restore_round,
                other=lambda block=block: fio(
                    root, mode="randread", block=block, depth=4, total=total
                ),
            )  # fmt: skip
        bench.tier.close()
        shutil.rmtree(root / f"store-{block}")


def index_rows(root: Path, rounds: int) -> Iterator[Row]:
    """The index against its goals."""
    insert, *lookups = measure_index(root, rows=20_000, rounds=rounds)
    yield larger_is_better(
        insert.metric, insert.unit, insert.value, other=20_000, other_name="goal", goal=">= 20,000"
    )
    for row, limit in zip(lookups, (1, 3, 3), strict=True):
        yield smaller_is_better(
            row.metric, row.unit, row.value, other=limit, other_name="goal", goal=f"<= {limit}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, help="On the medium to measure. Default: $TMPDIR.")
    parser.add_argument("--size", default="256MiB", help="Bytes each round.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", action="store_true", help="Run beside a syncing neighbour.")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("error: fio is not installed; apt-get install fio")
    root = Path(tempfile.mkdtemp(prefix="store-bench-", dir=options.dir))
    total = parse_bytes(options.size, field="--size")
    try:
        with load(root, wanted=options.load):
            rows = [*disk_rows(root, total, options.rounds), *index_rows(root, options.rounds)]
    finally:
        shutil.rmtree(root)
    version = subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True)
    name = "store_bench_load" if options.load else "store_bench"
    load_1 = f"{os.getloadavg()[0]:.1f}"
    report(name, rows, others={"fio": version.stdout.strip(), "load average at end": load_1})


if __name__ == "__main__":
    main()
