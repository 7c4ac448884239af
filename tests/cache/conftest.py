"""Makes `cache_driver` importable: the stateful machines need it when their module is read."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
