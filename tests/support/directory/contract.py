"""What the suite over every backend is told with: a directory and time, units, copies, claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ownerserve.directory import messages as ask
from ownerserve.directory.messages import DirectoryRefusal, Request
from ownerserve.directory.port import Directory
from ownerserve.directory.rules import StateKind, TierCode
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit

LEASE_S = 60.0
"""Of a clock that tests put forward: longer than any test of a machine that is busy."""
P1, P2, P3 = (PrefixHash(bytes([number]) * 32) for number in (1, 2, 3))
S1, S2, S3 = (SessionId(f"tenant/s{number}") for number in (1, 2, 3))
MAIN = StateKind.DENSE | StateKind.COMPRESSED


def unit(name: str, life: int = 1, rank: int = 0) -> RoutingUnit:
    return RoutingUnit(WorkerId(name), rank, Incarnation(life))


A, B, C = unit("a"), unit("b"), unit("c")


class World:
    """A directory and its clock, which `sleep` puts forward."""

    def __init__(self, directory: Directory, sleep: Callable[[float], object]) -> None:
        self.directory = directory
        self.sleep = sleep

    def ask(self, request: Request) -> Any:
        return self.directory.execute([request])[0]

    def join(self, *units: RoutingUnit) -> None:
        for one in units:
            assert isinstance(self.ask(ask.Register(one)), ask.Leased)

    def past_lease(self) -> None:
        self.sleep(LEASE_S * 1.1)


def extents(held: Sequence[PrefixHash]) -> tuple[ask.HeldExtent, ...]:
    return tuple(ask.HeldExtent(one, 512, TierCode.HOST, MAIN) for one in held)


def hold(
    world: World,
    who: RoutingUnit,
    what: PrefixHash,
    tier: TierCode,
    kinds: int = MAIN,
    tokens: int = 512,
) -> None:
    """A read-only copy."""
    told = ask.Publish(who, (ask.HeldExtent(what, tokens, tier, kinds),))
    assert isinstance(world.ask(told), ask.Published)


def claim(world: World, who: RoutingUnit, session: SessionId, what: PrefixHash) -> Any:
    """A copy on the device, with last-copy duty where nobody alive has it."""
    bound = world.ask(ask.Bind(session, who))
    return world.ask(ask.Advance(session, who, bound.epoch, bound.version + 1, what, 512))


def refused(outcome: object, reason: DirectoryRefusal) -> bool:
    return isinstance(outcome, ask.Refused) and outcome.reason is reason
