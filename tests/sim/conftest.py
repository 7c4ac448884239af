"""The shared traces as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.fixture
def shared_traces() -> Path:
    """Where the real traces are; skips without them."""
    if not SHARED.is_dir():
        pytest.skip("the shared traces (../shared/traces) are not on this machine")
    return SHARED
