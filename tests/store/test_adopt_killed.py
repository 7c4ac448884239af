"""kill -9 at system calls of an adoption, in a process of its own, by strace.

The short form takes every k-th call; all of them: OWNERSERVE_CRASH_EVERY=1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.node.storage.journal import tips_in, write_tips
from ownerserve.node.vocabulary.records import Tip
from ownerserve.store.tiers.backend import put
from tests.support.store import adopt_child

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]

TENANTS = {number: (b"t" * 32, b"")[number % 2] for number in range(8)}
SIZE = 30_000
EVERY = int(os.environ.get("OWNERSERVE_CRASH_EVERY", "8"))
CALLS = (
    "pwrite64,pwritev,pwritev2,write,fdatasync,fsync,fallocate,ftruncate,unlink,rename,openat,flock"
)
JOURNAL = "sessions-0123456789abcdef.jsonl"


def run(home: Path, *strace: str) -> subprocess.CompletedProcess[bytes]:
    command = ["strace", "-f", "-qq", "-y", *strace, sys.executable]
    command += [adopt_child.__file__, str(home / "from"), str(home / "into")]
    return subprocess.run(command, check=False, capture_output=True, timeout=300)


def points(home: Path, folder: Path) -> Iterator[str]:
    """What to inject at every call of a whole adoption that touches either store."""
    shutil.copytree(home, folder / "warm")
    assert run(folder / "warm").returncode == 0  # writes the .pyc files
    shutil.copytree(home, folder / "count")
    log = folder / "calls"
    assert run(folder / "count", "-e", f"trace={CALLS}", "-o", str(log)).returncode == 0
    seen: dict[str, int] = {}
    for line in log.read_text().splitlines():
        call = line.split("(")[0].split()[-1]
        if call in CALLS.split(","):
            seen[call] = seen.get(call, 0) + 1
            if str(folder / "count") in line:
                yield f"{call}:signal=KILL:when={seen[call]}"


@pytest.fixture
def home(open_disk, samples, tmp_path) -> Path:
    """Two closed stores, of which FROM has six and INTO four artifacts, two of them in both."""
    for name, numbers in (("from", range(6)), ("into", range(4, 8))):
        tier = open_disk(tmp_path / "home" / name, segment_bytes=32 * 4096)
        for number in numbers:
            meta = samples.meta(number, tenant=TENANTS[number])
            put(tier, meta, samples.payload(number, SIZE))
        tier.close()
    for name, session in (("from", "theirs"), ("into", "ours")):
        tip = Tip(SessionId(session), 3, {2: PrefixHash(bytes(32))})
        write_tips(tmp_path / "home" / name / JOURNAL, {tip.session_id: tip})
    return tmp_path / "home"


def test_killed_at_any_call_nothing_is_lost_and_nothing_is_there_twice(
    home, open_disk, samples, tmp_path
):
    every_point = list(points(home, tmp_path))
    assert len(every_point) > 50
    wanted = [samples.payload(number, SIZE) for number in TENANTS]
    for place, inject in enumerate(every_point[::EVERY]):
        life = tmp_path / str(place)
        shutil.copytree(home, life)
        call = inject.split(":")[0]
        ended = run(life, "-e", f"trace={call}", "-o", os.devnull, "-e", f"inject={inject}")
        assert ended.returncode != 0, inject
        is_marked = (life / "from" / "ADOPTED").exists()
        if is_marked:  # whoever reads the mark may remove FROM
            shutil.rmtree(life / "from")
        else:
            again = run(life, "-e", "trace=none", "-o", os.devnull)
            assert again.returncode == 0, (inject, again.stderr.decode()[-2000:])
            source = open_disk(life / "from", segment_bytes=32 * 4096)
            assert samples.read(source, *range(6)) == wanted[:6], inject
            source.close()
        tier = open_disk(life / "into", segment_bytes=32 * 4096)
        assert samples.read(tier, *TENANTS) == wanted, inject
        assert sum(used.records for used in tier.usage().values()) == len(TENANTS), inject
        assert tier.core.index.quarantined() == []
        tier.close()
        assert set(tips_in(life / "into" / JOURNAL)[0]) == {"theirs", "ours"}, inject
