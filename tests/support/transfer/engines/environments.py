"""Where each engine is installed (make test-engines), and what its processes are told."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.children import ROOT

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


def packages_of(engine: str) -> Path | None:
    """Where the engine's package lies; None: its environment was not made."""
    return next((ROOT / f".venv-{engine}").glob(f"lib/*/site-packages/{engine}/.."), None)
