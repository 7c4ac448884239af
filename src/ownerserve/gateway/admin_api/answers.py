"""The answers of the admin port, by type: what is served is encoded from these, and what the API's
description says of them is made of these too (openapi.py).

Owns no fact. `None` is what nobody told; a field that may be left out says so by its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ownerserve.gateway.owner_changes import Heard
from ownerserve.gateway.roster import Stay
from ownerserve.gateway.workers.components import ComponentMemory
from ownerserve.kv.messages import ExecutionMode, PlacementAction, Tier
from ownerserve.kv.wire.status import ProfileStatement, RefillShare
from ownerserve.router.decision import DispatchReason, TurnClass
from ownerserve.router.entry.terms import WaitReason
from ownerserve.router.messages import Arm
from ownerserve.router.requests.identity import SessionSource
from ownerserve.router.rollout.steering import Mode
from ownerserve.router.worker import WorkerRole

Counts = Mapping[str, int]


class AdminAnswer(msgspec.Struct):
    """An answer of the admin port is a JSON object."""


class ErrorRow(AdminAnswer):
    """A problem is why a request was refused: `code` for programs, `message` and `mend` for people;
    `field` is what of the request was wrong."""

    code: str
    field: str | None
    message: str
    mend: str


class ErrorAnswer(AdminAnswer):
    """Every error of the admin port is one of these."""

    error: ErrorRow


class HealthAnswer(AdminAnswer):
    """How many workers may be chosen."""

    workers_up: int


class LogLevel(AdminAnswer):
    """The least that the log has, and what it may be set to."""

    level: str
    levels: Sequence[str]


# ---- /status


class DirectoryAnswers(AdminAnswer):
    """What the directory answered, by outcome, what that comes to (`state`), and which workers own
    sessions there."""

    state: str
    answers: Counts
    workers_owning: Sequence[str]


class Requests(AdminAnswer):
    """What became of all requests: received = done + rejected + live."""

    received: int
    done: int
    rejected: int
    finished: int
    broken: int
    aborted: int


class DeviceMemory(AdminAnswer):
    """A worker's device memory for state, in bytes, by its last statement."""

    bytes_total: int
    bytes_free: int
    bytes_evictable: int
    components: Sequence[ComponentMemory] | None


class PricedBy(AdminAnswer):
    """What a worker is priced by, and what it says of itself (`stated`)."""

    models: Sequence[str]
    role: WorkerRole
    actions: Sequence[PlacementAction]
    spec_digest: str
    kv_bytes_total: int
    kv_bytes_per_token: float
    kv_bytes_per_sequence: float
    prefill_ms: Sequence[float]
    step_ms: float
    step_ms_per_sequence: float
    is_measured: bool
    stated: ProfileStatement | None
    problems: Sequence[str]


class WorkerLoadRow(AdminAnswer):
    """One routing unit with its load, as the router counts it now."""

    worker: str
    up: bool
    requests: int
    pending_prefill_tokens: int
    held_tokens: int
    sessions: int
    dp_rank: int
    incarnation: int | None
    model: str | None
    queue_ms: float
    batch: float
    occupancy: float
    busy_share: float | None
    refill_shares: Sequence[RefillShare]
    profile: PricedBy
    device_memory: DeviceMemory | None
    connections_opened: int
    connections_reused: int
    connections_idle: int


class ProbeRow(AdminAnswer):
    """What the last probes of a worker found, also of one that never was up."""

    states_itself: bool
    models: Sequence[str]
    assigned: Sequence[str]
    models_unknown: str | None
    problems: Sequence[str]
    slow: bool
    cause: str


class Pressed(AdminAnswer):
    """Turns that did not go as decided, by kind and reason."""

    kind: str
    reason: str
    count: int


class Latency(AdminAnswer):
    """Times in seconds; the edges that half and 95 % of the values do not exceed."""

    count: int
    mean_s: float | None
    p50_at_most_s: float | None
    p95_at_most_s: float | None


class LatencyRow(AdminAnswer):
    """The latency of one execution mode; None: nobody says how those were served."""

    mode: ExecutionMode | None
    first_byte: Latency
    whole: Latency


class PatternRow(AdminAnswer):
    """A session whose turns were served without what it had left, so many in a row now and at most:
    its later turns by mode, how many went on from what it had left, and the mean time to their
    first byte."""

    session: str
    later_turns: int
    kept: int
    lost_run: int
    longest_lost_run: int
    first_byte_mean_s: float
    modes: Counts


class Patterns(AdminAnswer):
    """How the sessions seen last were served, of those with four later turns: how many of them by
    the share (in percent) of their later turns that went on from what they had left, and those
    that starved most. `finishes`: whole answers by why they ended."""

    kept_share: Counts
    worst: Sequence[PatternRow]
    finishes: Counts


class Discovered(AdminAnswer):
    """What one source of workers says: how many it names, how often it failed, and why it can say
    nothing now."""

    workers: int
    failures: int
    cause: str | None


class WaitingTurns(AdminAnswer, rename={"session_class": "class"}):
    """Turns of one tenant and class that wait before the fleet, for one reason."""

    tenant: str
    session_class: str
    reason: WaitReason
    turns: int


class NotLetIns(AdminAnswer, rename={"session_class": "class"}):
    """Requests of one tenant and class that were not let in, by reason."""

    tenant: str
    session_class: str
    reason: str
    count: int


class HeldTurnRow(AdminAnswer, rename={"session_class": "class"}):
    """A turn that waits before the fleet: for what, how long, where it stands in line now, and
    where it stood when it came. `session` None: it belongs to none."""

    session: str | None
    tenant: str
    session_class: str
    reason: WaitReason
    waited_s: float
    place: int
    of: int
    came_at: int


class Queue(AdminAnswer):
    """A queue is the turns that wait before the fleet, those that came first one by one, and the
    requests that were not let in. `without_room`: sessions that were let in though there was no
    seat."""

    waiting: Sequence[WaitingTurns]
    first: Sequence[HeldTurnRow]
    without_room: int
    not_let_in: Sequence[NotLetIns]


class LearntFacts(AdminAnswer):
    """What the sessions of the last turns are like, as the constants were derived from it."""

    context_tokens_p50: int
    context_tokens_p90: int
    addition_tokens_p50: int
    reuse_share: float
    decoding: float


class RoutingConstants(AdminAnswer):
    """The constants that decisions depend on, as they are in force. `by_hand`: those that somebody
    gave. All others follow the fleet; `learnt_from` null: they are still what a gateway begins
    with."""

    hot_ms: float
    cool_s: float
    memory_ms_per_gib: float
    duplicate_ms_per_gib: float
    interference: float
    by_hand: Sequence[str]
    turns: int
    learnt_from: LearntFacts | None


class GatewayStatus(AdminAnswer):
    """The workers with their load, and the account of all requests."""

    age_s: float
    policy: str
    mode: Mode
    draining: bool
    constants: RoutingConstants
    sessions: int
    content_sessions: int
    directory: DirectoryAnswers | None
    clients: int
    live: int
    requests: Requests
    discovery: Mapping[str, Discovered]
    workers: Sequence[WorkerLoadRow]
    probes: Mapping[str, ProbeRow]
    never_up: Sequence[str]
    reasons: Counts
    refusals: Counts
    failures: Counts
    downs: Counts
    errors: Counts
    pressure: Sequence[Pressed]
    queue: Queue
    releases: Counts
    owner_changes: Counts
    latency: Sequence[LatencyRow]
    patterns: Patterns


# ---- /decisions


class CopySource(AdminAnswer):
    """Where state was to come from."""

    worker: str
    tier: str
    tokens: int


class WantedMigration(AdminAnswer, rename={"source": "from", "target": "to"}):
    """A migration that the decision wanted beside the turn, or a replica of its prefix."""

    source: str
    target: str
    tokens: int


class ShadowDecision(AdminAnswer):
    """What the policy that decides beside would have done; what was done is expected to cost
    `regret_ms` more."""

    policy: str
    worker: str
    action: PlacementAction
    reason: DispatchReason
    expected_cached_tokens: int
    regret_ms: float


class PricedWay(AdminAnswer):
    """One way to place the turn, with its price; the terms add up to it."""

    action: PlacementAction
    worker: str
    total_ms: float
    cached_tokens: int
    terms_ms: Mapping[str, float]


class WaitRow(AdminAnswer):
    """What a turn waited for before the fleet, how long, and where it stood in line when it
    came."""

    reason: WaitReason
    waited_s: float
    place: int
    of: int


class DecisionRow(AdminAnswer):
    """One decision: where a turn went and why, or why nowhere (`worker` None, and nothing from
    `attempt` on). `age_s` is how long ago it was made."""

    age_s: float
    request_id: str
    trace_id: str | None
    session: str | None
    named_by: SessionSource | None
    parent: str | None
    worker: str | None
    reason: str
    waits: Sequence[WaitRow]
    attempt: int | UnsetType = UNSET
    prefill_tokens: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    turn: TurnClass | UnsetType = UNSET
    arm: Arm | UnsetType = UNSET
    action: PlacementAction | UnsetType = UNSET
    expected_cached_tokens: int | UnsetType = UNSET
    prefill_worker: str | UnsetType | None = UNSET
    source: CopySource | UnsetType | None = UNSET
    wanted_migration: WantedMigration | UnsetType | None = UNSET
    wanted_replica: WantedMigration | UnsetType | None = UNSET
    shadow: ShadowDecision | UnsetType | None = UNSET
    priced: Sequence[PricedWay] | UnsetType = UNSET


class Decisions(AdminAnswer):
    """The newest decisions, the last one first."""

    decisions: Sequence[DecisionRow]


# ---- /sessions and /owners


class HeldCopy(AdminAnswer):
    """State of a session at one place; `worker` None: in a store that all reach."""

    worker: str | None
    tier: Tier
    tokens: int


class SessionRow(AdminAnswer):
    """A session, who owns it, where its next turn goes (`home`) and where its state lies."""

    session: str
    owner: str | None
    former_owner: str | None
    home: str | None
    granted_to: str | None
    seen_s_ago: float
    moved_s_ago: float | None
    turns: int
    live: int
    context_tokens: int
    copies: Sequence[HeldCopy]


class OwnerChangeRow(AdminAnswer, rename={"former": "from", "owner": "to"}):
    """A session went from one owner to another."""

    age_s: float
    session: str
    former: str
    owner: str
    how: Heard


class SessionsAnswer(AdminAnswer):
    """The sessions that were used last, and the newest changes of owners."""

    known: int
    sessions: Sequence[SessionRow]
    owner_changes: Sequence[OwnerChangeRow]


class EpochRow(AdminAnswer):
    """One grant of ownership; epochs compare by term (its ordinal), then by counter."""

    term: int
    counter: int


class OwnerRow(AdminAnswer):
    """An owner row says who owns a session, as far as this gateway heard: `up` False is an owner
    that is down or began another life, `epoch` None one that nobody granted."""

    session: str
    owner: str | None
    up: bool
    granted_to: str | None
    seen_s_ago: float
    epoch: EpochRow | None


class OwnerCount(AdminAnswer):
    """How many sessions go to one routing unit now."""

    worker: str
    dp_rank: int
    sessions: int


class Owners(AdminAnswer):
    """The owners of the sessions that were used last, how many sessions go where, and the newest
    changes."""

    known: int
    workers: Sequence[OwnerCount]
    sessions: Sequence[OwnerRow]
    owner_changes: Sequence[OwnerChangeRow]
    changes: Counts


# ---- /workers


class WorkerRow(AdminAnswer):
    """What a worker is to this gateway."""

    worker: str
    url: str
    assigned: Sequence[str]
    arm: Arm
    models: Sequence[str]
    stay: Stay
    up: bool
    requests: int
    cause: str | None


class Workers(AdminAnswer):
    """All workers."""

    workers: Sequence[WorkerRow]


# ---- /rollout


class CachedTokens(AdminAnswer):
    """What two policies expected not to be computed."""

    live: int
    shadow: int


class ShadowSums(AdminAnswer):
    """What came of the turns that a shadow decided too."""

    compared: int
    agreed: int
    regret_ms: float
    gain_ms: float
    expected_cached_tokens: CachedTokens


class ArmSums(AdminAnswer):
    """What became of the turns of one arm."""

    ends: Counts
    tokens: Counts
    displaced: int


class RolloutAnswer(AdminAnswer):
    """The rollout's answer: who decides, and what was counted."""

    policy: str
    mode: Mode
    shadow: str | None
    canary_policy: str | None
    canary_share: float
    decides: str
    beside: str | None
    canary_workers: Sequence[str]
    shadows: Mapping[str, ShadowSums]
    arms: Mapping[Arm, ArmSums]


class ReloadAnswer(AdminAnswer):
    """The options that a reload changed, and those that the files say otherwise now and that stay
    as they are until a restart."""

    changed: Sequence[str]
    stays: Sequence[str]
