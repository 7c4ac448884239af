"""A rotation of a store's own key, to be killed.

python rotate_child.py DIR     seals small groups, so that a kill finds many places to fall
"""

from __future__ import annotations

import sys
from pathlib import Path

from ownerserve.store.disk import rotate
from ownerserve.store.service.runtime import WallClock

GROUP_BYTES = 40_000

if __name__ == "__main__":
    rotate.GROUP_BYTES = GROUP_BYTES
    done = rotate.rotate_key(
        Path(sys.argv[1]), rotate.KeyChange(), clock=WallClock(), on_progress=lambda _: None
    )
    print(done.resealed, done.standing)
