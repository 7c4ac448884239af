"""A worker in a fault schedule: one life of its process, with the owner's side and its node.

    turn --> Came: hear its epoch, Bind --> Node: let in, restored, started, computed
               --> ours, under the epoch that opened the journal? --> written to it, answered
               `-- a guest's: answered, and written nowhere

No turn waits for the directory, and none is refused for an epoch: what was an owner's when it came
and is not when it is computed is answered as a guest's.
`paused` lives do nothing; what comes for them waits. A dead one does nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, ParamSpec, TypeAlias

import msgspec

from ownerserve.directory import messages as ask
from ownerserve.directory.owner.doors import GuardedOwner
from ownerserve.directory.owner.state import Ask, Asks, OwnerState, SessionGrant, SessionTip
from ownerserve.directory.rules import StateKind, TierCode
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.node.vocabulary.events import TurnArrived
from ownerserve.router.messages import Failure, ReleaseEnd
from ownerserve.router.worker import Receipt
from tests.support.directory.fault_net import Violation
from tests.support.directory.fault_node import HUNG_UP, TICK_S, Job, Node
from tests.support.directory.fault_publisher import Publisher

if TYPE_CHECKING:
    from tests.support.directory.fault_router import Router
    from tests.support.directory.fault_world import World

RETRY_S = 0.4

P = ParamSpec("P")

Client = tuple[SessionId, int]
Caller: TypeAlias = "tuple[Router, Receipt, RoutingUnit]"
"""The router that sent a turn, its receipt, and the life that it was meant for."""


class Serving(msgspec.Struct, eq=False):
    """What a turn at the node is for. `grant` None: it is a guest's."""

    client: Client
    request: str
    grant: SessionGrant | None


def _to_nobody(_end: ReleaseEnd) -> None:
    """Who asked is not there any more."""


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
        self.publisher = Publisher(self)
        self._turns = count(1)
        self._serving: dict[TurnId, Serving] = {}
        self._inbox: list[partial[None]] = []
        self._opened: dict[SessionId, SessionGrant] = {}
        self._openings: dict[SessionId, int] = {}
        self._busy: dict[SessionId, Serving] = {}  # until its write is known
        self._queue: dict[str, Client] = {}
        self._guests: set[str] = set()
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
        self.world.net.after(for_s, self.resume)

    def resume(self) -> None:
        self.paused = False
        self.world.touched.append(self)  # what it serves counts again
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            self.deliver(action)

    def _tick(self) -> None:
        if self.dead:
            return
        self.world.net.after(TICK_S, self._next_tick)
        now_s = self.world.net.now_s
        if asks := self.owner.tick(now_s):
            self.send([*asks, *self.guarded.along(now_s)])
        self.node.tick()
        self.publisher.tick()

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
            case (_, ask.Leased(_, memory)):
                self.publisher.leased(memory)
        self.send(self.guarded.answered(asked, outcome, self.world.net.now_s))
        self._look_at_grants()

    @property
    def waiting(self) -> int:
        """Turns that are here and not done."""
        return len(self._busy) + len(self._queue) + len(self._guests)

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
        """Serve it, and try to become its owner. The client asks again until it hears. `epoch`: the
        highest that its router knows."""
        session_id = client[0]
        now_s = self.world.net.now_s
        if caller is not None and caller[2] != self.unit:
            self._refuse(caller)
            return
        if epoch is not None:
            self._hears(session_id, epoch)
        self.send(self.guarded.came(session_id, now_s, epoch=epoch))
        self._look_at_grants()
        if caller is not None:
            self._callers.setdefault(request, []).append(caller)
        grant = self._opened_under(session_id)
        if grant is None:
            self._serve_guest(client, request)
        elif session_id in self._busy:
            self._queue[request] = client
        else:
            self._busy[session_id] = serving = Serving(client, request, grant)
            self._admit(serving, self._length[session_id])

    def _opened_under(self, session_id: SessionId) -> SessionGrant | None:
        """The own grant, with the journal opened under it; None: a later owner did that."""
        grant = self.owner.may_serve(session_id, self.world.net.now_s)
        if grant is None or self._is_open(session_id, grant):
            return grant
        journal = self.world.journals[session_id]
        later = journal.open(self.unit, grant.epoch)
        if later is not None:
            self._hears(session_id, later)
            self.guarded.hear(session_id, later)
            return None
        self._opened[session_id] = grant
        self._openings[session_id] = journal.openings
        self._length[session_id] = len(journal.done)
        self._busy.pop(session_id, None)
        return grant

    def _serve_guest(self, client: Client, request: str) -> None:
        """Once at a time: who asks again hears what is under way."""
        if request not in self._guests:
            self._guests.add(request)
            self._admit(Serving(client, request, None), len(self.world.journals[client[0]].done))

    def _admit(self, serving: Serving, position: int) -> None:
        """The session's next turn goes to the node, with all that was said before it."""
        session_id = serving.client[0]
        turn_id = TurnId(f"{self.unit.incarnation}.{next(self._turns)}")
        said = self.world.journals[session_id].said(position, serving.request)
        self._serving[turn_id] = serving
        arrived = TurnArrived(turn_id, session_id, said.prompt)
        if self.node.admit(Job(arrived, session_id, said.output)) is not None:
            del self._serving[turn_id]
            self._turn_away(serving)

    def started(self, turn_id: TurnId) -> None:
        """All that could be restored is there."""
        serving = self._serving[turn_id]
        if self.node.begin(turn_id):
            owner = self._named_by(serving)
            for router, receipt, _ in self._callers.get(serving.request, ()):
                self.world.net.send(partial(router.begun, receipt, owner))
            compute_s = self.world.net.rng.uniform(0.0, 0.3)
            self.world.net.after(compute_s, partial(self.deliver, self._ran, turn_id))
            return
        del self._serving[turn_id]
        self._turn_away(serving)

    def _named_by(self, serving: Serving) -> tuple[RoutingUnit, Epoch] | None:
        """Whom the answer names as the session's owner as it begins."""
        if serving.grant is not None:
            return self.unit, serving.grant.epoch
        return self.guarded.other_owner(serving.client[0]) if self.world.guests_tell else None

    def _may_write(self, serving: Serving) -> bool:
        """Whose the session is may have changed since the turn came."""
        grant = serving.grant
        now = self.owner.may_serve(serving.client[0], self.world.net.now_s)
        is_ours = now is not None and grant is not None and now.epoch == grant.epoch
        return is_ours and self._is_open(serving.client[0], grant)

    def _ran(self, turn_id: TurnId) -> None:
        serving = self._serving.pop(turn_id)
        self.node.finish(turn_id)
        if serving.grant is None or not self._is_open(serving.client[0], serving.grant):
            self._answer_as_guest(serving)
        else:
            self._computed(serving)

    def _answer_as_guest(self, serving: Serving) -> None:
        """The session's record does not know of it."""
        self._guests.discard(serving.request)
        self._left(serving.client[0])
        self.world.was_guest(serving.client[0], self.unit)
        journal = self.world.journals[serving.client[0]]
        journal.guests.add(serving.request)
        self.world.counts["turns of guests"] += 1
        other = self.guarded.other_owner(serving.client[0]) if self.world.guests_tell else None
        self._answer(serving, len(journal.done), other)

    def _left(self, session_id: SessionId) -> None:
        """What the node tells at a turn's end, whoever owns the session by then."""
        now_s = self.world.net.now_s
        tokens = 3 + int(now_s) // 2 * 2  # as far as anybody has come (keep_prefixes)
        tip = SessionTip(
            PrefixHash(f"{session_id}/{tokens}".encode()), tokens, kinds=StateKind.DENSE
        )
        self.send(self.guarded.left(session_id, tip, now_s))

    def _answer(
        self, serving: Serving, length: int, owner: tuple[RoutingUnit, Epoch] | None
    ) -> None:
        """Who owns the session is said with it: an owner names itself, a guest whom it heard of."""
        for router, receipt, _ in self._callers.pop(serving.request, ()):
            told = partial(router.answered, receipt, 1000 + 25 * length, owner)
            self.world.net.send(told)
        self.world.net.send(partial(self.world.done, serving.client, serving.request))

    def _turn_away(self, serving: Serving) -> None:
        """Who sent it hears so, and may ask another; a client that came by itself asks again."""
        session_id = serving.client[0]
        self._guests.discard(serving.request)
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
        """An owner's turn: until its outcome is known, or a new epoch makes it void, nothing else
        of the session is written here."""
        if self._may_write(serving):
            name = serving.client[0]
            write = partial(self._write, serving, self._length[name], self._openings[name])
            self.world.net.send(write)
        if self._is_open(serving.client[0], serving.grant):
            again = partial(self.deliver, self._computed_again, serving)
            self.world.net.after(RETRY_S, again)

    def _is_open(self, session_id: SessionId, grant: SessionGrant | None) -> bool:
        opened = self._opened.get(session_id)
        return opened is not None and grant is not None and opened.epoch == grant.epoch

    def _computed_again(self, serving: Serving) -> None:
        if self._busy.get(serving.client[0]) is not serving:
            return
        if self._may_write(serving):
            self._computed(serving)
        else:
            self._ceases(serving)

    def _ceases(self, serving: Serving) -> None:
        """Not ours any more, before its outcome was known: it is answered as a guest's. Should the
        session be ours again under the same epoch, what was done is read anew."""
        session_id = serving.client[0]
        del self._busy[session_id]
        self._opened.pop(session_id, None)
        self._answer_as_guest(serving)
        self._next(session_id)

    def _write(self, serving: Serving, position: int, opening: int) -> None:
        assert serving.grant is not None
        journal = self.world.journals[serving.client[0]]
        later = journal.write(
            self.unit, serving.grant.epoch, position, serving.request, opening=opening
        )
        answer = partial(self.deliver, self._written, serving, later, len(journal.done))
        self.world.net.send(answer)

    def _written(self, serving: Serving, later: Epoch | None, length: int) -> None:
        session_id = serving.client[0]
        is_busy = self._busy.get(session_id) is serving
        if later is not None:
            self._hears(session_id, later)
            self.guarded.hear(session_id, later)
            if is_busy:
                self._ceases(serving)
            return
        assert serving.grant is not None
        self._answer(serving, length, (self.unit, serving.grant.epoch))
        if self._is_open(session_id, serving.grant):
            self._length[session_id] = max(self._length[session_id], length)
        if is_busy:
            del self._busy[session_id]
            self._next(session_id)

    def _next(self, session_id: SessionId) -> None:
        for request, client in list(self._queue.items()):
            if client[0] == session_id:
                del self._queue[request]
                self.turn(client, request, None)
                return

    def release(
        self,
        session_id: SessionId,
        epoch: Epoch,
        target: RoutingUnit,
        *,
        answer: Callable[[ReleaseEnd], None] = _to_nobody,
    ) -> None:
        """A turn was done at the target, says a router that knows the session under `epoch`."""
        heard = self.heard.get(session_id, epoch)
        self._hears(session_id, epoch)
        leaving = self.guarded.release(session_id, epoch, target, now_s=self.world.net.now_s)
        self._look_at_grants()
        if isinstance(leaving, WorkerRefusal):
            self.world.counts[f"release {leaving.value}"] += 1
            self.world.net.send(partial(answer, ReleaseEnd.NOT_OWNER))
            return
        if epoch < heard:
            raise Violation(f"{self.unit} gave {session_id} up under an epoch below {heard}")
        self.world.counts["hand-overs"] += 1
        self.send(leaving)
        self.world.net.send(partial(answer, ReleaseEnd.RELEASED))

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
        place = (self.unit, TierCode.DEVICE, StateKind.DENSE)
        if not has:
            oracle.copies.add((prefix_hash, self.unit))
            extent = ask.HeldExtent(prefix_hash, tokens, *place[1:])
            world.ask_now(ask.Publish(self.unit, (extent,), seen=self.owner.seen))
        elif isinstance(grant, SessionGrant) and rng.random() < 0.6:
            if tokens > grant.tokens:
                tip = SessionTip(prefix_hash, tokens, kinds=StateKind.DENSE)
                self.send(self.guarded.left(session_id, tip, now_s))
        elif now_s < world.pledged.get((prefix_hash, self.unit), 0.0):
            pass  # a report that is still on its way would bring the copy back into the record
        elif isinstance(world.ask_now(ask.Drop(prefix_hash, *place[:2])), ask.Dropped):
            oracle.copies.discard((prefix_hash, self.unit))
