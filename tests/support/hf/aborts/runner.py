"""The toy model over pools: it does what `ModelRunner` and `HfPort` do for loop and node."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import torch

from ownerserve.cache.effects import (
    CopyBlock,
    CopyState,
    Effect,
    LoadPoint,
    ResetState,
    SavePoint,
)
from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.cache.layout import Table
from ownerserve.cache.tree import prefix_tree
from ownerserve.engines.hf.model.runner import NOBODY, DecodeRow
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import unpack
from ownerserve.kv.regions import Region
from ownerserve.node.runtime.engine_port import LayerProgress, LayersTold
from ownerserve.plan.inputs import HF, Abilities
from tests.support.hf.aborts.toy import (
    EMPTY,
    POINT_BYTES,
    ROW_BYTES,
    VOCABULARY,
    follows,
    point_of,
    row_of,
    scores,
    state_at,
    states_of,
)
from tests.support.node.lending_nodes import SECTIONS, B, region

POISON = 0xA5
SLOWEST_S = 0.002


class ToyRunner:
    """A `RunnerPort` and an `EnginePort`. Each forward takes a drawn time."""

    def __init__(self, slots: int, seed: int) -> None:
        self.device = torch.device("cpu")
        self.vocab_size = VOCABULARY
        self._draw = random.Random(seed)
        self._dense = np.full((slots, B, ROW_BYTES), POISON, np.uint8)
        self._swa = np.full((slots, POINT_BYTES), POISON, np.uint8)
        self._states: dict[int, bytes] = {}
        arrays = {"dense": self._dense, "swa": self._swa}
        self._regions = tuple(region(SECTIONS[n], array, slots) for n, array in arrays.items())
        self._pools = {name: array.reshape(slots, -1) for name, array in arrays.items()}

    # -- a step --------------------------------------------------------------------------------

    def apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case LoadPoint(slots, state):
                    self._states[state] = state_at(self._swa[slots["swa"]].tobytes())
                case SavePoint(state, slots):
                    self._swa[slots["swa"]] = _bytes(point_of(self._states[state]))
                case ResetState(state):
                    self._states[state] = EMPTY
                case CopyState(source, target):
                    self._states[target] = self._states[source]
                case CopyBlock(slots):
                    source, target = slots["dense"]
                    self._dense[target] = self._dense[source]
                case _:
                    raise AssertionError(f"no {effect} here")

    def prefill(
        self,
        table: Table,
        tokens: Sequence[int],
        start: int,
        *,
        write_floor: int = 0,
        turn_id: TurnId = NOBODY,
    ) -> torch.Tensor:
        time.sleep(self._draw.random() * SLOWEST_S)
        for position, token in enumerate(tokens, start):
            self._compute(table, token, position, write_floor)
        return self._logits(table, start + len(tokens))[None]

    def decode(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        for row in rows:
            self._compute(row.table, row.token, row.position, 0)
        return torch.stack([self._logits(row.table, row.position + 1) for row in rows])

    def _compute(self, table: Table, token: int, position: int, write_floor: int) -> None:
        state = self._states[table.state] = follows(self._states[table.state], token)
        if position >= write_floor:
            slot = table.range["dense"][position // B]
            self._dense[slot, position % B] = _bytes(row_of(state))

    def _logits(self, table: Table, end: int) -> torch.Tensor:
        rows = self._dense[table.range["dense"][: -(-end // B)]].reshape(-1, ROW_BYTES)[:end]
        return torch.from_numpy(scores(rows.tobytes(), self._states[table.state]))

    # -- what a node asks ----------------------------------------------------------------------

    @property
    def abilities(self) -> Abilities:
        return HF

    def read_slots(self, component: str, slots: Sequence[int]) -> memoryview:
        return memoryview(self._pools[component][list(slots)].tobytes())

    def write_slots(self, component: str, slots: Sequence[int], data: memoryview) -> None:
        pool = self._pools[component]
        pool[list(slots)] = np.frombuffer(data, np.uint8).reshape(len(slots), -1)

    def regions(self) -> tuple[Region, ...]:
        return self._regions

    def watch_layers(self, turn_id: TurnId, told: LayersTold) -> None: ...

    def unwatch_layers(self, turn_id: TurnId) -> None: ...

    def layers_done(self, turn_id: TurnId) -> LayerProgress | None:
        return None

    # -- what a test asks ----------------------------------------------------------------------

    def wrong_slots(self, cache: HeteroCache) -> int:
        """How many slots do not hold what the tree says that they do."""
        size, wrong = cache.layout.packed_block_bytes, 0
        for node in prefix_tree.nodes(parts_of(cache).tree.root):
            states = states_of(unpack(prefix_tree.tokens(node, 0, node.end, block_bytes=size)))
            for block, slot in enumerate(node.blocks, node.start):
                rows = b"".join(map(row_of, states[block * B : (block + 1) * B]))
                wrong += self._dense[slot].tobytes() != rows
            for stop in node.stops:
                for slot in stop.point_slots(cache.layout.point_names).values():
                    point = point_of(states[stop.depth * B - 1])
                    wrong += self._swa[slot].tobytes() != point
        return wrong

    def poison(self) -> None:
        """Fill all slots, of which nobody has any."""
        for pool in self._pools.values():
            pool.fill(POISON)

    @property
    def is_poisoned(self) -> bool:
        return all(bool((pool == POISON).all()) for pool in self._pools.values())


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
