"""HostedNodeState: a node in an engine that owns its blocks. Events in, effects out. Pure.

    arrival -> find -> asked -> offer -> placed -> bring -> run -> ended
    `---------------- Restores -----------------'   `--- Saves ---'

What NodeState is for our own cache, for an engine such as vLLM: the same records, plans and
restores, over a Device that answers `Later`. What runs is saved as it is computed, since nothing
of it is ours once the engine has finished with it; what stays on the device is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed
from ownerserve.node.restore.restores import Restores
from ownerserve.node.restore.sources import Device
from ownerserve.node.retention.saves import Saves
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.node.vocabulary.events import (
    Computing,
    DeviceAsked,
    DevicePlaced,
    Effect,
    Event,
    Filled,
    FindRecords,
    Kept,
    NotFetched,
    NotKept,
    RecordsFound,
    RestoreReport,
    SessionOver,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.restore import Planner


class _Hashed:
    """What was hashed already."""

    def __init__(self, prefix: HashedPrefix) -> None:
        self._prefix = prefix

    def hashed(
        self, tokens: Packed, session_id: SessionId | None, made: HashedPrefix | None = None
    ) -> HashedPrefix:
        return self._prefix


class HostedNodeState:
    """See the module. Called on the engine's scheduling thread."""

    def __init__(
        self,
        device: Device,
        names: RecordNames,
        *,
        planner: Planner,
        costs: CostModel,
        saves: Saves,
        settings: NodeSettings,
    ) -> None:
        self.restores = Restores(device, names, planner=planner, costs=costs, settings=settings)
        self.names = names
        self.saves = saves
        self._operation_ids = count(1)
        block = device.layout.block_tokens
        self._chains = Chains(block, block_bytes=block * TOKEN_BYTES)
        self._looking: dict[int, TurnId] = {}
        self._bringing: dict[int, TurnId] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about `event`."""
        return list(self._handle(event, now))

    def _handle(self, event: Event, now: float) -> Iterable[Effect]:
        restores, saves = self.restores, self.saves
        match event:
            case TurnArrived():
                return self._arrived(event, now)
            case RecordsFound(operation_id, held):
                turn_id = self._looking.pop(operation_id, None)
                if turn_id is not None:
                    saves.known(turn_id, set(held))
                return restores.found(event, operation_id=self._next_operation(), now=now)
            case DeviceAsked(turn_id):
                return restores.asked(turn_id, now=now)
            case DevicePlaced(turn_id):
                operation_id = self._next_operation()
                self._bringing[operation_id] = turn_id
                return restores.placed(turn_id, operation_id=operation_id, now=now)
            case NotFetched(operation_id):
                turn_id = self._bringing.pop(operation_id, None)
                if turn_id is not None:
                    saves.doubt(turn_id)
                return restores.not_fetched(event, operation_id=self._next_operation(), now=now)
            case Filled(operation_id):
                self._bringing.pop(operation_id, None)
                return restores.filled(event, now)
            case Computing():
                return saves.computing(event, self._next_operation)
            case TurnEnded(turn_id):
                self.restores.reports.pop(turn_id, None)
                return saves.ended(event, self._next_operation)
            case TurnGone(turn_id):
                dropped = list(restores.gone(turn_id, now))
                self.restores.reports.pop(turn_id, None)
                return dropped
            case Kept(operation_id):
                saves.landed(operation_id, "kept")
            case NotKept(operation_id):
                saves.landed(operation_id, "not_kept")
            case SessionOver(session_id):
                saves.over(session_id)
            case Tick():
                return restores.overdue(now)
        return ()

    def take_over(self, other: HostedNodeState) -> None:
        """Go on counting where `other` ends: answers to its operations mean nothing here."""
        self._operation_ids = other._operation_ids
        self.saves.counts = other.saves.counts

    def is_waiting(self, turn_id: TurnId) -> bool:
        """Whether a turn's restore is not decided yet."""
        return turn_id in self.restores

    def report(self, turn_id: TurnId) -> RestoreReport | None:
        """What came of a turn's restore; handed out once."""
        return self.restores.reports.pop(turn_id, None)

    def _arrived(self, event: TurnArrived, now: float) -> Iterable[Effect]:
        prefix = self._chains.hashed(event.tokens, event.session_id)
        operation_id = self._next_operation()
        if event.turn_id in self.saves:
            self.saves.again(event.turn_id)
        else:
            prompt = len(event.tokens) // TOKEN_BYTES
            self.saves.arrived(
                event.turn_id,
                prefix.fork(),
                prompt=prompt,
                session_id=event.session_id,
                tenant=event.tenant,
            )
        effects = list(
            self.restores.arrived(event, _Hashed(prefix), operation_id=operation_id, now=now)
        )
        if any(isinstance(effect, FindRecords) for effect in effects):
            self._looking[operation_id] = event.turn_id
        return effects

    def _next_operation(self) -> int:
        return next(self._operation_ids)
