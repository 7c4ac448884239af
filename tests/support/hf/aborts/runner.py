"""The toy model over pools: it does what `ModelRunner` and `HfPort` do for loop and node."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from ownerserve.cache.layout import Table
from ownerserve.engines.hf.model.runner import NOBODY, DecodeRow
from ownerserve.kv.ids import TurnId
from ownerserve.node.vocabulary.engine_port import LayerProgress, LayersTold
from ownerserve.plan.inputs import HF, Abilities
from tests.support.hf.aborts.traps import Traps
from tests.support.node.lending_nodes import LAYERS
from tests.support.node.toy import VOCABULARY
from tests.support.node.toy_memory import ToyMemory

SLOWEST_S = 0.002


class ToyRunner(ToyMemory):
    """A `RunnerPort` and an `EnginePort`. Each forward takes a drawn time, and behind it each layer
    that is told."""

    def __init__(self, slots: int, seed: int, traps: Traps) -> None:
        super().__init__(slots)
        self._traps = traps
        self.device = torch.device("cpu")
        self.vocab_size = VOCABULARY
        self._draw = random.Random(seed)
        self._told: dict[TurnId, LayersTold] = {}

    def prefill(
        self,
        table: Table,
        tokens: Sequence[int],
        start: int,
        *,
        write_floor: int = 0,
        turn_id: TurnId = NOBODY,
    ) -> torch.Tensor:
        if turn_id.startswith("prefill-"):
            self._traps.computing(start)
        time.sleep(self._draw.random() * SLOWEST_S)
        logits = self.compute(table, tokens, start, write_floor=write_floor)
        if (told := self._told.get(turn_id)) is not None:
            for layers in range(1, LAYERS + 1):
                told(LayerProgress(start, start + len(tokens), {"dense": layers}))
                time.sleep(self._draw.random() * SLOWEST_S)
        return torch.from_numpy(logits)[None]

    def decode(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        logits = (self.compute(row.table, [row.token], row.position) for row in rows)
        return torch.stack([torch.from_numpy(row) for row in logits])

    @property
    def abilities(self) -> Abilities:
        return HF

    def watch_layers(self, turn_id: TurnId, told: LayersTold) -> None:
        self._told[turn_id] = told

    def unwatch_layers(self, turn_id: TurnId) -> None:
        self._told.pop(turn_id, None)

    def layers_done(self, turn_id: TurnId) -> LayerProgress | None:
        return None
