"""kill -9 at system calls of a rotation, in a process of its own, by strace.

The short form takes every k-th call; all of them: see test_rotate.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ownerserve.store.tiers.backend import put
from tests.support.store import rotate_child

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]

TENANTS = {number: (b"t" * 32, b"")[number % 2] for number in range(8)}
SIZE = 30_000
EVERY = int(os.environ.get("OWNERSERVE_CRASH_EVERY", "24"))
CALLS = (
    "pwrite64,pwritev,pwritev2,write,fdatasync,fsync,fallocate,ftruncate,unlink,rename,openat,flock"
)


def run(store: Path, *strace: str) -> subprocess.CompletedProcess[bytes]:
    command = ["strace", "-f", "-qq", "-y", *strace, sys.executable]
    command += [rotate_child.__file__, str(store)]
    return subprocess.run(command, check=False, capture_output=True, timeout=300)


def points(store: Path, log: Path) -> Iterator[str]:
    """What to inject at every call of a whole rotation that touches the store."""
    shutil.copytree(store, store.parent / "warm")
    assert run(store.parent / "warm").returncode == 0  # writes the .pyc files
    shutil.copytree(store, store.parent / "count")
    assert run(store.parent / "count", "-e", f"trace={CALLS}", "-o", str(log)).returncode == 0
    seen: dict[str, int] = {}
    for line in log.read_text().splitlines():
        call = line.split("(")[0].split()[-1]
        if call in CALLS.split(","):
            seen[call] = seen.get(call, 0) + 1
            if str(store.parent / "count") in line:
                yield f"{call}:signal=KILL:when={seen[call]}"


def test_killed_at_any_call_every_record_is_there(open_disk, samples, tmp_path):
    tier = open_disk(segment_bytes=32 * 4096)
    for number, tenant in TENANTS.items():
        put(tier, samples.meta(number, tenant=tenant), samples.payload(number, SIZE))
    tier.close()
    wanted = [samples.payload(number, SIZE) for number in TENANTS]
    every_point = list(points(tmp_path / "store", tmp_path / "calls"))
    assert len(every_point) > 80
    for place, inject in enumerate(every_point[::EVERY]):
        life = tmp_path / str(place)
        shutil.copytree(tmp_path / "store", life)
        call = inject.split(":")[0]
        ended = run(life, "-e", f"trace={call}", "-o", os.devnull, "-e", f"inject={inject}")
        assert ended.returncode != 0, inject
        if place % 2:
            for path in life.glob("index.sqlite*"):
                path.unlink()
        tier = open_disk(life, segment_bytes=32 * 4096)
        assert samples.read(tier, *TENANTS) == wanted, inject
        assert tier.core.index.quarantined() == []
        tier.close()
        again = run(life, "-e", "trace=none", "-o", os.devnull)
        assert again.returncode == 0, (inject, again.stderr.decode()[-2000:])
        tier = open_disk(life, segment_bytes=32 * 4096)
        assert samples.read(tier, *TENANTS) == wanted, inject
        tier.close()
