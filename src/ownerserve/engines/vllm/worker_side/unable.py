"""An unable worker answers for a rank whose pages can't be read or written: nothing is loaded,
nothing is kept, and nobody waits for it.

Only a worker sees how its pages lie. It says so with its first report, and from then on the
scheduler's side orders nothing; until then it may have.
"""

from __future__ import annotations

from ownerserve.engines.vllm.worker_commands import LoadResult, WorkerCommands, WorkerStepReport
from ownerserve.store.format.model import MissReason


class UnableWorker:
    """An `UnableWorker` stands in the place of a rank's `WorkerSide`; `why` is for people."""

    def __init__(self, why: str) -> None:
        self._report = WorkerStepReport(unable=(why,))
        self._failed: set[str] = set()

    def load(self, commands: WorkerCommands) -> None:
        """Fail the step's loads."""
        self._failed.update(load.request_id for load in commands.loads)
        self._failed.update(commands.failures)
        self._add(
            WorkerStepReport(
                loads=tuple(
                    LoadResult(load.operation_id, load.request_id, reason=MissReason.IO_ERROR)
                    for load in commands.loads
                )
            )
        )

    def save(self, commands: WorkerCommands) -> None:
        """Keep nothing of the step's saves: their blocks are free to go."""
        ordered = tuple(save.operation_id for save in commands.saves)
        self._add(WorkerStepReport(copied=ordered, not_kept=ordered))

    def results(self, commands: WorkerCommands | None) -> tuple[set[str], set[str]]:
        """Return the requests whose load is over since the last call: all have failed."""
        failed, self._failed = self._failed, set()
        return set(failed), failed

    def report(self) -> WorkerStepReport:
        """Return what there is to say since the last report."""
        report, self._report = self._report, WorkerStepReport()
        return report

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _add(self, report: WorkerStepReport) -> None:
        self._report = self._report.joined(report)
