"""vLLM's scheduler, synchronous or a step ahead, with drafts or without: it calls a connector's
hooks in vLLM's order and with vLLM's values."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from ownerserve.engines.vllm.worker_commands import Tables, WorkerCommands, WorkerStepReport
from tests.support.vllm_parts.fake_vllm.cache import FakeCacheManager
from tests.support.vllm_parts.fake_vllm.request import FakeRequest, RequestStatus

STEP_TOKENS = 16
MOST_RUNNING = 4


class Hooks(Protocol):
    """The hooks of a connector that the scheduler calls, as our scheduler's side names them."""

    def arrived(self, request: Any) -> None: ...
    def matched(self, request: Any, hit: int) -> tuple[int | None, bool]: ...
    def placed(self, request: Any, tables: Tables, tokens: int) -> None: ...
    def build(self, output: Any) -> WorkerCommands: ...
    def reported(self, report: WorkerStepReport | None) -> None: ...
    def finished(self, request: Any, tables: Tables) -> None: ...
    def frees_soon(self) -> bool: ...


@dataclass(frozen=True)
class Scheduled:
    """What one step computes of a request: its next `count` tokens, the last `drafted` of them
    drafts, in these blocks. `start` and `known` are where the scheduler takes it to be, and its
    tokens; workers go by that when it `begins`, and by what they have sampled from then on."""

    request: FakeRequest
    start: int
    count: int
    drafted: int
    known: int
    tables: tuple[list[int], ...]
    begins: bool


@dataclass(eq=False)
class SchedulerOutput:
    """vLLM's, as far as a connector reads it, with what the workers are told."""

    num_scheduled_tokens: dict[str, int]
    rows: list[Scheduled]
    commands: WorkerCommands = field(default_factory=WorkerCommands)


@dataclass(frozen=True)
class StepOutput:
    """What the workers say of a step: tokens by request, loads that are over, our report."""

    sampled_token_ids: dict[str, list[int]]
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()
    report: WorkerStepReport | None = None


class FakeScheduler:
    """One engine core's scheduler. `drafts` tokens are drafted a step; `ahead`: a step is scheduled
    before the answer to the one before it is here."""

    def __init__(
        self, manager: FakeCacheManager, hooks: Hooks, *, drafts: int, ahead: bool
    ) -> None:
        self.manager = manager
        self.hooks = hooks
        self.drafts = drafts
        self.depth = 2 if ahead else 1
        self.requests: dict[str, FakeRequest] = {}
        self.waiting: deque[FakeRequest] = deque()
        self.running: list[FakeRequest] = []
        self.in_flight: deque[SchedulerOutput] = deque()
        self._begin: set[str] = set()
        self._finished_recving: set[str] = set()
        self._failed_recving: set[str] = set()
        self._deferred_frees: deque[tuple[SchedulerOutput, list[Any]]] = deque()

    # -- requests ------------------------------------------------------------------------------

    def add_request(self, request: FakeRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.hooks.arrived(request)

    def abort(self, request: FakeRequest) -> None:
        """`finish_requests` with FINISHED_ABORTED."""
        is_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        still = is_loading and request.request_id not in self._finished_recving
        self._finished_recving.discard(request.request_id)
        self._failed_recving.discard(request.request_id)
        self._finish(request, RequestStatus.FINISHED_ABORTED, delay_free_blocks=still)

    def _finish(
        self, request: FakeRequest, status: RequestStatus, *, delay_free_blocks: bool = False
    ) -> None:
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.status = status
        processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        self.manager.remove_skipped_blocks(request.request_id, processed)
        blocks = -(-request.num_computed_tokens // self.manager.block_pool.hash_block_size)
        tables = self.manager.get_block_ids(request.request_id)
        self.hooks.finished(request, tuple(table[:blocks] for table in tables))
        if not delay_free_blocks:
            self._free(request)

    def _free(self, request: FakeRequest) -> None:
        self._free_blocks(request)
        del self.requests[request.request_id]

    def _free_blocks(self, request: FakeRequest) -> None:
        """Steps under way may still write to them: with a step ahead vLLM frees them later."""
        blocks = self.manager.pop_blocks_for_free(request)
        if self.in_flight and request.num_in_flight_tokens:
            self._deferred_frees.append((self.in_flight[-1], blocks))
        else:
            self.manager.block_pool.free_blocks(blocks)

    def reset_prefix_cache(self) -> bool:
        """As vLLM's with `reset_running_requests`; False: it raises, for blocks are still held."""
        while self.running:
            self._preempt(self.running.pop())
        return self.manager.block_pool.reset()

    # -- a step --------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        budget, rows = STEP_TOKENS, dict[str, Scheduled]()
        preempts, at = False, 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            count = min(budget, self._wanted(request))
            if count <= 0:
                at += 1
                continue
            placed, preempted = self._allocated(request, count)
            preempts = preempts or preempted
            if not placed:
                break
            rows[request.request_id] = self._scheduled(request, count)
            request.spec_token_ids = []
            budget, at = budget - count, at + 1
        if not preempts:
            self._admit(budget, rows)
        output = SchedulerOutput({name: row.count for name, row in rows.items()}, [*rows.values()])
        output.commands = self.hooks.build(output)
        self.in_flight.append(output)
        for row in output.rows:
            self._after_schedule(row)
        return output

    def _wanted(self, request: FakeRequest) -> int:
        ahead = request.num_output_placeholders
        most = request.num_prompt_tokens + request.max_tokens
        if ahead > 0 and request.num_computed_tokens + 2 - ahead >= most:
            return 0
        return request.num_tokens_with_spec + ahead - request.num_computed_tokens

    def _allocated(self, request: FakeRequest, count: int) -> tuple[bool, bool]:
        """Return whether a running request has blocks for its step, and whether one was preempted
        for that; the last ones go first."""
        preempted = False
        while not self.manager.allocate_slots(request, count):
            if self.hooks.frees_soon():
                return False, preempted
            victim = self.running[-1]
            if self.depth > 1 and victim.num_in_flight_tokens:
                return False, preempted
            self.running.remove(victim)
            self._preempt(victim)
            preempted = True
            if victim is request:
                return False, preempted
        return True, preempted

    def _preempt(self, request: FakeRequest) -> None:
        self._free_blocks(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        # Only a reset comes amid steps: what they answer of the request means nothing any more.
        request.drop_stale_output = True
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _scheduled(self, request: FakeRequest, count: int) -> Scheduled:
        begins = request.request_id in self._begin
        self._begin.discard(request.request_id)
        tables, start = (
            self.manager.get_block_ids(request.request_id),
            request.num_computed_tokens,
        )
        known = request.num_tokens
        drafted = max(0, start + count - known - request.num_output_placeholders)
        return Scheduled(request, start, count, drafted, known, tables, begins)

    def _admit(self, budget: int, rows: dict[str, Scheduled]) -> None:
        skipped: list[FakeRequest] = []
        # Those that hold blocks have a queue of their own in vLLM, which comes first.
        self.waiting = deque(sorted(self.waiting, key=lambda at: not self._holds_blocks(at)))
        while self.waiting and budget > 0 and len(self.running) < MOST_RUNNING:
            request = self.waiting.popleft()
            if not self._is_ready(request):
                skipped.append(request)
                continue
            hits, local, external = None, 0, 0
            if request.num_computed_tokens == 0:
                hits, local = self.manager.get_computed_blocks(request)
                found, loads = self.hooks.matched(request, local)
                if found is None:
                    skipped.append(request)
                    continue
                assert loads == (found > 0) and local + found <= request.num_tokens
                external = found
            have = request.num_computed_tokens + local + external
            count = 0 if external else min(budget, request.num_tokens - have)
            fits = not external or self._leaves_room_for_others(request)
            if not fits or not self.manager.allocate_slots(
                request, count, hits=hits, local=local, external=external
            ):
                self.waiting.appendleft(request)
                break
            tables = self.manager.get_block_ids(request.request_id)
            self.hooks.placed(request, tables, external)
            request.num_computed_tokens = have
            if external:
                request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
                skipped.append(request)
                continue
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self._begin.add(request.request_id)
            rows[request.request_id] = self._scheduled(request, count)
            budget -= count
        self.waiting.extendleft(reversed(skipped))

    def _holds_blocks(self, request: FakeRequest) -> bool:
        return request.num_computed_tokens > 0 or (
            request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        )

    def _leaves_room_for_others(self, request: FakeRequest) -> bool:
        """Return whether a load takes no blocks that prompts under way still need: vLLM's
        `reserved_blocks` and `full_sequence_must_fit`."""
        block = self.manager.block_pool.hash_block_size
        begun = [at for at in (*self.waiting, *self.running) if self._holds_blocks(at)]
        left = sum(-(-(at.num_tokens - at.num_computed_tokens) // block) + 1 for at in begun)
        needed = -(-request.num_tokens // block) + 1 + max(0, left)
        groups = len(self.manager.windows)
        return needed * groups <= self.manager.block_pool.get_num_free_blocks()

    def _is_ready(self, request: FakeRequest) -> bool:
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return True
        if request.request_id not in self._finished_recving:
            return False
        self._finished_recving.remove(request.request_id)
        if request.request_id in self._failed_recving:
            self._failed_recving.remove(request.request_id)
            blocks = self.manager.pop_blocks_for_free(request)
            self.manager.block_pool.free_blocks(blocks)
        else:
            self.manager.cache_blocks(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        preempted = request.num_preemptions > 0
        request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
        return True

    def _after_schedule(self, row: Scheduled) -> None:
        request = row.request
        request.num_computed_tokens += row.count
        request.num_in_flight_tokens += row.count
        known = request.num_tokens + request.num_output_placeholders
        request.is_prefill_chunk = request.num_computed_tokens < known
        if self.depth > 1 and not request.is_prefill_chunk:
            request.num_output_placeholders += 1 + row.drafted
            request.spec_token_ids = [-1] * self.drafts

    # -- its answer ----------------------------------------------------------------------------

    def update_from_output(self, output: StepOutput) -> None:
        """Take in the workers' answer to the oldest step in flight."""
        step = self.in_flight.popleft()
        while self._deferred_frees and self._deferred_frees[0][0] not in self.in_flight:
            self.manager.block_pool.free_blocks(self._deferred_frees.popleft()[1])
        for name in output.failed_recving:
            request = self.requests.get(name)
            if request and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self._failed_recving.add(name)
        for row in step.rows:
            self._sampled(row, output.sampled_token_ids[row.request.request_id])
        self.hooks.reported(output.report)
        for name in output.finished_recving:
            request = self.requests[name]
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._finished_recving.add(name)
            else:
                assert request.is_finished()
                self._free(request)

    def _sampled(self, row: Scheduled, tokens: list[int]) -> None:
        request = row.request
        request.num_in_flight_tokens -= row.count
        is_stale = request.num_stale_output_tokens > 0
        if is_stale:
            request.num_stale_output_tokens -= row.count
            assert request.num_stale_output_tokens >= 0
        if request.is_finished() or is_stale or not tokens:
            return
        rejected = row.drafted + 1 - len(tokens)
        request.num_computed_tokens -= rejected
        left = request.num_prompt_tokens + request.max_tokens - request.num_tokens
        request.append_output_token_ids(tokens[:left])
        if self.depth > 1:
            request.num_output_placeholders -= rejected + len(tokens[:left])
            known = request.num_computed_tokens - request.num_output_placeholders
            self.manager.cache_blocks(request, known)
        if len(tokens) >= left:
            self._finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        elif self.depth == 1:
            request.spec_token_ids = [-1] * self.drafts
