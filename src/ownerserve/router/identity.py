"""Who is asking: the session a request belongs to.

Owns the list of headers and body fields that name a session, and their order. The first that is
present wins; ids are compared whole, never by prefix ("session-1" and "session-12" are two), and
each is scoped to its tenant, its model and the field that named it (naming.py). Where nothing names
a session its content does (content_chain.py): `content_of` says which bytes count, and never looks
into them.

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
from ownerserve.router.content_chain import Content, root_of
from ownerserve.router.naming import Scope
from ownerserve.router.scan import BodyFields

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
_FINAL = (b"x-ownerserve-session-final", b"x-dynamo-session-final")

IDENTITY_HEADERS = frozenset(
    {*_SESSION_HEADERS, *_PARENT_HEADERS.values(), _CLAUDE_AGENT, _CLAUDE_PARENT, *_FINAL}
)
"""Every header `identify` reads, in lower case. A request that gives one twice is refused."""

_BEFORE_MESSAGES = ("tools", "system", "instructions")
"""In the order in which chat templates show them."""

_CACHE_MARKER = b'"cache_control"'
_CACHE_MARKERS = re.compile(rb',\s*"cache_control"\s*:\s*(?:null|\{[^{}]*\})')
"""Anthropic's: a client moves them on with every turn, so they can't count as content."""

_METADATA_SESSION = re.compile(r"_session_([0-9A-Za-z-]+)$")


class Source(enum.StrEnum):
    """Which kind of field named the session."""

    HEADER = "header"
    BODY = "body"
    CONTENT = "content"
    NONE = "none"


class Identity(msgspec.Struct, frozen=True, gc=False):
    """The session of a request; `session` is None when nothing names one.

    `parent`: as the client says, or whose content it begins like. `final`: the client says that
    the session ends with this turn.
    """

    session: SessionId | None = None
    source: Source = Source.NONE
    parent: SessionId | None = None
    final: bool = False


ANONYMOUS = Identity()


@lru_cache(maxsize=4096)
def tenant_of(credential: bytes | None) -> str:
    """The tenant behind a credential, in a form that may be shown; "-" for none."""
    return "-" if credential is None else blake2b(credential, digest_size=12).hexdigest()


def response_alias(scope: Scope, response_id: str) -> SessionId:
    """The name under which a later `previous_response_id` will ask for this answer's session."""
    return scope.name("previous_response_id", response_id)


def identify(headers: Mapping[bytes, bytes], body: BodyFields, *, scope: Scope) -> Identity:
    """The session of a request from its lower-case identity `headers` and its `body` fields."""
    if headers:
        for name in _SESSION_HEADERS:
            value = headers.get(name)
            if value:
                return _from_header(name, value.decode("latin-1"), headers=headers, scope=scope)
    found = _from_body(body, scope) if body.spans else ANONYMOUS
    if headers and found.session is not None and says_final(headers):
        return msgspec.structs.replace(found, final=True)
    return found


def says_final(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client says that its session ends with this turn."""
    return any(headers.get(name, b"").lower() in (b"true", b"1") for name in _FINAL)


def content_of(body: BodyFields, *, tenant: str) -> Content | None:
    """The conversation in a body: what comes before the messages, and their bytes.

    The bytes end where the next turn's go on: before the bracket, or the quote of one long text.
    """
    for key in ("messages", "input", "prompt"):
        span = body.content.get(key)
        if span is not None:
            break
    else:
        return None
    data, start, end = body.body, span.start + 1, span.end - 1
    if data[start - 1] not in b'["':
        return None
    before = {name: body.slice(name) for name in _BEFORE_MESSAGES if name in body.content}
    root, root_bytes = root_of(f"{tenant}/{body.text('model')}", before)
    if data.find(_CACHE_MARKER, start, end) >= 0:
        data = _CACHE_MARKERS.sub(b"", data[start:end])
        start, end = 0, len(data)
    while end > start and data[end - 1] in b" \t\r\n":
        end -= 1
    return Content(data, start, end, root, root_bytes)


def _from_header(
    name: bytes, value: str, *, headers: Mapping[bytes, bytes], scope: Scope
) -> Identity:
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
    return Identity(session=session, source=Source.HEADER, parent=parent, final=says_final(headers))


def _from_body(body: BodyFields, scope: Scope) -> Identity:
    for field in ("session_id", "prompt_cache_key", "previous_response_id"):
        value = body.text(field)
        if value:
            return Identity(session=scope.name(field, value), source=Source.BODY)
    value = _vllm_session(body.raw("vllm_xargs"))
    if value:
        return Identity(session=scope.name("vllm_xargs", value), source=Source.BODY)
    value = _metadata_session(body.raw("metadata"))
    if value:
        return Identity(session=scope.name("metadata", value), source=Source.BODY)
    value = body.text("user")
    if value:
        return Identity(session=scope.name("user", value), source=Source.BODY)
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
