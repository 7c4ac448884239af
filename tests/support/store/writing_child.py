"""A worker's store as its process leaves it when it is killed.

python -m tests.support.store.writing_child DIR FIRST END    says "ready", then waits to be killed
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from ownerserve.kv.units import MIB
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import put
from tests.support.children import importing
from tests.support.store.samples import Samples

TENANT = b"t" * 32
SIZE = 60_000


def tenant_of(number: int) -> bytes:
    """Every third artifact is a tenant's."""
    return TENANT if number % 3 == 0 else b""


class Writing:
    """A process that has the store open, with artifacts [first, end) in it."""

    def __init__(self, directory: Path, first: int, end: int) -> None:
        command = [sys.executable, "-m", "tests.support.store.writing_child"]
        self._process = subprocess.Popen(
            [*command, str(directory), str(first), str(end)],
            env=importing(),
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def written_and_killed(directory: Path, first: int, end: int) -> None:
    """Leave a store of artifacts [first, end) whose worker was killed."""
    Writing(directory, first, end).kill()


def main(directory: str, first: str, end: str) -> None:
    tier = DiskTier(Path(directory), WallClock(), options=DiskOptions(segment_bytes=MIB))
    for number in range(int(first), int(end)):
        meta = Samples.meta(number, tenant=tenant_of(number))
        put(tier, meta, Samples.payload(number, SIZE))
    print("ready", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
