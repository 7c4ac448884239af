"""What a worker says beside its answers, as header lines of a fake engine."""

from __future__ import annotations

import json

LIFE = 1_700_000_000_000_000_000


def said(
    life: int = LIFE,
    *,
    as_of: float = 1.0,
    load: dict[str, int] | None = None,
    **more: object,
) -> dict[str, str]:
    """The line of a worker in this life. `load`: beside its date; `more`: further fields."""
    line = {"unit": ["own-name", 0, life], "load": {"as_of_s": as_of} | (load or {})} | more
    return {"x-ownerserve-answer": json.dumps(line)}
