"""When a session leaves a busy owner: EAR's trigger, target and brakes (seed 002 §4.3, §6).

A session at its owner, when a turn of it arrives:

| state | holds when | then |
|---|---|---|
| calm | the pressure there is <= T_hot, or <= hot_ratio x the target's | stays |
| cooling | it is hot, and the session moved less than T_cool ago | stays |
| stuck | it is hot, but nobody else has room for the context | stays |
| leaving | otherwise | moves to the least busy worker with room |

Pressure is measured by what is observable: for EAR pending prefill tokens, as time at the worker's
own rate; for OwnerServe also the sequences that decode there (policies/ownerserve.py).
What brakes: the session's own pending work does not make its owner hot for it (a giant session
would flee from itself), the target must be less busy by the relative term too (a fleet that is hot
everywhere keeps still), and after a move the session stays for T_cool (O(lifetime / T_cool) moves).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

from ownerserve.router.candidates import Candidates
from ownerserve.router.request import Request
from ownerserve.router.rooms import room_tokens
from ownerserve.router.settings import Settings
from ownerserve.router.worker import Worker


class Heat(Enum):
    """A session's state at its home."""

    CALM = "calm"
    COOLING = "cooling"
    STUCK = "stuck"
    LEAVING = "leaving"


_CALM, _COOLING, _STUCK, _LEAVING = Heat
STAYS_CALM: tuple[Heat, Worker | None] = (_CALM, None)
"""What holds up to T_hot: `heat` need not be asked."""

Pressure: TypeAlias = Callable[[Request, Worker, Candidates], float]
"""What leaving the worker could spare a turn, in ms."""


def wait_ms(request: Request, worker: Worker, fleet: Candidates) -> float:
    """EAR's pressure: how long others' pending prefill keeps the turn waiting there."""
    load, own = worker.load, request.own_pending_tokens
    if not own or worker is not request.home or load.pending_tokens <= 0:
        return load.queue_ms
    return load.queue_ms * max(load.pending_tokens - own, 0) / load.pending_tokens


def heat(
    request: Request,
    pressure_ms: float,
    home: Worker,
    *,
    fleet: Candidates,
    settings: Settings,
    pressure: Pressure,
) -> tuple[Heat, Worker | None]:
    """Under a pressure over T_hot at its home: the session's state, and where it leaves for."""
    target = least_with_room(request, home, fleet)
    if target is None:
        return _STUCK, None
    if pressure_ms <= settings.hot_ratio * pressure(request, target, fleet):
        return STAYS_CALM
    if request.since_move_s < settings.cool_s:
        return _COOLING, None
    return _LEAVING, target


def least_with_room(request: Request, home: Worker | None, fleet: Candidates) -> Worker | None:
    """The least loaded worker but `home` whose free memory takes the whole context, of all."""
    tokens = request.prompt_tokens + request.output_tokens
    least = fleet.least_one()
    if least is not home and room_tokens(least) >= tokens:
        return least  # as a rule: the others need not be looked at
    return fleet.least_with_room(tokens, but=home)
