"""Taking turns over whoever is there: what round robin policies share."""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.router.worker import Worker


class Rotation:
    """Remembers who was last, by stable order, so that workers may come and go."""

    def __init__(self) -> None:
        self._last_order = -1

    def next(self, workers: Iterable[Worker]) -> Worker:
        """The one after the last; `workers` are in stable order and not none."""
        first = None
        for worker in workers:
            if worker.order > self._last_order:
                break
            first = first or worker
        else:
            assert first is not None
            worker = first
        self._last_order = worker.order
        return worker
