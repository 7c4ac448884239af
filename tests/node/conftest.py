"""Makes `node_driver` importable: the stateful machine needs it when its module is read."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
