"""Policies: which worker a request goes to. One small file each; POLICIES names them all."""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.router.policies.base import Choice, Policy, Request
from ownerserve.router.policies.round_robin import RoundRobin
from ownerserve.router.policies.session_affinity import SessionAffinity

POLICIES: dict[str, Callable[[], Policy]] = {
    "affinity": SessionAffinity,
    "round_robin": RoundRobin,
}

__all__ = ["POLICIES", "Choice", "Policy", "Request", "RoundRobin", "SessionAffinity"]
