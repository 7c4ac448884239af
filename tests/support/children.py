"""Where processes that a test starts find our code: the source, and this package."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def importing(*more: Path, **settings: str) -> dict[str, str]:
    """An environment in which `ownerserve`, `tests.support` and what lies in `more` are imported.

    `settings` are variables set beside.
    """
    path = os.pathsep.join(str(folder) for folder in (ROOT / "src", ROOT, *more))
    return {**os.environ, "PYTHONPATH": path, **settings}
