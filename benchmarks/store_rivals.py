"""File layouts of others, for store_bench.py: each writes and reads rounds of blocks on request.

    .venv-vllm/bin/python benchmarks/store_rivals.py vllm DIR BLOCK_BYTES COUNT
        vLLM's own classes (vllm.v1.kv_offload.tiering.fs): its thread pool of 16 read and 16 write
        threads, its batch_store_block / batch_load_block, its O_DIRECT probe. One file a block,
        written to a temporary name and renamed; no fsync, nothing verified. A job is 16 blocks.
    python benchmarks/store_rivals.py chunk_files DIR BLOCK_BYTES COUNT
        As LMCache lays out its local disk: one raw file for each 256-token chunk, buffered write,
        no rename, no fsync, nothing verified; read buffered into a prepared buffer. Our own few
        lines, not LMCache. What it wrote is synced and dropped from the page cache between rounds,
        outside the time, so that reads come from the medium.

Protocol: a line `write` or `read` in, seconds out. Runs as a child, since vLLM has its own Python.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

JOB_BLOCKS = 16


def vllm_rounds(
    root: Path, view: memoryview, block: int, count: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """(write a round of new blocks, read a round of random ones) by vLLM's tier."""
    from functools import partial

    from vllm.v1.kv_offload.tiering.fs.io import (
        batch_load_block,
        batch_store_block,
        probe_o_direct,
    )
    from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

    pool = DualQueueThreadPool(16, 16)
    direct = probe_o_direct(str(root))
    paths: list[str] = []
    dice = random.Random(0)

    def name(number: int) -> str:
        # <hhh>/<hh>_g<group>/<hash>.bin, as its FileMapper has it.
        text = f"{dice.getrandbits(64):016x}{number:048x}"
        return str(root / text[:3] / f"{text[3:5]}_g0" / f"{text}.bin")

    def finish(jobs: int) -> None:
        done = 0
        while done < jobs:
            for _, success, _ in pool.get_finished():
                assert success
                done += 1
            time.sleep(0.0002)

    def run(names: list[str], call: Callable[..., None], enqueue: Callable[..., None]) -> None:
        jobs = range(0, len(names), JOB_BLOCKS)
        for job in jobs:
            part = names[job : job + JOB_BLOCKS]
            offsets = [(job + n) % count * block for n in range(len(part))]
            enqueue(job, 1, [partial(call, part, view, offsets, block, direct)])
        finish(len(jobs))

    def write() -> None:
        fresh = [name(len(paths) + n) for n in range(count)]
        paths.extend(fresh)
        run(fresh, batch_store_block, pool.enqueue_store)

    def read() -> None:
        run(dice.choices(paths, k=count), batch_load_block, pool.enqueue_load)

    return write, read


def chunk_file_rounds(
    root: Path, view: memoryview, block: int, count: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """(write, read) with one plain file a chunk."""
    paths: list[Path] = []
    dice = random.Random(0)

    def write() -> None:
        for number in range(count):
            paths.append(root / f"{len(paths):032x}.pt")
            with paths[-1].open("wb") as file:
                file.write(view[number * block : (number + 1) * block])

    def read() -> None:
        for number, path in enumerate(dice.choices(paths, k=count)):
            with path.open("rb", buffering=0) as file:
                file.readinto(view[number * block : (number + 1) * block])

    return write, read


def forget(root: Path) -> None:
    """Write back and drop the page cache of every file."""
    for path in root.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    kind, folder, block_text, count_text = sys.argv[1:]
    root, block, count = Path(folder), int(block_text), int(count_text)
    root.mkdir(parents=True, exist_ok=True)
    view = memoryview(mmap.mmap(-1, block * count))
    for at in range(0, len(view), 1 << 20):
        view[at : at + (1 << 20)] = os.urandom(min(1 << 20, len(view) - at))
    make = {"vllm": vllm_rounds, "chunk_files": chunk_file_rounds}[kind]
    write, read = make(root, view, block, count)
    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        {"write": write, "read": read}[line.strip()]()
        took_s = time.perf_counter() - started
        if kind == "chunk_files":
            forget(root)
        print(took_s, flush=True)


if __name__ == "__main__":
    main()
