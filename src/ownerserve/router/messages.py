"""What RouterState is told (events) and what it answers (outcomes). Plain data, no behaviour.

A request in events and outcomes:

    Arrive ─> Dispatch ─> FirstByte ─> Done                       served
       │         ├─> Failed ─> Dispatch (another attempt) | Refuse  nothing reached the client yet
       │         └─> Broken | Aborted                             worker died | client hung up
       └─> Refuse                                                 rejected
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.usage import Usage

Receipt = NewType("Receipt", int)
"""Stands for one counted dispatch. Single-use: it is given back exactly once (invariant 5)."""


class Label(enum.StrEnum):
    """An enum of metric labels. Hashes as the text it equals, and as fast (Enum's own does not)."""

    __hash__ = str.__hash__


class Reason(Label):
    """Why a worker was chosen. A label of metrics and the x-ownerserve-reason header."""

    ROUND_ROBIN = "round_robin"
    OWNER = "owner"
    NEW_SESSION = "new_session"
    OWNER_LOST = "owner_lost"
    NO_SESSION = "no_session"
    RETRY_NEW_CONNECTION = "retry_new_connection"
    RETRY_OTHER_WORKER = "retry_other_worker"


class Refusal(Label):
    """Why a request got no worker."""

    NO_WORKER = "no_worker"
    DRAINING = "draining"
    ALL_TRIED = "all_tried"
    RETRY_BUDGET = "retry_budget"


class Failure(Label):
    """What went wrong at a worker before the first byte of its answer."""

    STALE = "stale"
    """A kept connection turned out closed: says nothing about the worker."""
    CONNECT = "connect"
    """No connection could be made: nobody listens there."""
    CLOSED = "closed"
    """The worker closed a fresh connection without an answer."""
    MALFORMED = "malformed"
    """The answer was no HTTP."""


class Down(Label):
    """Why a worker is taken out."""

    UNHEALTHY = "unhealthy"
    UNREACHABLE = "unreachable"
    REMOVED = "removed"


# Events


class WorkerUp(msgspec.Struct, frozen=True, gc=False):
    """A worker answers. Idempotent."""

    worker: WorkerId


class WorkerDown(msgspec.Struct, frozen=True, gc=False):
    """A worker is gone, and with it what it held: its bindings are dropped. Idempotent."""

    worker: WorkerId
    why: Down


class Drain(msgspec.Struct, frozen=True, gc=False):
    """Take nothing new; what is live runs to its end."""


class Arrive(msgspec.Struct, frozen=True, gc=False):
    """A request; `prompt_bytes` is the size of its body."""

    session: SessionId | None
    prompt_bytes: int


class FirstByte(msgspec.Struct, frozen=True, gc=False):
    """The worker began to answer: its prefill is over."""

    receipt: Receipt


class Done(msgspec.Struct, frozen=True, gc=False):
    """The answer is complete. `alias`: a name under which the next turn may ask for the session."""

    receipt: Receipt
    usage: Usage | None = None
    alias: SessionId | None = None


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The attempt failed before the first byte; another may be made."""

    receipt: Receipt
    failure: Failure


class Broken(msgspec.Struct, frozen=True, gc=False):
    """The worker failed after the first byte: the client got a part, nothing can be retried."""

    receipt: Receipt


class Aborted(msgspec.Struct, frozen=True, gc=False):
    """The client hung up, before or during the answer."""

    receipt: Receipt


class SessionEnd(msgspec.Struct, frozen=True, gc=False):
    """The session is over; forget it."""

    session: SessionId


Settling = WorkerUp | WorkerDown | Drain | FirstByte | Done | Broken | Aborted | SessionEnd
Event = Arrive | Failed | Settling

# Outcomes


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Send it to `worker`; give the receipt back by Done, Failed, Broken or Aborted."""

    receipt: Receipt
    worker: WorkerId
    reason: Reason
    attempt: int
    prefill_tokens: int
    """Estimate of what the worker must compute before the first byte."""


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """Tell the client no."""

    refusal: Refusal


class Noted(msgspec.Struct, frozen=True, gc=False):
    """Nothing to do."""


NOTED = Noted()
Outcome = Dispatch | Refuse | Noted
