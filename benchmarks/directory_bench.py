"""What the ownership directory costs: in this process, on Valkey or Redis, and filled anew.

    python benchmarks/directory_bench.py [--extents N]

Operations a second of CPU time in this process, of wall time on a server (which runs on the same
machine, on another core if there is one). Beside them what a plain lock costs on the same server:
`SET key owner NX PX lease`, without epochs, prefixes or forks. Without a server binary on PATH
those rows are left out, with a note.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.port import Directory
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.frames import RequestBatch, decode_question, encode
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.rules import StateKind, TierCode
from ownerserve.directory.terms import TermFile
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from result import Row, larger_is_better, report

# Real servers, as the tests start them.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WORKERS = 8
PART = 1000
REPEATS = 5
MAIN = StateKind.DENSE | StateKind.COMPRESSED
UNITS = [RoutingUnit(WorkerId(f"w{n}"), 0, Incarnation(1)) for n in range(WORKERS)]
Timer = Callable[[], float]


def digest(number: int) -> PrefixHash:
    return PrefixHash(number.to_bytes(8, "little") * 4)


def workload(count: int) -> Iterator[tuple[str, list[ask.Request]]]:
    """Each operation `count` times, on records of its own, in an order in which all succeed."""
    yield "register", [ask.Register(unit) for unit in UNITS]
    yield "bind a new session", [ask.Bind(_session(n), UNITS[n % WORKERS]) for n in range(count)]
    yield "find_session", [ask.FindSession(_session(n)) for n in range(count)]
    yield (
        "publish of one extent",
        [
            ask.Publish(
                UNITS[n % WORKERS], (ask.HeldExtent(digest(n), 4096, TierCode.DEVICE, int(MAIN)),)
            )
            for n in range(count)
        ],
    )
    yield (
        "lookup of 3 candidates",
        [ask.Lookup((digest(count + n), digest(2 * count + n), digest(n))) for n in range(count)],
    )
    yield "renew_lease", [ask.RenewLease(UNITS[n % WORKERS]) for n in range(count)]


def rates(directory: Directory, *, count: int, batch: int, timer: Timer) -> dict[str, float]:
    """Operations a second, each kind once."""
    found = {}
    for name, requests in workload(count):
        began = timer()
        for start in range(0, len(requests), batch):
            outcomes = directory.execute(requests[start : start + batch])
            refused = [one for one in outcomes if isinstance(one, ask.Refused | ask.Miss)]
            assert not refused, (name, refused[:1])
        found[name] = len(requests) / max(timer() - began, 1e-9)
    del found["register"]
    return found


def median_rates(
    fresh: Callable[[], Directory], *, count: int, batch: int, timer: Timer
) -> dict[str, float]:
    """Medians over runs that each start from nothing."""
    runs = []
    for _ in range(REPEATS):
        directory = fresh()
        runs.append(rates(directory, count=count, batch=batch, timer=timer))
        directory.close()
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def inventories(extents: int) -> list[bytes]:
    """Frames as workers send them: every extent once, each worker its share, 1,000 a frame."""
    frames = []
    for start in range(0, extents, PART):
        held = tuple(
            ask.HeldExtent(digest(n), 64 * (n % 2000 + 1), TierCode(n % 3), MAIN)
            for n in range(start, min(start + PART, extents))
        )
        unit = UNITS[start // PART % WORKERS]
        frames.append(encode(RequestBatch((ask.Publish(unit, held),))))
    return frames


def rebuild(directory: Directory, frames: Sequence[bytes]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process) from encoded inventories to all known."""
    directory.execute([ask.Register(unit) for unit in UNITS])
    began, began_cpu = time.perf_counter(), time.process_time()
    for frame in frames:
        question = decode_question(frame)
        assert isinstance(question, RequestBatch)
        for outcome in directory.execute(question.requests):
            assert isinstance(outcome, ask.Published), outcome
    return time.perf_counter() - began, time.process_time() - began_cpu


def embedded() -> EmbeddedDirectory:
    return EmbeddedDirectory(ManualClock(), TermFile(), lease_s=600.0, opens_in_s=0.0)


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def embedded_rows(extents: int) -> list[Row]:
    rows = []
    found = median_rates(embedded, count=20_000, batch=1, timer=time.process_time)
    for name, rate in found.items():
        rows.append(Row(f"in-process: {name}", "operations/CPU s", rate))
    frames = inventories(extents)
    gc.collect()
    before = rss_bytes()
    directory = embedded()
    wall_s, cpu_s = rebuild(directory, frames)
    gc.collect()
    rows += [
        Row(f"in-process: rebuild of {extents:,} extents", "wall s", wall_s, goal="<= 10"),
        Row(f"in-process: rebuild of {extents:,} extents", "CPU s", cpu_s, goal="<= 10"),
        Row("in-process: memory an extent", "bytes", (rss_bytes() - before) / extents),
    ]
    lookups = [ask.Lookup((digest(n * 7 % extents),)) for n in range(20_000)]
    began = time.process_time()
    for one in lookups:
        assert isinstance(directory.execute([one])[0], ask.Found)
    rate = len(lookups) / (time.process_time() - began)
    rows.append(Row(f"in-process: lookup among {extents:,}", "operations/CPU s", rate))
    return rows


def service_rows() -> list[Row]:
    """Over the socket: one client, one request a frame and 64."""
    rows = []
    for batch in (1, 64):
        server = DirectoryServer(embedded())
        server.start()
        client = DirectoryClient(server.address)
        for name, rate in rates(client, count=5_000, batch=batch, timer=time.perf_counter).items():
            rows.append(Row(f"service, {batch} a frame: {name}", "operations/s", rate))
        client.close()
        server.stop()
    return rows


def shared_rows(extents: int, server: Any) -> list[Row]:
    from ownerserve.directory.valkey.directory import ValkeyDirectory, ValkeyOptions
    from ownerserve.directory.valkey.primary import parse_source

    def fresh() -> Directory:
        server.client().flushall()
        directory = ValkeyDirectory(
            parse_source(server.url), ValkeyOptions(lease_s=600.0, timeout_s=30.0)
        )
        directory.status()
        server.client().hset("ownerserve:term", "open_us", "0")
        return directory

    rows = []
    for batch, count in ((1, 2_000), (64, 20_000)):
        lock = _plain_lock(server, count=count, batch=batch)
        how = "one at a time" if batch == 1 else f"{batch} pipelined"
        for name, rate in median_rates(
            fresh, count=count, batch=batch, timer=time.perf_counter
        ).items():
            rows.append(
                larger_is_better(
                    f"server, {how}: {name}",
                    "operations/s",
                    rate,
                    other=lock,
                    other_name="SET NX PX",
                )
            )
    frames = inventories(extents)
    directory = fresh()
    before, cpu_before = server.client().info("memory")["used_memory"], _server_cpu_s(server)
    wall_s, cpu_s = rebuild(directory, frames)
    used = server.client().info("memory")["used_memory"] - before
    there_s = _server_cpu_s(server) - cpu_before
    rows += [
        Row(f"server: rebuild of {extents:,} extents", "wall s", wall_s, goal="<= 10"),
        Row(f"server: rebuild of {extents:,} extents", "CPU s here", cpu_s),
        Row(f"server: rebuild of {extents:,} extents", "CPU s there", there_s),
        Row("server: memory an extent", "bytes", used / extents),
    ]
    directory.close()
    return rows


def _server_cpu_s(server: Any) -> float:
    used = server.client().info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def _plain_lock(server: Any, *, count: int, batch: int) -> float:
    client = server.client()
    client.flushall()
    began = time.perf_counter()
    for start in range(0, count, batch):
        if batch == 1:
            client.set(f"s:{start}", "w0", nx=True, px=5000)
            continue
        pipe = client.pipeline(transaction=False)
        for n in range(start, start + batch):
            pipe.set(f"s:{n}", "w0", nx=True, px=5000)
        pipe.execute()
    return count / (time.perf_counter() - began)


def _session(number: int) -> SessionId:
    return SessionId(f"tenant/session-{number:08d}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extents", type=int, default=1_000_000)
    extents = parser.parse_args().extents
    rows = embedded_rows(extents) + service_rows()
    others = {}
    from tests.support.directory.servers import Server, find_binary

    if find_binary() is None:
        print("no valkey-server or redis-server on PATH: rows of a shared backend are left out")
    else:
        with tempfile.TemporaryDirectory() as home:
            server = Server(Path(home))
            try:
                info = server.client().info("server")
                name = "valkey" if "valkey_version" in info else "redis"
                others[name] = str(info[f"{name}_version"])
                rows += shared_rows(extents, server)
            finally:
                server.stop()
    report("directory_bench", rows, others=others)


if __name__ == "__main__":
    main()
