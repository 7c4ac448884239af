"""This module collects the commands that a step is to carry to the workers, and tells which answers
are complete. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ownerserve.engines.vllm.worker_commands import (
    LoadInto,
    LoadResult,
    SaveCommand,
    WorkerCommands,
)
from ownerserve.node.vocabulary.events import Kept, NotKept
from ownerserve.store.format.model import ArtifactKind

NOTHING, NOTHING_YET = WorkerCommands(), WorkerCommands(is_idle=True)


class PendingCommands:
    """`PendingCommands` are the commands of the step being built, and the loads that are not
    answered."""

    def __init__(self) -> None:
        self.bringing: set[int] = set()
        self._loads: list[LoadInto] = []
        self._points: list[SaveCommand] = []
        self._ranges: list[SaveCommand] = []
        self._drops: list[int] = []
        self._failures: list[str] = []

    def load(self, load: LoadInto) -> None:
        """Add a load to the step's commands."""
        self._loads.append(load)
        self.bringing.add(load.operation_id)

    def save(self, save: SaveCommand) -> None:
        """Order a save; a point's goes before all ranges of the step."""
        is_point = save.meta.kind is ArtifactKind.POINT
        (self._points if is_point else self._ranges).append(save)

    def drop(self, operation_id: int) -> None:
        """Give up a load that nobody waits for; it still has to end."""
        self._drops.append(operation_id)

    def fail(self, request_id: str) -> None:
        """Fail the request: the engine waits for a load that was never ordered."""
        self._failures.append(request_id)

    def give_up_loads(self) -> None:
        """Let all loads, begun or not, end as failures."""
        self._drops += self.bringing

    def take(self, *, is_idle: bool) -> WorkerCommands:
        """Return the commands since the last call."""
        saves = (*self._points, *self._ranges)
        if not (self._loads or saves or self._drops or self._failures):
            return NOTHING_YET if is_idle else NOTHING
        commands = WorkerCommands(
            loads=tuple(self._loads),
            saves=saves,
            drops=tuple(self._drops),
            failures=tuple(self._failures),
            is_idle=is_idle,
        )
        self._loads, self._points, self._ranges = [], [], []
        self._drops, self._failures = [], []
        return commands


class Tally:
    """A `Tally` counts answers by operation; one counts when every worker has given it."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._said: Counter[tuple[str, int]] = Counter()
        self._failed: dict[int, LoadResult] = {}
        self._refused: set[int] = set()

    def complete(self, what: str, operation_ids: Iterable[int]) -> Iterator[int]:
        """Yield those of `operation_ids` that the last of the workers has now reported."""
        for operation_id in operation_ids:
            self._said[what, operation_id] += 1
            if self._said[what, operation_id] >= self._workers:
                del self._said[what, operation_id]
                yield operation_id

    def saved(self, kept: Iterable[int], not_kept: Iterable[int]) -> Iterator[Kept | NotKept]:
        """Yield what came of the saves that the last of the workers has now answered: one is kept
        when each of them kept it."""
        refused = tuple(not_kept)
        self._refused.update(refused)
        for operation_id in self.complete("saved", (*kept, *refused)):
            if operation_id in self._refused:
                self._refused.remove(operation_id)
                yield NotKept(operation_id)
            else:
                yield Kept(operation_id)

    def over(self, result: LoadResult) -> LoadResult | None:
        """Return the load's result once every worker has answered: a failed one when one of them
        failed; else None."""
        if result.reason:
            self._failed[result.operation_id] = result
        if not any(self.complete("loads", (result.operation_id,))):
            return None
        return self._failed.pop(result.operation_id, result)
