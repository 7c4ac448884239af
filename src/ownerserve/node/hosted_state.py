"""GuestState: a node in an engine that owns its blocks. Events with `now` in, effects out. Pure.

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
    Arrived,
    Asked,
    Computing,
    Effect,
    Ended,
    Event,
    Filled,
    Find,
    Found,
    Gone,
    Kept,
    NotFetched,
    NotKept,
    Placed,
    RestoreReport,
    SessionOver,
    Tick,
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


class GuestState:
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
        self._errands = count(1)
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
            case Arrived():
                return self._arrived(event, now)
            case Found(errand, held):
                turn_id = self._looking.pop(errand, None)
                if turn_id is not None:
                    saves.known(turn_id, set(held))
                return restores.found(event, errand=self._next_errand(), now=now)
            case Asked(turn_id):
                return restores.asked(turn_id, now=now)
            case Placed(turn_id):
                errand = self._next_errand()
                self._bringing[errand] = turn_id
                return restores.placed(turn_id, errand=errand, now=now)
            case NotFetched(errand):
                turn_id = self._bringing.pop(errand, None)
                if turn_id is not None:
                    saves.doubt(turn_id)
                return restores.not_fetched(event, errand=self._next_errand(), now=now)
            case Filled(errand):
                self._bringing.pop(errand, None)
                return restores.filled(event, now)
            case Computing():
                return saves.computing(event, self._next_errand)
            case Ended(turn_id):
                self.restores.reports.pop(turn_id, None)
                return saves.ended(event, self._next_errand)
            case Gone(turn_id):
                dropped = list(restores.gone(turn_id, now))
                self.restores.reports.pop(turn_id, None)
                return dropped
            case Kept(errand):
                saves.landed(errand, "kept")
            case NotKept(errand):
                saves.landed(errand, "not_kept")
            case SessionOver(session_id):
                saves.over(session_id)
            case Tick():
                return restores.overdue(now)
        return ()

    def take_over(self, other: GuestState) -> None:
        """Go on counting where `other` ends: answers to its errands mean nothing here."""
        self._errands = other._errands
        self.saves.counts = other.saves.counts

    def is_waiting(self, turn_id: TurnId) -> bool:
        """Whether a turn's restore is not decided yet."""
        return turn_id in self.restores

    def report(self, turn_id: TurnId) -> RestoreReport | None:
        """What came of a turn's restore; handed out once."""
        return self.restores.reports.pop(turn_id, None)

    def _arrived(self, event: Arrived, now: float) -> Iterable[Effect]:
        prefix = self._chains.hashed(event.tokens, event.session_id)
        errand = self._next_errand()
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
        effects = list(self.restores.arrived(event, _Hashed(prefix), errand=errand, now=now))
        if any(isinstance(effect, Find) for effect in effects):
            self._looking[errand] = event.turn_id
        return effects

    def _next_errand(self) -> int:
        return next(self._errands)
