"""This module has the words in which a turn asks to be let in: whose it is, on which terms, what it
is expected to take, until when it may wait; and the no that it may hear."""

from __future__ import annotations

from math import inf

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.router.decision import Label
from ownerserve.router.requests.body import Usage
from ownerserve.router.sessions import RoutedSession
from ownerserve.router.settings import DEFAULTS
from ownerserve.router.worker import Worker


class SessionClass(Label):
    """A session class says which of a tenant's turns one is; each has its share of the tenant's."""

    INSIDE = "inside"
    """A later turn of a session that was served, its sub-agent or its fork."""
    NEW = "new"
    """A session's first turn, or a turn that belongs to none."""
    BATCH = "batch"
    """Background work, by its client's word or its tenant's terms."""


class Priorities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Priorities are the shares that a tenant's classes have while all of them wait. No class
    starves another."""

    inside: float = 16.0
    new: float = 4.0
    batch: float = 1.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if not 0 < getattr(self, field) < inf:
                raise InvalidInput(f"priorities.{field}", "is no share", "use more than 0")

    def of(self, session_class: SessionClass) -> float:
        """Return the share of a class."""
        share: float = getattr(self, session_class.value)
        return share


class TenantTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Terms are what a tenant may take, beside others and in all.

    name                  shown in metrics; "": a tenant that no file names
    weight                its share of the fleet while others wait too
    is_batch              whether all its turns are background work
    requests_per_minute   how many requests it may begin; None: no limit
    tokens_per_minute     how many tokens it may have computed; None: no limit
    """

    name: str = ""
    weight: float = 1.0
    is_batch: bool = False
    priorities: Priorities = Priorities()
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None

    def __post_init__(self) -> None:
        for field in ("weight", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, field)
            if value is not None and not 0 < value < inf:
                raise InvalidInput(field, f"{value}", "use more than 0")

    @property
    def is_limited(self) -> bool:
        """Whether the tenant has a rate limit."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


NO_TERMS = TenantTerms()
"""The terms of whoever no file names."""


class EnteringTurn(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An entering turn is all that its entry is decided by.

    session         None: it belongs to none, and needs no seat
    prompt_tokens   of its whole prompt
    cost_tokens     what it is expected to have computed, its answer included
    parent          the session whose sub-agent or fork this one is (`forked_from`)
    tenant          whose it is; equal ones share what the terms give
    model           only workers that serve it may take the turn; None: all do
    absent_tokens   of what its session had computed, what no tier holds now, by what is known
    came_s          when it came
    deadline_s      when its client no longer waits for it to begin; infinite: it has not said
    """

    session: SessionId | None
    prompt_tokens: int
    cost_tokens: int
    parent: SessionId | None = None
    tenant: str = ""
    terms: TenantTerms = NO_TERMS
    session_class: SessionClass = SessionClass.NEW
    model: str | None = None
    absent_tokens: int = 0
    came_s: float = 0.0
    deadline_s: float = inf


class WaitReason(Label):
    """A wait reason says what a turn waits for before the fleet."""

    SEAT = "seat"
    """The fleet has no memory for one more session."""
    RUNNING = "running"
    """There run as many turns as may."""
    STATE = "state"
    """The state of its session is gone, and the fleet has no memory free to have it again."""


class LinePlace(msgspec.Struct, frozen=True, gc=False):
    """A line place says where one stands in line, the first at 1, of how many who wait there."""

    place: int
    of: int


class TurnWait(msgspec.Struct, frozen=True, gc=False):
    """A turn wait is what a turn waited for, where it stood in line when it came, and how long it
    waited, in seconds."""

    reason: WaitReason
    came: LinePlace
    waited_s: float


class TurnAwayReason(Label):
    """A turn-away reason says why a turn was not let in: a metric's label and the error's code."""

    QUEUE_FULL = "queue_full"
    """The queue holds as many as it may, of which the tenant has its part."""
    DEADLINE_UNMET = "deadline_unmet"
    """The turn would wait beyond its deadline, by what was measured."""
    DEADLINE_PAST = "deadline_past"
    """The deadline came while the turn waited."""


class TurnedAway(msgspec.Struct, frozen=True, gc=False):
    """A turn was turned away: it may come again after `retry_after_s`, an estimate."""

    reason: TurnAwayReason
    retry_after_s: float


class Enter(msgspec.Struct, frozen=True):
    """The turn may go on: its sender decides now where it runs."""


ENTER = Enter()


def class_of(
    session: RoutedSession | None, parent: RoutedSession | None, *, is_batch: bool
) -> SessionClass:
    """Return the class of a turn of `session`, whose sub-agent or fork it is of `parent`; None: not
    known to the router."""
    if is_batch:
        return SessionClass.BATCH
    is_inside = (session is not None and session.turns > 0) or (
        parent is not None and parent.turns > 0
    )
    return SessionClass.INSIDE if is_inside else SessionClass.NEW


def expected_cost(prompt_tokens: int, session: RoutedSession | None) -> int:
    """Return how many tokens a turn is expected to have computed: what of its prompt its session
    has not had computed before, and an answer as long as the session's are."""
    if session is None:
        return max(prompt_tokens, 1) + DEFAULTS.output_tokens
    new_tokens = max(prompt_tokens - session.known_tokens, 1)
    return new_tokens + (int(session.output_tokens) or DEFAULTS.output_tokens)


def absent_tokens(prompt_tokens: int, session: RoutedSession | None) -> int:
    """Return how many tokens of the prompt its session had computed that no tier holds any more, by
    what the router was told."""
    if session is None:
        return 0
    held = max((copy.tokens for copy in session.copies()), default=0)
    return max(min(session.known_tokens, prompt_tokens) - held, 0)


def refilled_ms(usage: Usage, session: RoutedSession | None, worker: Worker) -> float:
    """Return how long the worker's engine, at its speed, computed what earlier turns of the session
    had left; `session` is as it was before this turn. What a fork shares was never its own."""
    if session is None or not session.prompt_tokens or not usage.tells_cached:
        return 0.0
    again = min(session.known_tokens, usage.prompt_tokens) - usage.cached_tokens
    return worker.speed.prefill.ms(again, usage.cached_tokens) if again > 0 else 0.0
