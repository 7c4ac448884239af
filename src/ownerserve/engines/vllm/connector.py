"""`OwnerServeConnector` is the class that vLLM loads. Glue only: every hook is one call.

    --kv-transfer-config '{"kv_connector": "OwnerServeConnector",
        "kv_connector_module_path": "ownerserve.engines.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"store": "DIR"}}'

vLLM makes two: one beside its scheduler, one in every worker. What they say to each other travels
with a step's metadata.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from ownerserve.engines.vllm import compat, registration
from ownerserve.engines.vllm.build import (
    ConnectorParts,
    scheduler_side,
    slot_padding,
    worker_side,
)
from ownerserve.engines.vllm.replay.padding import SlotPadding, padded_blocks
from ownerserve.engines.vllm.scheduler_side.former_cache import FormerCache
from ownerserve.engines.vllm.scheduler_side.scheduler import SchedulerSide
from ownerserve.engines.vllm.stats import OwnerServeProm, OwnerServeStats
from ownerserve.engines.vllm.weights import WorkerCall, may_change
from ownerserve.engines.vllm.worker_commands import WorkerCommands, WorkerStepReport
from ownerserve.engines.vllm.worker_side.unable import UnableWorker
from ownerserve.engines.vllm.worker_side.worker import WorkerSide
from ownerserve.kv.errors import InvalidInput

log = logging.getLogger("vllm.ownerserve")

T = TypeVar("T")


class StepCommands(KVConnectorMetadata):  # type: ignore[misc]
    """`StepCommands` carry the commands of one step from the scheduler to every worker."""

    def __init__(self, commands: WorkerCommands) -> None:
        self.commands = commands


class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A `StepReport` carries the results of what workers did back to the scheduler."""

    def __init__(self, report: WorkerStepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(self.report.joined(other.report))


class OwnerServeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """`OwnerServeConnector` is both sides; `_scheduler` or `_worker` is None in the other's
    process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parts = ConnectorParts(vllm_config, kv_cache_config)
        self._parts = parts
        self._former = FormerCache()
        self._scheduler = scheduler_side(parts) if role is KVConnectorRole.SCHEDULER else None
        self._hears_calls = self._scheduler is not None and compat.hear_worker_calls(
            vllm_config, self._workers_called
        )
        if self._scheduler is not None:  # for a scheduler of ours
            self.replays, self.resuming = parts.replays, self._scheduler.resuming
        self._worker: WorkerSide | UnableWorker | None = None
        self._step: KVConnectorMetadata | None = None
        self._saved: WorkerCommands | None = None
        self._padding: SlotPadding | None = None
        self._has_said = False

    @property
    def requires_kv_delivery(self) -> bool:
        """`requires_kv_delivery` is False: what is not saved is a later miss."""
        return False

    # -- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        parts = self._parts
        if parts.not_served and parts.ranks.stages > 1:
            # Of a pipeline the scheduler knows the first stage alone.
            self._worker = UnableWorker(f"on a pipeline stage: {parts.not_served}")
        else:
            self._worker = self._able(kv_caches)
        self._padding = slot_padding(parts)

    def _able(self, kv_caches: dict[str, Any]) -> WorkerSide | UnableWorker:
        try:
            return worker_side(self._parts, kv_caches)
        except InvalidInput as error:
            return UnableWorker(str(error))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Do nothing: blocks that are still to be copied have a reference of ours."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._step = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        commands = self._commands()
        if commands.pads:  # what is not kept from being written would spoil what others read
            assert self._padding is not None
            self._padding.pad(forward_context.slot_mapping, commands.pads)
        if self._worker is not None:
            self._worker.load(commands)

    def has_connector_metadata(self) -> bool:
        """Return whether the two hooks below are to be called: never. vLLM asks once a layer."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a load is whole before its request runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Do nothing: saves are a step's, so that full CUDA graphs stay."""

    def wait_for_save(self) -> None:
        self._save(self._commands())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        report = self._worker.report() if self._worker is not None else WorkerStepReport()
        if self._padding is not None and not self._has_said:
            self._has_said = True
            report = msgspec.structs.replace(report, can_pad=(self._padding.works,))
        return None if report.is_empty else StepReport(report)

    def _commands(self) -> WorkerCommands:
        step = self._step
        return step.commands if isinstance(step, StepCommands) else WorkerCommands()

    def _results(self) -> tuple[set[str], set[str]]:
        if self._worker is None:
            return set(), set()
        commands = self._commands()
        self._save(commands)  # vLLM 0.30 has no `wait_for_save` in a step that computes nothing
        results: tuple[set[str], set[str]] = self._worker.results(commands)
        return results

    def _save(self, commands: WorkerCommands) -> None:
        """Hand a step's saves to the worker, once."""
        if self._worker is not None and commands is not self._saved:
            self._saved = commands
            self._worker.save(commands)

    # -- scheduler -----------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._side.bind(kv_cache_manager.block_pool, kv_cache_manager)
        self._former.bind(kv_cache_manager.block_pool)

    def on_new_request(self, request: Any) -> None:
        self._safely(self._forget_former, None)
        self._safely(lambda: self._side.arrived(request), None)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        nothing: tuple[int | None, bool] = (0, False)
        self._safely(self._forget_former, None)
        return self._safely(lambda: self._side.matched(request, num_computed_tokens), nothing)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids()
        self._safely(lambda: self._side.placed(request, tables, num_external_tokens), None)

    def build_connector_meta(self, scheduler_output: Any) -> StepCommands:
        commands = self._safely(lambda: self._side.build(scheduler_output), None)
        commands = commands or self._side.pending.take(is_idle=False)
        if pads := self._pads(scheduler_output):
            scheduler_output.has_sync_kv_loads = True  # `start_load_kv` runs before the forward
            commands = msgspec.structs.replace(commands, pads=pads)
        return StepCommands(commands)

    def update_connector_output(self, connector_output: Any) -> None:
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        done = report.report if isinstance(report, StepReport) else None
        self._safely(lambda: self._side.reported(done), None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self._safely(lambda: self._side.finished(request, block_ids), None)
        return False, None

    def has_pending_block_frees(self) -> bool:
        return self._safely(self._side.frees_soon, instead=False)

    def has_pending_push_work(self) -> bool:
        """Return whether something is still to be saved, so that steps go on; such a step waits, it
        does not spin."""
        side = self._scheduler
        if side is None:
            return False
        saves = side.state.saves
        return len(side.holds) + len(saves) + len(saves.late) > 0 or side.reports.is_waiting()

    def take_events(self) -> list[Any]:
        """Return the KV events of what stands in the store, since the last call."""
        return self._safely(self._side.reports.events, [])

    def _pads(self, scheduler_output: Any) -> tuple[int, ...]:
        """Return the window blocks of rows that this step replays. A mistake here may not pass:
        without them blocks that others read would be written."""
        if not self.replays.running:
            return ()
        return padded_blocks(
            self.replays, scheduler_output, self._parts.kv_cache_config.kv_cache_groups
        )

    def reset_cache(self) -> bool:
        """Go on knowing nothing of vLLM's blocks. What is stored keeps its name while the weights
        are known to be the same; else nothing stored bears the name from now on."""
        if not self._hears_calls or self._former.has_ended():
            self._parts.forget_weights()
        self._side.reset(self._parts.state(self._parts.name))
        return True

    def _workers_called(self, call: WorkerCall) -> None:
        """Hear a call to vLLM's workers before it is made."""
        if self._scheduler is not None and may_change(call):
            what = call.method or "a function"
            log.info("what is stored is not used from now on: weights may change by %s", what)
            self._parts.forget_weights()
            self._former.weights_changed()
            self._safely(self.reset_cache, instead=True)

    def _forget_former(self) -> None:
        """Go on under another name where vLLM has reset what was cached as the weights changed."""
        if self._former.has_ended():
            self._parts.forget_weights()
            self._side.reset(self._parts.state(self._parts.name))

    def status(self) -> dict[str, int]:
        """Return counters and what is under way, for probes and tests."""
        return self._side.status()

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a hook of the scheduler's, called on a worker"
        return self._scheduler

    def _safely(self, call: Callable[[], T], instead: T) -> T:
        """Return what `call` gives. On an exception switch off and return `instead`: a mistake of
        ours must not end the engine, which goes on as if it had no connector."""
        try:
            return call()
        except Exception:  # the root of every hook of the scheduler's
            log.exception("OwnerServe is switched off; please report this")
            self._side.switch_off()
            return instead

    # -- both ----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> OwnerServeStats | None:
        side = self._scheduler
        return self._safely(lambda: OwnerServeStats.taken(side), None) if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OwnerServeStats:
        return OwnerServeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OwnerServeProm:
        return OwnerServeProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish what is under way; the store may be opened by another process after it."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()


registration.register()
