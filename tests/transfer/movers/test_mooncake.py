"""Mooncake's engine behind our mover: it writes late, and only where nothing else is."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.children import ROOT, importing

PYTHON = ROOT / ".venv-mooncake" / "bin" / "python"
LIBRARIES = [ROOT / ".venv-mooncake/root" / at / "x86_64-linux-gnu" for at in ("usr/lib", "lib")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.crash,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="needs Mooncake's environment: make bench-transfer"
    ),
]


def test_what_ends_amid_is_unproven_and_its_slot_stays_its_own() -> None:
    path = os.pathsep.join(map(str, LIBRARIES))
    done = subprocess.run(
        [PYTHON, "-m", "tests.support.transfer.mooncake_child"],
        env=importing(LD_LIBRARY_PATH=path), cwd=ROOT,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith('["came"')]
    assert told, done.stderr[-3000:]
    assert json.loads(told[0])[1] == {
        "1 runs": "ReadLanded",
        "3000 runs": "ReadLanded",
        "frozen": ["ReadUnproven", "late"],
        "the slot is not used again": True,
        "thawed": "ReadQuiet",
        "bytes came late": True,
        "killed": ["ReadUnproven", "peer_lost"],
        "quiet after it failed": 0,
        "abandoned": 8 << 20,
    }
