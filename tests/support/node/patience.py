"""For tests over real threads and ports whose peers all answer: how long it takes on a busy machine
decides nothing."""

from __future__ import annotations

import pytest

from ownerserve.transfer.control import source, target

PATIENCE_S = 60.0


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers at all answers in time."""
    for name in ("SILENT_S", "READ_S", "LEND_MOST_S"):
        monkeypatch.setattr(target, name, PATIENCE_S)
    monkeypatch.setattr(source, "IDLE_S", PATIENCE_S)
