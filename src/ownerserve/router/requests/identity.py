"""The session that a request belongs to: read from its headers and its body.

Owns the list of headers and body fields that name a session, and their order. The first that is
present wins; ids are compared whole, never by prefix ("session-1" and "session-12" are two), and
each is scoped to its tenant, its model and the field that named it. Where nothing names
a session its content does (content_chain.py).

| order | field | sent by |
|---|---|---|
| 1 | x-session-id | OpenCode, and whoever asks for a session by hand |
| 2 | x-dynamo-session-id | Dynamo clients (parent: x-dynamo-parent-session-id) |
| 3 | x-smg-routing-key | SGLang Model Gateway clients |
| 4 | x-claude-code-session-id | Claude Code; with x-claude-code-agent-id a sub-agent of it |
| 5 | thread-id, session-id, session_id, conversation_id | Codex (parent: x-codex-parent-..) |
| 6 | x-opencode-session, x-session-affinity | OpenCode (parent: x-parent-session-id) |
| 7 | body session_id, prompt_cache_key, previous_response_id | ours, OpenAI clients |
|   | body vllm_xargs.session_id | vLLM clients |
| 8 | body metadata.user_id with a session in it | Claude Code before it had a header |
| 9 | body user | OpenAI clients; names a user rather than a session, so it comes last |
| 10 | what the body begins with | agents that send no key |

A session ends with the turn that says so: x-ownerserve-session-final or x-dynamo-session-final.

**Names**: a digest of tenant, model, field and the client's own word is the session's name. A name
is the session's only one, for router, workers, peers and directory: 32 hex digits, whatever the
client wrote. Nobody finds another tenant's session by guessing its id, an id of any length costs
the same, and nothing of a client's text leaves the gateway.

**The model is in the name from the first turn on**, so that a fleet that learns of a second model
renames nobody. Where all workers serve one model it is that one, without a look at the body; where
they serve several, or it is not known what one of them serves, it is the one that the body names.
Both are equal for whoever is served: a worker that serves one model answers no other name. One
exception costs a session its cached state once: a body that names no model, on the day when the
fleet learns of a second one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import FINAL_HEADER, NAME_DIGITS
from ownerserve.router.requests.body import BodyFields

NAMES_KEPT = 16_384
KEPT_ID_MAX = 128
"""Characters. Names of sessions that come again are kept, so long as their ids are short."""


class Scope(msgspec.Struct, frozen=True, gc=False):
    """The tenant and the model of a session: ids are compared within one scope only."""

    tenant: str
    model: str = ""

    def name(self, field: str, *values: str) -> SessionId:
        """The session that a client means by `field` = `values`."""
        make = _kept if sum(map(len, values)) <= KEPT_ID_MAX else _name
        return make(self.tenant, self.model, field, *values)


def _name(*parts: str) -> SessionId:
    text = "".join([f"{len(part)}:{part}" for part in parts])
    data = text.encode("utf-8", "surrogatepass")
    digest = blake2b(data, digest_size=NAME_DIGITS // 2, person=b"ownerserve-name")
    return SessionId(digest.hexdigest())


_kept = lru_cache(NAMES_KEPT)(_name)


_SESSION_HEADERS = (
    b"x-session-id",
    b"x-dynamo-session-id",
    b"x-smg-routing-key",
    b"x-claude-code-session-id",
    b"thread-id",
    b"session-id",
    b"session_id",
    b"conversation_id",
    b"x-opencode-session",
    b"x-session-affinity",
)
_PARENT_HEADERS = {
    b"x-session-id": b"x-parent-session-id",
    b"x-dynamo-session-id": b"x-dynamo-parent-session-id",
    b"thread-id": b"x-codex-parent-thread-id",
    b"x-opencode-session": b"x-parent-session-id",
    b"x-session-affinity": b"x-parent-session-id",
}
_CLAUDE_SESSION, _CLAUDE_AGENT = b"x-claude-code-session-id", b"x-claude-code-agent-id"
_CLAUDE_PARENT = b"x-claude-code-parent-agent-id"
_FINAL = (FINAL_HEADER.encode(), b"x-dynamo-session-final")

IDENTITY_HEADERS = frozenset(
    {*_SESSION_HEADERS, *_PARENT_HEADERS.values(), _CLAUDE_AGENT, _CLAUDE_PARENT, *_FINAL}
)
"""Every header `identify` reads, in lower case. A request that gives one twice is refused."""

_METADATA_SESSION = re.compile(r"_session_([0-9A-Za-z-]+)$")


class SessionSource(enum.StrEnum):
    """Which kind of field named the session."""

    HEADER = "header"
    BODY = "body"
    CONTENT = "content"
    NONE = "none"


class SessionIdentity(msgspec.Struct, frozen=True, gc=False):
    """The session of a request; `session` is None when nothing names one.

    `parent`: as the client says, or whose content it begins like. `final`: the client says that
    the session ends with this turn.
    """

    session: SessionId | None = None
    source: SessionSource = SessionSource.NONE
    parent: SessionId | None = None
    final: bool = False


ANONYMOUS = SessionIdentity()


@lru_cache(maxsize=4096)
def tenant_of(credential: bytes | None) -> str:
    """The tenant behind a credential, in a form that may be shown; "-" for none."""
    return "-" if credential is None else blake2b(credential, digest_size=12).hexdigest()


def response_alias(scope: Scope, response_id: str) -> SessionId:
    """The name under which a later `previous_response_id` will ask for this answer's session."""
    return scope.name("previous_response_id", response_id)


def identify(headers: Mapping[bytes, bytes], body: BodyFields, *, scope: Scope) -> SessionIdentity:
    """The session of a request from its lower-case identity `headers` and its `body` fields."""
    is_said = not IDENTITY_HEADERS.isdisjoint(headers)  # most requests have other headers alone
    if is_said:
        for name in _SESSION_HEADERS:
            value = headers.get(name)
            if value:
                return _from_header(name, value.decode("latin-1"), headers=headers, scope=scope)
    found = _from_body(body, scope) if body.spans else ANONYMOUS
    if is_said and found.session is not None and says_final(headers):
        return msgspec.structs.replace(found, final=True)
    return found


def says_final(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client says that its session ends with this turn."""
    return any(headers.get(name, b"").lower() in (b"true", b"1") for name in _FINAL)


def _from_header(
    name: bytes, value: str, *, headers: Mapping[bytes, bytes], scope: Scope
) -> SessionIdentity:
    field = name.decode()
    session, parent = scope.name(field, value), None
    if name == _CLAUDE_SESSION:
        agent = headers.get(_CLAUDE_AGENT)
        if agent:  # a sub-agent has a context of its own; its parent is an agent or the main one
            above = headers.get(_CLAUDE_PARENT)
            parent = scope.name(field, value, above.decode("latin-1")) if above else session
            session = scope.name(field, value, agent.decode("latin-1"))
    elif name in _PARENT_HEADERS:
        above = headers.get(_PARENT_HEADERS[name])
        parent = scope.name(field, above.decode("latin-1")) if above else None
    return SessionIdentity(
        session=session, source=SessionSource.HEADER, parent=parent, final=says_final(headers)
    )


def _from_body(body: BodyFields, scope: Scope) -> SessionIdentity:
    for field in ("session_id", "prompt_cache_key", "previous_response_id"):
        value = body.text(field)
        if value:
            return SessionIdentity(session=scope.name(field, value), source=SessionSource.BODY)
    value = _vllm_session(body.raw("vllm_xargs"))
    if value:
        return SessionIdentity(session=scope.name("vllm_xargs", value), source=SessionSource.BODY)
    value = _metadata_session(body.raw("metadata"))
    if value:
        return SessionIdentity(session=scope.name("metadata", value), source=SessionSource.BODY)
    value = body.text("user")
    if value:
        return SessionIdentity(session=scope.name("user", value), source=SessionSource.BODY)
    return ANONYMOUS


class _Metadata(msgspec.Struct, gc=False):
    user_id: str | None = None


class _MetadataUser(msgspec.Struct, gc=False):
    session_id: str | None = None


class _VllmArguments(msgspec.Struct, gc=False):
    session_id: Any = None


_VLLM_ARGUMENTS = msgspec.json.Decoder(_VllmArguments)
_METADATA = msgspec.json.Decoder(_Metadata)
_METADATA_USER = msgspec.json.Decoder(_MetadataUser)


def _vllm_session(raw: bytes | None) -> str | None:
    """What vLLM itself would take for the session where neither body nor header says one."""
    if raw is None:
        return None
    try:
        value = _VLLM_ARGUMENTS.decode(raw).session_id
    except UNREADABLE:
        return None  # vLLM refuses what is no object
    return value if isinstance(value, str) else None


def _metadata_session(raw: bytes | None) -> str | None:
    """Claude Code's `metadata.user_id`: "user_.._session_<id>", or JSON with a session_id."""
    if raw is None or b"session" not in raw:
        return None
    try:
        user = _METADATA.decode(raw).user_id
        if user is None:
            return None
        match = _METADATA_SESSION.search(user)
        return match[1] if match else _METADATA_USER.decode(user).session_id
    except UNREADABLE:
        return None  # someone else's metadata
