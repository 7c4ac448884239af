"""Three workers under a policy that sends where a test says."""

from __future__ import annotations

from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, Term
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.messages import Arrive, Dispatch, Done, Event, FirstByte, WorkerUp
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.requests.body import Usage
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Receipt
from tests.support.router.fleets import unit

S, FORK = SessionId("s"), SessionId("fork")
NAMES = ("w0", "w1", "w2")
TIP = PrefixHash(b"tip".ljust(32))
OTHER_REASON = DispatchReason.SCORE


class Sends:
    """A policy that sends where the test says, while that worker is a candidate."""

    needs = ANY_WORKER

    def __init__(self) -> None:
        self.to = "w0"
        self.asked: list[RoutingRequest] = []

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        self.asked.append(request)
        told = [worker for worker in fleet if worker.id == self.to]
        return run_at(request, (told or list(fleet))[0], OTHER_REASON)


class Fleet:
    """Three workers in their first life, and a policy that obeys."""

    def __init__(self) -> None:
        self.policy = Sends()
        self.state = RouterState(self.policy)
        self.now = 0.0
        for name in NAMES:
            self.tell(WorkerUp(WorkerId(name), 0, Incarnation(1)))

    def tell(self, event: Event) -> object:
        self.now += 1.0
        outcome = self.state.handle(event, self.now)  # type: ignore[call-overload]
        self.state.check()
        return outcome

    def send(self, to: str, session: SessionId = S) -> Receipt:
        self.policy.to = to
        dispatch = self.tell(Arrive(session, 4000))
        assert isinstance(dispatch, Dispatch)
        assert dispatch.worker == to
        return dispatch.receipt

    def turn(self, to: str) -> None:
        receipt = self.send(to)
        self.tell(FirstByte(receipt))
        self.tell(Done(receipt, Usage(1000, 10, 0)))

    def places(self, session: SessionId = S) -> tuple[str | None, str | None]:
        """Home and owner, as the next turn would find them."""
        known = self.state.sessions.get(session)
        assert known is not None
        home, owner = known.live_home, known.live_owner
        return home and home.id, owner and owner.id


def epoch(counter: int) -> Epoch:
    return Epoch(Term(1, 0), counter)


def stamp(name: str, life: int) -> WorkerLoad:
    return WorkerLoad(unit(name, life), 1.0, 0, 0, 0, 0, 0)
