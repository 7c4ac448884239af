"""The artifact store on disk against fio and against a file for each artifact.

    python benchmarks/store_bench.py                    a few minutes
    python benchmarks/store_bench.py --load             beside one process that writes and syncs
                                                        and one that reads
    python benchmarks/store_bench.py --dir /mnt/nvme --size 1GiB --rounds 7

Ours and the others take turns, round by round, so that what else the machine does falls on both;
a ratio is the median of the rounds' ratios.

    verified read     look-up, O_DIRECT read, header and every digest checked, bytes in fresh
                      memory; fio: the same size and depth, O_DIRECT, nothing checked
    verified restore  16 records by one read, anywhere or (neighbours) spilled together
    durable write     reserve, fill, digest, append, one fdatasync for each 32 MiB; streamed: the
                      next 32 MiB are filled meanwhile; fio: sequential O_DIRECT from one buffer
                      into a fresh preallocated file, the same syncs
    file each         one a record, fdatasync, rename, fsync of the directory
    vllm, chunk_files store_rivals.py says what they do, and what they leave out
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from ownerserve.kv.units import KIB, MIB, parse_bytes
from ownerserve.store.format.segment import sync_directory
from ownerserve.store.service.measure import GROUP_BYTES, DiskBench, measure_index
from result import Row, larger_is_better, report, smaller_is_better

GOALS = {
    "durable write 1 MiB, streamed": ">= 0.9 quiet",
    "durable write 1 MiB, streamed vs file each": ">= 3 loaded",
    "verified read 1 MiB x4": ">= 0.7",
    "verified read 64 KiB x4": ">= 0.8",
    "verified restore of 16 x 64 KiB": ">= 0.8",
    "verified restore of 16 x 1 MiB": ">= 0.7",
}
SCRIPT = Path(__file__).with_name("store_rivals.py")
VLLM = Path(__file__).resolve().parent.parent / ".venv-vllm" / "bin" / "python"


class Rival:
    """Another layout in a child process (store_rivals.py); MB/s of its rounds."""

    def __init__(self, python: Path | str, kind: str, root: Path, block: int, total: int) -> None:
        count = total // block
        self._bytes = count * block
        self._child = subprocess.Popen(
            [python, SCRIPT, kind, root / kind, str(block), str(count)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit("error: a child of the benchmark ended early")
        return line.strip()

    def round(self, what: str) -> float:
        """MB/s of one `write` or `read` round."""
        assert self._child.stdin is not None
        self._child.stdin.write(what + "\n")
        self._child.stdin.flush()
        return self._bytes / 1e6 / float(self._line())

    def close(self) -> None:
        """End the child."""
        self._child.terminate()
        self._child.wait()


def fio(root: Path, *, mode: str, block: int, depth: int, total: int) -> float:
    """MB/s of one fio job."""
    return fio_job(root, mode=mode, block=block, depth=depth, total=total)[0]


def fio_job(root: Path, *, mode: str, block: int, depth: int, total: int) -> tuple[float, float]:
    """(MB/s, microseconds of CPU a block) of one fio job."""
    command = [
        "fio", "--name=job", f"--filename={root / mode}.dat", f"--rw={mode}", f"--bs={block}",
        f"--size={total}", "--direct=1", "--ioengine=libaio", f"--iodepth={depth}",
        "--output-format=json", "--randrepeat=0", "--fallocate=posix",
    ]  # fmt: skip
    if mode == "write":
        # A fresh file each time, as ours are: rewriting written blocks spares the file system work.
        command += ["--unlink=1", f"--fdatasync={max(1, GROUP_BYTES // block)}", "--end_fsync=1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout)["jobs"][0]
    found = job["write" if mode == "write" else "read"]
    cpu_us = (job["usr_cpu"] + job["sys_cpu"]) / 100 * found["runtime"] * 1000
    return float(found["bw_bytes"]) / 1e6, cpu_us / found["total_ios"]


def write_files(root: Path, block: int, total: int) -> float:
    """MB/s of a careful file-per-artifact writer."""
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
    """Two neighbours for as long as the block runs: one writes and syncs, one reads."""
    common = ["--size=512m", "--time_based", "--runtime=36000", "--bs=256k"]
    writer = ["--name=writer", f"--filename={root / 'w.dat'}", "--rw=randwrite", "--fsync=16"]
    reader = ["--name=reader", f"--filename={root / 'r.dat'}", "--rw=randread", "--direct=1"]
    processes = [
        subprocess.Popen(["fio", *job, *common], stdout=subprocess.DEVNULL)
        for job in ((writer, reader) if wanted else ())
    ]
    try:
        yield
    finally:
        for process in processes:
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
    """Writes and reads at three sizes, beside fio and three layouts of files."""
    for block in (64 * KIB, MIB, 16 * MIB):
        bench = DiskBench(root / f"store-{block}", block, total)
        yield from write_rows(root, bench, total, rounds)
        yield from read_rows(root, bench, total, rounds)
        if block <= MIB:
            yield from cpu_rows(root, bench, total, rounds)
        bench.tier.close()
        shutil.rmtree(root / f"store-{block}")
        for name, python, kind in (
            ("vLLM 0.32 fs tier", VLLM, "vllm"),
            ("file a chunk, no sync", sys.executable, "chunk_files"),
        ):
            if Path(python).exists() and block >= MIB:
                yield from rival_rows(root, block, total, rounds=rounds, who=(name, python, kind))


def write_rows(root: Path, bench: DiskBench, total: int, rounds: int) -> Iterator[Row]:
    """Durable writes, group by group and streamed."""
    block, name = bench.payload_bytes, bench.label
    files = min(total, 256 * block)
    for metric, ours in (
        (f"durable write {name}", bench.write_round),
        (f"durable write {name}, streamed", bench.stream_round),
    ):
        yield turns(
            metric, rounds, ours=ours, name="fio",
            other=lambda: fio(root, mode="write", block=block, depth=1, total=total),
        )  # fmt: skip
    yield turns(
        f"durable write {name}, streamed vs file each", rounds, ours=bench.stream_round,
        other=lambda: write_files(root, block, files), name="file each, synced",
    )  # fmt: skip


def cpu_rows(root: Path, bench: DiskBench, total: int, rounds: int) -> Iterator[Row]:
    """What the processor spends on a record: the share of a ratio that a busy machine can't move.

    Ours: the whole process, all threads. A ratio below 1 is the price of looking up, digesting
    and of the interpreter; it costs throughput where it exceeds the medium's time for the record.
    """
    for metric, ours, mode, depth in (
        ("CPU of a verified read", partial(bench.read_round, 4), "randread", 4),
        ("CPU of a verified record, restore of 16", bench.gather_round, "randread", 16),
        ("CPU of a durable record, streamed", bench.stream_round, "write", 1),
    ):
        mine, its = [], []
        for _ in range(rounds):
            its.append(
                fio_job(root, mode=mode, block=bench.payload_bytes, depth=depth, total=total)[1]
            )
            started = time.process_time()
            ours()
            mine.append((time.process_time() - started) / bench.count * 1e6)
        yield smaller_is_better(
            f"{metric}, {bench.label}", "us", median(mine), other=median(its), other_name="fio"
        )


def read_rows(root: Path, bench: DiskBench, total: int, rounds: int) -> Iterator[Row]:
    """Verified reads: one at a time, four threads, restores of 16."""
    block, name = bench.payload_bytes, bench.label

    def beside(metric: str, ours: Callable[[], float], depth: int) -> Row:
        return turns(
            metric, rounds, ours=ours, name=f"fio QD{depth}",
            other=lambda: fio(root, mode="randread", block=block, depth=depth, total=total),
        )  # fmt: skip

    for depth in (1, 4):
        yield beside(f"verified read {name} x{depth}", partial(bench.read_round, depth), depth)
    if block <= MIB:
        yield beside(f"verified restore of 16 x {name}", bench.gather_round, 4)
        yield beside(f"verified restore of 16 x {name} (QD16)", bench.gather_round, 16)
        yield beside(f"verified restore of 16 x {name} neighbours", bench.restore_round, 4)


def rival_rows(
    root: Path, block: int, total: int, *, rounds: int, who: tuple[str, Path | str, str]
) -> Iterator[Row]:
    """Ours durable and verified; theirs as their layout does it."""
    name, python, kind = who
    bench = DiskBench(root / "ours", block, total)
    rival = Rival(python, kind, root, block, total)
    for metric, ours, what in (
        (f"write {bench.label} vs {kind}", bench.stream_round, "write"),
        (
            f"restore of 16 x {bench.label} vs {kind}",
            bench.gather_round if block <= MIB else partial(bench.read_round, 4),
            "read",
        ),
    ):
        yield turns(metric, rounds, ours=ours, other=partial(rival.round, what), name=name)
    rival.close()
    bench.tier.close()
    shutil.rmtree(root / "ours")
    shutil.rmtree(root / kind)


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
