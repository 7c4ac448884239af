"""A simulated worker as one that lends: turns that compute into blocks of the real cache, step by
step and layer by layer, and what `TransferSource` asks of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.transfer.control.events import (
    AnswerPeer,
    CheckTicket,
    DigestsMade,
    EndLend,
    LendNotOpened,
    LendOpened,
    MakeDigests,
    OpenLend,
    PeerAsked,
    SourceEffect,
    TicketOver,
    TicketRead,
    TicketStands,
    TurnGrew,
    TurnOver,
)
from ownerserve.transfer.control.messages import (
    NO_TURN,
    Grown,
    Lend,
    LendRefusal,
    Lent,
    LentRank,
    More,
    PeerAnswer,
    ReaderRank,
)
from ownerserve.transfer.control.pieces import SizedPiece
from ownerserve.transfer.vocabulary import FramePiece
from tests.support.transfer_control.memory import (
    BLOCK_BYTES,
    CELL,
    CELL_BYTES,
    GARBAGE,
    HEADS,
    LAYERS,
    B,
    Value,
    digest_of,
    places,
)

if TYPE_CHECKING:
    from tests.support.transfer_control.node import SimNode

STEP_BLOCKS = 3


def heads_of(rank: int, ranks: int) -> range:
    """The heads that one of so many ranks keeps."""
    return range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)


class SimTurn:
    """A turn: blocks [0, done) are computed, and `layers` layers of blocks [done, going)."""

    def __init__(self, turn_id: TurnId, tokens: bytes, cells: list[bytes], done: int) -> None:
        self.turn_id = turn_id
        self.tokens = tokens
        self.cells = cells
        self.done = self.going = done
        self.layers = 0
        self.is_over = False

    @property
    def blocks(self) -> int:
        return len(self.tokens) // BLOCK_BYTES


class AskedOf(NamedTuple):
    """A question, and when it came."""

    event: PeerAsked
    at_s: float


class Lending:
    """What a node computes and lends."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.turns: dict[TurnId, SimTurn] = {}
        self.standing: dict[int, TurnId] = {}
        """Tickets that the runtime knows of, and the turn that each follows."""
        self.addresses: dict[tuple[int, bytes, int], int] = {}
        """Where a ticket's units were: a reader by address goes there, whatever is there now."""
        self.asked: dict[int, AskedOf] = {}
        self.readers: dict[int, RoutingUnit] = {}
        self.ranks: dict[int, tuple[LentRank, ...]] = {}
        self.stood_s: dict[int, float] = {}
        """By question, and by ticket: who asked, and what was lent; when the ticket was last asked
        for and stood."""
        self.begun: set[tuple[RoutingUnit, int]] = set()
        self.called_off: set[tuple[RoutingUnit, int]] = set()
        """Wishes for which a lend was begun, and which were called off."""
        self.is_layerwise = node.world.net.rng.random() < 0.5
        self.is_slow = node.world.net.rng.random() < 0.3
        self.tells_revoked = node.world.net.rng.random() < 0.5

    # -- turns ---------------------------------------------------------------------------------

    def begin(self, tokens: bytes) -> TurnId | None:
        node, world = self.node, self.node.world
        turn_id = TurnId(f"turn {world.next_number()}")
        begun = node.cache.begin(Turn(turn_id, None, tokens), world.net.now_s)
        if not isinstance(begun, Begun):
            return None
        done = begun.restored // B
        turn = SimTurn(turn_id, tokens, world.names.cells(tokens), done)
        self.turns[turn_id] = turn
        row = node.cache.table(turn_id).range["kv"]
        for block in range(done):
            world.require(node.block_is(row[block], tokens, block), "a turn builds on wrong bytes")
        self._later(turn, self._step)
        return turn_id

    def _later(self, turn: SimTurn, action: Callable[[SimTurn], None]) -> None:
        def act() -> None:
            if not turn.is_over:
                action(turn)

        self.node.after(self.node.world.net.rng.uniform(0.0, 0.15), act)

    def _step(self, turn: SimTurn) -> None:
        node, net = self.node, self.node.world.net
        if turn.done == turn.blocks:
            self.over(turn, node.cache.finish)
            return
        step = 1 + net.rng.randrange(max(STEP_BLOCKS, turn.blocks // 3))
        turn.going = min(turn.blocks, turn.done + step)
        taken = node.cache.reserve(turn.turn_id, turn.going * B, net.now_s)
        self._tell_revoked()
        if isinstance(taken, NoRoom):
            turn.going = turn.done
            self.over(turn, node.cache.abort)
            return
        self._layer(turn)

    def _layer(self, turn: SimTurn) -> None:
        """One layer of the step is computed; with the last, its blocks are sealed."""
        node, world = self.node, self.node.world
        row = node.cache.table(turn.turn_id).range["kv"]
        for block in range(turn.done, turn.going):
            for head in range(HEADS):
                value = world.names.value(turn.tokens, block, layer=turn.layers, head=head)
                node.memory[row[block], turn.layers, head] = value
        turn.layers += 1
        if turn.layers < LAYERS:
            if self.is_layerwise:
                self._grew(turn, turn.layers - 1)
            self._later(turn, self._layer)
            return
        new = turn.tokens[turn.done * BLOCK_BYTES : turn.going * BLOCK_BYTES]
        node.cache.advance(turn.turn_id, new, world.net.now_s)
        self._grew(turn, LAYERS - 1 if self.is_layerwise else 0)
        turn.done, turn.layers = turn.going, 0
        self._later(turn, self._step)

    def _grew(self, turn: SimTurn, first_layer: int) -> None:
        pieces = self._pieces(turn, range(turn.done, turn.going), range(first_layer, turn.layers))
        for ticket, follows in self.standing.items():
            if follows == turn.turn_id:
                self._note(ticket, turn, range(turn.done, turn.going))
        self.node.lends(TurnGrew(turn.turn_id, pieces))

    def _pieces(self, turn: SimTurn, blocks: range, layers: range) -> tuple[SizedPiece, ...]:
        pieces = []
        for number, artifact in enumerate(turn.cells):
            first = max(blocks.start, number * CELL) - number * CELL
            end = min(blocks.stop, (number + 1) * CELL) - number * CELL
            if first < end and layers:
                piece = FramePiece(artifact, first, end, layers.start, layers.stop)
                size = CELL_BYTES * (end - first) * len(layers) // (CELL * LAYERS)
                pieces.append(SizedPiece(piece, size))
        return tuple(pieces)

    def _note(self, ticket: int, turn: SimTurn, blocks: range) -> None:
        """Where the blocks are that the ticket covers from now on."""
        row = self.node.cache.table(turn.turn_id).range["kv"]
        for block in blocks:
            number, unit = divmod(block, CELL)
            if number < len(turn.cells):
                self.addresses.setdefault((ticket, turn.cells[number], unit), row[block])

    def over(self, turn: SimTurn, how: Callable[[TurnId, float], object]) -> None:
        turn.is_over = True
        del self.turns[turn.turn_id]
        how(turn.turn_id, self.node.world.net.now_s)
        for ticket, follows in self.standing.items():
            if follows == turn.turn_id:
                self.standing[ticket] = NO_TURN
        self.node.lends(TurnOver(turn.turn_id))

    def _tell_revoked(self) -> None:
        """Some engines say at once which tickets a turn has revoked."""
        if self.tells_revoked:
            stand = {ticket.number for ticket in self.node.parts.lends}
            for ticket in [one for one in self.standing if one not in stand]:
                self._over(ticket)

    # -- what the source asks ------------------------------------------------------------------

    def perform(self, effect: SourceEffect) -> None:
        node, rng = self.node, self.node.world.net.rng
        delay_s = rng.choice((0.0, 0.0, 0.002, 0.05))
        match effect:
            case OpenLend(_, reader, lend):
                wish = (reader, lend.nonce)
                node.world.require(wish not in self.begun, "two lends for one nonce")
                node.world.require(wish not in self.called_off, "lent what was called off")
                self.begun.add(wish)
                node.after(delay_s, lambda: self._open(effect))
            case EndLend(ticket):
                self.standing.pop(ticket, None)
                node.cache.lends.end(ticket)
            case CheckTicket(ticket, check):
                node.after(delay_s, lambda: self._check(ticket, check))
            case MakeDigests():
                node.after(delay_s, lambda: self._digest(effect, []))
            case AnswerPeer(question, answer):
                self._look_at(question, answer)
                node.world.answer(question, answer)

    def _open(self, effect: OpenLend) -> None:
        node, lend, now = self.node, effect.lend, self.node.world.net.now_s
        ranks = self._pairs(lend.ranks)
        turn = self.turns.get(lend.turn_id)
        if turn is not None:
            ticket = node.cache.lends.lend((), now, idle_s=effect.idle_s)
            node.cache.lends.follow(ticket, turn.turn_id)
            done = range(turn.done)
            pieces = self._pieces(turn, done, range(LAYERS))
            if self.is_layerwise and turn.layers:
                going = range(turn.done, turn.going)
                pieces += self._pieces(turn, going, range(turn.layers))
                done = range(turn.going)
            self.standing[ticket] = turn.turn_id
            self.readers[ticket], self.ranks[ticket] = effect.reader, ranks
            self._note(ticket, turn, done)
            node.lends(LendOpened(effect.number, ticket, ranks, pieces, turn.turn_id))
            return
        last = max(
            (node.world.names.cell(one.artifact) for one in lend.wanted), key=lambda c: c.first
        )
        resident = node.cache.residents.prefix(last.tokens)
        first = min(node.world.names.cell(one.artifact).first for one in lend.wanted)
        if resident.blocks <= first:
            node.lends(LendNotOpened(effect.number, LendRefusal.NOT_HELD))
            return
        slots = resident.range_slots(0, resident.blocks)
        ticket = node.cache.lends.lend((last.tokens,), now, idle_s=effect.idle_s)
        self.standing[ticket] = NO_TURN
        self.readers[ticket], self.ranks[ticket] = effect.reader, ranks
        whole = SimTurn(NO_TURN, last.tokens, node.world.names.cells(last.tokens), 0)
        for block, slot in enumerate(slots):
            number, unit = divmod(block, CELL)
            self.addresses[ticket, whole.cells[number], unit] = slot
        pieces = self._pieces(whole, range(resident.blocks), range(LAYERS))
        node.lends(LendOpened(effect.number, ticket, ranks, pieces))

    def _pairs(self, readers: tuple[ReaderRank, ...]) -> tuple[LentRank, ...]:
        pairs = []
        for source in range(self.node.ranks):
            mine = heads_of(source, self.node.ranks)
            for reader in readers:
                first = max(mine.start, reader.first_head)
                end = min(mine.stop, reader.end_head)
                if first < end:
                    name = self.node.name
                    pairs.append(LentRank(reader.rank, name, first, end))
        return tuple(pairs)

    def _check(self, ticket: int, check: int) -> None:
        """Ask the cache; what it says is heard a little later."""
        node, now_s = self.node, self.node.world.net.now_s
        delay_s = self._delay_s()
        if node.cache.lends.read(ticket, now_s):
            node.after(delay_s, lambda: self._stood(ticket, check, now_s))
        else:
            node.after(delay_s, lambda: self._over(ticket))

    def _delay_s(self) -> float:
        """How long an engine takes over a piece's digest, and to say that a ticket stood."""
        delays_s = (0.0, 0.05, 0.8) if self.is_slow else (0.0, 0.0, 0.0, 0.02)
        return self.node.world.net.rng.choice(delays_s)

    def _stood(self, ticket: int, check: int, at_s: float) -> None:
        self.stood_s[ticket] = max(at_s, self.stood_s.get(ticket, 0.0))
        self.node.lends(TicketStands(ticket, check))

    def _look_at(self, question: int, answer: PeerAnswer) -> None:
        """What a source says must be so, whatever its reader makes of it."""
        require, asked = self.node.world.require, self.asked.pop(question)
        message, reader = asked.event.message, asked.event.reader
        if isinstance(answer, Lent) and isinstance(message, Lend):
            require((reader, message.nonce) not in self.called_off, "lent what was called off")
        if not isinstance(answer, Grown) or not isinstance(message, More):
            return
        require(self.readers[message.ticket] == reader, "another's ticket")
        require(message.lender == self.node.unit, "another life's ticket")
        stood_s = self.stood_s.get(message.ticket, -1.0)
        require(stood_s >= asked.at_s, "answered for a ticket that was not asked for since")
        for piece, digests in ((one.piece, one.digests) for one in answer.pieces):
            found = tuple(
                digest_of(self._right(piece, range(rank.first_head, rank.end_head)))
                for rank in self.ranks[message.ticket]
            )
            require(found == digests, "published a digest of wrong bytes")

    def _right(self, piece: FramePiece, heads: range) -> list[Value]:
        names = self.node.world.names
        cell = names.cell(piece.artifact)
        return [
            names.value(cell.tokens, cell.first + unit, layer=layer, head=head)
            for unit, layer in places(piece)
            for head in heads
        ]

    def _over(self, ticket: int) -> None:
        self.standing.pop(ticket, None)
        self.node.lends(TicketOver(ticket))

    def _digest(self, effect: MakeDigests, made: list[tuple[bytes, ...]]) -> None:
        """One piece after another, while turns go on: what a block holds when it comes to it."""
        node = self.node
        piece = effect.pieces[len(made)]
        ranks = self.ranks[effect.ticket]
        digests = (
            self.values(effect.ticket, piece, range(r.first_head, r.end_head)) for r in ranks
        )
        made.append(tuple(digest_of(values) for values in digests))
        if len(made) < len(effect.pieces):
            delay_s = self._delay_s()
            node.after(delay_s, lambda: self._digest(effect, made))
        else:
            node.lends(DigestsMade(effect.ticket, effect.batch, tuple(made)))

    # -- what movers ask -----------------------------------------------------------------------

    def values(self, ticket: int, piece: FramePiece, heads: range) -> list[Value]:
        """What is at the addresses of a piece now."""
        return [
            self.value(ticket, piece.artifact, unit, layer=layer, head=head)
            for unit, layer in places(piece)
            for head in heads
        ]

    def value(self, ticket: int, artifact: bytes, unit: int, *, layer: int, head: int) -> Value:
        slot = self.addresses[ticket, artifact, unit]
        return self.node.memory.get((slot, layer, head), GARBAGE)

    def stands(self, ticket: int) -> bool:
        """What a mover's server asks after each read."""
        stands = self.node.cache.lends.read(ticket, self.node.world.net.now_s)
        if stands:
            self.node.after(0.0, lambda: self.node.lends(TicketRead(ticket)))
        return stands
