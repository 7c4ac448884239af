"""A `HostedNodeState` is the node of an engine that owns its blocks: events in, effects out. Pure.

    arrival -> find -> asked -> offer -> placed -> bring -> run -> ended
    `---------------- Restores -----------------'   `--- Saves ---'

What NodeState is for our own cache, for an engine such as vLLM: the same records, plans and
restores, over a Device that answers `Later`. What runs is saved as it is computed, since nothing
of it is ours once the engine has finished with it; what stays on the device is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ownerserve.cache.outcomes import Resume
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed
from ownerserve.node.restore.restores import Restores
from ownerserve.node.restore.sources import Device
from ownerserve.node.retention.saves import Saves
from ownerserve.node.vocabulary.events import (
    Completion,
    Computing,
    Copied,
    DeviceAsked,
    DevicePlaced,
    Effect,
    Event,
    FetchAndFill,
    Filled,
    FindRecords,
    Kept,
    NotFetched,
    NotKept,
    OperationId,
    RecordsFound,
    RestoreReport,
    SessionOver,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.restore import Planner


class _Hashed:
    """A `_Hashed` gives the digests of a prompt that was hashed already, whatever it is asked
    for."""

    def __init__(self, prefix: HashedPrefix) -> None:
        self._prefix = prefix

    def hashed(
        self, tokens: Packed, session_id: SessionId | None, made: HashedPrefix | None = None
    ) -> HashedPrefix:
        return self._prefix


class HostedNodeState:
    """A `HostedNodeState` is a node in an engine that owns its blocks; called on the engine's
    scheduling thread."""

    def __init__(
        self,
        device: Device,
        operations: Operations,
        *,
        planner: Planner,
        costs: CostModel,
        saves: Saves,
        settings: NodeSettings,
    ) -> None:
        """Make the node; `saves` must begin its operations with the same `operations`."""
        self.names = saves.names
        self.saves = saves
        self.operations = operations
        # The engine gives a turn all its blocks before anything is written: a load is one part.
        settings = msgspec.structs.replace(settings, part_tokens=0)
        self.restores = Restores(
            device, self.names, operations, planner=planner, costs=costs, settings=settings
        )
        self._block = device.layout.block_tokens
        self._turns: dict[OperationId, TurnId] = {}
        """The turns of restores whose answers say something of what `saves` need not copy."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event and return the effects that it asks for, in order."""
        effects = list(self._handle(event, now))
        while self.restores.parted:
            self.saves.junctions.parted(*self.restores.parted.pop())
        return effects

    def _handle(self, event: Event, now: float) -> Iterable[Effect]:
        restores, saves = self.restores, self.saves
        match event:
            case TurnArrived():
                return self._arrived(event, now)
            case DeviceAsked(turn_id):
                return restores.asked(turn_id, now=now)
            case DevicePlaced(turn_id):
                return self._noted(turn_id, self.restores.placed(turn_id, now=now))
            case RecordsFound() | NotFetched() | Filled() | Copied() | Kept() | NotKept():
                restored = self._tell_saves(event)
                return self._noted(restored, self.operations.complete(event, now))
            case Computing():
                return saves.computing(event)
            case TurnEnded(turn_id):
                self.restores.reports.pop(turn_id, None)
                return saves.ended(event)
            case TurnGone(turn_id):
                dropped = list(restores.gone(turn_id, now))
                self.restores.reports.pop(turn_id, None)
                return dropped
            case SessionOver(session_id):
                saves.over(session_id)
            case Tick():
                return restores.overdue(now)
        return ()

    def _tell_saves(self, event: Completion) -> TurnId | None:
        """Tell `saves` what a restore has learnt of the store, so that stored records of its turn
        are not copied again; return the turn, None where it is no restore's answer."""
        turn_id = self._turns.pop(event.operation_id, None)
        if turn_id is not None:
            match event:
                case RecordsFound(held=held):
                    here = {id_ for id_, tier in held.items() if tier is not Tier.PEER}
                    self.saves.known(turn_id, here)
                case NotFetched():
                    self.saves.doubt(turn_id)
        return turn_id

    def _noted(self, turn_id: TurnId | None, effects: Iterable[Effect]) -> Iterable[Effect]:
        """Return the effects of a turn's restore, whose answers `_tell_saves` will hear."""
        done = list(effects)
        if turn_id is not None:
            asked = [at for at in done if isinstance(at, FindRecords | FetchAndFill)]
            self._turns |= {at.operation_id: turn_id for at in asked}
        return done

    def take_over(self, other: HostedNodeState) -> None:
        """Go on counting where `other` ends, so that answers to its operations mean nothing
        here."""
        other.saves.give_up()
        self.operations.go_on_from(other.operations)
        self.saves.counts, self.saves.unsaved = other.saves.counts, other.saves.unsaved

    def use(self, planner: Planner) -> None:
        """Plan restores with `planner` from now on."""
        self.restores.use(planner)

    def resume(self, turn_id: TurnId, tokens: int) -> Resume | None:
        """Return how a turn of `tokens` tokens goes on from what the engine has, nothing being
        brought; None: at the engine's own hit."""
        return self.restores.resume(turn_id, b"", tokens)

    def is_waiting(self, turn_id: TurnId) -> bool:
        """Return whether the turn's restore is not decided yet."""
        return turn_id in self.restores

    def report(self, turn_id: TurnId) -> RestoreReport | None:
        """Take the report of the turn's restore; None where there is none, or it was taken."""
        return self.restores.reports.pop(turn_id, None)

    def _arrived(self, event: TurnArrived, now: float) -> Iterable[Effect]:
        prefix = event.hashed
        if prefix is None:
            prefix = HashedPrefix(self._block)
            prefix.grow(event.tokens)
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
        return self._noted(event.turn_id, self.restores.arrived(event, _Hashed(prefix), now=now))
