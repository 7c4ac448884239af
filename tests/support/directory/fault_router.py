"""A router in a fault schedule: RouterState behind a bad network, and a ledger that watches it.

    client --take--> router --turn--> worker
           <-done---        <-begun, refused, answered--
                    --FindSession--> directory         (Claimed)
                    --ReleaseSession--> owner          (AskRelease, ReleaseEnded)
                    --probe--------> worker            (WorkerUp, Stamped; WorkerDown when silent)

It dies too: the next one knows nothing, and the clients ask it again. What must hold after every
event: each request that came in has one end, or is under way (invariant 3); each dispatch ends
once (invariant 5); nobody is tried twice for one request; the router follows no earlier epoch and
no former life. `RouterState.check()` looks at the books every other second.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ownerserve.directory import messages as ask
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, later
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.messages import (
    Aborted,
    Arrive,
    AskRelease,
    Broken,
    Claimed,
    Dispatch,
    Done,
    Down,
    Event,
    Failed,
    Failure,
    FirstByte,
    ReleaseEnd,
    ReleaseEnded,
    Stamped,
    WorkerDown,
    WorkerUp,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Receipt
from tests.support.directory.fault_net import Violation

if TYPE_CHECKING:
    from tests.support.directory.fault_process import Client, Process
    from tests.support.directory.fault_world import World

PROBE_S = 0.7
SILENT_PROBES = 3
FIRST_BYTE_S = 0.4
REST_OF_ANSWER_S = 0.8
RELEASE_S = 1.0
PROMPT_BYTES = 4000
POLICIES = ("ownerserve", "ear", "sticky")


class Call(msgspec.Struct, gc=False):
    """One HTTP request that came in; `request` may come in many."""

    client: Client
    request: str
    tried: tuple[WorkerId, ...] = ()
    has_begun: bool = False


class Router:
    """One life of a gateway: what it does is what RouterState says."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.dead = False
        self.state = RouterState(make_policy(rng.choice(POLICIES)))
        self.calls: dict[Receipt, Call] = {}
        self._came = 0
        self._probes = 0
        self._ended = 0
        self._silent: dict[WorkerId, int] = dict.fromkeys(world.workers, 0)
        self._given_up: dict[WorkerId, int] = {}
        """The number of the last probe that was still open when the worker was taken down."""
        self._releases: list[AskRelease] = []
        self._lifes: dict[WorkerId, Incarnation] = {}
        self._epochs: dict[SessionId, Epoch] = {}
        self._seen: Epoch | None = None
        self._probe()

    # ---- requests

    def take(self, client: Client, request: str) -> None:
        """A client asks, or asks again: what it asked before is given up, or races with this."""
        if self.dead:
            return
        if self.world.net.rng.random() < 0.5:
            for receipt, call in list(self.calls.items()):
                if call.client == client:
                    self._end(Aborted(receipt))
                    self.world.net.send(partial(self._hang_up, receipt, call))
        known = self.state.sessions.get(client[0])
        if known is None or self.world.net.rng.random() < 0.2:
            self.look_up(client[0])
        self._came += 1
        turns = len(self.world.journals[client[0]].done)
        arrive = Arrive(client[0], PROMPT_BYTES + 100 * turns)
        self._go(Call(client, request), arrive)

    def _go(self, call: Call, event: Arrive | Failed) -> None:
        """Send it where the state says, or drop it: its client asks again."""
        outcome = self.state.handle(event, self.world.net.now_s)
        if isinstance(event, Failed) and not self.state.fleet[call.tried[-1]].up:
            self._given_up[call.tried[-1]] = self._probes - 1
        if not isinstance(outcome, Dispatch):
            self._ended += 1
            self._look()
            return
        if outcome.worker in call.tried:
            raise Violation(f"{call.request} was sent to {outcome.worker} again")
        call.tried += (outcome.worker,)
        call.has_begun = False
        self.calls[outcome.receipt] = call
        self._look()
        worker = self.state.fleet[outcome.worker]
        if not worker.up or worker.incarnation is None:
            raise Violation(f"{call.request} was sent to {outcome.worker}, which is down")
        target = RoutingUnit(outcome.worker, 0, worker.incarnation)
        net, receipt = self.world.net, outcome.receipt
        session = self.state.sessions.get(call.client[0])
        epoch = None if session is None else session.epoch
        net.send(partial(self._arrives, receipt, call, target, epoch))
        net.after(FIRST_BYTE_S, partial(self._no_byte, receipt))

    def _arrives(
        self, receipt: Receipt, call: Call, target: RoutingUnit, epoch: Epoch | None
    ) -> None:
        """At whoever lives at the worker's address now."""
        process = next(
            (one for one in self.world.processes if one.unit.worker == target.worker), None
        )
        if process is None or process.dead:
            self.world.net.send(partial(self.failed, receipt, Failure.CONNECT))
        else:
            caller = (self, receipt, target)
            process.deliver(process.turn, call.client, call.request, caller, epoch=epoch)

    def _hang_up(self, receipt: Receipt, call: Call) -> None:
        for process in self.world.processes:
            if process.unit.worker == call.tried[-1]:
                process.deliver(process.hung_up, call.request, (self, receipt))

    # ---- what workers answer: perhaps twice, perhaps after it no longer counts

    def begun(self, receipt: Receipt, owner: tuple[RoutingUnit, Epoch] | None) -> None:
        """The first byte. `owner`: whose the session is, and under which epoch, by its word."""
        call = self.calls.get(receipt)
        if call is None or call.has_begun or self.dead:
            return
        call.has_begun = True
        claimed = None if owner is None else Claimed(call.client[0], *owner)
        self.state.handle(FirstByte(receipt, claimed=claimed), self.world.net.now_s)
        self._heard_of(call.client[0])
        self._look()

    def answered(
        self, receipt: Receipt, tokens: int, owner: tuple[RoutingUnit, Epoch] | None
    ) -> None:
        """The whole answer. `owner`: whose the session is, and under which epoch, by its word."""
        call = self.calls.get(receipt)
        if call is None or self.dead:
            return
        if owner is not None:
            self._claimed(call.client[0], *owner)
        self._end(Done(receipt, Usage(tokens, 20, tokens // 2)))
        self.world.net.send(partial(self.world.done, call.client, call.request))

    def failed(self, receipt: Receipt, failure: Failure) -> None:
        """Nothing of it has reached the client: another may be asked."""
        call = self.calls.get(receipt)
        if call is None or call.has_begun or self.dead:
            return
        del self.calls[receipt]
        if self.world.net.rng.random() < 0.5:
            self.look_up(call.client[0])
        self._go(call, Failed(receipt, failure))

    def _no_byte(self, receipt: Receipt) -> None:
        call = self.calls.get(receipt)
        if call is not None and call.has_begun:
            self.world.net.after(REST_OF_ANSWER_S, partial(self._no_end, receipt))
        else:
            self.failed(receipt, Failure.CLOSED)

    def _no_end(self, receipt: Receipt) -> None:
        if receipt in self.calls and not self.dead:
            self._end(Broken(receipt))

    def _end(self, event: Done | Broken | Aborted) -> None:
        del self.calls[event.receipt]
        self._ended += 1
        self._tell(event)

    def _tell(self, event: Event) -> None:
        effect = self.state.handle(event, self.world.net.now_s)  # type: ignore[call-overload]
        if isinstance(effect, AskRelease):
            self._ask_release(effect)
        self._look()

    # ---- an owner elsewhere is asked to hand over

    def _ask_release(self, wanted: AskRelease) -> None:
        """Its one end is the answer, or the silence."""
        self.world.counts["releases asked"] += 1
        self._releases.append(wanted)
        self.world.net.send(partial(self._release_arrives, wanted))
        self.world.net.after(RELEASE_S, partial(self.release_ended, wanted, ReleaseEnd.KEPT))

    def _release_arrives(self, wanted: AskRelease) -> None:
        for process in self.world.processes:
            if process.unit.worker == wanted.source.worker:
                answer = partial(self.release_ended, wanted)
                release = partial(process.release, wanted.session, wanted.epoch, wanted.target)
                process.deliver(release, answer=answer)

    def release_ended(self, wanted: AskRelease, end: ReleaseEnd) -> None:
        """Told once, if a late answer comes or none."""
        if wanted in self._releases and not self.dead:
            self._releases.remove(wanted)
            self._tell(ReleaseEnded(wanted.session, wanted.epoch, end))

    # ---- the directory's and the workers' word

    def look_up(self, session_id: SessionId) -> None:
        self.world.net.send(partial(self._asked, session_id))

    def _asked(self, session_id: SessionId) -> None:
        if self.world.net.now_s < self.world.away_until_s:
            return
        found = self.world.ask_now(ask.FindSession(session_id, self._seen))
        if isinstance(found, ask.SessionIs) and found.owner_live:
            self.world.net.send(partial(self._claimed, session_id, found.owner, found.epoch))

    def _claimed(self, session_id: SessionId, owner: RoutingUnit, epoch: Epoch) -> None:
        if self.dead:
            return
        before = self._bound_to(session_id)
        self._tell(Claimed(session_id, owner, epoch))
        self._heard_of(session_id)
        if self._bound_to(session_id) not in (before, owner, None):
            raise Violation(f"{session_id} went to another than {owner} by a word on it")

    def _heard_of(self, session_id: SessionId) -> None:
        """Remember the session's epoch: it only grows."""
        session = self.state.sessions.get(session_id)
        if session is None or session.epoch is None:
            return
        if session.epoch < self._epochs.setdefault(session_id, session.epoch):
            raise Violation(f"a router went back to {session.epoch} of {session_id}")
        self._epochs[session_id] = session.epoch
        self._seen = later(self._seen, session.epoch)

    def _bound_to(self, session_id: SessionId) -> RoutingUnit | None:
        session = self.state.sessions.get(session_id)
        worker = None if session is None else session.live_owner
        if worker is None or worker.incarnation is None:
            return None
        return RoutingUnit(worker.id, 0, worker.incarnation)

    def _probe(self) -> None:
        if self.dead:
            return
        self.world.net.after(PROBE_S, self._probe)
        self._probes += 1
        if self._probes % 3 == 0:
            self._look_closely()
        for worker in self.world.workers:
            self._silent[worker] += 1
            if self._silent[worker] == SILENT_PROBES:
                self._tell(WorkerDown(worker, Down.UNHEALTHY))
                self._given_up[worker] = self._probes - 1
            self.world.net.send(partial(self._probed, worker, self._probes))

    def _probed(self, worker: WorkerId, number: int) -> None:
        for process in self.world.processes:
            if process.unit.worker == worker:
                process.deliver(self._answer_probe, process, number)

    def _answer_probe(self, process: Process, number: int) -> None:
        pending, now_s = 1000 * process.waiting, self.world.net.now_s
        status = WorkerLoad(process.unit, now_s, pending, process.waiting, 0, 0, 0)
        self.world.net.send(partial(self._lives, status, number))

    def _lives(self, status: WorkerLoad, number: int) -> None:
        """A probe is answered. One that was counted as bad is closed: it has no answer any more."""
        unit = status.unit
        if self.dead or number <= self._given_up.get(unit.worker, 0):
            return
        self._silent[unit.worker] = 0
        self._tell(WorkerUp(unit.worker, 0, unit.incarnation))
        self._tell(Stamped(status))
        known = self.state.fleet[unit.worker].incarnation
        if known is None or known < self._lifes.setdefault(unit.worker, known):
            raise Violation(f"a router went back to life {known} of {unit.worker}")
        self._lifes[unit.worker] = known

    # ---- what must hold

    def _look(self) -> None:
        live = len(self.calls)
        if self.state.live != live or self._came != self._ended + live:
            raise Violation(f"a router has {live} calls, {self.state.live} dispatches live")

    def _look_closely(self) -> None:
        self.state.check()
        account = self.state.account
        if (account.received, account.done + account.rejected) != (self._came, self._ended):
            raise Violation(f"a router counts {account.received} in, {self._came} came")

    def at_rest(self) -> None:
        """Nothing is under way any more: no load may be left."""
        self._look_closely()
        for worker in self.state.fleet:
            if self.calls or worker.requests or worker.pending_prefill_tokens:
                raise Violation(f"{worker.id} is counted {worker.requests} requests at rest")
