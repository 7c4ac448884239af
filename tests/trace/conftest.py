"""Where the fixtures and, if they are there, the shared traces lie."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "traces"


@pytest.fixture
def fixtures() -> Path:
    return HERE / "fixtures"


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the shared traces (../shared/traces) are not on this machine")
    return SHARED
