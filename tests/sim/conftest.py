"""Makes the drivers of this folder importable, and the shared traces a fixture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[2] / "shared" / "traces"

sys.path.insert(0, str(HERE))


@pytest.fixture
def shared_traces() -> Path:
    """Where the real traces are; skips without them."""
    if not SHARED.is_dir():
        pytest.skip("the shared traces (../shared/traces) are not on this machine")
    return SHARED
