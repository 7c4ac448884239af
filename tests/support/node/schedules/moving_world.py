"""A seeded schedule of three workers that own sessions, a directory and two gateways that order
sessions to move, and turns amid their answers, at the same time too.

Frames are lost, doubled, late; workers freeze, are cut off the directory, die, leave and begin
anew; so do gateways; the directory loses its memory, and perhaps its term; clocks go apart; turns
race, clients hang up. After `HEAL_S` all is well. What must hold:

    always      one may write; versions never go back, and each turn that an owner has finished is
                in what it says; who gives a session up owns it, under the epoch and version that it
                is asked for, and no turn of it is there; one goes on with a turn; each token of an
                answer comes once, and is a cold engine's; who has a turn has it when its leg comes
    at rest     whom a record names owns it; nothing is left of what has ended, at either side
    after that  each session is served; a drained worker is left by all sessions, in time
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import msgspec

from ownerserve.directory.messages import FindSession, SessionIs
from ownerserve.gateway.workers import rpc
from ownerserve.kv.ids import SessionId, TurnId, WorkerId
from ownerserve.kv.messages import Epoch
from ownerserve.node.transfers import moves, turn_moves
from ownerserve.router.worker import Receipt
from tests.support.node.lending_nodes import B
from tests.support.node.retired import RetiredMemory
from tests.support.node.schedules.clock import VirtualLoop
from tests.support.node.schedules.gateway import Call, Gateway
from tests.support.node.schedules.moving_node import MovingNode
from tests.support.node.schedules.moving_turns import UNCLAIMED_S
from tests.support.node.schedules.network import SimLine
from tests.support.node.schedules.node import SimNode, prompt_of
from tests.support.node.schedules.owning import LEASE_S, SLOW_S, SimDirectory, of_owning
from tests.support.node.schedules.schedule import ANSWER, Schedule, play_one
from tests.support.node.toy import cold
from tests.support.removals import Instead

HEAL_S = 12.0
ACTIONS = 60
ANSWERED_S = 20.0
"""So long after all is well turns that wait are answered, and moves that are under way are over."""
OWNED_S = 2 * LEASE_S + 2.0
LEFT_S = 12.0
"""So long it takes until a drained worker has no session."""
AGAIN_S = 1.0
LONG = 14
"""Tokens of an answer in which its turn may move."""
NAMES = ("a", "b", "c")

OneGrant: TypeAlias = tuple[str, SessionId, Epoch]
"""Whose grant it is, of what, and under which epoch."""


class Sent(msgspec.Struct, eq=False):
    """A turn at a worker, or what is left of one, and who waits for it."""

    call: Call
    gateway: Gateway
    receipt: Receipt


class Wanted(msgspec.Struct, eq=False):
    """What a client asks for, until it has the answer, which is to be a cold engine's."""

    prompt: list[int]
    answer: list[int]


class MovingWorld(Schedule):
    """One schedule."""

    def __init__(self, seed: int, loop: VirtualLoop, retired: RetiredMemory) -> None:
        super().__init__(seed, loop, retired)
        self.brings_ahead = seed % 2 == 0
        """Whether what a turn has sealed is brought before it is stopped: by turns."""
        draw = self.draw
        self._touched: list[MovingNode] = []
        """Nodes that may own since the last look."""
        count = draw.choice((2, 3, 4))
        self.sessions = [SessionId(f"{number:032x}") for number in range(count)]
        self.directory = SimDirectory(self)
        self._versions: dict[SessionId, tuple[int, int]] = {}
        self._grants: dict[OneGrant, int] = {}
        self._finished: dict[OneGrant, int] = {}
        """The version that a grant has, by the turns which its owner has finished."""
        self._said: dict[SessionId, list[int]] = {name: [] for name in self.sessions}
        self._wanted: dict[SessionId, Wanted] = {}
        self._crowds: set[TurnId] = set()
        self._sent: dict[TurnId, Sent] = {}
        self._turns = self._lives = 0
        self._nodes = {name: self._born(name) for name in NAMES}
        self.gateways = [Gateway(self, number) for number in range(2)]

    @property
    def lives(self) -> Iterable[SimNode]:
        return self._nodes.values()

    @classmethod
    def instead(cls, loop: VirtualLoop, world: Callable[[], Any]) -> Iterable[Instead]:
        return (
            *of_owning(loop, world),
            Instead(moves, "time", loop),
            Instead(turn_moves, "time", loop),
            Instead(turn_moves, "UNCLAIMED_S", UNCLAIMED_S),
            Instead(rpc, "AsyncFramedClient", SimLine),
        )

    def _born(self, name: str) -> MovingNode:
        self._lives += 1
        return MovingNode(self, name, self._lives)

    # -- a schedule ----------------------------------------------------------------------------

    def play(self) -> None:
        for _ in range(ACTIONS):
            self.loop.call_at(self.draw.uniform(0.5, HEAL_S), self._act)
        for name in self.sessions:
            self.loop.call_at(self.draw.uniform(0.5, 2.0), partial(self._ask, name))
        self.loop.run_for(HEAL_S)
        self.is_well = True
        self.loop.run_for(1.0)  # who leaves has left
        for gateway in self.gateways:
            gateway.drained.clear()
        self._until(self._is_at_rest, ANSWERED_S)
        self.require(not self._wanted, f"turns without an answer: {self._wanted.keys()}")
        self._until(lambda: not self._astray(), OWNED_S)
        self.require(not self._astray(), f"nobody owns {self._astray()}")
        self._look_at_rest()
        for _ in range(2):  # the second turn's answer tells whose the session is
            self._last_turns()
            self.loop.run_for(2.0)
        self._leave_one()
        self.loop.run_for(2.0)
        self._look_at_rest()
        self._last_turns()
        for gateway in self.gateways:
            gateway.state.check()
            self.counts.update({f"move {end}": n for end, n in gateway.moves.counts.items()})
            rests = gateway.moves.rests.counts
            self.counts.update({f"rest {end}": n for end, n in rests.items()})
        self.check_end()
        for node in self._nodes.values():
            self.counts.update({f"take {end}": n for end, n in node.takes.counts.items()})

    def _until(self, holds: Callable[[], bool], within_s: float) -> None:
        until_s = self.loop.time() + within_s
        while not holds() and self.loop.time() < until_s:
            self.loop.run_for(0.5)

    def _is_at_rest(self) -> bool:
        moving = any(gateway.ordered for gateway in self.gateways)
        left = any(any(node.books().values()) for node in self._nodes.values())
        return not self._wanted and not moving and not left

    def _act(self) -> None:
        draw = self.draw
        node = self._nodes[draw.choice(NAMES)]
        gateway = draw.choice(self.gateways)
        action = draw.random()
        if action < 0.30:
            self._ask(draw.choice(self.sessions))
        elif action < 0.64:
            self._order()
        elif action < 0.70:
            self._drain(node)
        elif action < 0.73:
            gateway.hang_up()
        elif action < 0.76:
            gateway.call_off()
        elif action < 0.82:
            self._freeze(node)
        elif action < 0.86:
            self._cut_off(node)
        elif action < 0.89:
            self._kill(node)
        elif action < 0.905:
            node.ownership.close(within_s=1.0)
            self.loop.call_later(1.0, self._replace, node)
            self.counts["left"] += 1
        elif action < 0.93:
            gateway.kill()
            self.gateways[self.gateways.index(gateway)] = Gateway(self, gateway.number)
            self.counts["gateways killed"] += 1
        elif action < 0.945:
            self.directory.dies(draw.uniform(0.1, LEASE_S))
            self.counts["directories"] += 1
        elif not node.is_frozen:
            node.soon(lambda: self._press(node))

    def _freeze(self, node: MovingNode) -> None:
        if not node.is_frozen:
            until_s = self.loop.time() + self.draw.uniform(0.2, 2 * LEASE_S)
            node.frozen_until_s = min(HEAL_S, until_s)
            self.loop.call_at(node.frozen_until_s, self.touch, node)
            self.counts["frozen"] += 1

    def _cut_off(self, node: MovingNode) -> None:
        """Nothing of a node gets to the directory for a while; before that, perhaps, its answers
        come late."""
        begins_s = self.loop.time() + self.draw.choice((0.0, 2 * SLOW_S))
        node.apart_from_s = begins_s
        node.apart_until_s = min(HEAL_S, begins_s + self.draw.uniform(0.2, 2 * LEASE_S))
        self.counts["apart"] += 1

    def _order(self) -> None:
        """One gateway or both order a session to move, perhaps to different workers."""
        draw, session = self.draw, self.draw.choice(self.sessions)
        target = ""
        for gateway in self.gateways if draw.random() < 0.5 else self.gateways[:1]:
            target = draw.choice(NAMES)
            gateway.order(session, WorkerId(target))
        if draw.random() < 0.5:  # and a turn comes amid it
            self.loop.call_later(draw.random(), self._ask, session)
        if draw.random() < 0.2:
            self.loop.call_later(draw.uniform(0.0, 0.3), self._crowd, target)

    def _crowd(self, name: str) -> None:
        """A turn that needs nearly all the room of a worker comes to it, past the gateways."""
        node, turn_id = self._nodes[name], self.new_turn()
        prompt = prompt_of(self.text((self.slots - 3) * B))

        def come() -> None:
            if node.run(turn_id, prompt, answer=ANSWER) is None:
                self._crowds.add(turn_id)
                self.counts["crowds"] += 1

        node.soon(come)

    def _drain(self, node: MovingNode) -> None:
        worker = WorkerId(node.name)
        gateways = self.gateways if self.draw.random() < 0.7 else self.gateways[:1]
        for gateway in gateways:
            gateway.drain(worker)
            self.loop.call_later(self.draw.uniform(0.5, 4.0), gateway.undrain, worker)
        self.counts["drained"] += 1

    def _press(self, node: MovingNode) -> None:
        """Blocks that nobody holds are gone."""
        node.cache.pressure.evict_blocks(min(8, node.cache.occupancy.evictable_blocks()))

    def _kill(self, node: MovingNode) -> None:
        self.counts["killed"] += 1
        self._replace(node)

    def _replace(self, node: MovingNode) -> None:
        if self._nodes[node.name] is node:
            node.kill()
            for turn_id in [one for one in self._sent if one in node.turns]:
                del self._sent[turn_id]
            self._nodes[node.name] = self._born(node.name)

    # -- turns ---------------------------------------------------------------------------------

    def _ask(self, session: SessionId) -> None:
        """A client begins a turn, and asks again until it is answered."""
        if session in self._wanted:
            return
        before = self._said[session]
        new = self.text(self.draw.randint(B // 2, 3 * B))
        tokens = self.draw.choice((ANSWER, ANSWER, LONG))
        if len(before) + len(new) + tokens > self.longest:
            before = before[: self.draw.choice((0, B, 2 * B + 3))]
        prompt = [*before, *new]
        self._wanted[session] = Wanted(prompt, cold(prompt, tokens))
        self._try(session, self._wanted[session])

    def _try(self, session: SessionId, wanted: Wanted) -> None:
        if self._wanted.get(session) is wanted:
            self.draw.choice(self.gateways).turn(session, wanted.prompt)
            self.loop.call_later(AGAIN_S * (1 + 4 * self.draw.random()), self._try, session, wanted)

    def is_wanted(self, session: SessionId, prompt: list[int]) -> bool:
        wanted = self._wanted.get(session)
        return wanted is not None and wanted.prompt is prompt

    def answer_to(self, session: SessionId) -> list[int]:
        """What a cold engine would answer to the turn that its client waits for."""
        return self._wanted[session].answer

    def new_turn(self) -> TurnId:
        self._turns += 1
        return TurnId(f"turn {self._turns}")

    def sent(self, turn_id: TurnId, call: Call, gateway: Gateway, receipt: Receipt) -> None:
        """A worker has taken the turn in, or goes on with it."""
        self._sent[turn_id] = Sent(call, gateway, receipt)

    def spoke(self, turn_id: TurnId, at: int, token: int) -> None:
        """A worker says a token of an answer, and more is to come."""
        sent = self._sent.get(turn_id)
        if sent is not None:
            self.require(sent.call.answer[at] == token, f"{turn_id} has a wrong answer")
            assert isinstance(self.acting, MovingNode)
            owner = self.acting.ownership.owner_of(sent.call.session)
            sent.gateway.soon(0.001, lambda: sent.gateway.heard(sent.receipt, at, token, owner))

    def moved_on(self, turn_id: TurnId, tokens: int) -> None:
        """A worker says that the rest of an answer is another's."""
        sent = self._sent.pop(turn_id, None)
        self.counts["turns moved"] += 1
        if sent is not None:
            sent.gateway.soon(0.002, lambda: sent.gateway.moved_on(sent.receipt, tokens))

    def answered(self, turn_id: TurnId, said: list[int], *, is_brought: bool) -> None:
        self._crowds.discard(turn_id)
        sent = self._sent.pop(turn_id, None)
        if sent is None:
            return
        answer, session = sent.call.answer, sent.call.session
        self.require(said == answer[-len(said) :], f"{turn_id} has a wrong answer")
        assert isinstance(self.acting, MovingNode)
        owner = self.acting.ownership.owner_of(session)
        is_own = owner is not None and owner.version is not None
        if owner is not None and owner.version is not None:
            self.says(self.acting, session, owner.epoch, owner.version)
        self.counts["answered by its owner" if is_own else "answered by a guest"] += 1
        if sent.call.begins:
            self.counts["answered where it went on"] += 1
        sent.gateway.soon(0.002, lambda: sent.gateway.answered(sent.receipt, said[-1], owner))

    def done(self, session: SessionId, prompt: list[int], said: list[int]) -> None:
        """A client has its answer."""
        if self.is_wanted(session, prompt):
            answer = self._wanted.pop(session).answer
            self.require(said == answer, f"{session}: {said} is said, and not {answer}")
            self._said[session] = [*prompt, *said]

    def failed(self, turn_id: TurnId) -> None:
        is_here = turn_id in self._sent or turn_id in self._crowds
        self.require(not is_here, f"{turn_id} found no room, alone")

    # -- what must hold ------------------------------------------------------------------------

    def wrote(self, told: TurnId) -> None:
        """A token of a turn is written: one goes on with it."""
        writers = [node.name for node in self._nodes.values() if node.writes(told)]
        self.require(len(writers) == 1, f"{writers} go on with {told}")

    def touch(self, node: MovingNode) -> None:
        """It may own since now: it is looked at as soon as it has taken in what it was told."""
        self._touched.append(node)
        self.loop.call_soon(self._look)

    def _look(self) -> None:
        """One may write."""
        while self._touched:
            node = self._touched.pop()
            for session in self.sessions:
                if self._may_write(node, session):
                    others = [one for one in self._nodes.values() if one is not node]
                    both = [one.name for one in others if self._may_write(one, session)]
                    self.require(not both, f"{session} is {node.name}'s and {both}'s")

    def _may_write(self, node: MovingNode, session: SessionId) -> bool:
        grant = None
        if not node.is_dead and not node.is_frozen:
            grant = node.ownership.owner.may_serve(session, node.boot_time_s())
        if grant is None:
            return False
        one = (str(node.unit), session, grant.epoch)
        before = self._grants.get(one, grant.version)
        self.require(grant.version >= before, f"{node.name} goes back to {grant} from {before}")
        self._grants[one] = grant.version
        return True

    def finishes(self, node: MovingNode, session: SessionId) -> None:
        """A turn that leaves a block ends at a node: where that owns the session, it counts from
        now on."""
        grant = node.ownership.owner.may_serve(session, node.boot_time_s())
        if grant is not None:
            one = (str(node.unit), session, grant.epoch)
            self._finished[one] = max(self._finished.get(one, 0), grant.version) + 1

    def says(self, node: MovingNode, session: SessionId, epoch: Epoch, version: int) -> None:
        """An owner says its version: all that it has finished counts, and what it has said."""
        one = (str(node.unit), session, epoch)
        before = self._finished.get(one, 0)
        self.require(version >= before, f"{node.name} says {session}:{version}, after {before}")
        self._finished[one] = version

    def look_at_records(self) -> None:
        """Versions never go back, while the directory remembers."""
        for session, found in self._records().items():
            memory = self.directory.memory
            before = self._versions.get(session, (memory, found.version))
            is_back = before[0] == memory and found.version < before[1]
            self.require(not is_back, f"{session} goes back to {found.version} from {before[1]}")
            self._versions[session] = (memory, found.version)

    def _records(self) -> dict[SessionId, SessionIs]:
        if self.directory.is_away:
            return {}
        found = self.directory.execute([FindSession(name) for name in self.sessions])
        named = zip(self.sessions, found, strict=True)
        return {name: one for name, one in named if isinstance(one, SessionIs)}

    def _astray(self) -> list[SessionId]:
        """Sessions whose record names one who lives, and who does not own them."""
        units = {node.unit: node for node in self._nodes.values()}
        return [
            name
            for name, record in self._records().items()
            if record.owner in units and not self._may_write(units[record.owner], name)
        ]

    def _look_at_rest(self) -> None:
        self._touched += self._nodes.values()
        self._look()
        for gateway in self.gateways:
            self.require(not gateway.ordered, "an ordered move does not end")
        for node in self._nodes.values():
            books = node.books()
            self.require(not any(books.values()), f"{node.name} still has {books}")
            for session in node.gave_up:
                known = node.cache.sessions.get(session)
                is_kept = known is not None and known.is_referenced
                self.require(not is_kept, f"{node.name} keeps {session}, which it gave up")

    def _last_turns(self) -> None:
        """Each session is served, and owned by one."""
        for name in self.sessions:
            self._ask(name)
        self._until(lambda: not self._wanted, ANSWERED_S)
        self.require(not self._wanted, f"turns without an answer: {self._wanted.keys()}")
        self._until(self._are_owned, OWNED_S)
        self.require(self._are_owned(), f"nobody owns one of {self._records()}")
        self._until(self._is_at_rest, ANSWERED_S)

    def _are_owned(self) -> bool:
        return len(self._records()) == len(self.sessions) and not any(
            sum(self._may_write(node, name) for node in self._nodes.values()) != 1
            for name in self.sessions
        )

    def _leave_one(self) -> None:
        """A worker is drained, and all its sessions leave it, without a turn."""
        node = self._nodes[self.draw.choice(NAMES)]
        worker = WorkerId(node.name)
        for gateway in self.gateways:
            gateway.drain(worker)
        owned = partial(self._owned_by, node)
        self.counts["sessions to leave"] += len(owned())
        self._until(lambda: not owned(), LEFT_S)
        self.require(not owned(), f"{node.name} is drained, and has {owned()}")

    def _owned_by(self, node: MovingNode) -> list[SessionId]:
        """What the node owns, of sessions that a gateway takes for its own."""
        known = {name for gateway in self.gateways for name in gateway.sessions_at(node.unit)}
        return [
            name
            for name, one in self._records().items()
            if one.owner == node.unit and name in known
        ]


def play(seed: int) -> Counter[str]:
    """One schedule; an error names its seed. Returns what was in it."""
    return play_one(MovingWorld, seed).counts
