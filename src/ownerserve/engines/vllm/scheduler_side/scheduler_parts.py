"""Who works beside the scheduler's side: each owns one thing that is no decision about a turn."""

from __future__ import annotations

import msgspec

from ownerserve.engines.vllm.scheduler_side.holding import Holding
from ownerserve.engines.vllm.scheduler_side.lookup import StoreLookup
from ownerserve.engines.vllm.scheduler_side.measure import ConnectorObserver
from ownerserve.engines.vllm.scheduler_side.owning import SessionsHere
from ownerserve.engines.vllm.scheduler_side.soft_references import SoftReferences
from ownerserve.engines.vllm.scheduler_side.tenants import Tenants
from ownerserve.engines.vllm.scheduler_side.worker_reports import Outside


class Around(msgspec.Struct, frozen=True):
    """What a scheduler's side works with. `bypassed`: why no state of this engine has an identity;
    None when it has. `step_tokens`: most that one step computes."""

    lookup: StoreLookup
    holding: Holding
    soft: SoftReferences
    measuring: ConnectorObserver
    outside: Outside
    sessions: SessionsHere
    tenants: Tenants
    workers: int
    step_tokens: int
    bypassed: str | None = None
