"""This module builds the connector's two sides from vLLM's configuration. Wiring, and every refusal
to start."""

from __future__ import annotations

import logging
import re
import time
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from ownerserve.engines.vllm import compat, identity
from ownerserve.engines.vllm.layout import shape, whole
from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.layout.shape import StateShape
from ownerserve.engines.vllm.ranks import Ranks
from ownerserve.engines.vllm.replay import rules
from ownerserve.engines.vllm.replay.padding import SlotPadding
from ownerserve.engines.vllm.replay.replays import ReplayLengths, Replays
from ownerserve.engines.vllm.scheduler_side.device import EngineDevice
from ownerserve.engines.vllm.scheduler_side.events import ResidencyEvents
from ownerserve.engines.vllm.scheduler_side.holding import Holding
from ownerserve.engines.vllm.scheduler_side.lending import (
    HeldSessions,
    LentShard,
    LentShards,
    RankedTransfers,
)
from ownerserve.engines.vllm.scheduler_side.lookup import StoreLookup
from ownerserve.engines.vllm.scheduler_side.measure import ConnectorObserver
from ownerserve.engines.vllm.scheduler_side.node_rpc import EngineLimits, NodeRpcHandler, limits_of
from ownerserve.engines.vllm.scheduler_side.owning import (
    SessionsHere,
    gateway_port,
    opener,
    transfer_place,
)
from ownerserve.engines.vllm.scheduler_side.scheduler import SchedulerParts, SchedulerSide
from ownerserve.engines.vllm.scheduler_side.soft_references import SoftReferences
from ownerserve.engines.vllm.scheduler_side.worker_reports import WorkerReports
from ownerserve.engines.vllm.served import NotServed, check_config, check_parallel
from ownerserve.engines.vllm.settings import ConnectorSettings, decode
from ownerserve.engines.vllm.tenants import Tenants
from ownerserve.engines.vllm.turns.prompts import Prompts
from ownerserve.engines.vllm.worker_side.lending import RankForms, RankLending
from ownerserve.engines.vllm.worker_side.stage import Stage
from ownerserve.engines.vllm.worker_side.streams import host_runtime, stream_of
from ownerserve.engines.vllm.worker_side.worker import BringsHere, WorkerSide
from ownerserve.kv.errors import InvalidInput, OwnerServeError
from ownerserve.kv.frame import (
    CONV,
    DENSE,
    FORMAT,
    RECURRENT,
    WINDOW,
    Payload,
    PayloadPart,
    PayloadSection,
)
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.prefix import Identity
from ownerserve.kv.registry import build_spec
from ownerserve.kv.specs import Coverage, ModelSpec
from ownerserve.kv.wire.holders import Holder
from ownerserve.node.hosted_state import HostedNodeState
from ownerserve.node.ownership.inventory import Inventory, kinds_of
from ownerserve.node.ownership.ownership import Ownership
from ownerserve.node.retention.saves import Capture, SaveLimits, Saves
from ownerserve.node.runtime.node_runtime import Calibration
from ownerserve.node.runtime.stating import speed_statement, tier_statements
from ownerserve.node.storage.adopting import take_over_at_start
from ownerserve.node.storage.backing import Backing, open_backing
from ownerserve.node.transfers.bringing import Bringing
from ownerserve.node.transfers.counting import named
from ownerserve.node.transfers.opening import NodeTransfers, TransferPlace
from ownerserve.node.transfers.ranks import holders_of
from ownerserve.node.transfers.stored_looks import StoredLooks
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import LeadForm, RecordNames, descriptors
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.plan.inputs import VLLM, Abilities, replaying_windows
from ownerserve.plan.restore import Planner
from ownerserve.plan.swa.branches import Branches, PointCost
from ownerserve.plan.swa.checkpoints import CheckpointPolicy, Full, TurnEnd, Zero
from ownerserve.plan.window_replay import why_too_long

log = logging.getLogger("vllm.ownerserve")

SIMPLE: dict[str, type[CheckpointPolicy]] = {"turn-end": TurnEnd, "full": Full, "zero": Zero}
"""Policies that need to know nothing of the model."""


RECORD_TOKENS = 1024
LEAST_RECORD_BLOCKS = 8

ALWAYS = Defaults(
    "restores = always",
    Coefficients(0.0, 1e6, 0.0),
    {tier: Medium(0.0, 1e12) for tier in (Tier.HOST, Tier.PEER, Tier.DISK)},
)
"""Prices by which nothing is computed that can be loaded; on a GPU all of it lands in host memory
first."""


class ConnectorParts:
    """`ConnectorParts` hold an engine's configuration, read once. Raises InvalidInput for what an
    operator must mend."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self.settings: ConnectorSettings = decode(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidInput(
                "kv_load_failure_policy",
                f"{transfer.kv_load_failure_policy!r} fails a request whose state can't be read",
                'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
            )
        self.config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.ranks = Ranks.of(parallel)
        self.store = Path(self.settings.store)
        self.home = self.ranks.home(self.store)
        self.not_served: str | None = None
        try:
            check_parallel(parallel)
            check_config(vllm_config.model_config.hf_config.to_dict())
            self.shape = shape.describe(
                kv_cache_config,
                block_tokens=self.settings.block_tokens,
                packed_by=compat.packed_by(vllm_config),
                drafts=self._left_out(),
                stage_layers=compat.stage_layers(vllm_config) if self.ranks.stages > 1 else (),
                model=self._known_model(),
            )
        except NotServed as error:
            self.not_served, self.shape = str(error), shape.nothing(kv_cache_config)
        self.layout = self.shape.layout()
        by_length = max(LEAST_RECORD_BLOCKS, RECORD_TOKENS // self.layout.block_tokens)
        self.record_blocks = self.settings.record_blocks or by_length

    def _left_out(self) -> frozenset[str]:
        """Return the layers that are no state here: the drafter's, unless they are to be kept."""
        groups = self.kv_cache_config.kv_cache_groups
        drafts = compat.draft_layers(self.config, groups)
        return drafts if self.settings.drafter == "left-out" else frozenset()

    def _known_model(self) -> ModelSpec | None:
        """Return what the registry says of the model; None where it does not know it, and where a
        drafter's layers, of which it says nothing, are kept beside the model's."""
        if self.settings.drafter != "left-out":
            return None
        return known_model(self.config)

    @cached_property
    def identity(self) -> Identity:
        """`identity` is the name that this engine's state bears; the weight files may be read for
        it."""
        cache = self.home / "weights.json"
        return identity.identity_of(
            self.config, whole_of(self), weights=self.settings.weights, cache=cache
        )

    @cached_property
    def calibration(self) -> Calibration:
        """`calibration` is what loads and prompts cost here, kept beside the store."""
        if self.settings.restores == "always":
            return Calibration(None, ALWAYS)
        return Calibration(file_of(self, "costs", "json"))

    @cached_property
    def replays(self) -> Replays:
        """`replays` are those of this engine core; without a planner where it can do none."""
        lengths = ReplayLengths()
        if not rules.is_asked(self.config):
            return Replays(lengths, None, workers=self.ranks.workers)
        groups = self.kv_cache_config.kv_cache_groups
        stages = int(self.config.parallel_config.pipeline_parallel_size)
        why = rules.why_off(self.config, self.kv_cache_config, has_hooks=compat.has_replay_hooks())
        if why is None:
            text = self.config.model_config.hf_text_config.to_dict()
            found = rules.replay_lengths(text, groups, stages=stages)
            lengths, why = (lengths, found) if isinstance(found, str) else (found, None)
        why = why or why_too_long(
            lengths.reach,
            block_tokens=self.layout.block_tokens,
            step_tokens=int(self.config.scheduler_config.max_num_batched_tokens),
        )
        if why is not None:
            log.warning("nothing is replayed: %s", why)
            return Replays(lengths, None, workers=self.ranks.workers)
        model = msgspec.structs.replace(self.shape.model_state(), exact_replay_tokens=lengths.reach)
        planner = Planner(model, replaying_windows(self.abilities()))
        return Replays(lengths, planner, workers=self.ranks.workers)

    @cached_property
    def device(self) -> EngineDevice:
        """`device` is vLLM's blocks as the node sees them."""
        return EngineDevice(self.layout)

    def names(self, name: Identity) -> RecordNames:
        """Return the names of records whose identity is `name`."""
        return RecordNames(
            name,
            self.layout,
            engine=FORMAT,
            blocks=self.record_blocks,
            parts=arrays_of(self.shape),
            lead=self.lead,
        )

    @property
    def lead(self) -> LeadForm | None:
        """`lead` is how windows lead up to a point's, if they are kept so."""
        # Stages describe what they keep, each its own: not yet leads.
        return self.shape.lead() if self.ranks.stages == 1 else None

    def state(self, name: Identity) -> HostedNodeState:
        """Make a node whose records bear `name`."""
        settings, names = self.settings, self.names(name)
        operations = Operations()
        saves = Saves(
            names,
            operations,
            policy=self.policy(),
            capture=Capture(exact_end=self.shape.is_recurrent),
            limits=SaveLimits(copy_bytes=settings.copy_bytes, buffer_bytes=settings.buffer_bytes),
        )
        node = NodeSettings(
            record_blocks=self.record_blocks,
            restore_deadline_s=settings.restore_deadline_s,
            least_fetched=1,  # vLLM knows a load by the tokens that it brings
            attempts=1,  # vLLM frees a failed load's blocks: a second try would queue again
        )
        return HostedNodeState(
            self.device,
            operations,
            planner=self.planner(),
            costs=self.calibration.model,
            saves=saves,
            settings=node,
        )

    def planner(self) -> Planner:
        """Make the planner of restores, which replays nothing."""
        return Planner(self.shape.model_state(), self.abilities())

    def policy(self) -> CheckpointPolicy:
        """Make the policy that says which boundaries get point state."""
        simple = SIMPLE.get(self.settings.checkpoints)
        return simple() if simple is not None else Branches(point_cost(self))

    def forget_weights(self) -> None:
        """Go on under a name that no one else ever bore: the weights may be others from now on."""
        weights = f"{self.identity.weights} reset {uuid4().hex}"
        self.name = msgspec.structs.replace(self.identity, weights=weights)

    @cached_property
    def name(self) -> Identity:
        """`name` is what state that is computed from now on bears: `identity`, until the weights
        may be others than those of the checkpoint."""
        return self.identity

    def abilities(self) -> Abilities:
        """Return what vLLM lets a connector do on this platform."""
        if not compat.is_cpu():
            return VLLM
        return msgspec.structs.replace(VLLM, landing_tier=Tier.DEVICE)


def point_cost(parts: ConnectorParts) -> PointCost:
    """Return what the model's point weighs here."""
    model = parts.shape.model_state()
    return PointCost(
        model.point_bytes, model.range_bytes_per_token, has_lead=parts.lead is not None
    )


def known_model(vllm_config: Any) -> ModelSpec | None:
    """Return what the registry says of the model; None, with a word in the log, where it does not
    know it."""
    try:
        return build_spec(vllm_config.model_config.hf_text_config.to_dict())
    except OwnerServeError as error:
        log.info("which layer keeps what is taken from vLLM alone: %s", error)
        return None


def scheduler_side(parts: ConnectorParts) -> SchedulerSide:
    """Make the scheduler's side of an engine core, with the threads that work beside it."""
    why = parts.not_served and "model"
    why = why or identity.why_not(parts.config, is_recurrent=parts.shape.is_recurrent)
    if why is not None:
        log.warning("state is neither kept nor restored: %s", parts.not_served or why)
    components = ", ".join(parts.shape.components)
    log.info("OwnerServe: blocks of %d tokens, %s", parts.layout.block_tokens, components)
    for other in parts.ranks.others(parts.store):
        log.warning(
            "what %d pipeline stages of %d tensor-parallel ranks have stored in %s is not found by "
            "%d of %d: it is not converted. Remove it, or start with as many",
            *(other.stages, other.tensor, parts.home),
            *(parts.ranks.stages, parts.ranks.tensor),
        )
    unit, kept = unit_of(parts), holding(parts)
    sessions = SessionsHere(ownership(parts, unit, kept.inventory) if why is None else None)
    transfers = transfers_of(parts, unit, kept) if why is None else None
    peers = None if transfers is None else transfers.peers
    lookup = StoreLookup(parts.ranks.shards(parts.store)[0], peers)
    handler = NodeRpcHandler(limits(parts, unit), kept, sessions, transfers)
    reports = worker_reports(parts, opened(handler, parts))
    tiers, planner = tiers_of(parts.settings, transfers), parts.planner()

    def tell(costs: CostModel) -> None:
        reports.measured(speed_statement(costs, replay_tokens=0), tier_statements(costs, tiers))
        kept.plans(planner, parts.calibration.model.prices())

    scheduler_parts = SchedulerParts(
        lookup=lookup,
        holding=kept,
        soft=SoftReferences(parts.settings.soft_reference),
        prompts=Prompts(
            parts.layout.block_tokens,
            lookup.later,
            algorithm=str(parts.config.cache_config.prefix_caching_hash_algo),
            processing=identity.processing_of(parts.config),
        ),
        measuring=ConnectorObserver(
            # Where prices are given they are not learnt; what things take is told all the same.
            parts.calibration if parts.settings.restores == "by-cost" else Calibration(None),
            lookup.later,
            tell=tell,
            tail_tokens=parts.layout.block_tokens,
            computed=handler.computed,
        ),
        reports=reports,
        sessions=sessions,
        tenants=Tenants.of(parts.home),
        replays=parts.replays,
        workers=parts.ranks.workers,
        step_tokens=int(parts.config.scheduler_config.max_num_batched_tokens),
        bypassed=why,
        transfers=dict if transfers is None else lambda: named(transfers.counts()),
    )
    return SchedulerSide(parts.state(parts.identity), parts.device, parts.shape, scheduler_parts)


def unit_of(parts: ConnectorParts) -> RoutingUnit:
    """Return the routing unit that this engine core is, in this life: each call makes another
    one."""
    return RoutingUnit(worker_id(parts), parts.ranks.data_parallel, Incarnation(time.time_ns()))


def ownership(parts: ConnectorParts, unit: RoutingUnit, inventory: Inventory) -> Ownership | None:
    """Make and start what owns sessions as `unit`, and tells the directory what `inventory` holds;
    None without a directory."""
    if not parts.settings.directory:
        return None
    open_directory = opener(parts.settings.directory, parts.settings.curve_key_file)
    owned = Ownership(
        unit,
        open_directory,
        block_tokens=parts.layout.block_tokens,
        scope=parts.identity.digest(),
        inventory=inventory,
        kinds=kinds_of(parts.layout, Coverage.RANGE),
    )
    owned.start()
    return owned


def holding(parts: ConnectorParts) -> Holding:
    """Make what tells of all ranks' stores; its thread starts."""
    return Holding(
        parts.names(parts.identity),
        parts.ranks.shards(parts.store),
        file_of(parts, "sessions", "jsonl"),
        can_replay=parts.abilities().can_replay,
    )


def place_of(parts: ConnectorParts, rank: int = 0) -> TransferPlace | None:
    """Return where peers read a rank of this engine, and by which roads it reads them; None where
    neither is done: by the settings, or since a stage has but its layers of what a peer would
    read."""
    settings, ranks = parts.settings, parts.ranks
    if not settings.lend_bytes or ranks.stages > 1 or parts.not_served:
        return None
    # Each of several ranks is asked at a port of its own too, behind that at which it is read.
    behind = ranks.data_parallel * ranks.tensor + rank
    behind *= 2 if ranks.tensor > 1 else 1
    return transfer_place(
        settings.transfer_host,
        settings.transfer_port and settings.transfer_port + behind,
        settings.curve_key_file,
        lend_bytes=settings.lend_bytes,
        interface=settings.transfer_interface,
    )


def sections_of(parts: ConnectorParts) -> dict[str, PayloadSection]:
    """Return what a unit of each component holds, as peers lay it out."""
    return {name: at.section for name, at in parts.shape.components.items()}


def heads_of(parts: ConnectorParts) -> dict[str, int]:
    """Count the model's heads, over all tensor-parallel ranks, by component."""
    ranks = parts.ranks.tensor
    kv_heads = compat.kv_heads(parts.config) if ranks > 1 else 1
    return whole.model_heads(sections_of(parts).values(), ranks=ranks, kv_heads=kv_heads)


def whole_of(parts: ConnectorParts) -> Payload:
    """Return the state of all tensor-parallel ranks, by which it is named: however many they
    are."""
    payload, ranks = parts.shape.payload, parts.ranks.tensor
    return payload if ranks == 1 else whole.whole(payload, heads_of(parts), ranks=ranks)


def holders(parts: ConnectorParts, rank: int) -> dict[str, Holder]:
    """Return what one tensor-parallel rank states of itself to peers."""
    return holders_of(
        sections_of(parts),
        spec=whole_of(parts).digest(),
        block_tokens=parts.layout.block_tokens,
        at=(rank, parts.ranks.tensor),
        heads=heads_of(parts),
    )


def file_of(parts: ConnectorParts, name: str, suffix: str) -> Path:
    """Return where the engine core keeps something about the state that it names: another number of
    ranks has other stores, and other costs."""
    ranks = f"-of-{parts.ranks.tensor}" if parts.ranks.tensor > 1 else ""
    return parts.home / f"{name}-{parts.identity.digest().hex()[:16]}{ranks}.{suffix}"


def bringing_of(parts: ConnectorParts, place: TransferPlace) -> Bringing:
    """Make what brings of peers in a process that lends nothing; its thread starts."""
    block = parts.layout.block_tokens
    bringing = Bringing(unit_of(parts), sections_of(parts), block_tokens=block, place=place)
    bringing.peers.own = tuple(holders(parts, rank) for rank in range(parts.ranks.tensor))
    return bringing


def rank_transfers(parts: ConnectorParts, backing: Backing, directory: Path) -> BringsHere | None:
    """Make what brings of peers in a rank's process, and lends what the rank has stored, if it is
    one of several: else the scheduler's process lends. None where neither is done."""
    rank = compat.tensor_rank()
    place = place_of(parts, rank)
    if place is None:
        return None
    if parts.ranks.tensor == 1:
        return bringing_of(parts, place)
    unit, forms = unit_of(parts), RankForms(descriptors_of(parts.shape), sections_of(parts))
    # Who reads several ranks tells them apart by their names, as it does workers.
    unit = msgspec.structs.replace(unit, worker=WorkerId(f"{unit.worker}.rank-{rank}"))
    try:
        return RankLending(
            unit, holders(parts, rank), backing.tiers, forms=forms, place=place, directory=directory
        )
    except OSError as error:
        log.warning("%s; nothing is lent or brought", error)
        return None


def transfers_of(
    parts: ConnectorParts, unit: RoutingUnit, kept: Holding
) -> NodeTransfers | RankedTransfers | None:
    """Open what tells peers what this engine has stored, and the port where they read it, unless
    its ranks have theirs; None where nothing is lent."""
    place, sections = place_of(parts), sections_of(parts)
    if place is None:
        return None
    block, first = parts.layout.block_tokens, parts.calibration.model.prices()
    names, directories = parts.names(parts.identity), parts.ranks.shards(parts.store)
    sessions = HeldSessions(kept)
    if parts.ranks.tensor > 1:
        shards = LentShards(directories)
        looks = StoredLooks(names, sessions, shards, prices=lambda: kept.prices or first)
        return RankedTransfers(bringing_of(parts, place), looks, shards)
    (directory,) = directories
    transfers = NodeTransfers(unit, None, sections, block_tokens=block, place=place)
    shard = LentShard(directory)
    transfers.state(holders(parts, 0))
    transfers.lend_stored(names, sessions, shard, prices=lambda: kept.prices or first)
    transfers.stopped = shard.close
    return transfers


def worker_reports(parts: ConnectorParts, handler: NodeRpcHandler | None) -> WorkerReports:
    """Make the reports of this engine: by RPC, and as KV events where vLLM publishes them."""
    ranges = parts.layout.range_names
    events = getattr(parts.config, "kv_events_config", None)
    follows = events is not None and events.enable_kv_cache_events
    return WorkerReports(
        handler,
        ResidencyEvents() if follows and ranges else None,
        component=ranges[0] if ranges else "",
        groups=parts.shape.group_tokens,
    )


def limits(parts: ConnectorParts, unit: RoutingUnit) -> EngineLimits:
    """Return the facts that the RPC handler tells of this engine and that do not change in its
    life."""
    layout = parts.layout
    slot_bytes = {component.name: component.slot_bytes for component in layout.components}
    return limits_of(
        parts.config,
        unit=unit,
        token_bytes=sum(slot_bytes[name] for name in layout.range_names) // layout.block_tokens,
        sequence_bytes=sum(slot_bytes[name] for name in layout.point_names),
        spec_digest=parts.identity.spec_digest.hex(),
    )


def worker_id(parts: ConnectorParts) -> WorkerId:
    """Return what the worker calls itself: the setting, else vLLM's own id of the engine, which it
    makes anew with each start. All data-parallel ranks of an engine are one worker; vLLM tells
    theirs apart by a suffix."""
    engine_id = re.sub(r"(?:_dp\d+)+$", "", str(parts.config.kv_transfer_config.engine_id))
    return WorkerId(parts.settings.worker_id or engine_id)


def tiers_of(
    settings: ConnectorSettings, transfers: NodeTransfers | RankedTransfers | None
) -> dict[Tier, int | None]:
    """Return the media where this engine finds state below its device, with the bytes of each:
    those of peers it does not know."""
    tiers: dict[Tier, int | None] = {}
    if settings.host_cache_bytes:
        tiers[Tier.HOST] = settings.host_cache_bytes
    tiers[Tier.DISK] = settings.store_bytes
    if transfers is not None:
        tiers[Tier.PEER] = None
    return tiers


def opened(handler: NodeRpcHandler, parts: ConnectorParts) -> NodeRpcHandler | None:
    """Let the handler answer, and return it; None, with a warning, where its address can't be left
    in the store."""
    settings = parts.settings
    # Each data-parallel rank answers for itself, at a port of its own.
    asked = settings.rpc_port and settings.rpc_port + parts.ranks.data_parallel
    port = gateway_port(settings.rpc_host, asked, settings.curve_key_file)
    try:
        handler.open(parts.home, port)
    except OSError as error:
        log.warning("%s; /ownerserve/* has no answers", error)
        return None
    return handler


def slot_padding(parts: ConnectorParts) -> SlotPadding | None:
    """Make the worker's part of replays, once its model is loaded; None where none was asked
    for."""
    if not rules.is_asked(parts.config):
        return None
    padding = SlotPadding(parts.kv_cache_config.kv_cache_groups, compat.attention_of(parts.config))
    if not padding.works:
        log.warning("nothing is replayed: attention by %s", ", ".join(padding.unknown) or "none")
    return padding


def worker_side(parts: ConnectorParts, kv_caches: dict[str, Any]) -> WorkerSide:
    """Make the worker's side of one rank, once its caches exist."""
    first = next(iter(kv_caches.values()))
    device = (first if hasattr(first, "device") else first[0]).device
    if device.type == "cpu":
        compat.ready_the_cpu()
    specs = {
        name: spec
        for group in parts.kv_cache_config.kv_cache_groups
        for name, spec in compat.layer_specs(group)
    }
    orders = {
        name: compat.cpu_key_order(specs[at.layers[0].name])
        for name, at in parts.shape.components.items()
        if name in (DENSE, WINDOW)
    }
    lies_swapped = {
        CONV: parts.shape.is_recurrent and compat.conv_columns_first(),
        RECURRENT: parts.shape.is_recurrent and compat.delta_state_is_transposed(),
    }
    codec = PageCodec(
        parts.shape,
        kv_caches,
        num_blocks=parts.kv_cache_config.num_blocks,
        key_orders=orders,
        transposed=[name for name, swapped in lies_swapped.items() if swapped],
        staging_bytes=parts.settings.staging_bytes,
    )
    stage = compat.pipeline_stage() if parts.ranks.stages > 1 else 0
    directory = parts.ranks.shard(parts.store, stage, compat.tensor_rank())
    cache_bytes, cuda = parts.settings.host_cache_bytes, host_runtime(device)
    buffer_bytes = parts.settings.buffer_bytes
    limits = parts.settings.store_limits(point_cost(parts).store_share)
    dead = [parts.ranks.shard(Path(d), stage, compat.tensor_rank()) for d in parts.settings.adopt]
    take_over_at_start(dead, directory, limits.on_disk())
    backing = open_backing(
        directory, cache_bytes, cuda=cuda, buffer_bytes=buffer_bytes, limits=limits
    )
    side = WorkerSide(
        backing,
        codec,
        stream_of(device),
        readers=parts.settings.readers,
        stage=stage_of(parts) if parts.ranks.stages > 1 else None,
        rank=str(directory.relative_to(parts.home)) if parts.ranks.workers > 1 else "",
    )
    if backing is not None and (brings := rank_transfers(parts, backing, directory)) is not None:
        side.bring_by(brings)
    return side


def stage_of(parts: ConnectorParts) -> Stage:
    """Return what this worker's pipeline stage keeps, and how its records are described."""
    shape = parts.shape
    return Stage(
        descriptors_of(shape),
        {name: len(at.groups) for name, at in shape.components.items()},
    )


def descriptors_of(shape: StateShape) -> dict[str, bytes]:
    """Return how a worker's own records are described, by component."""
    return descriptors(shape.layout(), arrays_of(shape), form=FORMAT)


def arrays_of(shape: StateShape) -> dict[str, tuple[PayloadPart, ...]]:
    """Return the arrays in a unit of each component, the lead's too."""
    return {name: at.section.parts for name, at in shape.components.items()}
