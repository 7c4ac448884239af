"""This module learns before any decision who asks, for which model, like which session, and who
owns it: from the request, and of a session that is new here from the directory.

`Asking` owns the order of looking: headers, then the body's fields, then its content; and the
session's name from there on: aliases are resolved here, once. Each JSON body is scanned, also of a
session that a header names: no worker may see a `session_id` that is a client's own. Any search for
that key in all its spellings costs more than the scan (0.2 to 0.3 ms for 400 KB). Contents are
looked at only when nothing names the session, or when it comes for the first time: which one does
it begin like?

`SessionFinder` owns the look-ups that wait for the directory. Nothing is decided here: workers own,
and say so themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import msgspec
from msgspec import structs

from ownerserve.directory.messages import (
    DirectoryRefusal,
    FindSession,
    Found,
    Lookup,
    Miss,
    Outcome,
    Refused,
    SessionIs,
)
from ownerserve.directory.port import Directory
from ownerserve.gateway.http.client import HttpRequest
from ownerserve.gateway.http.heads import RequestHead
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.processes.homes import Homes
from ownerserve.gateway.tracing.trace import TurnTrace
from ownerserve.gateway.workers.rpc import WorkerNames
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit, later
from ownerserve.kv.wire.headers import GROUP_HEADER
from ownerserve.router.entry.terms import NO_TERMS, TenantTerms, TurnWait
from ownerserve.router.messages import Arrive, Claimed
from ownerserve.router.requests.body import (
    NO_FIELDS,
    BodyFields,
    Prompt,
    Said,
    check_as_engines_read,
    pieces,
    place_of_prompt,
    scan,
)
from ownerserve.router.requests.identity import (
    ANONYMOUS,
    ContentChain,
    Scope,
    SessionIdentity,
    SessionSource,
    content_of,
    identify,
    response_alias,
    says_final,
    turn_of,
)

_GROUP = GROUP_HEADER.encode()

LEARNT_IN_TURNS, LEARNT_EACH_TURNS = 4, 8
"""What a session's bytes a token are, its first turns tell, and then each eighth one."""


class IdentifiedRequest(msgspec.Struct, frozen=True, gc=False):
    """An identified request is what the router needs of one; `identity.session` and
    `arrive.session` are the session's own name.

    `named_parent`: what a header says; `arrive.parent` is whose bytes it shares. `fields`: what the
    body says, as far as it was read. `group`: of sessions that share a head, by the client's word
    or by what they begin with.
    """

    identity: SessionIdentity
    arrive: Arrive
    scope: Scope
    named_parent: SessionId | None = None
    fields: BodyFields = NO_FIELDS
    group: str | None = None
    prompt: Prompt = Prompt.ELSEWHERE
    """Where the prompt's text is; looked up as the body is let go."""
    salt: str | None = None
    """What the body is to say as `cache_salt`, whatever it says; None: what it says."""
    terms: TenantTerms = NO_TERMS
    """What its tenant may take."""
    charged_tokens: int = 0
    """What was taken for it from its tenant's token limit."""
    untold_tokens: int = 0
    """What is taken besides if nobody tells what it took: what of its prompt would be its session's
    from before, which is by the session's name alone."""
    trace: TurnTrace | None = None
    """The trace that the turn is part of; None: none."""
    waits: tuple[TurnWait, ...] = ()
    """What it waited for before the fleet."""

    @property
    def trace_id(self) -> str | None:
        """The id of that trace, which the books have beside the request's."""
        return None if self.trace is None else self.trace.trace_id

    def without_body(self, turns: int) -> IdentifiedRequest:
        """Return the request without its body's bytes, but with what they say of the prompt. The
        body of a session with more `turns` than a few is looked through now and then only."""
        is_looked_at = turns <= LEARNT_IN_TURNS or turns % LEARNT_EACH_TURNS == 0
        place = place_of_prompt(self.fields) if is_looked_at else Prompt.ELSEWHERE
        return structs.replace(self, fields=NO_FIELDS, prompt=place)

    def body_for(
        self, body: bytes, session_id: str | None, *more: Said
    ) -> Sequence[bytes | memoryview]:
        """Return the body as a worker gets it, in pieces: under the tenant's salt, with
        `session_id`, the gateway's, where it says one itself, and with what it is to say
        besides."""
        spans, saids = self.fields.spans, list(more)
        if session_id is not None and "session_id" in spans:
            saids.append(Said("session_id", spans["session_id"], _quoted(session_id)))
        if self.salt is not None:
            saids.append(Said("cache_salt", spans.get("cache_salt"), _quoted(self.salt)))
        return pieces(body, *saids) if saids else (body,)

    def alias(self, response_id: str) -> SessionId:
        """Return the name by which a later turn may ask for this one's session."""
        return response_alias(self.scope, response_id)


class Asking:
    """Asking reads requests. `resolve` tells what an alias stands for; `is_known`, whether the
    router has the session; `homes`, which sessions are other processes' (None: none are).

    The gateway keeps `models`: all names that its workers answer to.
    """

    def __init__(
        self,
        *,
        resolve: Callable[[SessionId], SessionId],
        is_known: Callable[[SessionId], bool],
        homes: Homes | None = None,
    ) -> None:
        self.chain = ContentChain()
        self._homes = homes
        self._resolve = resolve
        self._is_known = is_known
        self._only_model: str | None = ""

    @property
    def serves_many(self) -> bool:
        """Whether a request's model decides who may serve it."""
        return self._only_model is None

    def serves(self, models: Set[str]) -> None:
        """Set the names that the fleet answers to now."""
        self._only_model = None if len(models) > 1 else next(iter(models), "")

    def read(self, request: HttpRequest) -> IdentifiedRequest:
        """Read who asks, for which model and session. Raises Rejected when the body is needed and
        can't be believed, and Elsewhere when the session is at another process.

        A request without a body (a listing of models) is no turn of a session.
        """
        try:
            return self._read(request)
        except InvalidInput as error:
            raise Rejected(HTTPStatus.BAD_REQUEST, "invalid_body", str(error)) from error

    def is_here(self, head: RequestHead) -> bool:
        """Return whether a head alone names the session, and it is at home here. Raises Elsewhere
        when it is at another process."""
        if self._homes is None or self.serves_many:
            return False
        scope = Scope(head.caller.tenant, self._only_model or "")
        identity = identify(head.special, NO_FIELDS, scope=scope)
        if identity.session is None:
            return False
        self._homes.check_named(identity)
        return True

    def _read(self, request: HttpRequest) -> IdentifiedRequest:
        """Read as `read` does. Raises InvalidInput for a field that can't be read."""
        body, head = request.body, request.head
        tenant = head.caller.tenant
        scope, model = Scope(tenant, self._only_model or ""), None
        if not body:
            return IdentifiedRequest(ANONYMOUS, Arrive(None, 0), scope, terms=head.caller.terms)
        by_headers = head.named.get(scope.model)
        if by_headers is None:
            by_headers = head.named[scope.model] = identify(head.special, NO_FIELDS, scope=scope)
        identity = by_headers
        is_named = identity.session is not None
        fields = _fields(head, body, is_named=is_named)
        if self.serves_many:
            model = fields.text("model")
            scope = Scope(tenant, model or "")
        if not is_named or self.serves_many:
            identity = identify(head.special, fields, scope=scope)
        if self._homes is not None and identity.session is not None and not request.is_here:
            self._homes.check_named(identity)  # an alias has the home that answered it
        identity = self._resolved(identity)
        shared_bytes, named_parent = 0, identity.parent
        if identity.session is None or not self._is_known(identity.session):
            identity, shared_bytes = self._by_content(
                identity, fields, scope=scope, request=request
            )
        return IdentifiedRequest(
            identity,
            Arrive(
                identity.session,
                len(body),
                model=model,
                # What a client calls a parent may begin quite differently: only bytes count.
                parent=identity.parent if shared_bytes else None,
                shared_bytes=shared_bytes or None,
            ),
            scope,
            named_parent,
            fields,
            self._group(identity, head, scope),
            salt=_salt(head, fields),
            terms=head.caller.terms,
        )

    def _group(self, identity: SessionIdentity, head: RequestHead, scope: Scope) -> str | None:
        """Return a session's group; a client may name it (a repository, a document)."""
        if identity.session is None:
            return None
        said = head.special.get(_GROUP)
        if said:
            return scope.name("group", "said", said.decode("latin-1"))
        return self.chain.group(identity.session)

    def _resolved(self, identity: SessionIdentity) -> SessionIdentity:
        """Return the identity under the session's own name, where an alias asked."""
        asked_by = identity.session
        if asked_by is None:
            return identity
        name = self._resolve(asked_by)
        return identity if name == asked_by else structs.replace(identity, session=name)

    def ended(self, identity: SessionIdentity) -> None:
        """Note that a turn is over, whatever became of it."""
        if identity.source is SessionSource.CONTENT and identity.session is not None:
            self.chain.ended(identity.session)

    def _by_content(
        self, identity: SessionIdentity, fields: BodyFields, *, scope: Scope, request: HttpRequest
    ) -> tuple[SessionIdentity, int]:
        """Return the identity that the content gives, or the parent that it begins like, and how
        many bytes they share. Raises Elsewhere."""
        content = content_of(fields, tenant=scope.tenant)
        if content is None:
            return identity, 0
        if identity.session is not None:
            place = self.chain.first_turn(identity.session, content, scope=scope)
            parent = place.parent or identity.parent
            return structs.replace(identity, parent=parent), place.shared_bytes
        turn = turn_of(content)
        if turn is None:
            return identity, 0
        if self._homes is not None:
            if not request.is_here:
                self._homes.check_content(turn)
            self._homes.note(turn)
        found = self.chain.take(turn, scope=scope)
        return (
            SessionIdentity(
                found.session, SessionSource.CONTENT, found.parent, says_final(request.head.special)
            ),
            found.shared_bytes,
        )


def _fields(head: RequestHead, body: bytes, *, is_named: bool) -> BodyFields:
    """Return the body's fields. Raises Rejected or InvalidInput for a body that can't be believed.

    A compressed body is refused too: it may hold any `session_id`, and no engine reads it. Where a
    header names the session, a body that is no strict JSON is looked at as lenient engines read it,
    and counts as one without fields.
    """
    special = head.special
    if special.get(b"content-encoding", b"identity").lower() not in (b"", b"identity"):
        raise Rejected(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "content_encoding",
            "content-encoding: a compressed body can't be read here, nor by an engine;"
            " send it plain",
        )
    is_json = special.get(b"content-type", b"").lower().startswith(b"application/json")
    if not (is_json or body.lstrip()[:1] == b"{"):
        if head.caller.salting is not None:
            raise Rejected(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "unsalted",
                "body: only JSON can be kept apart from other tenants'; send one JSON object",
            )
        return NO_FIELDS
    try:
        return scan(body)
    except InvalidInput:
        if not is_named:
            raise
        check_as_engines_read(body)
        return NO_FIELDS


def _quoted(text: str) -> bytes:
    """Return plain ASCII without quotes as JSON."""
    return b'"%b"' % text.encode("ascii")


def _salt(head: RequestHead, fields: BodyFields) -> str | None:
    """Return the salt under which the tenant's prompt is to be kept; None for a caller without
    one. A client's own parts it further."""
    salting = head.caller.salting
    return None if salting is None else salting.salt(fields.text("cache_salt") or "")


# ---- who owns it, asked of the directory
#
#     turns of unknown sessions ── waiting ──> one frame at a time ──> directory
#     turns go on <── Claimed, or LOOK_UP_S is over ──────────────────────┘
#
# A frame that takes longer than LOOK_UP_S makes nobody wait any more, until a later frame is
# answered in time: a directory that hangs or is away delays the turns that asked with its first
# frame, and no others. Those that come meanwhile ask and go on; a late answer is heard too.


log = logging.getLogger("ownerserve.gateway")

LOOK_UP_S = 0.25
"""A directory that takes longer is not waited for: the turn goes by what is known here."""
FRAME_MAX = 256


class SessionFinder:
    """The finder asks a directory, whose client blocks, in a thread of its own. `tell` hears of
    owners."""

    def __init__(
        self, directory: Directory, names: WorkerNames, *, tell: Callable[[Claimed], None]
    ) -> None:
        self.answers: Counter[str] = Counter()
        """Outcomes by name, refusals by reason: metric labels."""
        self._directory = directory
        self._tell = tell
        self._seen: Epoch | None = None
        self._names = names
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "directory")
        self._waiting: dict[SessionId, asyncio.Future[None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self._is_silent = False
        """Whether a frame took longer than a turn waits, and none was answered in time since."""
        self._is_failing = False
        """Whether the last frame met a fault."""

    def heard(self, epoch: Epoch) -> None:
        """Remember an epoch under which a worker owns: a directory that does not know it has lost
        memory."""
        self._seen = later(self._seen, epoch)

    async def look_up(self, session: SessionId) -> None:
        """Ask who owns the session, and wait for the answer for LOOK_UP_S at most; not at all where
        the directory was silent before."""
        if self._is_late():
            self.answers["not_asked"] += 1
            return
        answered = self._waiting.get(session)
        if answered is None:
            answered = self._waiting[session] = self._loop.create_future()
        if self._asking is None or self._asking.done():
            self._asked_s = self._loop.time()  # who waits counts from here
            self._asking = self._loop.create_task(self._ask())
        if self._is_silent:
            self.answers["not_awaited"] += 1
            return
        try:
            async with asyncio.timeout(LOOK_UP_S):
                await asyncio.shield(answered)
        except TimeoutError:
            self.answers["too_slow"] += 1

    async def owner_of(self, session: SessionId) -> RoutingUnit | None:
        """Return who owns the session now, under this gateway's name; None: nobody who lives, or
        the directory is silent."""
        if self._is_silent:
            return None
        (found,) = await self._execute([FindSession(session, self._seen)])
        if not isinstance(found, SessionIs) or not found.owner_live:
            return None
        self.heard(found.epoch)
        return self._names.here(found.owner)

    async def wishes(self, sessions: Sequence[SessionId]) -> list[tuple[SessionId, RoutingUnit]]:
        """Return which units are wished to hold a copy of what these sessions end in, and do not;
        none where the directory is silent, or says nothing of them."""
        if self._is_silent or not sessions:
            return []
        found = await self._execute([FindSession(one, self._seen) for one in sessions])
        tips = {
            one.prefix_hash: session
            for session, one in zip(sessions, found, strict=True)
            if isinstance(one, SessionIs) and one.prefix_hash is not None
        }
        if not tips:
            return []
        held = await self._execute([Lookup((tip,)) for tip in tips])
        return [
            (session, unit)
            for session, one in zip(tips.values(), held, strict=True)
            if isinstance(one, Found)
            for unit in one.wanted
        ]

    def close(self) -> None:
        """Stop asking, and let the directory's client go behind the frame under way."""
        if self._asking is not None:
            self._asking.cancel()
        for answered in self._waiting.values():
            answered.cancel()
        # Behind the frame under way: a client's socket is its thread's.
        self._thread.submit(self._directory.close)
        self._thread.shutdown(wait=False)

    def _is_late(self) -> bool:
        """Return whether the frame under way takes too long to stand behind it."""
        is_asking = self._asking is not None and not self._asking.done()
        return is_asking and self._loop.time() - self._asked_s >= LOOK_UP_S

    async def _ask(self) -> None:
        """Ask frame by frame, until nobody waits."""
        while self._waiting:
            sessions = list(self._waiting)[:FRAME_MAX]
            answered = [self._waiting.pop(session) for session in sessions]
            sent_s = self._loop.time()
            outcomes = await self._execute([FindSession(one, self._seen) for one in sessions])
            is_late = self._loop.time() - sent_s >= LOOK_UP_S
            is_answered = outcomes[0] != Refused(DirectoryRefusal.UNREACHABLE)
            self._is_silent = is_late or (self._is_silent and not is_answered)
            for session, outcome in zip(sessions, outcomes, strict=True):
                self._hear(session, outcome)
            for one in answered:
                if not one.done():
                    one.set_result(None)
            self._asked_s = self._loop.time()

    async def _execute(self, requests: Sequence[FindSession | Lookup]) -> list[Outcome]:
        """Ask one frame; a fault of the directory's is logged once and counts as silence, so that
        no turn waits for it."""
        try:
            outcomes = await self._loop.run_in_executor(
                self._thread, self._directory.execute, requests
            )
            if len(outcomes) != len(requests):
                raise InvariantViolated(f"{len(outcomes)} answers to {len(requests)} requests")
        except Exception:  # whatever a backend raises
            self.answers["failed"] += 1
            if not self._is_failing:
                log.exception("the directory fails: asked again until it answers")
            self._is_failing = True
            return [Refused(DirectoryRefusal.UNREACHABLE) for _ in requests]
        self._is_failing = False
        return outcomes

    def _hear(self, session: SessionId, outcome: Outcome) -> None:
        match outcome:
            case Refused(reason):
                self.answers[reason.lower()] += 1
            case Miss():  # nobody owns it: it goes where the policy says
                self.answers["miss"] += 1
            case SessionIs(owner, epoch, version):
                self.answers["session_is"] += 1
                self.heard(epoch)
                if outcome.owner_live:
                    self._tell(Claimed(session, self._names.here(owner), epoch, version))
            case _:
                self.answers["malformed"] += 1
