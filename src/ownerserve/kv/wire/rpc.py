"""This module has what is said on a node's RPC port, and how it is encoded. Version 1.

A place is asked for by what the turn may take: an append that goes to its state comes unasked, and
is judged as it arrives. node/admission.py says what the answers promise. Of a worker that holds no
places (vLLM) it is asked what it would say, and what it has of the turn's session.

A request is one msgpack frame `[version, request, nonce]`, an answer `[version, answer]`; requests
and answers are tagged structs, whose unknown fields are ignored and whose new fields have defaults,
so that version N reads N - 1.

A nonce is one wish, over all its messages and retries: who wishes draws it (`new_nonce`), says it
again with the same words, and calls it off with `Cancel`. Repeated, it gets the same answer. 0, or
none in the frame: words that nobody repeats.
"""

from __future__ import annotations

import secrets
from typing import Generic, NewType, TypeVar

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.kv.wire.framed import open_frame
from ownerserve.kv.wire.headers import AnswerLine, LenderAddress
from ownerserve.kv.wire.holders import LendingRank
from ownerserve.kv.wire.inventory import Page
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.status import ProfileStatement, WorkerLoad

VERSION = 1
OLDEST = 1
MAX_FRAME_BYTES = 1 << 20
"""A frame is small: the longest has the token ids of one prompt (`Prefill`). Longer ones are not
sent, and refused."""

Nonce = NewType("Nonce", int)
NO_NONCE = Nonce(0)


class Seed(msgspec.Struct, frozen=True, tag="seed"):
    """A seed is a prompt of `tokens` tokens from its beginning, and then an answer of
    `output_tokens`.
    """

    tokens: int
    output_tokens: int = 0


class Admit(msgspec.Struct, frozen=True, tag="admit", omit_defaults=True):
    """Admit answers `Probe`: the turn may come, behind so many tokens of prefill.

    Of the session that was named, `resident_tokens` from its beginning are on the device, and
    `restorable_tokens` can be brought from a tier below; from `planned_tokens` on the worker would
    compute a turn now, by its own prices. None: nobody can say.
    """

    ahead_prefill_tokens: int
    resident_tokens: int | None = None
    restorable_tokens: int | None = None
    planned_tokens: int | None = None


class Reject(msgspec.Struct, frozen=True, tag="reject"):
    """Reject answers any request: what it asked is refused, for `reason`."""

    reason: WorkerRefusal


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """Reserved answers `Reserve`: a place is held under this number, until the worker's admission
    gives it up.
    """

    reservation: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """Committed answers `Commit`: the place waits for its turn."""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Released answers `Release` and `ReleaseSession`: what was held is given up."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Status asks for the worker's load and profile; `StatusIs` answers it."""


class Probe(msgspec.Struct, frozen=True, tag="probe", omit_defaults=True):
    """Probe asks whether this turn would be let in, and what is here of its session; nothing is
    held for it."""

    wanted: Seed
    session_id: SessionId | None = None


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Reserve asks to hold a place for this turn."""

    turn_id: TurnId
    wanted: Seed


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Commit says that the turn of this reservation is on its way."""

    reservation: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Release says that the turn of this reservation won't come."""

    reservation: int


class ReleaseSession(msgspec.Struct, frozen=True, tag="release_session"):
    """ReleaseSession tells that a turn of the session was done at `target`: hand it over there, if
    it is owned here under `epoch` and no turn of it runs.

    Without `target`: that turn was the session's last, and it is over. Without `epoch` either:
    whoever asks only wants the cache to let the session go.
    """

    session_id: SessionId
    epoch: Epoch | None = None
    target: RoutingUnit | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel takes back what was asked under `nonce`: it is not begun, or is undone. Overtakes all
    that waits.
    """

    nonce: Nonce


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """Cancelled says that a request is called off, now or before: the answer to a `Cancel`, and to
    what comes after it.
    """


class ListHeld(msgspec.Struct, frozen=True, tag="list_held"):
    """ListHeld asks what is held, as far as it was said after the word number `after`; `PageIs`
    answers it: at once where there is such a word, else with the next one, or an empty page after
    `wait_ms` (NEWS_WAIT_MS at most).
    """

    after: int
    wait_ms: int = 0


NEWS_WAIT_MS = 1000
"""A question for news is held so long at most."""


class AskLine(msgspec.Struct, frozen=True, tag="ask_line"):
    """AskLine asks what is to be said on the answer to a turn of the session; None: of none. Of a
    turn that comes, `parent`: whose fork it is; `group`: of sessions that share a head; `epoch`:
    the highest under which its gateway knows it owned; `version`: how many turns it knows its
    owners finished; `bring_from`: who holds more of its prompt. Of an answer that begins,
    `request_id`: whose it is, as the gateway told it.
    """

    session_id: SessionId | None = None
    parent: SessionId | None = None
    group: str = ""
    epoch: Epoch | None = None
    version: int = 0
    request_id: str = ""
    bring_from: LenderAddress | None = None


class AskPrefix(msgspec.Struct, frozen=True, tag="ask_prefix", omit_defaults=True):
    """AskPrefix asks, node to node, what of the session's first `tokens` tokens could be lent now;
    where the session is not known, of its parent's. `PrefixIs` answers it; nothing is held."""

    session_id: SessionId
    tokens: int
    parent: SessionId | None = None


class AskLender(msgspec.Struct, frozen=True, tag="ask_lender", omit_defaults=True):
    """AskLender has a frame of transfer.control.messages for the node that lends, from `reader`.
    Artifacts are looked for among the first `tokens` tokens of the session, or of its parent.
    `boot`: the boot id of the reader's host."""

    frame: bytes
    reader: RoutingUnit
    session_id: SessionId | None = None
    parent: SessionId | None = None
    tokens: int = 0
    boot: str = ""


class Prefill(msgspec.Struct, frozen=True, tag="prefill", omit_defaults=True):
    """Prefill asks, node to node, to compute a prompt for another worker, which reads it from there
    as it is computed: all whole blocks that leave a token behind them, and no answer. `tokens` are
    the whole prompt's ids, little-endian uint32, whose state is apart by `cache_salt`. `source`
    holds the first `source_tokens` of it, of the session `session_id`. `Accepted` answers it; it is
    called off under its nonce. `leg`: the gateway may have asked for it too, in a leg of that
    number; then it is one prompt.
    """

    tokens: bytes
    cache_salt: str = ""
    session_id: SessionId | None = None
    source: LenderAddress | None = None
    source_tokens: int = 0
    leg: Nonce = NO_NONCE


class EndPrefill(msgspec.Struct, frozen=True, tag="end_prefill"):
    """EndPrefill gives up a prompt that was accepted: what a `Cancel` of it becomes."""

    turn_id: TurnId


class Take(msgspec.Struct, frozen=True, tag="take", omit_defaults=True):
    """Take asks a worker to take an idle session over from `source`, which owns it: its state
    first, ownership after. `SessionTaken` answers it. What was called off before ownership was
    asked for is given up. `with_state`: or not at all; else it goes without, where bringing that
    costs more than it saves.

    With `turn`, the id of a request that decodes at `source`: to have that one go on here.
    `target`: where `source` reaches this worker. `TurnSent` answers it.
    """

    session_id: SessionId
    source: LenderAddress
    turn: str = ""
    target: LenderAddress | None = None
    with_state: bool = False


class StopTurn(msgspec.Struct, frozen=True, tag="stop_turn"):
    """StopTurn asks, node to node, to stop the turn of the request `turn` between two steps, and to
    send it to `target`. `TurnSent` answers it, once the target has it; else the turn goes on.
    """

    turn: str
    target: LenderAddress


class MoveTurn(msgspec.Struct, frozen=True, tag="move_turn"):
    """MoveTurn has a turn that was stopped: `state` is all that its engine needs to go on, in that
    engine's own form. Its client is told the first `tokens` tokens of the answer (none of one that
    is not streamed). `TurnKept` answers it: it waits for the turn's leg, which says that its client
    has those tokens. A `Cancel` takes it back.
    """

    turn: str
    tokens: int
    state: bytes


class DropTurn(msgspec.Struct, frozen=True, tag="drop_turn"):
    """DropTurn gives up a turn that was kept: what a `Cancel` of a `MoveTurn` becomes."""

    turn: str


class TakePrefix(msgspec.Struct, frozen=True, tag="take_prefix"):
    """TakePrefix asks a worker to bring the first `tokens` tokens of a session from `source`, to
    hold a read-only replica of them that goes before all else. Nobody's ownership changes.
    `PrefixTaken` answers it; called off, it is given up.
    """

    session_id: SessionId
    tokens: int
    source: LenderAddress


class AskTokens(msgspec.Struct, frozen=True, tag="ask_tokens"):
    """AskTokens asks, node to node, which the first `tokens` tokens of a session are, whoever owns
    it; `TokensAre` answers it, nothing is held."""

    session_id: SessionId
    tokens: int


class AskSession(msgspec.Struct, frozen=True, tag="ask_session"):
    """AskSession asks, node to node, where a session stands that is owned here; `SessionStands`
    answers it, nothing is held."""

    session_id: SessionId


class HandOver(msgspec.Struct, frozen=True, tag="hand_over"):
    """HandOver asks, node to node, to hand a session over to `target`, which has its state as
    `version` turns left it: if it is owned here under `epoch` (None: no directory knows it), no
    turn of it runs, and it has that version still. `Moved` answers it, once that is the record.
    """

    session_id: SessionId
    version: int
    target: RoutingUnit
    epoch: Epoch | None = None


class Suspend(msgspec.Struct, frozen=True, tag="suspend"):
    """Suspend asks a worker to put an idle session that it owns away into its store, and then to
    own it no more: whoever its next turn comes to brings it from there. `Suspended` answers it.
    """

    session_id: SessionId


RpcRequest = (
    AskLender
    | AskLine
    | AskPrefix
    | AskSession
    | AskTokens
    | DropTurn
    | EndPrefill
    | HandOver
    | ListHeld
    | MoveTurn
    | Prefill
    | Status
    | Probe
    | Reserve
    | Commit
    | Release
    | ReleaseSession
    | StopTurn
    | Suspend
    | Take
    | TakePrefix
)


class StatusIs(msgspec.Struct, frozen=True, tag="status_is"):
    """StatusIs answers `Status`: the worker's load, dated; `profile`: what it is, where its engine
    says so here.
    """

    status: WorkerLoad
    profile: ProfileStatement | None = None


class LineIs(msgspec.Struct, frozen=True, tag="line_is", omit_defaults=True):
    """LineIs answers `AskLine` with the line to be said, and with what is for people beside it:
    `brought`, the value of x-ownerserve-brought-tokens."""

    line: AnswerLine
    brought: str = ""


class PageIs(msgspec.Struct, frozen=True, tag="page_is"):
    """PageIs answers `ListHeld` with a page of words about what is held."""

    page: Page


class PrefixIs(msgspec.Struct, frozen=True, tag="prefix_is", omit_defaults=True):
    """PrefixIs answers `AskPrefix`: `tokens` from the beginning could be lent, in whole blocks,
    whose prefix hash is `tip`, and point state at each of `points` (tokens, ascending). What is not
    on the device is read first, which takes some `ready_ms`; 0: all of it is there. `ranks`: who
    lends it, each its own part; empty: who answers does, whole. `ends` are shorter beginnings of it
    (tokens, prefix hash), for who shares only such a one."""

    tokens: int
    points: tuple[int, ...] = ()
    tip: bytes = b""
    ready_ms: float = 0.0
    ranks: tuple[LendingRank, ...] = ()
    ends: tuple[tuple[int, bytes], ...] = ()


class LenderSays(msgspec.Struct, frozen=True, tag="lender_says", omit_defaults=True):
    """LenderSays answers `AskLender`, with a frame of transfer.control.messages. `memory`: where
    what was lent lies (node/transfers/memory.py), for a reader on the lender's host."""

    frame: bytes
    memory: bytes = b""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Accepted answers `Prefill`: the first `tokens` tokens are computed by the turn of that id,
    and lent as it goes. Their prefix hash is `tip`; by the worker's prices it is there in
    `ready_ms`, of which `compute_ms` is the prompt itself and the rest what stands before it.
    """

    turn_id: TurnId
    tokens: int
    tip: bytes
    ready_ms: float
    compute_ms: float = 0.0


class TokensAre(msgspec.Struct, frozen=True, tag="tokens_are"):
    """TokensAre answers `AskTokens`: those that are on the device, in whole blocks, as state is
    named by them (packed, under the tenant's salt)."""

    tokens: bytes


class SessionStands(msgspec.Struct, frozen=True, tag="session_stands", omit_defaults=True):
    """SessionStands answers `AskSession`: owners finished `version` turns of the session, which
    left `sealed_tokens` in whole blocks, whose prefix hash is `tip`. `tokens` are those from the
    beginning that are on the device, as state is named by them (packed, under the tenant's salt):
    fewer where some went. `epoch`: under which it is owned; None: no directory knows it. A turn
    could go on from `restorable_tokens` of them: fewer where point state went.
    """

    version: int
    sealed_tokens: int
    tokens: bytes = b""
    tip: bytes = b""
    epoch: Epoch | None = None
    restorable_tokens: int = 0


class Moved(msgspec.Struct, frozen=True, tag="moved", omit_defaults=True):
    """Moved answers `HandOver`: the session is the target's, under `epoch`. `open_tokens` stand
    behind its last whole block, packed as those."""

    epoch: Epoch | None = None
    open_tokens: bytes = b""


class SessionTaken(msgspec.Struct, frozen=True, tag="session_taken", omit_defaults=True):
    """SessionTaken answers `Take`: the session is this worker's, under `epoch`, after `version`
    turns; the first `tokens` tokens of it are on the device."""

    version: int
    tokens: int
    epoch: Epoch | None = None


class TurnKept(msgspec.Struct, frozen=True, tag="turn_kept"):
    """TurnKept answers `MoveTurn`: the turn is here, and goes on once its leg comes."""

    turn: str


class TurnSent(msgspec.Struct, frozen=True, tag="turn_sent"):
    """TurnSent answers `StopTurn`, and a `Take` of a turn: its target has it, and its leg at the
    source ends, which says how far that came."""


class PrefixTaken(msgspec.Struct, frozen=True, tag="prefix_taken"):
    """PrefixTaken answers `TakePrefix`: a turn could go on from the first `tokens` tokens here, for
    which `moved_bytes` were read of the source; 0: they were here."""

    tokens: int
    moved_bytes: int


class Suspended(msgspec.Struct, frozen=True, tag="suspended"):
    """Suspended answers `Suspend`: nobody owns the session now, and what of it was worth a copy is
    in the store."""


RpcAnswer = (
    Accepted
    | LenderSays
    | LineIs
    | Moved
    | PageIs
    | PrefixIs
    | PrefixTaken
    | SessionStands
    | StatusIs
    | SessionTaken
    | Suspended
    | TurnKept
    | TurnSent
    | TokensAre
    | Admit
    | Reject
    | Reserved
    | Committed
    | Released
)
Said = RpcAnswer | Cancelled
"""What an asker hears; an engine gives an `RpcAnswer`."""

T = TypeVar("T")


class _Frame(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    version: int
    body: T
    nonce: Nonce = NO_NONCE


_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[_Frame[RpcRequest | Cancel]] = msgspec.msgpack.Decoder(
    _Frame[RpcRequest | Cancel]
)
_answers: msgspec.msgpack.Decoder[_Frame[Said]] = msgspec.msgpack.Decoder(_Frame[Said])


def new_nonce() -> Nonce:
    """Return a number, never 0, that nobody else draws."""
    return Nonce(secrets.randbits(63) | 1)


def encode(body: RpcRequest | Cancel | Said, nonce: Nonce = NO_NONCE) -> bytes:
    """Return one frame. Raises InvalidInput when it is longer than any reader takes."""
    data = _encoder.encode(_Frame(VERSION, body, nonce))
    check_length(len(data))
    return data


def check_length(count: int) -> None:
    """Raise InvalidInput for a frame of `count` bytes that is too long."""
    if count > MAX_FRAME_BYTES:
        mend = "name what is meant, and bring the bytes another way"
        raise InvalidInput("rpc", f"a frame of {count} bytes, at most {MAX_FRAME_BYTES}", mend)


def decode_request(data: bytes) -> tuple[RpcRequest | Cancel, Nonce]:
    """Return what is asked, and under which nonce. Raises InvalidInput for what is no request of a
    version that is read here.
    """
    check_length(len(data))
    frame = open_frame(data, _requests, oldest=OLDEST, newest=VERSION)
    return frame.body, frame.nonce


def decode_answer(data: bytes) -> Said:
    """Return the answer in a frame. Raises as `decode_request`."""
    check_length(len(data))
    return open_frame(data, _answers, oldest=OLDEST, newest=VERSION).body
