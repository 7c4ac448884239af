"""This module builds a worker: checkpoint, runner, pools, cache, scheduler, engine. Wiring only."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.policies import DEFAULT_EVICTION, EVICTION_POLICIES
from ownerserve.cache.pools.budget import PoolSizes, share_memory
from ownerserve.cache.pressure import Watermarks
from ownerserve.directory.opening import opener_of
from ownerserve.engines.hf.engine.commands import AsyncEngine
from ownerserve.engines.hf.engine.loop import StepLoop
from ownerserve.engines.hf.engine.moving import check_state
from ownerserve.engines.hf.metrics.prometheus import (
    OwnershipCollector,
    RemoteCollector,
    RestoreMetrics,
    WorkerMetrics,
)
from ownerserve.engines.hf.metrics.status import WorkerIdentity
from ownerserve.engines.hf.metrics.transfers import TransferCollector
from ownerserve.engines.hf.model.checkpoint import LoadedCheckpoint, load_checkpoint
from ownerserve.engines.hf.model.runner import ModelRunner
from ownerserve.engines.hf.model.text import ChatCodec
from ownerserve.engines.hf.node.port import SLOT_FORMAT, HfPort, identity_of
from ownerserve.engines.hf.node.restoring import WithNode
from ownerserve.engines.hf.scheduling.requests import Facts
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import SchedulerLimits
from ownerserve.kv.descriptor import TailForm
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.ids import WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.specs import Coverage
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.node.ownership.inventory import kinds_of
from ownerserve.node.ownership.keeping import Staying
from ownerserve.node.ownership.ownership import Ownership, Owning, Unowned
from ownerserve.node.retention.policy import policy_of
from ownerserve.node.runtime.node_runtime import Calibration, NodeRuntime
from ownerserve.node.state import NodeState
from ownerserve.node.storage.adopting import take_over_at_start
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.storage.journal import Journal
from ownerserve.node.storage.limits import StoreLimits
from ownerserve.node.storage.media import DEFAULT_WRITE
from ownerserve.node.transfers.lending import Lending
from ownerserve.node.transfers.opening import NodeTransfers, TransferPlace
from ownerserve.node.transfers.prefills import AfterRead
from ownerserve.node.transfers.ranks import holders_of
from ownerserve.node.vocabulary.chains import PromptPrefixes
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.restore import Planner

CHUNK_BLOCKS = 16
"""Default chunk, in blocks: long enough to keep the device busy, short beside a decode step."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`WorkerOptions` say what a worker is made from. `block_tokens` and `chunk_tokens` None: the
    model's default. `checkpoints` names a policy (node.retention), `evict` one of cache.policies.
    `worker_id` is what the worker calls itself, unlike any other in its fleet. `directory` is where
    it asks whose the sessions are (directory.opening), with `fleet_key` where the directory wants
    keys; None: the worker owns none. `transfer` is where peers read its state and by which it reads
    theirs, where it has a node; None: it does neither.

    With a `store` (a directory), a host cache or a shared medium (`remote`) it has a node, which
    writes to them as `write` says (node.storage.media); without, it keeps state on the device only.
    `remote_key_file` has the key of all who share the medium (None: it bears none). The stores of
    dead workers in `adopt` are taken over into `store` first.
    """

    model: str
    device: str = "cpu"
    kv_bytes: int = 256 << 20
    max_running: int = 16
    max_waiting: int = 1024
    block_tokens: int | None = None
    chunk_tokens: int | None = None
    seed: int = 0
    hca_tail: TailForm = TailForm.RAW_ROWS
    store: Path | None = None
    adopt: tuple[Path, ...] = ()
    host_cache_bytes: int = 0
    remote: str | None = None
    remote_key_file: Path | None = None
    write: str = DEFAULT_WRITE
    node: NodeSettings = NodeSettings()
    evict: str = DEFAULT_EVICTION
    watermarks: Watermarks = Watermarks()
    checkpoints: str = "turn-end"
    store_limits: StoreLimits = StoreLimits()
    worker_id: str = ""
    directory: str | None = None
    fleet_key: FleetKey | None = None
    transfer: TransferPlace | None = None


class HfWorker(msgspec.Struct, frozen=True):
    """An `HfWorker` is everything that a server needs; `sizes` is for people. `prefixes` makes the
    digests of prompts as they are read: for the answer's coverage, and for a node. Between two
    steps `leave` hears that it begins to leave, and `is_needed` tells whether anything here still
    is: a turn, a lend, a session that has not gone elsewhere."""

    engine: AsyncEngine
    codec: ChatCodec
    facts: Facts
    metrics: WorkerMetrics
    sizes: PoolSizes
    prefixes: PromptPrefixes
    ownership: Owning = msgspec.field(default_factory=Unowned)
    transfers: NodeTransfers | None = None
    leave: Callable[[], object] = bool
    is_needed: Callable[[], object] = bool


def build_worker(options: WorkerOptions) -> HfWorker:
    """Load the model, allocate its pools and wire the worker; the engine is not started. Raises
    InvalidInput for options that can't be served."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput("device", "this torch sees no CUDA device", "use --device cpu")
    checkpoint = load_checkpoint(options.model, device=options.device, seed=options.seed)
    runner = ModelRunner(
        checkpoint.model, block_tokens=options.block_tokens, hca_tail=options.hca_tail
    )
    sizes = share_memory(runner.layout, options.kv_bytes, max_running=options.max_running)
    runner.allocate(sizes.slots, sizes.state_slots)
    order, least = EVICTION_POLICIES[options.evict], sizes.least_points
    cache = HeteroCache(runner.layout, sizes.slots, sizes.state_slots, order(), least_points=least)
    cache.pressure.watermarks = options.watermarks
    limits = _limits(options, runner, sizes)
    facts = _facts(checkpoint, runner, limits)
    codec, metrics = ChatCodec(checkpoint.tokenizer), WorkerMetrics()
    node = build_node(_in_steps(options, limits), checkpoint, runner=runner, cache=cache)
    scheduler = Scheduler(
        cache,
        limits,
        resume_of=node.resume if node else None,
        checkpoints_of=node.state.checkpoints.during if node else None,
    )
    identity = _identity(options, checkpoint, runner=runner, limits=limits, node=node)
    transfers = _transfers(options.transfer, identity.unit, node, runner=runner, metrics=metrics)
    steps = StepLoop(
        runner, scheduler, cache=cache, decoder=codec, identity=identity, metrics=metrics
    )
    if node is not None:
        steps.attach(restoring := WithNode(node, scheduler, RestoreMetrics(metrics.registry)))
        if (counts := node.remote_counts) is not None:
            metrics.registry.register(RemoteCollector(counts))
        if transfers is not None:
            transfers.move_sessions(cache, steps, restoring.comings)
            transfers.move_turns(
                steps.movable,
                partial(check_state, facts=facts, device=runner.device),
                cache=cache,
                node=restoring.comings,
            )
            names, port = node.state.names, HfPort(runner)
            steps.serve_peers(transfers.compute_for_others(cache, names, steps, layers=port))
    if options.directory is not None:
        scope = node.state.names.identity if node else identity_of(checkpoint, runner)
        ownership = Ownership(
            identity.unit,
            opener_of(options.directory, options.fleet_key),
            block_tokens=facts.block_tokens,
            scope=scope.digest(),
            inventory=steps.inventory,
            kinds=kinds_of(runner.layout, Coverage.RANGE),
        )
        metrics.registry.register(OwnershipCollector(ownership))
        steps.own(ownership)
    engine, prefixes = AsyncEngine(steps), PromptPrefixes(facts.block_tokens)
    owning = steps.ownership
    leaving = _leaving(steps, Staying(cache.sessions, owning, time.monotonic))
    return HfWorker(engine, codec, facts, metrics, sizes, prefixes, owning, transfers, *leaving)


def _leaving(
    steps: StepLoop, staying: Staying
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what hears that the worker begins to leave, and what tells whether it is needed."""
    return staying.begin, lambda: steps.is_serving() or staying.is_wanted()


def _in_steps(options: WorkerOptions, limits: SchedulerLimits) -> WorkerOptions:
    """Return the options with what a step may take at most: prompts their share, each decode a
    token."""
    step_tokens = limits.prefill_tokens_a_step + limits.max_running
    node = msgspec.structs.replace(options.node, step_tokens=step_tokens)
    return msgspec.structs.replace(options, node=node)


def _identity(
    options: WorkerOptions,
    checkpoint: LoadedCheckpoint,
    *,
    runner: ModelRunner,
    limits: SchedulerLimits,
    node: NodeRuntime | None,
) -> WorkerIdentity:
    """Return what the worker is, in a life that begins now."""
    place = options.transfer
    return WorkerIdentity(
        checkpoint.name,
        time.time_ns(),
        limits.sequence_tokens,
        runner.spec_digest().hex(),
        worker=WorkerId(options.worker_id),
        owns_sessions=options.directory is not None,
        lends=() if place is None or node is None else place.lends(node.tiers),
        frees_prompts=place is not None and place.after_read is AfterRead.FREE,
    )


def _facts(checkpoint: LoadedCheckpoint, runner: ModelRunner, limits: SchedulerLimits) -> Facts:
    return Facts(
        model=checkpoint.name,
        vocab_size=runner.vocab_size,
        sequence_tokens=limits.sequence_tokens,
        eos_token_ids=checkpoint.eos_ids,
        block_tokens=runner.layout.block_tokens,
    )


def _transfers(
    place: TransferPlace | None,
    unit: RoutingUnit,
    node: NodeRuntime | None,
    *,
    runner: ModelRunner,
    metrics: WorkerMetrics,
) -> NodeTransfers | None:
    """Open the port where peers read this worker, and make peers a tier of its node; None where
    there is no node, or no place was named."""
    if place is None or node is None:
        return None
    state, port = node.state, HfPort(runner)
    lending = Lending(state.cache, state.names, state.chains, regions=port.regions)
    parts = runner.payload_parts()
    sections = {name: PayloadSection(name, of) for name, of in parts.items()}
    block = runner.layout.block_tokens
    transfers = NodeTransfers(unit, lending, sections, block_tokens=block, place=place)
    tiers = node.add_peers(transfers.peers, place.brings)
    spec = state.names.identity.spec_digest
    transfers.state(holders_of(sections, spec=spec, block_tokens=block))
    transfers.lend_stored(state.names, state.residency, tiers, prices=state.costs.prices)
    metrics.registry.register(TransferCollector(transfers))
    return transfers


def build_node(
    options: WorkerOptions, checkpoint: LoadedCheckpoint, *, runner: ModelRunner, cache: HeteroCache
) -> NodeRuntime | None:
    """Build a node over the store that was asked for; None when none was, or it can't be opened."""
    on_cuda = options.device.startswith("cuda")
    cuda = torch.cuda.cudart() if on_cuda else None  # type: ignore[no-untyped-call]
    if options.store is not None:
        take_over_at_start(options.adopt, options.store, options.store_limits.on_disk())
    backing = open_backing(
        options.store,
        options.host_cache_bytes,
        remote=options.remote,
        remote_key_file=options.remote_key_file,
        write=options.write,
        limits=options.store_limits,
        cuda=cuda,
    )
    if backing is None:
        return None
    identity, port = identity_of(checkpoint, runner), HfPort(runner)
    digest = identity.digest().hex()[:16]
    costs, journal = f"costs-{digest}.json", None
    if options.store is not None and any(tier.name == "disk" for tier in backing.tiers.tiers):
        journal = Journal(options.store / f"sessions-{digest}.jsonl")
    calibration = Calibration(options.store / costs if options.store is not None else None)
    names = RecordNames(
        identity,
        runner.layout,
        engine=SLOT_FORMAT,
        blocks=options.node.record_blocks,
        parts=runner.payload_parts(),
    )
    planner = Planner(runner.planned_state(), port.abilities)
    state = NodeState(
        cache,
        names,
        planner=planner,
        costs=calibration.model,
        settings=options.node,
        policy=policy_of(options.checkpoints, planner.model, calibration.model),
    )
    return NodeRuntime(state, port, backing=backing, calibration=calibration, journal=journal)


def _limits(options: WorkerOptions, runner: ModelRunner, sizes: PoolSizes) -> SchedulerLimits:
    block = runner.layout.block_tokens
    chunk = options.chunk_tokens or CHUNK_BLOCKS * block
    room = sizes.most_blocks * block if runner.layout.range_names else runner.max_positions
    return SchedulerLimits(
        chunk_tokens=chunk,
        prefill_tokens_a_step=chunk,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        sequence_tokens=min(room, runner.max_positions),
    )
