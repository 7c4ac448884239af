"""One fault schedule: a directory, workers, clients, and everything that can go wrong with them.

    client --turn--> router --turn--> worker [owner, node] --write under its epoch--> journal
                       |  FindSession    |  Bind, Transfer, RenewLease, Publish ...
                       v                 v
                    directory          may be away, or come back without memory

Faults until `heal_s`: messages lost, doubled, delayed; workers killed and born again, paused past
their lease, paused while their next life starts (a zombie); sessions handed over while turns run;
routers killed; clients that go past them to any worker; the directory amnesiac, with its term file
or without, and the network with it; devices emptied, stores that lose records. Then all is well:
a session that somebody wants is owned within two leases, and each turn has an answer, an owner's or
a guest's.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from itertools import count

from ownerserve.directory import messages as ask
from ownerserve.directory.decisions.decide import seen_of
from ownerserve.directory.decisions.state import DirectoryState
from ownerserve.directory.owner.state import Ask, SessionGrant
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from tests.support.directory.fault_net import (
    DoubleOwner,
    Journal,
    Late,
    LostRequest,
    Net,
    Violation,
)
from tests.support.directory.fault_node import Bad, Below, Store
from tests.support.directory.fault_oracle import Oracle
from tests.support.directory.fault_process import RETRY_S, Client, Process
from tests.support.directory.fault_router import Router

LEASE_S = 2.0
HEAL_S = 16.0
OWNED_S = 2 * LEASE_S + 1.0
"""Until somebody serves a session that is wanted: one lease of rebuilding; one more where a
directory without its term file finds out only then that its term is too low; and the asking."""
ANSWERED_S = OWNED_S + 2.0
"""Until a turn of it is done, which may wait behind others at its worker, and be refused there."""
LAST_GUESTS = 3
STEP_S = 0.25
IDLE_MAX_S = 6.0
# What is under way when the clients fall silent ends within the routers' patience.
REST_S = 1.5
PAUSE_S = 0.5
"""Between two turns of a client, once all is well."""


class World:
    """One schedule from one seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.net = Net(rng, HEAL_S)
        self.guests_tell = seed % 4 == 1
        """Guests' answers name the owner, as workers' do: that mends what may not need it."""
        self.oracle = Oracle(LEASE_S)
        self.sessions = [SessionId(f"s{number}") for number in range(rng.randrange(1, 4))]
        self.journals = {name: Journal(name) for name in self.sessions}
        self.pledged: dict[tuple[PrefixHash, RoutingUnit], float] = {}
        """Copies that a report on its way tells of, and until when it may come."""
        # Two turns of a session at a time, as forks and impatient clients make them.
        self.clients = [(name, number) for name in self.sessions for number in range(2)]
        self.epochs: dict[SessionId, list[Epoch]] = {name: [] for name in self.sessions}
        """All that were granted, in order."""
        self.guests: dict[SessionId, list[RoutingUnit]] = {name: [] for name in self.sessions}
        """Who served its last turns without owning it."""
        self.open: dict[Client, str] = {}
        self.finished: dict[Client, int] = dict.fromkeys(self.clients, 0)
        self._requests = count()
        self._lives = count(1)
        self.has_term_file = rng.random() < 0.5
        self._ordinal = 0
        self.away_until_s = 0.0
        self.zombies: list[Process] = []
        self.counts: Counter[str] = Counter()
        """Faults by kind."""
        self.touched: list[Process] = []
        """Who may have begun to serve by the present event: what `_look` must look at."""
        self.state = DirectoryState(self.new_term(None), lease_s=LEASE_S, open_at_s=0.0)
        self.bad = Bad(
            lost=rng.choice((0.0, 0.1, 0.4)),
            doubled=rng.choice((0.0, 0.2)),
            failed=rng.choice((0.0, 0.05, 0.3)),
            slowest_s=rng.choice((0.01, 0.2, 0.8)),
        )
        self.below = rng.choice(list(Below))
        self._stores: dict[WorkerId | None, Store] = {}
        self.workers = [WorkerId(f"w{number}") for number in range(rng.randrange(2, 5))]
        self.processes = [self._born(worker) for worker in self.workers]
        self.routers = [Router(self, rng) for _ in range(rng.randrange(1, 3))]
        self.owned_s = self.answered_s = 0.0
        """The longest that a client in good health waited for an owner, and for a first answer."""
        self._waits: set[Client] = set()
        self._asked_s: dict[Client, float] = {}
        self._owned_at_s: dict[SessionId, float] = {}
        """When each session was first owned by anybody once all was well."""
        self._wanted_s: dict[SessionId, float] = {}
        """When a turn of it came first then."""
        self._rests = False
        for client in self.clients:
            self._new_request(client)
        self.net.after(rng.uniform(0.2, 1.4), self._fault)
        self.net.after(0.3, self._work)

    def play(self) -> None:
        """Faults, then health; raises Violation."""
        self.net.run(HEAL_S, self.touched, self._look)
        self._heal()
        self._waits = set(self.clients)
        until_s = HEAL_S + LEASE_S  # whatever was owned by a lost memory is over by then
        self.net.run(until_s, self.touched, self._look)
        while self._waits or self._unowned():
            until_s += STEP_S
            self.net.run(until_s, self.touched, self._look)
            self._look_at_waits()
        self.state.check()
        self._rests = True
        rest_s = max(until_s, HEAL_S + self.net.latest_s) + REST_S
        self.net.run(rest_s, self.touched, self._look)
        for router in self.routers:
            router.at_rest()
        for process in (*self.processes, *self.zombies):
            if not process.dead:
                process.node.at_rest()
                process.publisher.at_rest()
                self.counts.update(process.node.counts)

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
        if isinstance(request, ask.Register) and isinstance(outcome, ask.Leased):
            self._look_at_claims(request.unit)
        return outcome

    def _look_at_claims(self, unit: RoutingUnit) -> None:
        """A new life is there: what a former one held in memory is offered to nobody any more."""
        for prefix_hash in {name for name, _ in self.oracle.copies | self.oracle.lost}:
            found = self.state.handle(ask.Lookup((prefix_hash,)), self.net.now_s)
            if isinstance(found, ask.Found) and any(
                place is not None and place.worker == unit.worker and place != unit
                for place, _, _ in found.locations
            ):
                raise Violation(f"{prefix_hash!r} is offered by a life of before {unit}")

    def _is_open(self) -> bool:
        return self.net.now_s >= self.state.open_at_s

    def asked(self, process: Process, asked: Ask) -> None:
        if self.net.now_s < self.away_until_s:
            return
        outcome = self.ask_now(asked.request)
        if isinstance(outcome, ask.Bound) and isinstance(asked.request, ask.Bind | ask.Transfer):
            self.epochs[asked.request.session_id].append(outcome.epoch)
        self.net.send(partial(process.deliver, process.answered, asked, outcome))

    def told_of(self, moved: ask.Advance) -> None:
        """A report is on its way: an old one may come late, after a later one."""
        self.oracle.copies.add((moved.prefix_hash, moved.unit))
        self.pledged[moved.prefix_hash, moved.unit] = self.net.now_s + self.net.latest_s

    def _forget(self) -> None:
        """The directory's process died with its memory."""
        rng, now_s = self.net.rng, self.net.now_s
        if now_s >= HEAL_S - 0.5:
            return
        self.counts["amnesias"] += 1
        if rng.random() < 0.25:  # what took it down took the network too
            self.net.storm_until_s = now_s + rng.uniform(0.5, 1.2) * LEASE_S
        self.oracle.forget()
        away_s = rng.choice((0.3, 3.0))  # started again at once, or after a while
        self.away_until_s = min(HEAL_S, now_s + rng.uniform(0.0, away_s))
        self.state = DirectoryState(
            self.new_term(None), lease_s=LEASE_S, open_at_s=self.away_until_s + LEASE_S
        )

    # ---- clients

    def _new_request(self, client: Client) -> None:
        session_id, number = client
        self.open[client] = f"{session_id}/{number}/{next(self._requests)}"
        self._asked_s[client] = self.net.now_s
        self._try(client, self.open[client])

    def _try(self, client: Client, request: str) -> None:
        """Through a router; now and then past it, to anyone."""
        if self.open[client] != request or self._rests:
            return
        rng, now_s = self.net.rng, self.net.now_s
        if now_s >= HEAL_S:
            self._wanted_s.setdefault(client[0], now_s)
        self.net.after(RETRY_S, partial(self._try, client, request))
        if rng.random() < 0.8:
            self.net.send(partial(rng.choice(self.routers).take, client, request))
            return
        alive = [one for one in self.processes if not one.dead]
        if alive:
            chosen = rng.choice(alive)
            self.net.send(partial(chosen.deliver, chosen.turn, client, request, None))

    def done(self, client: Client, request: str) -> None:
        journal = self.journals[client[0]]
        if request not in journal.done and request not in journal.guests:
            raise LostRequest(f"{request} was acknowledged and was not served")
        if self.open[client] == request:
            self.finished[client] += 1
            if client in self._waits:
                self._waits.discard(client)
                waited_s = self.net.now_s - self._since_s(client)
                self.answered_s = max(self.answered_s, waited_s)
            pause_s = self._idle_s() if self.net.now_s < HEAL_S else PAUSE_S
            self.open[client] = ""
            self.net.after(pause_s, partial(self._new_request, client))

    def _idle_s(self) -> float:
        """Between two turns of a client: a tool runs, mostly for a moment."""
        rng = self.net.rng
        return rng.uniform(0.0, 1.0 if rng.random() < 0.8 else IDLE_MAX_S)

    def _since_s(self, client: Client) -> float:
        """When its open request had nothing to wait for any more but us."""
        return max(HEAL_S, self._asked_s[client])

    def _unowned(self) -> list[SessionId]:
        """Sessions that nobody has owned yet since all was well."""
        return [name for name in self.sessions if name not in self._owned_at_s]

    def _look_at_waits(self) -> None:
        """All is well: what the clients wait for may take only so long."""
        now_s = self.net.now_s
        for name in self._unowned():
            if now_s - self._wanted_s.get(name, now_s) > OWNED_S:
                raise Late(f"nobody owns {name} {OWNED_S:.1f} s after all was well")
        for client in self._waits:
            if not self.open[client]:
                continue  # it has nothing to ask yet
            if now_s - self._since_s(client) > ANSWERED_S:
                raise Late(f"{self.open[client]} is not done {ANSWERED_S:.1f} s after all was well")

    # ---- what goes wrong

    def store_of(self, worker: WorkerId) -> Store:
        """What a new life finds below: its disk or all workers' as it was, or new host memory."""
        if self.below is Below.HOST:
            return Store()
        whose = worker if self.below is Below.DISK else None
        return self._stores.setdefault(whose, Store())

    def _born(self, worker: WorkerId) -> Process:
        return Process(self, RoutingUnit(worker, 0, Incarnation(next(self._lives))))

    def _replace(self, old: Process) -> None:
        self.processes = [one for one in self.processes if one.unit.worker != old.unit.worker]
        self.processes.append(self._born(old.unit.worker))

    def _kill(self, process: Process) -> None:
        process.node.check()
        self.counts.update(process.node.counts)
        self.counts["turns that died"] += len(process.node.jobs)
        process.dead = True
        gone = {one for one in self.oracle.copies if one[1] == process.unit}
        self.oracle.copies -= gone
        self.oracle.lost |= gone

    def _fault(self) -> None:
        rng = self.net.rng
        if self.net.now_s >= HEAL_S - 0.5:
            return
        self.net.after(rng.uniform(0.1, 1.6), self._fault)
        victim = rng.choice(self.processes)
        match rng.randrange(14):
            case 0 if not victim.dead:
                self.counts["kills"] += 1
                self._kill(victim)
                self.net.after(rng.uniform(0.0, 3.0), partial(self._replace, victim))
            case 1 | 2 if not victim.dead and not victim.paused:
                self.counts["pauses"] += 1
                victim.pause(rng.uniform(0.2, 2.5 * LEASE_S))
            case 3 if not victim.dead and not victim.paused:
                self.counts["zombies"] += 1
                self.zombies.append(victim)
                victim.pause(rng.uniform(0.2, LEASE_S))
                self._replace(victim)
            case 4 | 8:
                self._forget()
                if rng.random() < 0.5:  # and again, before all have told it who they are
                    self.net.after(rng.uniform(0.5, 2 * LEASE_S), self._forget)
            case 10:
                self.counts["routers killed"] += 1
                lost = rng.randrange(len(self.routers))
                self.routers[lost].dead = True
                self.routers[lost] = Router(self, rng)
            case 9 if not victim.dead and not victim.paused:
                self.counts["ends"] += 1
                victim.deliver(victim.end)
            case 5 | 6 | 7:
                self._release()
            case 11 | 12 if not victim.dead and not victim.paused:
                victim.node.press()
            case 13 if not victim.dead:
                victim.node.lose_record()

    def _release(self) -> None:
        """A router that knows the owner, or one of before, says that a turn was done elsewhere,
        by a life that is there (or was). Its word may come late, after others."""
        rng = self.net.rng
        name = rng.choice(self.sessions)
        owners = [one for one in self.processes if name in one.owner.grants]
        owner = owners[0] if owners and rng.random() < 0.9 else rng.choice(self.processes)
        targets = [one for one in self.guests[name] if one != owner.unit]
        grant = owner.owner.grants.get(name)
        is_known = grant is not None and rng.random() < 0.7
        epochs = [grant.epoch] if grant is not None and is_known else self.epochs[name]
        if epochs and targets:
            release = partial(owner.release, name, rng.choice(epochs), rng.choice(targets))
            self.net.send(partial(owner.deliver, release))

    def was_guest(self, session_id: SessionId, unit: RoutingUnit) -> None:
        """A turn of the session was done there, by who did not own it."""
        self.guests[session_id] = [*self.guests[session_id], unit][-LAST_GUESTS:]

    def _work(self) -> None:
        self.net.after(self.net.rng.uniform(0.05, 0.3), self._work)
        if self.net.now_s < self.net.heal_s and self.net.rng.random() < 0.1:
            self._release()
        chosen = self.net.rng.choice(self.processes)
        if self.net.now_s >= self.away_until_s and not chosen.dead and not chosen.paused:
            chosen.keep_prefixes()

    def _heal(self) -> None:
        for process in (*self.processes, *self.zombies):
            if process.paused:
                process.resume()
        for process in self.processes:
            if process.dead:
                self._replace(process)
        self.touched += self.processes  # who owns what as all gets well

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
                    if self.net.now_s >= HEAL_S:
                        self._owns(name)

    def _owns(self, session_id: SessionId) -> None:
        now_s = self.net.now_s
        if session_id not in self._owned_at_s:
            self._owned_at_s[session_id] = now_s
            waited_s = now_s - self._wanted_s.get(session_id, now_s)
            self.owned_s = max(self.owned_s, waited_s)

    def _serves(self, process: Process, session_id: SessionId) -> bool:
        return (
            not process.dead
            and not process.paused
            and isinstance(process.owner.may_serve(session_id, self.net.now_s), SessionGrant)
            and not self.oracle.is_superseded(process.unit)
        )

    def _look_for_another(self, process: Process, session_id: SessionId) -> None:
        for other in (*self.processes, *self.zombies):
            if other is process or session_id not in other.owner.grants:
                continue
            if self._serves(other, session_id):
                raise DoubleOwner(f"{session_id} is served by {other.unit} and by {process.unit}")


def play(seed: int) -> World:
    """One schedule; an error names its seed."""
    try:
        world = World(seed)
        world.play()
    except BaseException as error:
        error.add_note(f"fault schedule {seed}")
        raise
    return world
