"""Our scheduler's side, as `build` makes it, over fake vLLM parts: a look-up that answers when
asked, and an oracle that knows what may be stored, held and told."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ownerserve.engines.vllm.build import ALWAYS, SIMPLE
from ownerserve.engines.vllm.layout.shape import StateShape, describe
from ownerserve.engines.vllm.replay.replays import ReplayLengths, Replays
from ownerserve.engines.vllm.scheduler_side.device import EngineDevice
from ownerserve.engines.vllm.scheduler_side.in_pool import PoolEvents, PoolWatch
from ownerserve.engines.vllm.scheduler_side.measure import ConnectorObserver
from ownerserve.engines.vllm.scheduler_side.owning import SessionsHere
from ownerserve.engines.vllm.scheduler_side.scheduler import SchedulerParts, SchedulerSide
from ownerserve.engines.vllm.scheduler_side.soft_references import SoftReferences
from ownerserve.engines.vllm.scheduler_side.worker_reports import WorkerReports
from ownerserve.engines.vllm.settings import SoftReference
from ownerserve.engines.vllm.tenants import Tenants
from ownerserve.engines.vllm.turns import prompts
from ownerserve.engines.vllm.turns.prompts import Prompts
from ownerserve.engines.vllm.worker_commands import SaveCommand
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import HashedPrefix, Identity, Numerics, pack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.node.hosted_state import HostedNodeState
from ownerserve.node.retention.saves import Capture, SaveLimits, Saves
from ownerserve.node.runtime.node_runtime import Calibration
from ownerserve.node.transfers.offers import PeerOffer
from ownerserve.node.vocabulary.events import (
    FindRecords,
    PeerPrefix,
    PeerRecord,
    RecordsFound,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import Cell, Inside, RecordNames, Tip, records_of
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.inputs import VLLM
from ownerserve.plan.restore import Planner
from ownerserve.plan.swa.branches import Branches, PointCost
from ownerserve.store.format.model import ID_BYTES, ArtifactKind, Meta, Want
from tests.support.vllm_parts.fake_vllm.request import BLOCK, FakeRequest, Weights
from tests.support.vllm_parts.fake_vllm.scheduler import STEP_TOKENS
from tests.support.vllm_parts.fake_vllm.workers import Rank, Row, Stored, span
from tests.support.vllm_parts.specs import Config, dense, sliding

WINDOW_TOKENS = 7
RECORD_BLOCKS = 2
DEADLINE_S = 5.0
SHAPES = {
    "dense": describe(Config([dense(0, 1, block=BLOCK)]), block_tokens=BLOCK),
    "long blocks": describe(Config([dense(0, 1, block=BLOCK)]), block_tokens=2 * BLOCK),
    "windows": describe(
        Config([dense(0, block=BLOCK), sliding(1, block=BLOCK, window=WINDOW_TOKENS)]),
        block_tokens=BLOCK,
    ),
}
TENANTS = Tenants(bytes(range(ID_BYTES)))


@dataclass(frozen=True)
class Setup:
    """How one engine core is set up."""

    shape: str
    ranks: int
    checkpoints: str
    copies: int
    """Copies of a whole record for which there is room; the buffer has twice as much."""
    tenants: Tenants = TENANTS
    hashed_at_once: int = prompts.AT_ONCE_TOKENS
    """Tokens of a prompt that are hashed when it comes; those of a longer one are when told."""


def identity(epoch: int) -> Identity:
    return Identity(
        model_id="m",
        weights=f"of time {epoch}",
        tokenizer="t",
        spec_digest=b"",
        numerics=Numerics(dtype="float32"),
        tenant_salt=bytes(ID_BYTES),
    )


class Oracle:
    """What is true: which tokens were ever accepted, under which weights, and which saves are
    open."""

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self.names = [self._names(0)]
        self._texts: dict[bytes, list[int]] = {}
        self._salts: dict[bytes, str | None] = {b"": None}
        self._known: dict[str, HashedPrefix] = {}
        self.open: dict[int, SaveCommand] = {}
        self.told: Counter[str] = Counter()
        self.asked_for: set[bytes] = set()
        """Ids of records of which a copy was ever ordered."""
        self.answered: set[bytes] = set()
        """Ids of records of which something was told, well or not."""

    def _names(self, epoch: int) -> RecordNames:
        return RecordNames(
            identity(epoch),
            self.shape.layout(),
            engine="test/1",
            blocks=RECORD_BLOCKS,
            lead=self.shape.lead(),
        )

    def new_weights(self) -> None:
        self.names.append(self._names(len(self.names)))

    def learn(self, request: FakeRequest) -> None:
        """Note the tokens that a request has: prompt, and what was accepted."""
        self._salts[TENANTS.salt(request.cache_salt) or b""] = request.cache_salt
        block = self.shape.payload.block_tokens
        hashed = self._known.setdefault(request.request_id, HashedPrefix(block))
        before = len(hashed.digests)
        assert hashed.grow(pack(request.all_token_ids))
        for at in range(before, len(hashed.digests)):
            self._texts[hashed.digests[at]] = request.all_token_ids[: (at + 1) * block]

    def ordered(self, saves: Iterable[SaveCommand]) -> None:
        for save in saves:
            assert save.meta.prefix_hash in self._texts, "tokens that were not accepted"
            assert save.meta.tenant in self._salts
            self.open[save.operation_id] = save
            self.asked_for.add(save.meta.id)

    def check(self, save: SaveCommand, rows: Sequence[Sequence[Row]]) -> None:
        """What was copied is what the record is named."""
        meta, block = save.meta, self.shape.payload.block_tokens
        tokens, ends = self._texts[meta.prefix_hash], {}
        ends[len(tokens) // block - 1] = PrefixHash(meta.prefix_hash)
        epochs = [at for at, names in enumerate(self.names) if _id_of(names, meta, ends) == meta.id]
        assert len(epochs) == 1, f"{meta} has a name of another record"
        assert len(tokens) == meta.end_token
        right = Weights(epochs[0], self._salts[meta.tenant]).rows(tokens)
        first, end = span(self.shape, meta)
        groups = self.shape.components[meta.component].groups
        wanted = [[(group, right[at]) for at in range(first, end)] for group in groups]
        found = [list(own) for own in rows]
        assert found == wanted, f"{save.operation_id}: {meta.component} {first} to {end}"


def _id_of(names: RecordNames, meta: Meta, ends: dict[int, PrefixHash]) -> bytes:
    """The id that a record of this place and tenant has."""
    own, block = names.of(meta.tenant), names.layout.block_tokens
    if meta.kind is ArtifactKind.POINT:
        return own.point_id(meta.component, meta.end_token // block, ends)
    cell = Cell(meta.first_token // block, meta.end_token // block)
    return own.range_id(meta.component, cell, ends)


class Telling:
    """In the place of KV events: a record is told as stored once all ranks have it."""

    is_waiting = False

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._ids: dict[int, bytes] = {}
        self.oracle: Oracle | None = None

    def ordered(self, operation_id: int, blocks: object) -> None: ...

    def kept(self, operation_id: int) -> None:
        assert self.oracle is not None
        save = self.oracle.open.pop(operation_id)
        self.oracle.answered.add(save.meta.id)
        assert all(operation_id in rank.kept for rank in self._ranks), "stored, but not by all"
        self.oracle.told["kept"] += 1

    def not_kept(self, operation_id: int) -> None:
        assert self.oracle is not None
        self.oracle.answered.add(self.oracle.open.pop(operation_id).meta.id)
        self.oracle.told["not_kept"] += 1

    def lost(self, blocks: object) -> None: ...

    def take(self) -> list[Any]:
        return []


class Lookup:
    """In the place of the thread that looks into the first rank's store: it answers when told."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.lent: dict[bytes, Stored] = rank.lent
        """What a peer holds, whoever is named as one."""
        self.asked: deque[FindRecords | Callable[[], None]] = deque()
        self._lender: LenderAddress | None = None
        self._found: deque[RecordsFound] = deque()

    def submit(self, find: FindRecords) -> None:
        self.asked.append(find)

    def later(self, chore: Callable[[], None]) -> None:
        self.asked.append(chore)

    @property
    def has_answers(self) -> bool:
        return bool(self._found)

    def wait(self, timeout_s: float) -> bool:
        return False

    def poll(self) -> Iterable[RecordsFound]:
        while self._found:
            yield self._found.popleft()

    def close(self) -> None: ...

    def answer(self) -> None:
        """Do what was asked first."""
        asked = self.asked.popleft()
        if not isinstance(asked, FindRecords):
            asked()
            return
        store = self._rank.store
        inside = tuple(self._inside(asked))
        ids = [*(id_ for id_ in asked.ids if id_ in store), *(at.meta.id for at in inside)]
        held = dict.fromkeys(ids, Tier.DISK)
        if asked.peer is not None:
            self._lender = asked.peer.lender
            away = (id_ for id_ in asked.ids if id_ in self.lent)
            held = {**dict.fromkeys(away, Tier.PEER), **held}
        self._found.append(RecordsFound(asked.operation_id, held, inside))

    def offered(self, wants: Sequence[Want]) -> dict[bytes, PeerOffer]:
        away = [want for want in wants if want.id in self.lent and want.id not in self._rank.store]
        if not away:
            return {}
        assert self._lender is not None, "nobody was asked"
        prefix = PeerPrefix(
            self._lender, None, None, 0, (), {}, grid_blocks=1, compute_ms=0.0, turn_id=TurnId("")
        )
        record = PeerRecord("", 0, 0)
        return {want.id: PeerOffer(prefix, self._lender, record, 0) for want in away}

    def _inside(self, find: FindRecords) -> Iterable[Inside]:
        metas = [stored.meta for stored in self._rank.store.values()]
        for digest in find.boundaries:
            own = [
                Inside(meta, ends.index(digest) + 1, PrefixHash(digest))
                for meta in metas
                if meta.tenant == find.tenant and meta.boundaries
                for ends in [_ends(meta.boundaries, meta.prefix_hash)]
                if digest in ends
            ]
            if own:
                return own
        return ()


def _ends(boundaries: bytes, last: bytes) -> list[bytes]:
    inner = [boundaries[at : at + ID_BYTES] for at in range(0, len(boundaries), ID_BYTES)]
    return [*inner, last]


class Holding:
    """In the place of the thread that tells what is held: what it hears is checked."""

    def __init__(self, oracle: Oracle, ranks: Sequence[Rank]) -> None:
        self._oracle, self._ranks = oracle, ranks
        self._events: PoolEvents = deque()
        self.names = oracle.names[0]
        self.has_given_up: Callable[[], bool] = lambda: False

    def watch(self, shape: StateShape) -> PoolWatch:
        return PoolWatch(shape, self._events, lambda: None)

    def watches(self, shape: StateShape, pool: Any) -> None: ...

    def left(self, tips: Iterable[Tip]) -> None:
        under_way = {save.meta.id for save in self._oracle.open.values()}
        # One that was answered, and is saved again since: who is told may not know of that. Nor of
        # one that it has given up, and another one saves.
        under_way -= self._oracle.answered
        under_way -= {id_ for rank in self._ranks for id_ in rank.kept.values()}
        for tip in () if self.has_given_up() else tips:
            ids = records_of(self.names, tip).ids
            assert not under_way.intersection(ids), "told before it is stored"
            # Of its points, one that vLLM had itself is named too: it may be stored, or not.
            ranges = records_of(self.names, msgspec.structs.replace(tip, points=())).ids
            assert self._oracle.asked_for.issuperset(ranges), f"{tip}: a record that nobody made"

    def missed(self, session_id: object) -> None: ...

    def over(self, session_id: object) -> None: ...

    def renamed(self, names: RecordNames) -> None:
        self.names = names

    def close(self) -> None: ...


def node(setup: Setup, shape: StateShape, device: EngineDevice, names: RecordNames) -> Any:
    """The node of one name, as `build.ConnectorParts.state` makes it."""
    size = RECORD_BLOCKS * sum(component.slot_bytes for component in shape.layout().components)
    operations, model = Operations(), shape.model_state()
    cost = PointCost(
        model.point_bytes, model.range_bytes_per_token, has_lead=names.lead is not None
    )
    policy = SIMPLE[setup.checkpoints]() if setup.checkpoints in SIMPLE else Branches(cost)
    limits = SaveLimits(copy_bytes=setup.copies * size, buffer_bytes=2 * setup.copies * size)
    saves = Saves(
        names,
        operations,
        policy=policy,
        capture=Capture(exact_end=shape.is_recurrent),
        limits=limits,
    )
    settings = NodeSettings(
        record_blocks=RECORD_BLOCKS, restore_deadline_s=DEADLINE_S, least_fetched=1, attempts=1
    )
    return HostedNodeState(
        device,
        operations,
        planner=Planner(model, VLLM),
        costs=Calibration(None, ALWAYS).model,
        saves=saves,
        settings=settings,
    )


class Engine:
    """The side of one engine core with all that it works with."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.shape = setup, SHAPES[setup.shape]
        self.oracle = Oracle(self.shape)
        self.ranks = [Rank(self.shape, self.oracle) for _ in range(setup.ranks)]
        self.lookup = Lookup(self.ranks[0])
        self.sessions = SessionsHere(None)
        self.calibration = Calibration(None)
        self.lent: Counter[str] = Counter()
        """What is counted of lends."""
        self.telling = Telling(self.ranks)
        self.telling.oracle = self.oracle
        self._device = EngineDevice(self.shape.layout())
        names, holding = self.oracle.names[0], Holding(self.oracle, self.ranks)
        parts = SchedulerParts(
            lookup=self.lookup,  # type: ignore[arg-type]
            holding=holding,  # type: ignore[arg-type]
            soft=SoftReferences(SoftReference()),
            prompts=Prompts(self.shape.payload.block_tokens, self.lookup.later, algorithm="sha256"),
            measuring=ConnectorObserver(
                self.calibration, lambda chore: None, tell=lambda model: None
            ),
            reports=WorkerReports(
                None,
                self.telling,  # type: ignore[arg-type]
                component=names.range_names[0],
                groups=self.shape.group_tokens,
            ),
            sessions=self.sessions,
            tenants=setup.tenants,
            replays=Replays(ReplayLengths(), None, workers=setup.ranks),
            workers=setup.ranks,
            step_tokens=STEP_TOKENS,
            transfers=lambda: self.lent,
        )
        self.side = SchedulerSide(self._node(), self._device, self.shape, parts)
        given_up = ("save_shed", "gone_first")
        holding.has_given_up = lambda: any(self.side.status().get(name) for name in given_up)

    def _node(self) -> HostedNodeState:
        made = node(self.setup, self.shape, self._device, self.oracle.names[-1])
        assert isinstance(made, HostedNodeState)
        return made

    def reset(self) -> None:
        """What the connector does when it is asked to reset: a node of the name of now."""
        self.side.reset(self._node())

    def close(self) -> None:
        self.side.close()
