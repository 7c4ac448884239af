"""What each engine can do, once: the records that engines state as EnginePorts.

Owns no behaviour. Restores priced by hand (`ownerserve plan`) and the simulator
(`--engine-abilities`) take these same records, so neither grants what an engine does not state.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.plan.inputs import FULL_ABILITIES, Abilities, Overlap

HF = msgspec.structs.replace(FULL_ABILITIES, overlap=Overlap.NONE)
"""The reference engine: everything, but a restore is whole before its first forward."""

VLLM = Abilities(
    can_replay=False,
    can_reserve=False,
    per_group_hit=False,
    can_insert=False,
    landing_tier=Tier.HOST,
    layerwise_send=False,
    overlap=Overlap.NONE,
)
"""vLLM 0.32 on a GPU through our connector: one prefix length for all groups, foreign state lands
in host memory, nothing is replayed. On a CPU it lands where the engine reads it."""

ENGINES = {"hf": HF, "vllm": VLLM, "ideal": FULL_ABILITIES}
"""By the name that commands take. `ideal` is no engine of today: it can do all that is planned."""
