"""The toy model's memory: range and point slots as arrays of bytes, the live states of turns, and
what a step does to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
from ownerserve.kv.prefix import unpack
from ownerserve.kv.regions import Region
from tests.support.node.lending_nodes import SECTIONS, B, region
from tests.support.node.toy import (
    EMPTY,
    POINT_BYTES,
    ROW_BYTES,
    follows,
    point_of,
    row_of,
    scores,
    state_at,
    states_of,
)

POISON = 0xA5


class ToyMemory:
    """All slots of one worker."""

    def __init__(self, slots: int) -> None:
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

    def compute(
        self, table: Table, tokens: Sequence[int], start: int, *, write_floor: int = 0
    ) -> NDArray[np.float32]:
        """Compute tokens from position `start` on; returns the logits behind them."""
        state = self._states[table.state]
        for position, token in enumerate(tokens, start):
            state = follows(state, token)
            if position >= write_floor:
                slot = table.range["dense"][position // B]
                self._dense[slot, position % B] = _bytes(row_of(state))
        self._states[table.state] = state
        end = start + len(tokens)
        rows = self._dense[table.range["dense"][: -(-end // B)]].reshape(-1, ROW_BYTES)[:end]
        return scores(rows.tobytes(), state)

    # -- what a node asks ----------------------------------------------------------------------

    def read_slots(self, component: str, slots: Sequence[int]) -> memoryview:
        return memoryview(self._pools[component][list(slots)].tobytes())

    def write_slots(self, component: str, slots: Sequence[int], data: memoryview) -> None:
        pool = self._pools[component]
        pool[list(slots)] = np.frombuffer(data, np.uint8).reshape(len(slots), -1)

    def regions(self) -> tuple[Region, ...]:
        return self._regions

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
