"""This module is the vocabulary between scheduler and engine: what arrives, what one step does,
what is refused.

Data only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sized
from collections.abc import Sequence as Tokens
from enum import StrEnum
from typing import Protocol

import msgspec

from ownerserve.cache.effects import Effect
from ownerserve.cache.layout import Layout, Table
from ownerserve.cache.outcomes import Append, Begun, CacheRefused, NoRoom, Resume, Turn
from ownerserve.cache.sessions import DigestAt
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.node.vocabulary.chains import PromptPrefix


class SessionPositions(Protocol):
    """`SessionPositions` know where the sessions of a cache stand."""

    def append_of(self, turn: Turn, digest_at: DigestAt) -> Append | None:
        """Return `turn` as what it adds to its session; None when it must be begun from its
        whole prompt."""
        ...


class ArrivalsPort(Protocol):
    """An `ArrivalsPort` tells for how much state that comes slots are reserved."""

    @property
    def ingest(self) -> Sized:
        """`ingest` has the arrivals whose slots are not the cache's yet, or not again."""
        ...


class CachePort(ArrivalsPort, Protocol):
    """A `CachePort` is what the scheduler needs of `cache.HeteroCache` (docs/design/001)."""

    @property
    def layout(self) -> Layout:
        """`layout` is the components and the block length of the cache's state."""
        ...

    @property
    def sessions(self) -> SessionPositions:
        """`sessions` knows where the sessions of the cache stand."""
        ...

    def begin(
        self, turn: Turn, now: float, *, resume: Resume | None = None
    ) -> Begun | CacheRefused:
        """Start a turn from its whole prompt, at the deepest complete point or as `resume` says."""
        ...

    def append(self, turn: Append, now: float) -> Begun | CacheRefused:
        """Start a session's next turn from what it adds."""
        ...

    def reserve(self, turn_id: TurnId, upto: int, now: float) -> tuple[Effect, ...] | NoRoom:
        """Take range slots for all tokens before position `upto`, evicting as needed: all or
        none."""
        ...

    def advance(self, turn_id: TurnId, tokens: Packed, now: float) -> None:
        """Note that `tokens` are computed, with their state in the slots."""
        ...

    def snapshot(self, turn_id: TurnId, now: float) -> tuple[Effect, ...]:
        """Keep the point state of the turn's present position, which must be a boundary."""
        ...

    def fork(
        self, turn_id: TurnId, child_id: TurnId, now: float
    ) -> tuple[Effect, ...] | NoRoom | CacheRefused:
        """Open a second turn that goes on from where the first one stands."""
        ...

    def finish(self, turn_id: TurnId, now: float, *, tip: PrefixHash | None = None) -> object:
        """End a turn, whose output stays; `tip` is the digest of all full blocks that were
        computed."""
        ...

    def abort(self, turn_id: TurnId, now: float) -> None:
        """End a turn as if it had not been; a turn is preempted so too."""
        ...

    def table(self, turn_id: TurnId) -> Table:
        """Return the slots of a running turn; the next call changes the table."""
        ...

    def check(self) -> None:
        """Raise InvariantViolated unless the cache's books agree."""
        ...


ResumeOf = Callable[[Packed], Resume | None]
"""How to begin a turn of these tokens now; None: at the deepest complete point."""


CheckpointsOf = Callable[[int, int], Collection[int]]
"""Positions of a prompt [0, end) resumed at `start` at which state should be kept; given (start,
end). It is kept where a chunk ends there: chunks are never cut for it."""


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`SchedulerLimits` say what one worker takes on.

    `chunk_tokens` is the prefill grid, a multiple of B. A step computes whole chunks up to
    `prefill_tokens_a_step`, or one chunk when that alone is larger. `sequence_tokens` is the
    longest prompt + output that the pools and the model can hold.
    """

    chunk_tokens: int
    prefill_tokens_a_step: int
    max_running: int
    max_waiting: int
    sequence_tokens: int


class RequestArrival(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a request enters. `turn_ids` has one id for each choice; the first one runs the
    prompt.

    `order`: where it stands among arrivals; None: behind all that came before. A place and its room
    were promised to one that `is_promised`. `begins`: the prompt is the beginning of one of so many
    tokens, is computed in the same pieces as that one, and nothing is sampled behind it; 0: it is
    a prompt of its own.
    """

    request_id: str
    turn_ids: tuple[TurnId, ...]
    prompt: PromptPrefix
    max_new_tokens: int
    session_id: str | None = None
    order: int | None = None
    is_promised: bool = False
    begins: int = 0


class QueuedPrompt(msgspec.Struct, frozen=True):
    """A `QueuedPrompt` says that the request will be served (or fail with a reason in a later
    plan)."""


class RequestRejected(msgspec.Struct, frozen=True):
    """A `RequestRejected` says that the request is not taken, and nothing of it is kept."""

    reason: WorkerRefusal
    message: str


class Chunk(msgspec.Struct, frozen=True):
    """A `Chunk` is an order to compute `tokens` at positions `start`, ... and to sample the last
    logits for `sample_for`.

    `sample_for` is empty unless the chunk ends its prompt; then it names every choice of it. A
    chunk that `ends_turn` ends a prompt behind which nothing is sampled, and its turn with it.
    Range state below `write_floor` is read and not written.
    """

    turn_id: TurnId
    table: Table
    tokens: Tokens[int]
    start: int
    sample_for: tuple[TurnId, ...]
    write_floor: int = 0
    ends_turn: bool = False


class PlannedToken(msgspec.Struct, frozen=True):
    """A `PlannedToken` is an order to compute `token` at `position` and to sample the next one."""

    turn_id: TurnId
    table: Table
    token: int
    position: int


class Intake(StrEnum):
    """An `Intake` says how a turn was opened in the cache; a metric label."""

    APPEND = "append"
    """The prompt begins with all that its session's last turn left, and that is at hand."""
    BEGIN = "begin"
    """The cache compared the whole prompt."""


class AdmittedPrompt(msgspec.Struct, frozen=True):
    """An `AdmittedPrompt` is a prompt that left the queue; its first `restored` tokens need no
    compute, and up to `floor` range state is kept (a replay when that is more). `again` counts the
    preemptions that it comes back from."""

    request_id: str
    turn_id: TurnId
    restored: int
    again: int
    floor: int = 0
    intake: Intake = Intake.BEGIN


class StepPlan(msgspec.Struct):
    """A `StepPlan` is one iteration. Apply `effects` in order, run `chunks` and `rows` in any
    order, then report to `Scheduler.step_done`. `failed` requests have left; `preempted` turns are
    queued again."""

    effects: list[Effect] = []
    chunks: list[Chunk] = []
    rows: list[PlannedToken] = []
    admitted: list[AdmittedPrompt] = []
    preempted: list[TurnId] = []
    failed: list[str] = []

    @property
    def prefill_tokens(self) -> int:
        """`prefill_tokens` counts the prompt tokens that the step computes."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


class SchedulerLoad(msgspec.Struct, frozen=True):
    """A `SchedulerLoad` counts what is in the worker now."""

    waiting: int
    running: int
    pending_prefill_tokens: int
    growth_blocks: int = 0
    """What running sequences may still take, to the length that they were let in for."""
    queued_blocks: int = 0
    """What those that wait will take, resident or not."""


class Promises(Protocol):
    """`Promises` keep room for turns that are not here yet."""

    def withholds(self, blocks: int, order: int) -> bool:
        """Return whether a turn that stands at `order` would take promised room with so many
        blocks."""

    def revoke(self) -> bool:
        """Give up one promise, when nothing else is left to take; False: there is none."""


class NoPromises:
    """`NoPromises` serves a worker at which nobody reserves."""

    def withholds(self, blocks: int, order: int) -> bool:
        return False

    def revoke(self) -> bool:
        return False


class RequestCounts(msgspec.Struct):
    """`RequestCounts` count requests since the start. Invariant 3: arrived = done + rejected +
    live, where `done` includes the `aborted` and the `failed`."""

    arrived: int = 0
    done: int = 0
    rejected: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
