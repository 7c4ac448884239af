"""One fault schedule: a directory, workers, clients, and everything that can go wrong with them.

    client --turn--> router --turn--> worker --write under its epoch--> journal
                       |  FindSession    |  Bind, Transfer, RenewLease, Publish ...
                       v                 v
                    directory          may be away, or come back without memory

Faults until `heal_s`: messages lost, doubled, delayed; workers killed and born again, paused past
their lease, paused while their next life starts (a zombie); sessions handed over while turns run;
routers killed; clients that go past them to any worker; the directory amnesiac, with its term file
or without. Then all is well, and within two leases every request must be done.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import count

from fault_net import Journal, Net, Violation
from fault_oracle import Oracle
from fault_router import Router

from ownerserve.directory import messages as ask
from ownerserve.directory.decide import seen_of
from ownerserve.directory.owner import Asks, Grant, OwnerState
from ownerserve.directory.rules import Kind, Tier
from ownerserve.directory.state import DirectoryState
from ownerserve.kv.epoch import Stale, Term
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.messages import Failure, Receipt

LEASE_S = 2.0
HEAL_S = 16.0
# One lease of rebuilding; one more where a directory without its term file finds out only then
# that its term is too low; and the retries of asks and turns on the way.
SETTLE_S = 2 * LEASE_S + 3.0
# What is under way when the clients fall silent ends within the routers' patience.
REST_S = 1.5
RETRY_S = 0.4
TICK_S = 0.2
PARKED_MAX = 8


Client = tuple[SessionId, int]
Caller = tuple[Router, Receipt, RoutingUnit]
"""The router that sent a turn, its receipt, and the life that it was meant for."""
Turn = tuple[Client, str, Caller | None]


class Process:
    """One life of a worker. `paused` lives do nothing; what comes for them waits."""

    def __init__(self, world: World, unit: RoutingUnit) -> None:
        self.world = world
        self.unit = unit
        self.owner = OwnerState(unit)
        self.dead = False
        self.paused = False
        self._inbox: list[partial[None]] = []
        self._opened: dict[SessionId, Grant] = {}
        self._busy: dict[SessionId, str] = {}  # the request that is being served
        self._queue: dict[str, Client] = {}
        self._parked: list[Turn] = []  # until the directory has answered
        self._callers: dict[str, list[Caller]] = {}
        self._length: dict[SessionId, int] = {}
        self._next_tick = partial(self.deliver, partial(self._tick))
        self._tick()

    def deliver(self, action: partial[None]) -> None:
        """Run what arrived, now or after the pause."""
        if self.dead:
            return
        if self.paused:
            self._inbox.append(action)
        else:
            self.world.touched.append(self)
            action()

    def pause(self, for_s: float) -> None:
        self.paused = True
        self.world.net.after(for_s, self._resume)

    def _resume(self) -> None:
        self.paused = False
        self.world.touched.append(self)
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            self.deliver(action)

    def _tick(self) -> None:
        if self.dead:
            return
        self.world.net.after(TICK_S, self._next_tick)
        self.send(self.owner.tick(self.world.net.now_s))

    def send(self, asks: Asks) -> None:
        for one in asks:
            self.world.net.send(partial(self.world.asked, self, one.number, one.request))

    def answered(self, number: int, outcome: ask.Outcome) -> None:
        self.send(self.owner.answered(number, outcome, self.world.net.now_s))
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

    def turn(self, client: Client, request: str, caller: Caller | None) -> None:
        """Serve it, or try to become its owner. The client asks again until it hears."""
        session_id = client[0]
        now_s = self.world.net.now_s
        if caller is not None and caller[2] != self.unit:
            self._refuse(caller)
            return
        grant = self.owner.may_serve(session_id, now_s)
        if not isinstance(grant, Grant):
            self.send(self.owner.want(session_id, now_s))
            if caller is not None and grant.holder not in (None, self.unit):
                self._refuse(caller)
            elif len(self._parked) < PARKED_MAX:
                self._parked.append((client, request, caller))
            return
        if caller is not None:
            self._callers.setdefault(request, []).append(caller)
        journal = self.world.journals[session_id]
        opened = self._opened.get(session_id)
        if opened is None or opened.epoch != grant.epoch:
            outcome = journal.open(self.unit, grant.epoch)
            if isinstance(outcome, Stale):
                self.owner.fenced(session_id, outcome)
                return
            self._opened[session_id] = grant
            self._length[session_id] = len(journal.done)
            self._busy.pop(session_id, None)
        if session_id in self._busy:
            self._queue[request] = client
            return
        self._busy[session_id] = request
        for router, receipt, _ in self._callers.get(request, ()):
            self.world.net.send(partial(router.begun, receipt))
        compute_s = self.world.net.rng.uniform(0.0, 0.3)
        done = partial(self._computed, client, request, grant)
        self.world.net.after(compute_s, partial(self.deliver, partial(done)))

    def _refuse(self, caller: Caller) -> None:
        self.world.net.send(partial(caller[0].failed, caller[1], Failure.REFUSED))

    def _computed(self, client: Client, request: str, grant: Grant) -> None:
        session_id = client[0]
        if not self._is_open(session_id, grant):
            return
        now = self.owner.may_serve(session_id, self.world.net.now_s)
        if isinstance(now, Grant) and now.epoch == grant.epoch:
            position = self._length[session_id]
            self.world.net.send(partial(self._write, client, request, grant, position))
        # Until its outcome is known, or a new epoch makes it void, nothing else is written.
        again = partial(self._computed_again, client, request, grant)
        self.world.net.after(RETRY_S, partial(self.deliver, again))

    def _is_open(self, session_id: SessionId, grant: Grant) -> bool:
        opened = self._opened.get(session_id)
        return opened is not None and opened.epoch == grant.epoch

    def _computed_again(self, client: Client, request: str, grant: Grant) -> None:
        if self._busy.get(client[0]) == request:
            self._computed(client, request, grant)

    def _write(self, client: Client, request: str, grant: Grant, position: int) -> None:
        journal = self.world.journals[client[0]]
        outcome = journal.write(self.unit, grant.epoch, position, request)
        length = len(journal.done)
        answer = partial(self._written, client, request, grant, outcome, length)
        self.world.net.send(partial(self.deliver, partial(answer)))

    def _written(
        self, client: Client, request: str, grant: Grant, outcome: object, length: int
    ) -> None:
        session_id = client[0]
        if isinstance(outcome, Stale):
            if self.owner.grants.get(session_id) == grant:
                self.owner.fenced(session_id, outcome)
            return
        for router, receipt, _ in self._callers.pop(request, ()):
            self.world.net.send(partial(router.answered, receipt, 1000 + 25 * length))
        self.world.net.send(partial(self.world.done, client, request))
        if self._is_open(session_id, grant):
            self._length[session_id] = max(self._length[session_id], length)
            if self._busy.get(session_id) == request:
                del self._busy[session_id]
                self._next(session_id)

    def _next(self, session_id: SessionId) -> None:
        for request, client in list(self._queue.items()):
            if client[0] == session_id:
                del self._queue[request]
                self.turn(client, request, None)
                return

    def hand_over(self) -> None:
        """A migration: some session to some other life that is there (or was)."""
        mine = sorted(self.owner.grants)
        others = [one.unit for one in self.world.processes if one is not self]
        if mine and others:
            rng = self.world.net.rng
            chosen = rng.choice(mine)
            self.send(self.owner.hand_over(chosen, rng.choice(others), self.world.net.now_s))

    def end(self) -> None:
        """Give a session up, as after a long idle time; its clients come back all the same."""
        mine = sorted(self.owner.grants)
        if mine:
            chosen = self.world.net.rng.choice(mine)
            self.send(self.owner.end(chosen, self.world.net.now_s))

    def keep_prefixes(self) -> None:
        """Claim, copy, drop, release, advance: at once, as an owner on the same host would."""
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
            claim = ask.ClaimOwner(prefix_hash, tokens, *place, seen=self.owner.seen)
            outcome = world.ask_now(claim)
            if isinstance(outcome, ask.HeldBy):
                world.ask_now(ask.ReplicateReadonly(prefix_hash, *place))
            elif isinstance(outcome, ask.Granted):
                self.duties[prefix_hash] = outcome
        elif isinstance(grant, Grant) and rng.random() < 0.6:
            world.advance(self, session_id, grant, prefix_hash, tokens)
        elif rng.random() < 0.3 and prefix_hash in self.duties:
            world.ask_now(ask.Release(prefix_hash, self.unit, self.duties[prefix_hash].epoch))
        else:
            if isinstance(world.ask_now(ask.Drop(prefix_hash, *place[:2])), ask.Dropped):
                oracle.copies.discard((prefix_hash, self.unit))
                self.duties.pop(prefix_hash, None)

    @property
    def duties(self) -> dict[PrefixHash, ask.Granted]:
        return self.world.duties.setdefault(self.unit, {})


class World:
    """One schedule from one seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.net = Net(rng, HEAL_S)
        self.oracle = Oracle(LEASE_S)
        self.sessions = [SessionId(f"s{number}") for number in range(rng.randrange(1, 4))]
        self.journals = {name: Journal(name) for name in self.sessions}
        self.duties: dict[RoutingUnit, dict[PrefixHash, ask.Granted]] = {}
        # Two turns of a session at a time, as forks and impatient clients make them.
        self.clients = [(name, number) for name in self.sessions for number in range(2)]
        self.open: dict[Client, str] = {}
        self.finished: dict[Client, int] = dict.fromkeys(self.clients, 0)
        self._requests = count()
        self._lives = count(1)
        self.has_term_file = rng.random() < 0.5
        self._ordinal = 0
        self.away_until_s = 0.0
        self.zombies: list[Process] = []
        self.touched: list[Process] = []
        """Whose state the present event may have changed: what `_look` must look at."""
        self.state = DirectoryState(self.new_term(None), lease_s=LEASE_S, open_at_s=0.0)
        self.workers = [WorkerId(f"w{number}") for number in range(rng.randrange(2, 5))]
        self.processes = [self._born(worker) for worker in self.workers]
        self.routers = [Router(self, rng) for _ in range(rng.randrange(1, 3))]
        self.settled_s = 0.0
        """How long after healing the last client had its first answer."""
        self._waits: set[Client] = set()
        self._rests = False
        for client in self.clients:
            self._new_request(client)
        self.net.after(rng.uniform(0.2, 1.5), self._fault)
        self.net.after(0.3, self._work)

    def play(self) -> None:
        """Faults, then health; raises Violation."""
        self.net.run(HEAL_S, self._look)
        self._heal()
        self._waits = set(self.clients)
        self.net.run(HEAL_S + SETTLE_S, self._look)
        self.state.check()
        for client in self._waits:
            raise Violation(f"{self.open[client]} is not done two leases after healing")
        self._rests = True
        self.net.run(HEAL_S + SETTLE_S + REST_S, self._look)
        for router in self.routers:
            router.at_rest()

    # ---- the directory

    def new_term(self, above: Term | None) -> Term:
        """As `TermFile` does it, with this schedule's numbers."""
        floor = max(self._ordinal if self.has_term_file else 0, above.ordinal if above else 0)
        self._ordinal = floor + 1
        return Term(floor + 1, self.net.rng.randrange(1 << 40))

    def ask_now(self, request: ask.Request) -> ask.Outcome:
        now_s = self.net.now_s
        if self.state.is_behind(request):
            seen = seen_of(request)
            assert seen is not None
            self.state.start_term(self.new_term(seen.term), open_at_s=now_s + LEASE_S)
        record = self.oracle.before(self.state, request)
        outcome = self.state.handle(request, now_s)
        self.oracle.after(request, outcome, now_s, record=record, is_open=self._is_open)
        return outcome

    def _is_open(self) -> bool:
        return self.net.now_s >= self.state.open_at_s

    def asked(self, process: Process, number: int, request: ask.Request) -> None:
        if self.net.now_s < self.away_until_s:
            return
        outcome = self.ask_now(request)
        answer = partial(process.answered, number, outcome)
        self.net.send(partial(process.deliver, answer))

    def advance(
        self, process: Process, session_id: SessionId, grant: Grant, tip: PrefixHash, tokens: int
    ) -> None:
        """Sent over the bad network: an old one may come late, after a later one."""
        session = self.state.handle(ask.FindSession(session_id), self.net.now_s)
        if not isinstance(session, ask.SessionIs) or tokens <= session.tokens:
            return
        moved = ask.Advance(session_id, process.unit, grant.epoch, session.version, tip, tokens)
        self.net.send(partial(self._advanced, moved))

    def _advanced(self, moved: ask.Advance) -> None:
        if self.net.now_s >= self.away_until_s:
            self.ask_now(moved)

    def _forget(self) -> None:
        """The directory's process died with its memory."""
        rng, now_s = self.net.rng, self.net.now_s
        if now_s >= HEAL_S - 0.5:
            return
        self.oracle.forget()
        self.away_until_s = min(HEAL_S, now_s + rng.uniform(0.0, 3.0))
        self.state = DirectoryState(
            self.new_term(None), lease_s=LEASE_S, open_at_s=self.away_until_s + LEASE_S
        )

    # ---- clients

    def _new_request(self, client: Client) -> None:
        session_id, number = client
        self.open[client] = f"{session_id}/{number}/{next(self._requests)}"
        self._try(client, self.open[client])

    def _try(self, client: Client, request: str) -> None:
        """Through a router; now and then past it, to anyone."""
        if self.open[client] != request or self._rests:
            return
        rng = self.net.rng
        self.net.after(RETRY_S, partial(self._try, client, request))
        if rng.random() < 0.8:
            self.net.send(partial(rng.choice(self.routers).take, client, request))
            return
        alive = [one for one in self.processes if not one.dead]
        if alive:
            chosen = rng.choice(alive)
            turn = partial(chosen.turn, client, request, None)
            self.net.send(partial(chosen.deliver, turn))

    def done(self, client: Client, request: str) -> None:
        if request not in self.journals[client[0]].done:
            raise Violation(f"{request} was acknowledged and is not in the journal")
        if self.open[client] == request:
            self.finished[client] += 1
            if client in self._waits:
                self._waits.discard(client)
                self.settled_s = self.net.now_s - HEAL_S
            pause_s = self.net.rng.uniform(0.0, 1.0) if self.net.now_s < HEAL_S else 0.05
            self.open[client] = ""
            self.net.after(pause_s, partial(self._new_request, client))

    # ---- what goes wrong

    def _born(self, worker: WorkerId) -> Process:
        return Process(self, RoutingUnit(worker, 0, Incarnation(next(self._lives))))

    def _replace(self, old: Process) -> None:
        self.processes = [one for one in self.processes if one.unit.worker != old.unit.worker]
        self.processes.append(self._born(old.unit.worker))

    def _kill(self, process: Process) -> None:
        process.dead = True
        gone = {one for one in self.oracle.copies if one[1] == process.unit}
        self.oracle.copies -= gone
        self.oracle.lost |= gone

    def _fault(self) -> None:
        rng = self.net.rng
        if self.net.now_s >= HEAL_S - 0.5:
            return
        self.net.after(rng.uniform(0.1, 2.0), self._fault)
        victim = rng.choice(self.processes)
        match rng.randrange(11):
            case 0 if not victim.dead:
                self._kill(victim)
                self.net.after(rng.uniform(0.0, 3.0), partial(self._replace, victim))
            case 1 | 2 if not victim.dead and not victim.paused:
                victim.pause(rng.uniform(0.2, 2.5 * LEASE_S))
            case 3 if not victim.dead and not victim.paused:
                self.zombies.append(victim)
                victim.pause(rng.uniform(0.2, LEASE_S))
                self._replace(victim)
            case 4 | 8:
                self._forget()
                if rng.random() < 0.5:  # and again, before all have told it who they are
                    self.net.after(rng.uniform(0.5, 2 * LEASE_S), self._forget)
            case 10:
                lost = rng.randrange(len(self.routers))
                self.routers[lost].dead = True
                self.routers[lost] = Router(self, rng)
            case 9 if not victim.dead and not victim.paused:
                victim.deliver(partial(victim.end))
            case 5 | 6 | 7 if not victim.dead and not victim.paused:
                victim.deliver(partial(victim.hand_over))

    def _work(self) -> None:
        self.net.after(self.net.rng.uniform(0.05, 0.3), self._work)
        chosen = self.net.rng.choice(self.processes)
        if self.net.now_s >= self.away_until_s and not chosen.dead and not chosen.paused:
            chosen.keep_prefixes()

    def _heal(self) -> None:
        for process in (*self.processes, *self.zombies):
            if process.paused:
                process._resume()
        for process in self.processes:
            if process.dead:
                self._replace(process)

    # ---- what must hold after every event

    def _look(self) -> None:
        """At most one life says that it may serve a session. (Writes: `Journal`, for all lives.)

        A life begins to serve by an event of its own only: it is held against all others then.
        """
        while self.touched:
            process = self.touched.pop()
            for name in process.owner.grants:
                if self._serves(process, name):
                    self._look_for_another(process, name)

    def _serves(self, process: Process, session_id: SessionId) -> bool:
        return (
            not process.dead
            and not process.paused
            and isinstance(process.owner.may_serve(session_id, self.net.now_s), Grant)
            and not self.oracle.is_superseded(process.unit)
        )

    def _look_for_another(self, process: Process, session_id: SessionId) -> None:
        for other in (*self.processes, *self.zombies):
            if other is process or session_id not in other.owner.grants:
                continue
            if self._serves(other, session_id):
                raise Violation(f"{session_id} is served by {other.unit} and by {process.unit}")


def play(seed: int) -> World:
    """One schedule; an error names its seed."""
    try:
        world = World(seed)
        world.play()
    except BaseException as error:
        error.add_note(f"fault schedule {seed}")
        raise
    return world
