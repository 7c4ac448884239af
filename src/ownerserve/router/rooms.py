"""The workers that may take a turn, in order of load, apart by how much room each has.

Owns steps of room, not the room. A step is an eighth of an octave of tokens that a worker's free
memory still takes at its own bytes a token; the workers of a step stand in order of load. So the
least loaded of all with room is found by a look at the first of each step above the need: some 80
steps at most, however many workers there are.

    need 100k tokens ──> steps     ... | 92k-100k | 100k-109k | 109k-119k | ...  64M | unknown
                         looked at                  (its own)       x         x    x      x

Of the need's own step nobody is taken: who has room for it has less than a twelfth to spare, and
the context grows with each turn. A worker that has changed is put in its place when the room is
next asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import inf, log2

from ownerserve.router.worker import Worker

STEPS_AN_OCTAVE = 8
_UNKNOWN = 1 << 12
"""The step of a worker that says nothing of its memory: taken as enough."""


class Rooms:
    """Workers by (step of room, key of load)."""

    __slots__ = ("_keys", "_place")

    def __init__(self) -> None:
        self._keys: dict[int, list[int]] = {}
        """The keys of a step's workers, least first; no step is empty."""
        self._place: dict[int, tuple[int, int]] = {}
        """Step and key of each worker, by its order."""

    def place(self, workers: Iterable[Worker], key_of: dict[int, int]) -> None:
        """They stand with the room that they have now, at the key of load that `key_of` says."""
        for worker in workers:
            place = _step(room_tokens(worker)), key_of[worker.order]
            if place != self._place.get(worker.order):
                self.discard(worker)
                self._place[worker.order] = place
                insort(self._keys.setdefault(place[0], []), place[1])

    def discard(self, worker: Worker) -> None:
        """Forget a worker that is no candidate any more."""
        place = self._place.pop(worker.order, None)
        if place is None:
            return
        step, key = place
        keys = self._keys[step]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._keys[step]

    def least(self, tokens: float, *, but: Worker | None) -> int | None:
        """The least key of those whose room lies in a step above that of `tokens`; None: none."""
        need, found = _step(tokens), None
        home = None if but is None else self._place.get(but.order)
        for step, keys in self._keys.items():
            if step <= need:
                continue
            key = keys[0]
            if home == (step, key):  # keys name workers: nobody else's is equal
                if len(keys) == 1:
                    continue
                key = keys[1]
            if found is None or key < found:
                found = key
        return found


def room_tokens(worker: Worker) -> float:
    """How long a sequence its free memory takes, infinite where nothing is known of it."""
    free, speed = worker.load.kv_bytes_free, worker.speed
    if free == inf:
        return inf
    if not speed.kv_bytes_per_token:
        return inf if free >= speed.kv_bytes_per_sequence else 0.0
    return (free - speed.kv_bytes_per_sequence) / speed.kv_bytes_per_token


def _step(tokens: float) -> int:
    """Which step has `tokens` of room."""
    if tokens == inf:
        return _UNKNOWN
    return int(log2(tokens) * STEPS_AN_OCTAVE) + 1 if tokens >= 1.0 else 0
