"""A policy decides where a turn runs. Each is one small file; POLICIES names them all."""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.router.decision import RoutingRequest
from ownerserve.router.policies.base import RoutingPolicy
from ownerserve.router.policies.dynamo import Dynamo
from ownerserve.router.policies.ear import Ear
from ownerserve.router.policies.kv_aware import KvAware
from ownerserve.router.policies.least_load import LeastLoad
from ownerserve.router.policies.llm_d import LlmdPrecise
from ownerserve.router.policies.lmetric import LMetric, LMetricGate
from ownerserve.router.policies.multi_owner import MultiOwner
from ownerserve.router.policies.ownerserve import OwnerServe
from ownerserve.router.policies.preble import Preble
from ownerserve.router.policies.program_ttl import ProgramTtl
from ownerserve.router.policies.round_robin import RoundRobin
from ownerserve.router.policies.round_robin_pd import RoundRobinPd
from ownerserve.router.policies.smetric import SMetric
from ownerserve.router.policies.static_pd import StaticPd, StaticPdDelta
from ownerserve.router.policies.sticky import Sticky
from ownerserve.router.policies.ttft_gate import TtftGate
from ownerserve.router.settings import DEFAULTS, Settings

TUNED: dict[str, Callable[[Settings], RoutingPolicy]] = {"ear": Ear, "ownerserve": OwnerServe}
PLAIN: dict[str, Callable[[], RoutingPolicy]] = {
    "dynamo": Dynamo,
    "kv_aware": KvAware,
    "least_load": LeastLoad,
    "llm_d_precise": LlmdPrecise,
    "lmetric": LMetric,
    "lmetric_gate": LMetricGate,
    "multi_owner": MultiOwner,
    "preble": Preble,
    "program_ttl": ProgramTtl,
    "round_robin": RoundRobin,
    "round_robin_pd": RoundRobinPd,
    "smetric": SMetric,
    "static_pd": StaticPd,
    "static_pd_delta": StaticPdDelta,
    "sticky": Sticky,
    "ttft_gate": TtftGate,
}
ROUTING_POLICIES: tuple[str, ...] = tuple(sorted({**TUNED, **PLAIN}))
"""Names that `make_policy` knows."""


def make_policy(name: str, settings: Settings = DEFAULTS) -> RoutingPolicy:
    """Make a new policy of that name; the baselines have no settings, as their sources state
    them."""
    return TUNED[name](settings) if name in TUNED else PLAIN[name]()


__all__ = ["ROUTING_POLICIES", "TUNED", "RoutingPolicy", "RoutingRequest", "make_policy"]
