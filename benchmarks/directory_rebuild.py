"""A directory that lost its memory, filled again by live workers over its own port.

    python benchmarks/directory_rebuild.py [--extents N] [--workers N] [--sessions N]

Real processes: `ownerserve directory serve` (in its own memory, then on a Valkey or Redis server,
if there is a binary), and workers that each run the thread of a worker (node.ownership) over an
inventory. Each holds its share of the extents in host memory or on disk, and owns its share of the
sessions. They tell all; then `directory rebuild`, and all is told again. The clock runs from the
moment of forgetting until every extent and session is known.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ownerserve.directory.port import DirectoryStatus
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rules import MAIN_KINDS
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.prefix import pack
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.ownership import Ownership, TurnCame, TurnLeft
from result import Row, report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BLOCK = 16
LEASE_S = 30.0
WAIT_S = 300.0
TICK_S = 100  # of /proc: USER_HZ
PAGE_BYTES = 4096
OTHERS = 16
"""Records that are no extent or session: holders."""


def work(address: str, number: int, *, extents: int, sessions: int) -> None:
    """A worker: runs until its stdin is closed."""
    inventory = Inventory(has_kept=extents + sessions)
    for at in range(extents):
        digest = PrefixHash(at.to_bytes(24) + number.to_bytes(8))
        tier = Tier.HOST if at % 2 else Tier.DISK
        session = SessionId(f"held/{number}/{at}")
        inventory.has(session, tier, (at % 2000 + 1) * BLOCK, digest=digest, kinds=MAIN_KINDS)
    node = Ownership(
        RoutingUnit(WorkerId(f"w{number}"), 0, Incarnation(1)),
        lambda: DirectoryClient(address, timeout_s=30.0),
        block_tokens=BLOCK,
        scope=bytes(32),
        inventory=inventory,
    )
    node.start()
    for at in range(sessions):
        name = SessionId(f"tenant/{number}/{at:08d}")
        node.tell(TurnCame(name))
        node.tell(TurnLeft(name, pack([number, at, *range(BLOCK)])))
    sys.stdin.read()
    node.close(within_s=0.0)


class Fleet:
    """A directory process and workers beside it."""

    def __init__(
        self, home: Path, *, workers: int, extents: int, sessions: int, backend: str | None = None
    ) -> None:
        self.extents = extents // workers * workers + sessions // workers * workers
        self.sessions = sessions // workers * workers
        ready = home / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "ownerserve.cli.main", "directory", "serve"]
        command += ["--port", "0"]
        command += ["--lease", str(LEASE_S), "--ready-file", str(ready)]
        command += ["--new-fleet"] if backend is None else ["--backend", backend]
        self.directory = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not ready.exists():
            time.sleep(0.05)
        self.address = ready.read_text().strip()
        self.client = DirectoryClient(self.address, timeout_s=30.0)
        self.empty_bytes = rss_bytes(self.directory.pid)
        share = ["--extents", str(extents // workers), "--sessions", str(sessions // workers)]
        self.workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--work", self.address, str(number), *share],
                stdin=subprocess.PIPE,
            )
            for number in range(workers)
        ]

    def filled(self) -> tuple[float, DirectoryStatus]:
        """Seconds until all is known."""
        began_s = time.perf_counter()
        while (took_s := time.perf_counter() - began_s) < WAIT_S:
            status = self.client.status()
            records = status.records
            if records is not None and (records.prefixes, records.sessions) == (
                self.extents, self.sessions,
            ):  # fmt: skip
                return took_s, status
            every = self.extents + self.sessions + len(self.workers)
            if status.keys is not None and every <= status.keys <= every + OTHERS:
                return took_s, status
            time.sleep(0.05)
        raise TimeoutError(f"after {WAIT_S:g} s it knows {self.client.status()}")

    def cpu_s(self) -> tuple[float, float]:
        """Of the directory, and of all workers."""
        return cpu_s(self.directory.pid), sum(cpu_s(one.pid) for one in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.client.close()
        self.directory.terminate()
        self.directory.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK_S


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def rows_of(name: str, fleet: Fleet, server: Any = None) -> list[Row]:
    fleet.filled()
    before = fleet.cpu_s()
    there_s = 0.0 if server is None else server_cpu_s(server)
    began_s = time.perf_counter()
    fleet.client.forget()
    forgot_s = time.perf_counter() - began_s
    took_s, _ = fleet.filled()
    after = fleet.cpu_s()
    what = f"{name}: {fleet.extents:,} extents and {fleet.sessions:,} sessions"
    rows = [
        Row(f"{what}, from forgetting until all is known", "s", took_s, goal="<= 30"),
        Row(f"{what}, forgetting itself", "s", forgot_s),
        Row(f"{what}, CPU of the directory", "s", after[0] - before[0]),
        Row(f"{what}, CPU of all {len(fleet.workers)} workers", "s", after[1] - before[1]),
    ]
    if server is None:
        used = rss_bytes(fleet.directory.pid) - fleet.empty_bytes
        rows.append(
            Row(f"{name}: memory an extent, of the directory", "bytes", used / fleet.extents)
        )
    else:
        used = server.client().info("memory")["used_memory"]
        rows += [
            Row(f"{what}, CPU of the server", "s", server_cpu_s(server) - there_s),
            Row(f"{name}: memory an extent, of the server", "bytes", used / fleet.extents),
        ]
    return rows


def server_cpu_s(server: Any) -> float:
    used = server.client().info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extents", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--work", nargs=2, metavar=("ADDRESS", "NUMBER"), help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.work is not None:
        address, number = told.work
        work(address, int(number), extents=told.extents, sessions=told.sessions)
        return
    size = {"workers": told.workers, "extents": told.extents, "sessions": told.sessions}
    rows: list[Row] = []
    others = {}
    from tests.support.directory.servers import Server, find_binary

    with tempfile.TemporaryDirectory() as home:
        fleet = Fleet(Path(home), **size)
        try:
            rows += rows_of("in its own memory", fleet)
            print(rows, flush=True)
        finally:
            fleet.close()
        if find_binary() is None:
            print("no valkey-server or redis-server on PATH: rows of a shared backend are left out")
        else:
            server = Server(Path(home))
            try:
                info = server.client().info("server")
                name = "valkey" if "valkey_version" in info else "redis"
                others[name] = str(info[f"{name}_version"])
                fleet = Fleet(Path(home), **size, backend=server.url)
                try:
                    rows += rows_of(f"on {name}", fleet, server)
                finally:
                    fleet.close()
            finally:
                server.stop()
    report("directory_rebuild", rows, others=others)


if __name__ == "__main__":
    main()
