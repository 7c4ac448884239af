"""This module defines what RouterState is told (events) and what it answers (outcomes): plain data.

A request in events and outcomes:

    Arrive ─> Dispatch ─> FirstByte ─> Done                       served
       │         ├─> Failed ─> Dispatch (another attempt) | Refuse  nothing reached the client yet
       │         ├─> Misjudged ─> Dispatch | Refuse               it was not sent
       │         ├─> ComputedApart | NotComputedApart ─> Dispatch  the same, after its first leg
       │         ├─> Hedge ─> a second Dispatch | Noted            of the two one ends by
       │         │                                                 Outrun | LegFailed
       │         └─> Broken | Aborted                             worker died | client hung up
       └─> Refuse                                                 rejected
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, ExecutionMode, RoutingUnit, Tier
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.decision import Decision, DispatchReason, Label, TurnClass
from ownerserve.router.requests.body import Prompt, Usage
from ownerserve.router.sessions import Use
from ownerserve.router.worker import Profile, Receipt


class Refusal(Label):
    """A refusal says why a request got no worker."""

    NO_WORKER = "no_worker"
    NO_SUCH_MODEL = "no_such_model"
    """Workers are up, but none serves the model that the request names."""
    DRAINING = "draining"
    ALL_TRIED = "all_tried"
    RETRY_BUDGET = "retry_budget"
    EXHAUSTED = "exhausted"
    """The gateway itself has no descriptor, memory or address left."""


class Failure(Label):
    """A failure says what went wrong at a worker before the first byte of its answer."""

    STALE = "stale"
    """A kept connection turned out closed: says nothing about the worker."""
    CONNECT = "connect"
    """No connection could be made: nobody listens there."""
    OURS = "ours"
    """No connection could be made for want of something of the gateway's own: says nothing about
    the worker, and no other would do better."""
    CLOSED = "closed"
    """The worker closed a fresh connection without an answer."""
    SILENT = "silent"
    """The worker was taken out since, and nothing came: it took the turn and hangs."""
    LATE = "late"
    """The worker is up, and nothing of the answer came for longer than a client's patience."""
    MALFORMED = "malformed"
    """The answer was no HTTP."""
    REFUSED = "refused"
    """The worker's admission said no: nothing is wrong with it, and the session stays its own."""
    UNFIT = "unfit"
    """The request is none whose prompt can be computed apart: nobody was asked."""


class Answer(Label):
    """An answer's kind is what its own lines say of the worker that gives it."""

    TURN = "turn"
    """The worker serves the turn: a status below 400, and no execution mode that says otherwise.
    From then on it has the session's state up to the end of the prompt."""
    ERROR = "error"
    """The answer passes an error on: it says nothing of where the session is."""


class Down(Label):
    """A down reason says why a worker is taken out."""

    UNHEALTHY = "unhealthy"
    UNREACHABLE = "unreachable"
    REMOVED = "removed"
    """Its operator takes it out of the fleet: it gets no new turn, and leaves when none runs."""
    DRAINED = "drained"
    """Its operator wants it to get no new turn for now; what runs there ends."""
    MODELS_UNKNOWN = "models_unknown"
    """Nobody knows what it serves: it would answer for the wrong model."""
    ANOTHER_RANK = "another_rank"
    """The process at its address is now another rank, which comes up in the same moment."""


class Arm(Label):
    """An arm is a part of all sessions, for which another policy may decide, or other workers may
    run (rollout/steering.py). Who comes without a session is of the main arm."""

    MAIN = "main"
    CANARY = "canary"


# Events


class WorkerUp(msgspec.Struct, frozen=True, gc=False):
    """This event says that a worker (one routing unit of it) answers. It may be told again.

    An `incarnation` higher than the known one, or any other than it after the worker was down, is
    a new life: what it held in volatile tiers is gone. Without one, a worker that was down is taken
    to have restarted. `profile` None: as before.
    """

    worker: WorkerId
    dp_rank: int = 0
    incarnation: Incarnation | None = None
    profile: Profile | None = None


class WorkerDown(msgspec.Struct, frozen=True, gc=False):
    """This event says that all routing units of a worker are out of reach until they are up again.
    It may be told again."""

    worker: WorkerId
    why: Down


class WorkerLeft(msgspec.Struct, frozen=True, gc=False):
    """This event says that a worker that is down will not be back, and that nothing runs there any
    more: it is forgotten."""

    worker: WorkerId


class Drain(msgspec.Struct, frozen=True, gc=False):
    """This event tells the router to take nothing new; what is live runs to its end."""


class Stamped(msgspec.Struct, frozen=True, gc=False):
    """This event is a worker's word on its load, heard now; one older than the last is ignored."""

    status: WorkerLoad


class Reported(msgspec.Struct, frozen=True, gc=False):
    """This event says that `unit` (None: the shared store) holds [0, tokens) of a prefix in `tier`.

    `session` stands on it, when given: that is how the router learns a session's prefix hash, and
    of sessions that ran before it began. `prefix_hash` None: the holder has not hashed so far.
    `use`: what the holder said just now that it does with it.
    """

    unit: RoutingUnit | None
    tier: Tier
    prefix_hash: PrefixHash | None
    tokens: int
    session: SessionId | None = None
    use: Use = Use.BY_PRICE


class Gone(msgspec.Struct, frozen=True, gc=False):
    """This event says that `unit` (None: the shared store) no longer holds a prefix in `tier`.

    The prefix is the one that `session` stands on, when given, else the one that ends in
    `prefix_hash`.
    """

    unit: RoutingUnit | None
    tier: Tier
    prefix_hash: PrefixHash | None = None
    session: SessionId | None = None


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """This event is a worker's or the directory's word that `unit` owns the session under `epoch`,
    `version` of whose turns are finished. An earlier epoch is ignored."""

    session: SessionId
    unit: RoutingUnit
    epoch: Epoch
    version: int = 0


class TakenOver(msgspec.Struct, frozen=True, gc=False):
    """This event is the word of `unit` that it took an idle session over from `source`, and has the
    first `tokens` tokens of it on its device. It counts while `source` is known to own it, or
    `unit` already."""

    session: SessionId
    unit: RoutingUnit
    source: WorkerId
    tokens: int


class LeftToStore(msgspec.Struct, frozen=True, gc=False):
    """This event is the word of `source` that it put an idle session away into its store, and owns
    it no more. It counts while `source` is known to own it."""

    session: SessionId
    source: WorkerId


class ReleaseEnd(Label):
    """A release end says how asking an owner to hand a session over ended."""

    RELEASED = "released"
    NOT_OWNER = "not_owner"
    """Whoever was asked is not the owner under that epoch (any more)."""
    KEPT = "kept"
    """A turn of it runs there, or nothing was heard: it may still own the session."""


class ReleaseEnded(msgspec.Struct, frozen=True, gc=False):
    """This event ends an AskRelease; there is one for each."""

    session: SessionId
    epoch: Epoch
    end: ReleaseEnd


class Arrive(msgspec.Struct, frozen=True, gc=False):
    """This event says that a request arrived, whose body has `prompt_bytes`.

    `session` is its name (requests/identity.py), or another's that is an alias of it. `model`: only
    workers that serve it may take the turn, as the client named it; None: not looked for. `parent`:
    for a session's first turn, another session that begins in the same way; the first
    `shared_bytes` of the bodies are equal (None: all that the parent ever had).
    """

    session: SessionId | None
    prompt_bytes: int
    model: str | None = None
    parent: SessionId | None = None
    shared_bytes: int | None = None
    arm: Arm = Arm.MAIN


class FirstByte(msgspec.Struct, frozen=True, gc=False):
    """This event says that the worker began to answer, so that its prefill is over. `status`: its
    stamp on this answer.

    With Answer.TURN the worker is the session's owner from here on, until W8's nodes say so
    themselves. Done without a FirstByte before it says both at once. `mode`: what came of the
    prompt, by the worker's word; of a dispatch that is split and of which no ComputedApart was
    told, any other than remote_prefill says that the worker computed the prompt itself. None: as it
    was decided. `claimed`: whom the answer names as the session's owner. Whom the session left by
    this very turn is no news of where it is, nor is what an answer says that a later turn's has
    overtaken; another's ownership is.
    """

    receipt: Receipt
    status: WorkerLoad | None = None
    answer: Answer = Answer.TURN
    mode: ExecutionMode | None = None
    claimed: Claimed | None = None


class Done(msgspec.Struct, frozen=True, gc=False):
    """This event says that the answer is complete. `alias`: a name under which the next turn may
    ask for the session.

    `usage` is refused, and counted, when no sequence of the worker's model can have such counts.
    `prompt`: of one that is not in the body, its bytes teach nothing of its tokens.
    """

    receipt: Receipt
    usage: Usage | None = None
    alias: SessionId | None = None
    status: WorkerLoad | None = None
    prompt: Prompt = Prompt.IN_BODY


class Failed(msgspec.Struct, frozen=True, gc=False):
    """This event says that the attempt failed before the first byte; another may be made."""

    receipt: Receipt
    failure: Failure


class Unpromised(msgspec.Struct, frozen=True, gc=False):
    """This event says that the worker has no room for the turn and has done no work for it: the
    dispatch counts as if it had not been sent.

    Another is asked, as after Failed with Failure.REFUSED. When none is left, or the retries are
    used up, the turn is sent once more, to the best of all, without a promise.
    """

    receipt: Receipt


class Misjudged(msgspec.Struct, frozen=True, gc=False):
    """This event says that the turn was not sent: its worker, by its own word, holds less than the
    decision counted on, or would do otherwise with what it has. What it said was told before
    (Reported, Gone); the turn is decided anew among all."""

    receipt: Receipt


class ComputedApart(msgspec.Struct, frozen=True, gc=False):
    """This event says that the prompt of a dispatch that is split is computed where it was to be:
    its load comes off there."""

    receipt: Receipt


class NotComputedApart(msgspec.Struct, frozen=True, gc=False):
    """This event says that the prompt of a dispatch that is split could not be computed apart. The
    same dispatch goes on, with the same receipt, and its worker computes the prompt itself."""

    receipt: Receipt
    failure: Failure


class CarryOn(msgspec.Struct, frozen=True, gc=False):
    """This event says that the worker failed in the middle of its answer, which another worker is
    to carry on: the client has a part of it, and hears no error where one is found."""

    receipt: Receipt
    failure: Failure


class MovedOn(msgspec.Struct, frozen=True, gc=False):
    """This event says that the turn of the dispatch was stopped, by order, amid its answer, and
    goes on at `target`, which has all that it needs."""

    receipt: Receipt
    target: RoutingUnit


class Hedge(msgspec.Struct, frozen=True, gc=False):
    """This event says that nothing came of the dispatch for too long: another worker is to be asked
    too. The two are legs of one turn: the first that begins to answer goes on, the other ends by
    Outrun or LegFailed."""

    receipt: Receipt


class Outrun(msgspec.Struct, frozen=True, gc=False):
    """This event ends one of two legs before its first byte: the other one began to answer, or the
    turn ended."""

    receipt: Receipt


class LegFailed(msgspec.Struct, frozen=True, gc=False):
    """This event ends one of two legs that failed before its first byte; the other one goes on."""

    receipt: Receipt
    failure: Failure


class Broken(msgspec.Struct, frozen=True, gc=False):
    """This event says that the worker failed after the first byte: the client got a part, nothing
    can be retried."""

    receipt: Receipt


class Aborted(msgspec.Struct, frozen=True, gc=False):
    """This event says that the client hung up, before or during the answer, or that a fault of the
    gateway's ended it."""

    receipt: Receipt


class SessionEnd(msgspec.Struct, frozen=True, gc=False):
    """This event says that the session is over and to be forgotten."""

    session: SessionId


Settling = (
    WorkerUp | WorkerDown | WorkerLeft | Drain | Stamped | Reported | Gone | Claimed
    | ComputedApart | Outrun | LegFailed | Broken | Aborted | SessionEnd | ReleaseEnded
    | TakenOver | LeftToStore
)  # fmt: skip
Placing = Arrive | Failed | Unpromised | Misjudged | NotComputedApart | CarryOn | MovedOn
Event = Placing | Hedge | FirstByte | Done | Settling

# Outcomes


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """This outcome sends the turn to `worker`; the receipt is given back by Done, Failed,
    Unpromised, Misjudged, Broken or Aborted.

    `decision` has the action, the prefill worker, the source, the wanted migration and the priced
    alternatives; `reason` is its reason, or why this is another attempt. `session` is the router's
    own name for the session: the one to use in later events.
    """

    receipt: Receipt
    worker: WorkerId
    reason: DispatchReason
    attempt: int
    prefill_tokens: int
    """Estimate of what the worker must compute before the first byte."""
    decision: Decision
    turn: TurnClass
    session: SessionId | None
    prompt_tokens: int
    dp_rank: int
    arm: Arm = Arm.MAIN
    parent: SessionId | None = None
    """The session that a session's first turn begins like, by the router's own name."""


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """This outcome tells the client no, for the reason `refusal`."""

    refusal: Refusal


class AskRelease(msgspec.Struct, frozen=True, gc=False):
    """This outcome asks `source`, which owns the session under `epoch`, to hand it over to
    `target`, where its last turn was done. Nothing waits for it; ReleaseEnded tells how it
    ended."""

    session: SessionId
    source: RoutingUnit
    epoch: Epoch
    target: RoutingUnit


class LetGo(msgspec.Struct, frozen=True, gc=False):
    """This outcome asks `source`, which had the session until now, to let its cached state go
    before any other: another worker has begun to answer. Nothing waits for it, and nothing is told
    of it."""

    session: SessionId
    source: RoutingUnit


class Noted(msgspec.Struct, frozen=True, gc=False):
    """This outcome says that the event was taken in and there is nothing to do."""


NOTED = Noted()
Outcome = Dispatch | Refuse | AskRelease | LetGo | Noted
