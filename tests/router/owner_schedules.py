"""One fault schedule of gateways that speak for their workers: production's `Owners` under faults.

Until `HEAL_S`: batches lost on their way, executed and not heard of, executed late, told "not now"
or broken off in the middle; the directory amnesiac, with its term file or without; gateways killed
and replaced, or paused past their lease; workers killed and born again, silent to all or to one
gateway and back in the same life, or answering beside their next life; sessions that fork, end and
are asked for by two clients at once. Then all is well, and `Health` says what must come of it.

What gateways are held against is independent of them: the directory's own records and grants
(`fault_oracle`), which life stands at which address, and where turns were sent.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "directory"))

from fault_net import FASTEST_S, HEALTHY_S, STORM_LOSS, STUCK_S, Net, Violation
from fault_oracle import Oracle
from owner_gateway import BAD_PROBES, POLICIES, PROBE_S, RENEW_S, Gateway, Job, Place, Turn

from ownerserve.directory import messages as ask
from ownerserve.directory.decide import seen_of
from ownerserve.directory.records import Holder, holder_of
from ownerserve.directory.state import DirectoryState
from ownerserve.kv.epoch import Term
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway.leases import Leases
from ownerserve.router.gateway.receipts import unit_of

LEASE_S = 2.0
HEAL_S = 5.0
WELL_S = 2 * LEASE_S + 1.0
"""Until what is wished is so: one lease of rebuilding; one more where a directory without its term
file finds out only then that its term is too low; and the asking."""
SETTLE_S = 0.7
"""Until a turn's place is confirmed, or its gateway knows better: one renewal and a look at it."""
BUSY_TOKENS = 300_000


class World:
    """One schedule from one seed, up to its faults' end; `owner_health` goes on from there."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.net = Net(rng, HEAL_S)
        self.oracle = Oracle(LEASE_S)
        self.counts: Counter[str] = Counter()
        self.trace: list[tuple[float, int, str, str]] = []
        """Every request that the directory decided: when, whose, what, and the answer."""
        self.has_term_file = rng.random() < 0.5
        self._ordinal = 0
        self.away_until_s = 0.0
        self.answers_bad = rng.choice((0.0, 0.05, 0.2))
        self.state = DirectoryState(self._new_term(None), lease_s=LEASE_S, open_at_s=0.0)
        self.policy = rng.choice((None, *POLICIES))
        """Of all gateways; None: each has its own."""
        self._lives = count(1)
        self._names = count()
        self.places = {
            WorkerId(f"w{number}"): Place(f"w{number}", next(self._lives))
            for number in range(rng.randrange(2, 5))
        }
        self.tells: dict[SessionId, float] = {}
        """How often a turn's prompt is reported."""
        self.last: dict[SessionId, tuple[Gateway, RoutingUnit, float]] = {}
        """Where the latest turn was sent, by whom and when."""
        self.tips: dict[SessionId, list[PrefixHash]] = {}
        """What workers reported of each session."""
        self.over: dict[SessionId, Gateway] = {}
        """Ended, by the only gateway that ran turns of it, and no turn since."""
        self._ran_by: dict[SessionId, set[Gateway]] = {}
        self.sessions: list[SessionId] = []
        self._parents: dict[SessionId, SessionId] = {}
        for _ in range(rng.randrange(2, 7)):
            self._new_session()
        self._numbers = count()
        self.gateways = [Gateway(self, next(self._numbers)) for _ in range(rng.randrange(2, 4))]
        self._pace_s = rng.choice((0.05, 0.15, 0.4))
        self.net.after(0.1, self._client)
        self.net.after(rng.uniform(0.1, 0.6), self._fault)

    # ---- the directory

    def _new_term(self, above: Term | None) -> Term:
        floor = max(self._ordinal if self.has_term_file else 0, above.ordinal if above else 0)
        self._ordinal = floor + 1
        return Term(floor + 1, self.net.rng.randrange(1 << 40))

    def loses(self) -> bool:
        """Is this message lost?"""
        net = self.net
        if net.now_s >= HEAL_S:
            return False
        return net.rng.random() < (net.loss if net.now_s >= net.storm_until_s else STORM_LOSS)

    def delay_s(self) -> float:
        net = self.net
        if net.now_s >= HEAL_S:
            return HEALTHY_S
        delay_s = FASTEST_S + net.slowest_s * net.rng.random()
        if net.stuck and net.rng.random() < net.stuck:
            delay_s += STUCK_S * net.rng.random()
        return min(delay_s, HEAL_S - net.now_s)  # all is well when nothing is stuck any more

    def arrives(self, gateway: Gateway, job: Job) -> None:
        """A batch at the directory: lost with it, or kept until it is back."""
        rng = self.net.rng
        if self.net.now_s < self.away_until_s:
            if rng.random() < 0.5:
                self.net.at(self.away_until_s, partial(self.arrives, gateway, job))
            return
        outcomes = [self._decide(gateway, request) for request in job.requests]
        if self.net.now_s < HEAL_S and rng.random() < self.answers_bad:
            broken_off = rng.randrange(len(outcomes) + 1)  # done, and not told
            self.counts["batches broken off"] += 1
            for index in range(broken_off, len(outcomes)):
                outcomes[index] = ask.Refused(ask.Refusal.UNREACHABLE)
        if self.loses():
            self.counts["answers lost"] += 1
            return
        back = partial(gateway.do, partial(gateway.heard, job, outcomes))
        self.net.after(self.delay_s(), back)

    def _decide(self, gateway: Gateway, request: ask.Request) -> ask.Outcome:
        rng, is_bad = self.net.rng, self.net.now_s < HEAL_S and self.answers_bad
        if is_bad and rng.random() < self.answers_bad / 4:
            outcome: ask.Outcome = ask.Refused(ask.Refusal.CONTENDED)
        else:
            outcome = self._ask_now(request)
        if is_bad and not isinstance(outcome, ask.Refused) and rng.random() < self.answers_bad / 4:
            outcome = ask.Refused(ask.Refusal.NOT_REPLICATED)
        is_refused = isinstance(outcome, ask.Refused)
        told = outcome.reason.lower() if is_refused else type(outcome).__name__.lower()
        self.counts[f"{type(request).__name__}: {told}"] += 1
        self.trace.append((self.net.now_s, gateway.number, type(request).__name__, told))
        return outcome

    def _ask_now(self, request: ask.Request) -> ask.Outcome:
        now_s = self.net.now_s
        if self.state.is_behind(request):
            seen = seen_of(request)
            assert seen is not None
            self.counts["terms raised"] += 1
            self.state.start_term(self._new_term(seen.term), open_at_s=now_s + LEASE_S)
        record = self.oracle.before(self.state, request)
        outcome = self.state.handle(request, now_s)
        self.oracle.after(request, outcome, now_s, record=record, is_open=bool)
        return outcome

    def _forget(self) -> None:
        now_s, rng = self.net.now_s, self.net.rng
        self.counts[f"amnesias, term file {'kept' if self.has_term_file else 'lost'}"] += 1
        self.oracle.forget()
        self.away_until_s = min(HEAL_S, now_s + rng.uniform(0.0, rng.choice((0.2, 2.0))))
        self.state = DirectoryState(
            self._new_term(None), lease_s=LEASE_S, open_at_s=self.away_until_s + LEASE_S
        )

    # ---- clients

    def _new_session(self) -> None:
        rng = self.net.rng
        name = SessionId(f"s{next(self._names)}")
        if self.sessions and rng.random() < 0.4:
            self._parents[name] = rng.choice(self.sessions)
        self.tips[name] = []
        self.tells[name] = rng.choice((0.0, 0.7, 1.0))
        self.sessions.append(name)

    def _client(self) -> None:
        rng = self.net.rng
        if self.net.now_s >= HEAL_S:
            return
        self.net.after(rng.uniform(0.0, 2 * self._pace_s), self._client)
        session = rng.choice(self.sessions)
        is_final = rng.random() < 0.04
        for _ in range(1 if is_final or rng.random() < 0.7 else 2):
            self.turn(rng.choice(self.gateways), session, is_final=is_final)
        if is_final:
            self.sessions.remove(session)
            self._new_session()

    def turn(self, gateway: Gateway, session: SessionId, *, is_final: bool = False) -> None:
        """One turn by that gateway."""
        gateway.take(Turn(session, self._parents.get(session), is_final))

    def ran(self, turn: Turn, gateway: Gateway, unit: RoutingUnit) -> None:
        """A gateway sent a turn there."""
        self.counts["turns"] += 1
        self.counts["turns of forks"] += turn.parent is not None
        self.last[turn.session] = (gateway, unit, self.net.now_s)
        self.over.pop(turn.session, None)
        self._ran_by.setdefault(turn.session, set()).add(gateway)

    def refused(self, turn: Turn, gateway: Gateway) -> None:
        """No worker took it: it is as if it had not been sent."""
        self.counts["turns refused"] += 1
        _, unit, _ = self.last[turn.session]
        self.last[turn.session] = (gateway, unit, 0.0)

    def ended(self, turn: Turn, gateway: Gateway) -> None:
        self.counts["ends"] += 1
        if self._ran_by.get(turn.session) == {gateway} or self.net.now_s > HEAL_S + WELL_S:
            self.over[turn.session] = gateway

    # ---- what goes wrong

    def _born(self, place: Place) -> None:
        place.unit = RoutingUnit(place.unit.worker, 0, Incarnation(next(self._lives)))
        place.is_dead = False

    def _reborn(self, place: Place) -> None:
        if place.is_dead:
            self._born(place)

    def _bury(self, place: Place) -> None:
        place.zombie = None

    def _fault(self) -> None:
        net = self.net
        rng = net.rng
        if net.now_s >= HEAL_S - 0.1:
            return
        net.after(rng.uniform(0.02, 0.6), self._fault)
        place = rng.choice(list(self.places.values()))
        gateway = rng.choice(self.gateways)
        match rng.randrange(12):
            case 0 | 1 if not place.is_dead:
                self.counts["kills"] += 1
                place.is_dead, place.zombie = True, None
                net.after(rng.uniform(0.0, 2.0), partial(self._reborn, place))
            case 2 | 3:
                self.counts["silences"] += 1
                place.silent_until_s = net.now_s + rng.uniform(0.2, 2 * LEASE_S)
            case 4:
                self.counts["cuts"] += 1
                place.cut[gateway] = net.now_s + rng.uniform(0.2, 2 * LEASE_S)
            case 5 if not place.is_dead:
                self.counts["zombies"] += 1
                place.zombie = place.unit
                self._born(place)
                net.after(rng.uniform(0.2, 2.0), partial(self._bury, place))
            case 6 | 7:
                self._forget()
            case 8 if rng.random() < 0.5:
                self.counts["directory away"] += 1
                self.away_until_s = min(HEAL_S, net.now_s + rng.uniform(0.1, 2.0))
            case 8:
                net.storm_until_s = net.now_s + rng.uniform(0.3, 2.0)
            case 9:
                self.counts["gateways killed"] += 1
                gateway.is_dead = True
                self.gateways[self.gateways.index(gateway)] = Gateway(self, next(self._numbers))
            case 10 if not gateway.is_paused:
                self.counts["gateways paused"] += 1
                gateway.pause(min(rng.uniform(0.1, 1.5 * LEASE_S), HEAL_S - net.now_s))
            case 11:
                place.pending = rng.choice((0, BUSY_TOKENS))

    def heal(self) -> None:
        """All is well from now on."""
        for place in self.places.values():
            place.zombie, place.silent_until_s, place.pending = None, 0.0, 0
            place.cut.clear()
            if place.is_dead:
                self._born(place)


class Health:
    """What must come of a schedule once all is well. Raises Violation."""

    def __init__(self, world: World) -> None:
        self.world = world

    def play(self) -> None:
        """The faults, then all that must hold."""
        world = self.world
        self._run(HEAL_S)
        world.heal()
        self._lone_turns()
        self._rounds()
        self._ends()
        self._silence()
        self._rest()
        for gateway in world.gateways:
            gateway.state.check()
        world.state.check()

    def _run(self, more_s: float) -> None:
        net = self.world.net
        net.run(net.now_s + more_s, [], lambda: None)

    def _lone_turns(self) -> None:
        """One turn of each session, and nothing after it: its wish is not lost."""
        world, rng = self.world, self.world.net.rng
        late: list[tuple[SessionId, Gateway]] = []
        for session in world.sessions:
            at_s, gateway = rng.choice((0.0, 0.3, 1.0, 2.0, 3.0)), rng.choice(world.gateways)
            if at_s >= 2.0:  # what was under way when all got well is over
                late.append((session, gateway))
            world.net.after(at_s, partial(world.turn, gateway, session))
        self._run(WELL_S)
        for session in world.sessions:
            self._is_not_lost(session)
        for session, gateway in late:
            self._agrees(session, gateway)

    def _is_not_lost(self, session: SessionId) -> None:
        """What the latest turn wished is so, or another gateway was first."""
        world = self.world
        _, unit, at_s = world.last.get(session, (None, None, 0.0))
        if at_s < HEAL_S:
            return  # its gateway had not heard of any worker yet
        found = self._find(session)
        is_anothers = isinstance(found, ask.SessionIs) and found.owner != unit
        if is_anothers and at_s < HEAL_S + (BAD_PROBES + 1) * PROBE_S:
            return  # who was first may have been dead by then, and not found out
        self._stands(session, self._record(session), on_the_last=0)

    def _rounds(self) -> None:
        """Each gateway runs two turns of each session: by the first it hears of what it missed."""
        world, rng = self.world, self.world.net.rng
        for session in world.sessions:
            at_s = rng.uniform(0.0, 0.3)
            for gateway in rng.sample(world.gateways, len(world.gateways)):
                world.net.after(at_s, partial(world.turn, gateway, session))
                world.net.after(at_s + SETTLE_S, partial(world.turn, gateway, session))
                at_s += 2 * SETTLE_S
                world.net.after(at_s - 0.01, partial(self._owns_last, session, gateway))
        self._run(0.3 + 2 * SETTLE_S * len(world.gateways))

    def _owns_last(self, session: SessionId, gateway: Gateway) -> None:
        """It is owned where its latest turn was sent."""
        found = self._agrees(session, gateway)
        last, unit, _ = self.world.last[session]
        if found.owner != unit or last is not gateway:
            raise Violation(f"{session} ran at {unit} and is owned by {found.owner}")
        self._stands(session, found, on_the_last=1)
        grant = gateway.owners.grants.get(session)
        if grant is None or (grant.unit, grant.epoch) != (found.owner, found.epoch):
            raise Violation(f"{gateway.number} has {grant} of {session}, which is {found}")

    def _record(self, session: SessionId) -> ask.SessionIs:
        """It is owned, by the life that is there."""
        found = self._find(session)
        if not isinstance(found, ask.SessionIs):
            raise Violation(f"the directory does not know {session}, of which a turn ran")
        if not found.owner_live or self.world.places[found.owner.worker].unit != found.owner:
            raise Violation(f"{session} is {found.owner}'s, which is not there")
        return found

    def _agrees(self, session: SessionId, gateway: Gateway) -> ask.SessionIs:
        """The gateway that ran its last turn routes to its owner."""
        found = self._record(session)
        known = gateway.state.sessions.get(session)
        worker = None if known is None else known.live_owner
        if worker is None or unit_of(worker) != found.owner:
            place = None if worker is None else unit_of(worker)
            raise Violation(f"{gateway.number} routes {session} to {place}, {found.owner} owns it")
        return found

    def _stands(self, session: SessionId, found: ask.SessionIs, *, on_the_last: int) -> None:
        """On one of the last so many reports (0: on any; an older one may have waited)."""
        is_told = self.world.tells[session] == 1.0 and found.owner == self.world.last[session][1]
        if is_told and found.prefix_hash not in self.world.tips[session][-on_the_last:]:
            raise Violation(f"{session} stands on {found.prefix_hash!r}")

    def _find(self, session: SessionId) -> ask.Outcome:
        return self.world.state.handle(ask.FindSession(session), self.world.net.now_s)

    def _ends(self) -> None:
        """What has ended is unknown."""
        world, rng = self.world, self.world.net.rng
        for session in list(world.sessions):
            if rng.random() < 0.5:
                world.sessions.remove(session)
                world.turn(rng.choice(world.gateways), session, is_final=True)
        self._run(1.8)
        for session, gateway in world.over.items():
            if gateway.is_dead:
                continue  # it could not say so
            if isinstance(self._find(session), ask.SessionIs):
                raise Violation(f"{session} has ended, and is known")
            if session in gateway.owners.grants or gateway.state.sessions.get(session) is not None:
                raise Violation(f"{session} has ended, and {gateway.number} remembers it")

    def _silence(self) -> None:
        """A worker that all find silent loses its lease; one that answers again has a new one."""
        world, net = self.world, self.world.net
        place = net.rng.choice(list(world.places.values()))
        place.silent_until_s = net.now_s + 3 * PROBE_S + LEASE_S + 0.1
        self._run(place.silent_until_s - net.now_s - 0.01)
        holder = self._holder(place)
        if holder.lease_until_s > net.now_s:
            raise Violation(f"{place.unit} is silent, and its lease runs")
        self._run(PROBE_S + SETTLE_S)
        for one in world.places.values():
            holder = self._holder(one)
            if holder.lease_until_s < net.now_s + LEASE_S - RENEW_S - 0.3:
                raise Violation(f"{one.unit} answers, and its lease is not renewed")

    def _holder(self, place: Place) -> Holder:
        holder = holder_of(self.world.state._records, place.unit)
        if holder is None or holder.incarnation != place.unit.incarnation:
            raise Violation(f"{place.unit} is there, and is not registered: {holder}")
        return holder

    def _rest(self) -> None:
        """Nothing but renewals, and nothing kept for what is over."""
        world, renewals = self.world, 3
        began = len(world.trace)
        self._run(renewals * RENEW_S)
        asked = Counter((number, what, told) for _, number, what, told in world.trace[began:])
        for (number, what, told), times in asked.items():
            is_renewal = (what, told) == ("RenewLease", "leased")
            if not is_renewal or times > (renewals + 1) * len(world.places):
                raise Violation(f"at rest, {number} asks {what} {times} times: {told}")
        for gateway in world.gateways:
            for name, kept in vars(gateway.owners).items():
                bound = {"answers": None, "grants": len(world.tells), "_leases": len(world.places)}
                most = bound.get(name, 0)
                if (
                    isinstance(kept, dict | set | list | Leases)
                    and most is not None
                    and len(kept) > most
                ):
                    raise Violation(f"at rest, {gateway.number} keeps {name}: {kept}")


def play(seed: int) -> World:
    """One schedule; an error names its seed."""
    try:
        world = World(seed)
        Health(world).play()
    except BaseException as error:
        error.add_note(f"owner schedule {seed}")
        raise
    return world
