"""A node with a cache, an engine made of dictionaries, and a store that answers when told to.

Every slot holds what it should: a name made of the component and the tokens before and in it. So
a wrong slot, block or record shows as a wrong name, whoever made the mistake.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable

import msgspec

from ownerserve.cache.effects import LoadPoint, MoveBorder, SavePoint
from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, NoRoom, Replay, Turn
from ownerserve.cache.pressure import Checkpoint, Watermarks
from ownerserve.cache.tree import prefix_tree
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import TOKEN_BYTES, Identity, Numerics, hash_prefix
from ownerserve.kv.specs import Coverage
from ownerserve.node.state import NodeState
from ownerserve.node.vocabulary.chains import prefix_of
from ownerserve.node.vocabulary.events import (
    DropOperation,
    Effect,
    Event,
    Fetch,
    Fetched,
    Fill,
    Filled,
    FindRecords,
    Forget,
    Kept,
    Locate,
    Located,
    MoveSlots,
    NotFetched,
    NotKept,
    RecordsFound,
    Remember,
    RestoreReport,
    Start,
    StoreCopy,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.node.vocabulary.records import Inside, RecordNames, Tip
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.plan.inputs import FULL_ABILITIES, ModelState
from ownerserve.plan.restore import Planner
from ownerserve.plan.swa.checkpoints import CheckpointPolicy
from ownerserve.store.format.model import Meta, MissReason, Want

B = 16
REPLAY_TOKENS = 24
LAYOUT = Layout(
    B,
    (
        Component("main", Coverage.RANGE, 32, 32),
        Component("index", Coverage.RANGE, 32, 32),
        Component("swa", Coverage.POINT, 32, 32),
        Component("overlap", Coverage.POINT, 32, 32),
    ),
    state_bytes=64,
)
MODEL = ModelState(
    layers=4,
    block_tokens=B,
    range_bytes_per_token=4.0,
    point_bytes=64,
    exact_replay_tokens=REPLAY_TOKENS,
    bounded_replay_tokens=8,
)
IDENTITY = Identity(
    model_id="toy",
    weights="w",
    tokenizer="t",
    spec_digest=bytes(32),
    numerics=Numerics("float32"),
    tenant_salt=bytes(32),
)
PRICES = Defaults(
    "test",
    Coefficients(1.0, 1.0, 0.0),
    {Tier.HOST: Medium(0.1, 1e6), Tier.DISK: Medium(1.0, 1e6), Tier.PEER: Medium(0.1, 1e6)},
)


def truth(component: str, tokens: bytes) -> bytes:
    """What a slot holds: a block that ends `tokens`, or the point state behind them."""
    return hashlib.sha256(component.encode() + tokens).digest()


class NodeDriver:
    """See the module. Errands wait in `pending` until the test answers them."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        points: int = 16,
        least_points: int | None = None,
        settings: NodeSettings | None = None,
        ms_per_token: float = 1.0,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        slots = {
            c.name: blocks if c.coverage is Coverage.RANGE else points for c in LAYOUT.components
        }
        self.cache = HeteroCache(LAYOUT, slots, 4, least_points=least_points)
        self.settings = settings or NodeSettings(record_blocks=4, spill_after_s=1.0)
        names = RecordNames(IDENTITY, LAYOUT, engine="toy/1", blocks=self.settings.record_blocks)
        self.names = names
        self.state = NodeState(
            self.cache,
            names,
            planner=Planner(MODEL, FULL_ABILITIES),
            costs=CostModel(
                msgspec.structs.replace(PRICES, prefill=Coefficients(ms_per_token, ms_per_token, 0))
            ),
            settings=self.settings,
            policy=policy,
        )
        self.now = 0.0
        self.slots: dict[tuple[str, int], bytes] = {}
        self.stored: dict[bytes, bytes] = {}
        self.metas: dict[bytes, Meta] = {}
        self.checkpointed: list[TurnId] = []
        self.pending: deque[FindRecords | Fetch | StoreCopy] = deque()
        self.is_slow = False
        """Whether bytes come into slots when the test lets them, and not at once."""
        self.writes: deque[Fill] = deque()
        self.copied: dict[int, bytes] = {}
        self.fetched: dict[int, tuple[list[bytes], tuple[Want, ...]]] = {}
        self.waiting: dict[TurnId, TurnArrived] = {}
        self.started: list[TurnId] = []
        self.reports: dict[TurnId, RestoreReport] = {}
        self.file: dict[SessionId, Tip] = {}
        self._turns = 0

    # -- what a test does ----------------------------------------------------------------------

    def arrive(
        self, tokens: Iterable[int], session: str | None = "s", *, parent: str | None = None
    ) -> TurnId:
        """A turn is here."""
        self._turns += 1
        turn_id = TurnId(f"t{self._turns}")
        name = SessionId(session) if session is not None else None
        whose = SessionId(parent) if parent is not None else None
        prompt = prefix_of(tokens, B)
        hashed = prompt.hashed if self._turns % 4 else None  # now and then nobody has made it
        self.waiting[turn_id] = TurnArrived(
            turn_id, name, prompt.tokens, hashed=hashed, parent=whose
        )
        self.handle(self.waiting[turn_id])
        self.check_walk(turn_id)
        return turn_id

    def check_walk(self, turn_id: TurnId) -> None:
        """A prompt that is not compared from the root is where it would be if it were."""
        tokens = self.waiting[turn_id].tokens
        assert self.state.walks.match(turn_id, tokens) == self.cache.match(tokens)

    def turn(self, tokens: Iterable[int], session: str | None = "s") -> Begun:
        """Arrive, answer everything, run."""
        turn_id = self.arrive(tokens, session)
        self.settle()
        return self.run(turn_id)

    def settle(self) -> None:
        """Answer all operations, in order."""
        while self.pending:
            self.answer(self.pending.popleft())

    def idle(self, seconds: float = 10.0) -> None:
        """Time passes until all that is due has been copied."""
        self.now += seconds
        for _ in range(100):
            self.handle(Tick())
            if not self.pending and self.state.next_due() != 0.0:
                return
            self.settle()
        raise AssertionError("the node never comes to rest")

    def watermarks(self, marks: Watermarks) -> None:
        """Other ones, for the same place."""
        pressure = self.cache.pressure
        pressure.watermarks = msgspec.structs.replace(marks, tier=pressure.watermarks.tier)

    def forget_device(self) -> None:
        """Everything evictable goes."""
        count = self.cache.occupancy.evictable_blocks()
        if count:
            self.cache.pressure.evict_blocks(count)

    # -- the store -----------------------------------------------------------------------------

    def answer(self, asked: FindRecords | Fetch | StoreCopy) -> None:
        """What the store would say."""
        match asked:
            case FindRecords(operation_id, ids, boundaries=boundaries):
                inside = next((m for b in boundaries if (m := self._at_boundary(b))), ())
                known = (*ids, *(item.meta.id for item in inside))
                held = {id_: Tier.DISK for id_ in known if id_ in self.stored}
                self.handle(RecordsFound(operation_id, held, inside))
            case Fetch(operation_id, wants):
                missing = next((want.id for want in wants if want.id not in self.stored), None)
                if missing is not None:
                    self.handle(NotFetched(operation_id, MissReason.ABSENT, missing))
                    return
                self.fetched[operation_id] = [self._read(want) for want in wants], wants
                self.handle(Fetched(operation_id))
            case StoreCopy(operation_id, meta):
                self.stored[meta.id] = self.copied[operation_id]
                self.metas[meta.id] = meta
                self.handle(Kept(operation_id))

    def fail(self, asked: FindRecords | Fetch | StoreCopy) -> None:
        """The store could not."""
        match asked:
            case FindRecords(operation_id):
                self.handle(RecordsFound(operation_id, {}))
            case Fetch(operation_id, wants):
                self.handle(NotFetched(operation_id, MissReason.CORRUPT, wants[0].id))
            case StoreCopy(operation_id):
                self.handle(NotKept(operation_id))

    def _at_boundary(self, digest: bytes) -> tuple[Inside, ...]:
        """Range records that hold it; as in a store, those of one block are found by id alone."""
        return tuple(
            Inside(meta, units, digest)
            for id_, meta in self.metas.items()
            if id_ in self.stored and meta.boundaries
            for units in range(1, meta.units + 1)
            if (meta.boundaries + meta.prefix_hash)[32 * units - 32 : 32 * units] == digest
        )

    def _read(self, want: Want) -> bytes:
        data = self.stored[want.id]
        end = len(data) if want.end_unit is None else want.end_unit * 32
        return data[want.first_unit * 32 : end]

    # -- effects -------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        effects: deque[Effect] = deque(self.state.handle(event, self.now))
        while effects:
            match effects.popleft():
                case Start(turn_id):
                    assert turn_id in self.waiting, "started twice"
                    self.started.append(turn_id)
                    report = self.state.report(turn_id)
                    assert report is not None
                    self.reports[turn_id] = report
                case FindRecords() | Fetch() as asked:
                    self.pending.append(asked)
                case StoreCopy() as copy:
                    data = b"".join(self.slots[copy.component, slot] for slot in copy.slots)
                    self.copied[copy.operation_id] = data
                    self.pending.append(copy)
                case Checkpoint(turns):
                    self.checkpointed += turns
                case MoveSlots(moves):
                    self._move(moves)
                case DropOperation():
                    pass  # the answer comes all the same, and must change nothing
                case Fill() as fill if self.is_slow:
                    self.writes.append(fill)
                case Fill() as fill:
                    effects.extend(self.state.handle(self._fill(fill), self.now))
                case Locate(operation_id, ids):
                    held = frozenset(ids).intersection(self.stored)
                    effects.extend(
                        self.state.handle(Located(operation_id, {Tier.DISK: held}), self.now)
                    )
                case Remember(tip):
                    self.file[tip.session_id] = tip
                case Forget(session_id):
                    del self.file[session_id]

    def _move(self, moves: tuple[MoveBorder, ...]) -> None:
        """The slots that change sides lose what they held."""
        for border in moves:
            for name in LAYOUT.point_names:
                for source, target in border.point_moves.get(name, ()):
                    self.slots[name, target] = self.slots[name, source]
            assert not border.block_moves, "blocks have got more room"
            for name, slot in list(self.slots):
                if name in LAYOUT.point_names and slot >= border.points:
                    del self.slots[name, slot]

    def write(self) -> None:
        """The write that waits longest is made, whoever still wants it."""
        self.handle(self._fill(self.writes.popleft()))

    def _fill(self, fill: Fill) -> Filled:
        parts, wants = self.fetched.pop(fill.operation_id)
        for filling in fill.fillings:
            data = parts[filling.part]
            assert len(data) == 32 * len(filling.slots)
            for i, slot in enumerate(filling.slots):
                self.slots[filling.component, slot] = data[32 * i : 32 * i + 32]
        return Filled(fill.operation_id, tuple(want.id for want in wants))

    # -- the engine ----------------------------------------------------------------------------

    def run(self, turn_id: TurnId) -> Begun:
        """Run a started turn to its end; it outputs nothing."""
        self.started.remove(turn_id)
        self.check_walk(turn_id)
        event = self.waiting.pop(turn_id)
        resume = self.state.resume(event.tokens)
        begun = self.cache.begin(
            Turn(turn_id, event.session_id, event.tokens), self.now, resume=resume
        )
        assert isinstance(begun, Begun)
        self._check_state(begun, resume, event.tokens)
        tokens, count = event.tokens, len(event.tokens) // TOKEN_BYTES
        if isinstance(self.cache.reserve(turn_id, count, self.now), NoRoom):
            self.cache.abort(turn_id, self.now)
            self.handle(TurnGone(turn_id))
            return begun
        table = self.cache.table(turn_id)
        for block in range(begun.write_floor // B, count // B):
            for name in LAYOUT.range_names:
                prefix = tokens[: (block + 1) * B * TOKEN_BYTES]
                self.slots[name, table.range[name][block]] = truth(name, prefix)
        position = begun.restored
        stops = {(count - 1) // B * B, count // B * B, count}
        for stop in sorted(at for at in stops if at > position):
            self.cache.advance(turn_id, tokens[position * TOKEN_BYTES : stop * TOKEN_BYTES], 0.0)
            position = stop
            if stop % B == 0 and stop >= begun.write_floor:
                for effect in self.cache.snapshot(turn_id, self.now):
                    assert isinstance(effect, SavePoint)
                    for name, slot in effect.slots.items():
                        self.slots[name, slot] = truth(name, tokens[: stop * TOKEN_BYTES])
        digests = hash_prefix(tokens, B)
        self.cache.finish(turn_id, self.now, tip=digests[-1] if digests else None)
        self.handle(TurnEnded(turn_id, begun.restored, count, count))
        return begun

    def _check_state(self, begun: Begun, resume: object, tokens: bytes) -> None:
        """The state that a turn begins with is that of its tokens, or a replay covers it."""
        [effect] = begun.effects
        if isinstance(effect, LoadPoint):
            for name, slot in effect.slots.items():
                assert self.slots[name, slot] == truth(name, tokens[: begun.restored * TOKEN_BYTES])
        elif begun.restored:
            assert isinstance(resume, Replay)
            assert begun.write_floor - begun.restored >= REPLAY_TOKENS

    def check(self) -> None:
        """All books, and every resident block and point is what its tokens say."""
        self.state.check()
        size = self.cache.layout.packed_block_bytes
        for node in prefix_tree.nodes(parts_of(self.cache).tree.root):
            prefix = prefix_tree.tokens(node, 0, node.end, block_bytes=size)
            for i, slot in enumerate(node.blocks, start=node.start + 1):
                for name in LAYOUT.range_names:
                    assert self.slots[name, slot] == truth(name, prefix[: i * size])
            for stop in node.stops:
                for name, slot in zip(LAYOUT.point_names, stop.slots or (), strict=False):
                    if slot is not None:
                        assert self.slots[name, slot] == truth(name, prefix[: stop.depth * size])
