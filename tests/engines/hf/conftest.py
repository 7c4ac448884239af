"""Shared by the tests of the reference engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ownerserve.node.runtime.node_runtime import Calibration
from tests.support.hf.assumed import pass_over

MEASURE = Calibration.observe


@pytest.fixture(scope="module", autouse=True)
def assumed_prices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prices are those of an unmeasured engine, except in a module that says `MEASURES = True`."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "MEASURES", False):
            patch.setattr(Calibration, "observe", pass_over)
        yield


@pytest.fixture
def measured_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are what this machine measures."""
    monkeypatch.setattr(Calibration, "observe", MEASURE)
