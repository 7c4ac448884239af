"""Movers over engines that are not ours keep the contract of all movers, each over the real wheel
in an environment of its own: it writes late, and only where nothing else is.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.support.children import ROOT, importing

DEBIAN = "x86_64-linux-gnu"
SETTINGS = {
    "mooncake": {
        "LD_LIBRARY_PATH": os.pathsep.join(
            str(ROOT / ".venv-mooncake/root" / at / DEBIAN) for at in ("usr/lib", "lib")
        )
    },
    # Not the shared memory that UCX would take between two processes of one host.
    "nixl": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"},
}

pytestmark = [pytest.mark.slow, pytest.mark.crash]


@pytest.mark.parametrize("engine", SETTINGS)
def test_its_mover_keeps_the_contract(engine: str) -> None:
    place = ROOT / f".venv-{engine}"
    python = place / "bin" / "python"
    if next(place.glob("lib/*/site-packages/pytest"), None) is None:
        pytest.skip(f"needs {engine}'s environment: make test-engines")
    suite = f"tests/support/transfer/engines/{engine}_contract.py"
    chosen = "slow or not slow" if os.environ.get("OWNERSERVE_LONG") else "not slow"
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", chosen, suite],
        env=importing(**SETTINGS[engine]), cwd=ROOT,
        capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    told = done.stdout[-5000:] + done.stderr[-1000:]
    assert done.returncode == 0, told
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 30 and "skipped" not in done.stdout, told
