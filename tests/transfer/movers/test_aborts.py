"""The command that cuts reads off at random points does so, and says what came of it."""

from __future__ import annotations

import pytest

from tests.support.transfer.aborts import main

pytestmark = [pytest.mark.slow, pytest.mark.crash]


def test_aborts_are_made_by_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["shm", "--aborts", "30"]) == 0
    said = capfd.readouterr().out
    assert "shm: 3" in said and "0 bytes late" in said, said
