"""docs/gateway.md against the code that it describes."""

from __future__ import annotations

import re
from pathlib import Path

from ownerserve.router.decision import DispatchReason

DOCS = Path(__file__).parents[2] / "docs" / "gateway.md"


def test_the_reasons_are_all_there_and_no_others() -> None:
    """Who reads `x-ownerserve-reason` finds it in the table."""
    _, _, after = DOCS.read_text().partition("| reason | means |\n|---|---|\n")
    table, _, _ = after.partition("\n\n")
    assert [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()] == [
        [reason.value] for reason in DispatchReason
    ]
