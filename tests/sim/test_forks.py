"""Who is a fork at the door of a simulated fleet is what it is at a gateway's
(`router.admission.forked_from`, tests/gateway/test_seats.py)."""

from __future__ import annotations

from ownerserve.kv.ids import SessionId
from ownerserve.router.admission import SeatSettings, SessionAdmission
from ownerserve.router.entry.queue import AdmissionQueue
from ownerserve.router.sessions import SessionTable
from ownerserve.router.worker import Profile
from ownerserve.sim.fleet.admission import SimAdmissionQueue
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.turns import SimTurn
from tests.support.router.fleets import PLAIN, fleet_of, load
from tests.support.sim.engine_driver import turn


def test_a_fork_that_nobody_names_does_not_wait_and_who_shares_less_does() -> None:
    """Exactly half of the prompt is a session's inside, a little less is another's system prompt.
    The memory holds no second one."""
    fleet = fleet_of(Profile(speed=PLAIN.speed, kv_bytes_total=1_000_000))
    for worker in fleet:
        load(worker, sequences=1)
    seats = SessionAdmission(fleet, SeatSettings(growth_tokens=0))
    queue = SimAdmissionQueue(Heap(), AdmissionQueue(seats), SessionTable())
    went: list[str] = []

    def comes(number: int, shared: int) -> None:
        new = turn(number, list(range(300)), 800, 8)
        new.parent, new.shared_tokens = (SessionId("s0") if shared else None), shared
        queue.enter(new, lambda turn, now: went.append(turn.name), refused, now=0.0)

    def refused(turn: SimTurn, retry_after_s: float, now: float) -> None:
        raise AssertionError(f"{turn.name} was told no")

    for number, shared in enumerate((0, 399, 400, 1)):
        comes(number, shared)
    assert went == ["s0", "s2"]
    assert len(queue) == 2
    seats.check()
