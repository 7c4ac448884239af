"""Small fleets for tests: workers made by events, loads by the ledger, requests by hand."""

from __future__ import annotations

from typing import Any

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.router.decision import RoutingRequest
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import Arrive, Dispatch, Done, FirstByte, WorkerUp
from ownerserve.router.requests.body import Usage
from ownerserve.router.sessions import Copy
from ownerserve.router.state import RouterState
from ownerserve.router.worker import EVERY_ACTION, Load, Profile, Speed, Worker

GIB = 1 << 30

SPEED = Speed(
    prefill=Coefficients(0.0, 0.01, 0.0),
    step_ms=1.0,
    step_ms_per_sequence=0.0,
    media={
        Tier.HOST: Medium(0.0, 1e7),
        Tier.DISK: Medium(0.0, 1e6),
        Tier.PEER: Medium(0.0, 5e6),
        Tier.REMOTE: Medium(0.0, 5e5),
    },
    kv_bytes_per_token=1000.0,
)
"""Round numbers: 100 tokens a ms computed, 5,000 a ms fetched, 1,000 a ms from disk."""

ABLE = Profile(speed=SPEED, actions=EVERY_ACTION)
PLAIN = Profile(speed=SPEED)


def fleet_of(*profiles: Profile) -> Fleet:
    fleet = Fleet()
    for number, profile in enumerate(profiles):
        fleet.raise_up(WorkerUp(WorkerId(f"w{number}"), 0, Incarnation(1), profile))
    return fleet


def load(worker: Worker, *, pending: int = 0, sequences: int = 0, held: int = 0) -> None:
    """Put work on it: one dispatch with the prefill, others that are past theirs."""
    if pending:
        worker.add(Load(0.0, pending, held))
    for _ in range(sequences):
        worker.add(Load(0.0, 0, held))


def on(worker: Worker, tokens: int, tier: Tier = Tier.DEVICE) -> Copy:
    return Copy(worker, worker.life, tier, tokens)


def stored(tokens: int) -> Copy:
    """In the store that all share."""
    return Copy(None, 0, Tier.REMOTE, tokens)


def request(prompt: int = 1000, **known: Any) -> RoutingRequest:
    defaults: dict[str, Any] = {"session": SessionId("s"), "output_tokens": 100}
    if known.get("copies") and "known_tokens" not in known:
        known["known_tokens"] = max(copy.tokens for copy in known["copies"])
    if "owner" in known:
        defaults["home"] = known["owner"]
    return RoutingRequest(prompt_tokens=prompt, **{**defaults, **known})


def owned(worker: Worker, *, context: int = 10_000, new: int = 500, **more: Any) -> RoutingRequest:
    """A later turn of a session at its owner."""
    return request(context + new, owner=worker, turns=3, copies=(on(worker, context),), **more)


def unit(name: str, incarnation: int = 1, dp_rank: int = 0) -> RoutingUnit:
    return RoutingUnit(WorkerId(name), dp_rank, Incarnation(incarnation))


def status(
    name: str, as_of: float, *, pending: int = 0, running: int = 0, free: int = 50 * GIB,
    incarnation: int = 1,
) -> WorkerLoad:  # fmt: skip
    return WorkerLoad(
        unit=unit(name, incarnation),
        as_of=as_of,
        pending_prefill_tokens=pending,
        running_sequences=running,
        waiting_sequences=0,
        kv_bytes_free=free,
        kv_bytes_total=50 * GIB,
    )


def raise_up(state: RouterState, *names: str, profile: Profile = ABLE, life: int = 1) -> None:
    for name in names:
        state.handle(WorkerUp(WorkerId(name), 0, Incarnation(life), profile), 0.0)


def dispatched(state: RouterState, session: str | None, now: float, **more: Any) -> Dispatch:
    more.setdefault("prompt_bytes", 4000)
    outcome = state.handle(Arrive(None if session is None else SessionId(session), **more), now)
    assert isinstance(outcome, Dispatch)
    return outcome


def served(state: RouterState, session: str, now: float, *, tokens: int, **more: Any) -> Dispatch:
    """A whole turn of `tokens` prompt tokens and 10 of output, in one second; 4 bytes a token."""
    dispatch = dispatched(state, session, now, prompt_bytes=4 * tokens, **more)
    state.handle(FirstByte(dispatch.receipt), now + 0.5)
    state.handle(
        Done(dispatch.receipt, Usage(tokens, 10, dispatch.decision.cached_tokens)), now + 1
    )
    state.check()
    return dispatch
