"""A seeded schedule of two or three workers that lend to and bring from one another.

Messages are lost, doubled, late; workers freeze, die and begin anew; turns grow, are aborted and
revoke lends; reads break, end late, are garbled or write on after they failed. After `HEAL_S` all
is well: then everything ends, nothing is left, and a bring brings.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from ownerserve.cache.tree import prefix_tree
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Nonce
from ownerserve.transfer.control.events import (
    BringUnwanted,
    BringWanted,
    PeerAnswered,
    PeerAsked,
    PeerLink,
    PeerReplaced,
    QuestionLost,
    WantedArtifact,
)
from ownerserve.transfer.control.messages import NO_TURN, PeerAnswer, PeerQuestion
from ownerserve.transfer.vocabulary import FramePiece, Road
from tests.support.directory.fault_net import Net, Violation
from tests.support.transfer_control.memory import (
    BLOCK_BYTES,
    CELL,
    CELL_BYTES,
    LAYERS,
    Names,
    tokens_of,
)
from tests.support.transfer_control.node import SimNode
from tests.support.transfer_control.reading import RDMA, READV, TCP, Wished

HEAL_S, QUIET_S = 8.0, 60.0
ACTIONS = 45
WORDS = 3
SLACK_S = 0.5
"""How long this node's own engine may take on top, over all parts of a bring."""

Parts = tuple[tuple[WantedArtifact, ...], ...]


class World:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.net = Net(rng, HEAL_S)
        self.net.slowest_s = rng.choice((0.003, 0.02, 0.02, 0.3))
        self.names = Names()
        self.counts: Counter[str] = Counter()
        self.parts: dict[tuple[RoutingUnit, int], Parts] = {}
        self._number = 0
        self._questions: dict[int, tuple[SimNode, int]] = {}
        self._breaking, self._garbling = rng.choice((0.0, 0.01, 0.1)), rng.choice((0.0, 0.0, 0.02))
        self._blocks = rng.choice((14, 18, 24))
        self._closed = {READV: rng.random() < 0.3, TCP: False, RDMA: rng.random() < 0.3}
        names = ("a", "b", "c")[: rng.choice((2, 2, 3))]
        self.nodes = {name: SimNode(self, name, 1, blocks=self._blocks) for name in names}
        self._prompts = [
            tokens_of(tuple(rng.randrange(1, 1 + rng.choice((1, 1, WORDS))) for _ in range(blocks)))
            for blocks in [rng.randrange(2, 13) for _ in range(4)]
        ]

    def require(self, holds: object, problem: str) -> None:
        if not holds:
            raise Violation(problem)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    # -- a schedule ----------------------------------------------------------------------------

    def play(self) -> None:
        for _ in range(ACTIONS):
            self.net.at(self.net.rng.uniform(0.0, HEAL_S), self._act)
        self.net.run(HEAL_S, [], lambda: None)
        self._breaking = self._garbling = 0.0
        self.net.run(HEAL_S + QUIET_S, [], lambda: None)
        self._last_bring()
        self.net.run(HEAL_S + 2 * QUIET_S, [], lambda: None)
        for node in self.nodes.values():
            self._check_end(node)

    def _act(self) -> None:
        rng = self.net.rng
        node = self.nodes[rng.choice(sorted(self.nodes))]
        if node.frozen_until_s > self.net.now_s:
            return
        draw = rng.random()
        if draw < 0.24:
            node.lending.begin(rng.choice(self._prompts))
        elif draw < 0.34:
            self._press(node)
        elif draw < 0.7:
            self._bring(node)
        elif draw < 0.78:
            self._end_turn(node)
        elif draw < 0.86 and node.reading.wished:
            node.brings(BringUnwanted(rng.choice(sorted(node.reading.wished))))
        elif draw < 0.92:
            node.cache.pressure.evict_blocks(min(8, node.cache.occupancy.evictable_blocks()))
        elif draw < 0.95:
            node.frozen_until_s = min(HEAL_S, self.net.now_s + rng.uniform(0.2, 7.0))
            for wished in node.reading.wished.values():
                wished.until_s = max(wished.until_s, node.frozen_until_s + SLACK_S)
            self.counts["frozen"] += 1
        elif draw < 0.98:
            self._kill(node)
        else:
            self.net.storm_until_s = self.net.now_s + rng.uniform(0.1, 2.0)

    def _press(self, node: SimNode) -> None:
        """A turn like no other, which needs nearly all there is."""
        first = 100 * self.next_number()
        node.lending.begin(tokens_of(tuple(range(first, first + self._blocks - 3))))

    def _end_turn(self, node: SimNode) -> None:
        if node.lending.turns:
            turn = node.lending.turns[self.net.rng.choice(sorted(node.lending.turns))]
            node.lending.over(turn, node.cache.abort)

    def _kill(self, node: SimNode) -> None:
        node.is_dead = True
        self.counts["killed"] += 1
        life = node.unit.incarnation + 1
        self.nodes[node.name] = SimNode(self, node.name, life, blocks=self._blocks)
        for other in self.nodes.values():
            if self.net.rng.random() < 0.5:
                other.after(
                    self.net.rng.uniform(0.0, 2.0), self._telling(other, PeerReplaced(node.unit))
                )

    def _telling(self, node: SimNode, event: PeerReplaced) -> Callable[[], None]:
        return lambda: node.brings(event)

    def _bring(self, node: SimNode, *, must_bring: bool = False) -> None:
        rng = self.net.rng
        others = [other for name, other in sorted(self.nodes.items()) if name != node.name]
        rng.shuffle(others)
        tokens, turn_id = rng.choice(self._prompts), NO_TURN
        if others[0].lending.turns and rng.random() < 0.7:
            turn_id = rng.choice(sorted(others[0].lending.turns))
            tokens = others[0].lending.turns[turn_id].tokens
        elif others[0].frozen_until_s <= self.net.now_s and rng.random() < 0.5:
            turn_id = others[0].lending.begin(tokens) or NO_TURN
        self.bring(node, others, tokens, turn_id=turn_id, must_bring=must_bring)

    def bring(
        self,
        node: SimNode,
        peers: list[SimNode],
        tokens: bytes,
        *,
        turn_id: TurnId,
        must_bring: bool = False,
    ) -> None:
        rng = self.net.rng
        resident = node.cache.residents.prefix(tokens).blocks
        wanted = [
            WantedArtifact("kv", FramePiece(name, 0, CELL, 0, LAYERS), CELL_BYTES)
            for name in self.names.cells(tokens)[resident // CELL :]
        ]
        if not wanted:
            return
        size = rng.choice((1, 2, len(wanted)))
        parts = tuple(tuple(wanted[at : at + size]) for at in range(0, len(wanted), size))
        roads = [READV, TCP, RDMA]
        rng.shuffle(roads)
        number, compute_s = self.next_number(), rng.choice((0.2, 2.0, 8.0, 8.0))
        if must_bring:
            roads, compute_s = [*roads, TCP], 100.0
        self.parts[node.unit, number] = parts
        until_s = self.net.now_s + 2 * compute_s + len(parts) * SLACK_S
        wish = BringWanted(
            number=number,
            nonce=Nonce(number),
            parts=parts,
            peers=tuple(peer.link for peer in peers),
            ranks=node.reader_ranks,
            roads=tuple(roads),
            compute_ms=compute_s * 1000,
            turn_id=turn_id,
        )
        node.reading.wished[number] = Wished(wish, until_s, must_bring=must_bring)
        node.brings(wish)

    def _last_bring(self) -> None:
        """All is well, and for long: what one node has comes to another."""
        source, target = [self.nodes[name] for name in sorted(self.nodes)][:2]
        tokens = self._prompts[0]
        source.lending.begin(tokens)
        target.cache.pressure.evict_blocks(target.cache.occupancy.evictable_blocks())
        self.net.run(self.net.now_s + 10.0, [], lambda: None)
        self.bring(target, [source], tokens, turn_id=NO_TURN, must_bring=True)

    def _check_end(self, node: SimNode) -> None:
        counts = node.source.counts() | node.target.counts(self.net.now_s)
        self.require(not any(counts.values()), f"left at the end: {counts}")
        self.require(not node.reading.wished, "a bring never ended")
        self.require(not node.reading.rooms and not node.reading.arenas, "slots are left")
        self.require(not len(node.cache.lends), "tickets are left")
        node.cache.check()
        block_is, root = node.block_is, node.parts.tree.root
        for branch in prefix_tree.nodes(root):
            whole = prefix_tree.tokens(branch, 0, branch.end, block_bytes=BLOCK_BYTES)
            for block, slot in enumerate(branch.blocks, branch.start):
                self.require(block_is(slot, whole, block), "the tree has wrong bytes")
        node.cache.pressure.evict_blocks(node.cache.occupancy.evictable_blocks())
        self.require(not node.cache.occupancy.blocks.used, "blocks are left")

    # -- the network ---------------------------------------------------------------------------

    def ask(self, asker: SimNode, question: int, peer: PeerLink, *, message: PeerQuestion) -> None:
        def arrive() -> None:
            node = self.nodes[peer.address]
            number = self.next_number()
            self._questions[number] = (asker, question)
            node.after(0.0, lambda: node.asked(PeerAsked(number, asker.unit, message)))

        self.net.send(arrive)
        if question and self.net.now_s < HEAL_S and self.net.rng.random() < 0.03:
            asker.after(0.01, lambda: asker.brings(QuestionLost(question)))

    def answer(self, number: int, answer: PeerAnswer) -> None:
        asker, question = self._questions.pop(number)
        if question:
            event = PeerAnswered(question, answer)
            self.net.send(lambda: asker.after(0.0, lambda: asker.brings(event)))

    def node_of(self, peer: PeerLink) -> SimNode | None:
        """The life that a link is to; None: it is over."""
        node = self.nodes[peer.address]
        return node if node.unit == peer.unit else None

    def is_road_open(self, _reader: SimNode, _source: SimNode | None, road: Road) -> bool:
        return not self._closed[road]

    def breaks(self) -> bool:
        return self.net.rng.random() < self._breaking

    def garbles(self) -> bool:
        return self.net.rng.random() < self._garbling


def play(seed: int) -> World:
    """One schedule; an error names its seed."""
    world = World(seed)
    try:
        world.play()
    except BaseException as error:
        error.add_note(f"transfer schedule {seed}, at {world.net.now_s:.3f} s")
        raise
    return world
