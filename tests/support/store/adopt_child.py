"""An adoption, to be killed.

python adopt_child.py FROM INTO     copies small groups, so that a kill finds many places to fall
"""

from __future__ import annotations

import sys
from pathlib import Path

from ownerserve.kv.units import MIB
from ownerserve.node.storage.adopting import take_over
from ownerserve.store.disk import adopt
from ownerserve.store.disk.tier import DiskOptions
from ownerserve.store.tiers.policy import KindLimits, TierLimits

GROUP_BYTES = 60_000

if __name__ == "__main__":
    adopt.GROUP_BYTES = GROUP_BYTES
    limits = TierLimits(KindLimits(8 * MIB), KindLimits(MIB))
    options = DiskOptions(limits=limits, segment_bytes=32 * 4096)
    done = take_over(Path(sys.argv[1]), Path(sys.argv[2]), options)
    print(done.records.adopted, done.records.standing, done.sessions_added)
