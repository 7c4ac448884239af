"""How far a forward is, layer by layer, is told to who watches one of its turns.

    forward     layer 0 ......... layer 1 ......... layer 2 ...
    state       written | told    written | told     its tokens' state is in the pools

What nobody watches costs one look into a dict a forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ownerserve.kv.ids import TurnId
from ownerserve.node.vocabulary.engine_port import LayerProgress, LayersTold


class StepSpan(NamedTuple):
    """A span is what one forward computes of a turn: tokens [start, end)."""

    turn_id: TurnId
    start: int
    end: int


class LayerWatches:
    """`LayerWatches` own who is told of which turn, and how far the last forward of each such turn
    is. The engine's thread calls all but `of`, which any thread may."""

    def __init__(self, layers: Sequence[Mapping[str, int]], *, components: tuple[str, ...]) -> None:
        """`layers` has, for each of the model's layers, the sections that it has a layer of."""
        self._told: dict[TurnId, LayersTold] = {}
        self._progress: dict[TurnId, LayerProgress] = {}
        self._spans: list[StepSpan] = []
        self._done = 0
        counts: Counter[str] = Counter(dict.fromkeys(components, 0))
        self._counts = [dict(counts)]
        for layer in layers:
            counts.update(name for name in layer if name in components)
            self._counts.append(dict(counts))

    def watch(self, turn_id: TurnId, told: LayersTold) -> None:
        """Tell `told` of the turn's forwards from the next one on."""
        self._told[turn_id] = told

    def unwatch(self, turn_id: TurnId) -> None:
        """Forget the turn."""
        self._told.pop(turn_id, None)
        self._progress.pop(turn_id, None)

    def of(self, turn_id: TurnId) -> LayerProgress | None:
        """Return how far the turn's last forward is; None where none was watched."""
        return self._progress.get(turn_id)

    def begin(self, spans: Iterable[StepSpan]) -> bool:
        """Take in that a forward begins; tell whether somebody watches a turn of it."""
        self._done = 0
        self._spans = [one for one in spans if one.turn_id in self._told] if self._told else []
        return bool(self._spans)

    def done(self, layers: int) -> None:
        """Take in that the state of the first `layers` layers is written."""
        if layers <= self._done:
            return
        before, counts = self._counts[self._done], self._counts[layers]
        self._done = layers
        if counts == before and layers < len(self._counts) - 1:
            return  # layers that have point state only, which a turn's end saves
        for turn_id, start, end in self._spans:
            told = self._told.get(turn_id)
            if told is not None:
                self._progress[turn_id] = progress = LayerProgress(start, end, counts)
                told(progress)
