"""A worker in a fault schedule: one life of its process, with the owner's side and its node.

    turn --> may_serve? --no--> Bind, and wait or refuse
                 `-- yes --> open the journal under the epoch --> Node: let in, restored, started
                       --> may_serve under this epoch still? --> computed --> written to the journal

`paused` lives do nothing; what comes for them waits. A dead one does nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, ParamSpec, TypeAlias

import msgspec
from fault_net import Violation
from fault_node import HUNG_UP, STALE_EPOCH, TICK_S, Job, Node

from ownerserve.directory import messages as ask
from ownerserve.directory.doors import GuardedOwner
from ownerserve.directory.owner import Ask, Asks, Grant, OwnerState, Tip
from ownerserve.directory.rules import Kind, Tier
from ownerserve.kv.epoch import Epoch
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.node.events import Arrived
from ownerserve.router.messages import Failure, Receipt

if TYPE_CHECKING:
    from fault_router import Router
    from fault_world import World

RETRY_S = 0.4
PARKED_MAX = 8

P = ParamSpec("P")

Client = tuple[SessionId, int]
Caller: TypeAlias = "tuple[Router, Receipt, RoutingUnit]"
"""The router that sent a turn, its receipt, and the life that it was meant for."""
Turn: TypeAlias = "tuple[Client, str, Caller | None]"


class Serving(msgspec.Struct, eq=False):
    """What a turn at the node is for."""

    client: Client
    request: str
    grant: Grant


class Process:
    """One life of a worker."""

    def __init__(self, world: World, unit: RoutingUnit) -> None:
        self.world = world
        self.unit = unit
        self.guarded = GuardedOwner(OwnerState(unit))
        self.owner = self.guarded.owner
        self.heard: dict[SessionId, Epoch] = {}
        """The highest epoch of each session that came here, whoever brought it."""
        self.dead = False
        self.paused = False
        self.node = Node(world.net, world.bad, world.store_of(unit.worker), life=self)
        self._turns = count(1)
        self._serving: dict[TurnId, Serving] = {}
        self._inbox: list[partial[None]] = []
        self._opened: dict[SessionId, Grant] = {}
        self._busy: dict[SessionId, Serving] = {}  # until its write is known
        self._queue: dict[str, Client] = {}
        self._parked: list[Turn] = []  # until the directory has answered
        self._callers: dict[str, list[Caller]] = {}
        self._length: dict[SessionId, int] = {}
        self._next_tick = partial(self.deliver, self._tick)
        self._tick()

    def deliver(self, action: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
        """Run what arrived, now or after the pause."""
        if self.paused:
            self._inbox.append(partial(action, *args, **named))
        elif not self.dead:
            action(*args, **named)

    def pause(self, for_s: float) -> None:
        self.paused = True
        self.world.net.after(for_s, self._resume)

    def _resume(self) -> None:
        self.paused = False
        self.world.touched.append(self)  # what it serves counts again
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            self.deliver(action)

    def _tick(self) -> None:
        if self.dead:
            return
        self.world.net.after(TICK_S, self._next_tick)
        self.send(self.owner.tick(self.world.net.now_s))
        self.node.tick()

    def send(self, asks: Asks) -> None:
        for one in asks:
            if isinstance(one.request, ask.Advance):
                self.world.told_of(one.request)
            self.world.net.send(partial(self.world.asked, self, one))

    def answered(self, asked: Ask, outcome: ask.Outcome) -> None:
        self.world.touched.append(self)  # only an answer makes it an owner
        match asked.request, outcome:
            case (ask.Bind() | ask.Transfer() as request, ask.Bound() | ask.HeldBy()):
                self._hears(request.session_id, outcome.epoch)
            case (ask.Bind() | ask.Transfer() | ask.Advance() as request, ask.Conflict(current)):
                self._hears(request.session_id, current.epoch)
        self.send(self.guarded.answered(asked, outcome, self.world.net.now_s))
        self._look_at_grants()
        parked, self._parked = self._parked, []
        for client, request, caller in parked:
            if isinstance(self.owner.may_serve(client[0], self.world.net.now_s), Grant):
                self.turn(client, request, caller)
            elif caller is not None:
                self._refuse(caller)

    @property
    def waiting(self) -> int:
        """Turns that are here and not done."""
        return len(self._busy) + len(self._queue)

    def _hears(self, session_id: SessionId, epoch: Epoch) -> None:
        self.heard[session_id] = max(self.heard.get(session_id, epoch), epoch)

    def _look_at_grants(self) -> None:
        """Nothing is owned under an epoch below one that was heard of."""
        for session_id, grant in self.owner.grants.items():
            if grant.epoch < self.heard.get(session_id, grant.epoch):
                raise Violation(f"{self.unit} owns {session_id} below what it has heard")

    def turn(
        self, client: Client, request: str, caller: Caller | None, *, epoch: Epoch | None = None
    ) -> None:
        """Serve it, or try to become its owner. The client asks again until it hears. `epoch`: the
        highest that its router knows."""
        session_id = client[0]
        now_s = self.world.net.now_s
        if caller is not None and caller[2] != self.unit:
            self._refuse(caller)
            return
        if epoch is not None:
            self._hears(session_id, epoch)
            self.guarded.hear(session_id, epoch)
            self._look_at_grants()
        grant = self.owner.may_serve(session_id, now_s)
        if not isinstance(grant, Grant):
            self.send(self.guarded.came(session_id, now_s))
            if len(self._parked) < PARKED_MAX:
                self._parked.append((client, request, caller))
            return
        if caller is not None:
            self._callers.setdefault(request, []).append(caller)
        journal = self.world.journals[session_id]
        opened = self._opened.get(session_id)
        if opened is None or opened.epoch != grant.epoch:
            later = journal.open(self.unit, grant.epoch)
            if later is not None:
                self._hears(session_id, later)
                self.guarded.hear(session_id, later)
                return
            self._opened[session_id] = grant
            self._length[session_id] = len(journal.done)
            self._busy.pop(session_id, None)
        if session_id in self._busy:
            self._queue[request] = client
            return
        serving = self._busy[session_id] = Serving(client, request, grant)
        self._admit(serving)

    def _admit(self, serving: Serving) -> None:
        """The session's next turn goes to the node, with all that was said before it."""
        session_id = serving.client[0]
        turn_id = TurnId(f"{self.unit.incarnation}.{next(self._turns)}")
        said = self.world.journals[session_id].said(self._length[session_id], serving.request)
        self._serving[turn_id] = serving
        arrived = Arrived(turn_id, session_id, said.prompt)
        job = Job(arrived, session_id, said.output, serving.grant.epoch)
        if self.node.admit(job) is not None:
            del self._serving[turn_id]
            self._turn_away(serving)

    def started(self, turn_id: TurnId) -> None:
        """All that could be restored is there; whose the session is may have changed meanwhile."""
        serving = self._serving[turn_id]
        if not self._may_run(serving):
            self.node.give_up(turn_id, STALE_EPOCH)
        elif self.node.begin(turn_id):
            for router, receipt, _ in self._callers.get(serving.request, ()):
                self.world.net.send(partial(router.begun, receipt))
            compute_s = self.world.net.rng.uniform(0.0, 0.3)
            self.world.net.after(compute_s, partial(self.deliver, self._ran, turn_id))
            return
        del self._serving[turn_id]
        self._turn_away(serving)

    def _may_run(self, serving: Serving) -> bool:
        session_id, epoch = serving.client[0], serving.grant.epoch
        now = self.owner.may_serve(session_id, self.world.net.now_s)
        is_ours = isinstance(now, Grant) and now.epoch == epoch
        return is_ours and self._is_open(session_id, serving.grant)

    def _ran(self, turn_id: TurnId) -> None:
        serving = self._serving.pop(turn_id)
        if not self._is_open(serving.client[0], serving.grant):
            self.node.give_up(turn_id, STALE_EPOCH)
            return
        self.node.finish(turn_id)
        self._computed(serving)

    def _turn_away(self, serving: Serving) -> None:
        """Who sent it hears so, and may ask another; a client that came by itself asks again."""
        session_id = serving.client[0]
        for caller in self._callers.pop(serving.request, ()):
            self._refuse(caller)
        if self._busy.get(session_id) is serving:
            del self._busy[session_id]
            self._next(session_id)

    def hung_up(self, request: str, who: tuple[Router, Receipt]) -> None:
        """Who asked does not wait any more: a turn that has not begun is not wanted either."""
        callers = self._callers.get(request, [])
        self._callers[request] = left = [one for one in callers if one[:2] != who]
        if left or len(left) == len(callers):
            return
        for turn_id, serving in self._serving.items():
            if serving.request == request and turn_id in self.node.waiting:
                self.node.give_up(turn_id, HUNG_UP)
                del self._serving[turn_id]
                self._turn_away(serving)
                return

    def _refuse(self, caller: Caller) -> None:
        self.world.net.send(partial(caller[0].failed, caller[1], Failure.REFUSED))

    def _computed(self, serving: Serving) -> None:
        if self._may_run(serving):
            write = partial(self._write, serving, self._length[serving.client[0]])
            self.world.net.send(write)
        # Until its outcome is known, or a new epoch makes it void, nothing else is written.
        if self._is_open(serving.client[0], serving.grant):
            again = partial(self.deliver, self._computed_again, serving)
            self.world.net.after(RETRY_S, again)

    def _is_open(self, session_id: SessionId, grant: Grant) -> bool:
        opened = self._opened.get(session_id)
        return opened is not None and opened.epoch == grant.epoch

    def _computed_again(self, serving: Serving) -> None:
        if self._busy.get(serving.client[0]) is serving:
            self._computed(serving)

    def _write(self, serving: Serving, position: int) -> None:
        journal = self.world.journals[serving.client[0]]
        outcome = journal.write(self.unit, serving.grant.epoch, position, serving.request)
        answer = partial(self.deliver, self._written, serving, outcome, len(journal.done))
        self.world.net.send(answer)

    def _written(self, serving: Serving, later: Epoch | None, length: int) -> None:
        session_id, grant = serving.client[0], serving.grant
        if later is not None:
            self._hears(session_id, later)
            self.guarded.hear(session_id, later)
            return
        for router, receipt, _ in self._callers.pop(serving.request, ()):
            self.world.net.send(partial(router.answered, receipt, 1000 + 25 * length))
        self.world.net.send(partial(self.world.done, serving.client, serving.request))
        if self._is_open(session_id, grant):
            self._length[session_id] = max(self._length[session_id], length)
            if self._busy.get(session_id) is serving:
                del self._busy[session_id]
                self._next(session_id)

    def _next(self, session_id: SessionId) -> None:
        for request, client in list(self._queue.items()):
            if client[0] == session_id:
                del self._queue[request]
                self.turn(client, request, None)
                return

    def release(self, session_id: SessionId, epoch: Epoch, target: RoutingUnit) -> None:
        """A turn was done at the target, says a router that knows the session under `epoch`."""
        heard = self.heard.get(session_id, epoch)
        self._hears(session_id, epoch)
        leaving = self.guarded.release(session_id, epoch, target, now_s=self.world.net.now_s)
        self._look_at_grants()
        if isinstance(leaving, WorkerRefusal):
            self.world.counts[f"release {leaving.value}"] += 1
            return
        if epoch < heard:
            raise Violation(f"{self.unit} gave {session_id} up under an epoch below {heard}")
        self.world.counts["hand-overs"] += 1
        self.send(leaving)

    def end(self) -> None:
        """Give a session up, as after a long idle time; its clients come back all the same."""
        mine = sorted(self.owner.grants)
        if mine:
            chosen = self.world.net.rng.choice(mine)
            self.send(self.guarded.over(chosen, self.world.net.now_s))

    def keep_prefixes(self) -> None:
        """Publish, drop, advance: at once, as an owner on the same host would."""
        world, rng, now_s = self.world, self.world.net.rng, self.world.net.now_s
        session_id = rng.choice(world.sessions)
        tokens = 1 + int(now_s) // 2 * 2 + rng.randrange(3)
        prefix_hash = PrefixHash(f"{session_id}/{tokens}".encode())
        oracle = world.oracle
        has = (prefix_hash, self.unit) in oracle.copies
        grant = self.owner.may_serve(session_id, now_s)
        place = (self.unit, Tier.DEVICE, Kind.DENSE)
        if not has:
            oracle.copies.add((prefix_hash, self.unit))
            extent = ask.HeldExtent(prefix_hash, tokens, *place[1:])
            world.ask_now(ask.Publish(self.unit, (extent,), seen=self.owner.seen))
        elif isinstance(grant, Grant) and rng.random() < 0.6:
            if tokens > grant.tokens:
                tip = Tip(prefix_hash, tokens, kinds=Kind.DENSE)
                self.send(self.guarded.left(session_id, tip, now_s))
        elif now_s < world.pledged.get((prefix_hash, self.unit), 0.0):
            pass  # a report that is still on its way would bring the copy back into the record
        elif isinstance(world.ask_now(ask.Drop(prefix_hash, *place[:2])), ask.Dropped):
            oracle.copies.discard((prefix_hash, self.unit))
