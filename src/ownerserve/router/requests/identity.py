"""The session that a request belongs to: named by its headers or body, or found by its content.

Owns the list of headers and body fields that name a session, and their order. The first that is
present wins; ids are compared whole, never by prefix ("session-1" and "session-12" are two), and
each is scoped to its tenant, its model and the field that named it. Where nothing names
a session its content does (below).

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

**Content**: sessions of agents that send no key are found by what their bodies begin with
(ContentChain). Owns the tips: at which bytes the earlier bodies of each conversation ended. Never
parses content, never keeps any of it, and never believes two conversations to be one: what counts
is equality of every byte up to a tip (to a 64-bit chance; a mistake costs a cache hit, no answer
depends on it).

    body n      root | messages ............ tip_n ]
    body n+1    root | messages ............ tip_n , answer, tool result .... tip_n+1 ]

    root     digest of tenant, model, tools, system: what stands before the first message
    h(i)     xxh3 over chunk i, seeded with h(i-1): one for each chunk of the new body.
             1 KiB each for the first 4 KiB, then 4 KiB: what they cost is their number
    tip      a message boundary: h of the last whole chunk, then of the bytes left over

A tip is looked for where some body ended: each chunk's mark knows at which offsets past it. So one
pass over the bytes finds the latest tip; tips are kept, and of a session's first body about four
chunks an octave, for sessions that only begin alike.

| the longest that is known | then |
|---|---|
| the last tip of a session | its next turn |
| the same, nothing added, and that turn is still running | another sample: a fork |
| an earlier tip, or a chunk | a new session, forked there |
| nothing | a new session |

**Groups.** Sessions that begin alike are a group (one system prompt and tools, one repository). Its
name stands for the head that the first two of them shared; who shares that head with one of them
joins, also when it shares more.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from ownerserve.kv.errors import UNREADABLE, InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.kv.units import KIB
from ownerserve.kv.wire.headers import FINAL_HEADER, NAME_DIGITS
from ownerserve.router.requests.body import BodyFields

NAMES_KEPT = 16_384
KEPT_ID_MAX = 128
"""Characters. Names of sessions that come again are kept, so long as their ids are short."""


class Scope(msgspec.Struct, frozen=True, gc=False):
    """A scope is the tenant and the model of a session: ids are compared within one scope only."""

    tenant: str
    model: str = ""

    def name(self, field: str, *values: str) -> SessionId:
        """Return the router's name of the session that a client means by `field` = `values`."""
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
    """A session's source says which kind of field named it."""

    HEADER = "header"
    BODY = "body"
    CONTENT = "content"
    NONE = "none"


class SessionIdentity(msgspec.Struct, frozen=True, gc=False):
    """An identity says which session a request belongs to; `session` is None when nothing names
    one.

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
    """Return the tenant behind a credential, in a form that may be shown; "-" for none."""
    return "-" if credential is None else blake2b(credential, digest_size=12).hexdigest()


def response_alias(scope: Scope, response_id: str) -> SessionId:
    """Return the name under which a later `previous_response_id` will ask for this answer's
    session."""
    return scope.name("previous_response_id", response_id)


def identify(headers: Mapping[bytes, bytes], body: BodyFields, *, scope: Scope) -> SessionIdentity:
    """Find the session of a request in its lower-case identity `headers` and its `body` fields."""
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
    """Return whether the client says that its session ends with this turn."""
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
    """Return what vLLM itself would take for the session where neither body nor header says one."""
    if raw is None:
        return None
    try:
        value = _VLLM_ARGUMENTS.decode(raw).session_id
    except UNREADABLE:
        return None  # vLLM refuses what is no object
    return value if isinstance(value, str) else None


def _metadata_session(raw: bytes | None) -> str | None:
    """Return the session in Claude Code's `metadata.user_id`, which is "user_.._session_<id>" or
    JSON with a session_id; None when it has none."""
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


_BEFORE_MESSAGES = ("tools", "system", "instructions")
"""In the order in which chat templates show them."""

_CACHE_MARKER = b'"cache_control"'
_CACHE_MARKERS = re.compile(rb',\s*"cache_control"\s*:\s*(?:null|\{[^{}]*\})')
"""Anthropic's: a client moves them on with every turn, so they can't count as content."""


CHUNK_BYTES = KIB
FINE_CHUNKS = 4
COARSE_BYTES = 4 * KIB

CONTENT_MIN_BYTES = KIB
"""Less than this is no session: computing it anew costs nothing, and many say the same."""

TIPS_KEPT = 4
"""A session's last turns that a fork or an edit may go back to."""

OFFSETS_MAX = 16
"""Ends remembered past one chunk; the earliest goes first."""

SESSIONS_MAX = 50_000


class Content(msgspec.Struct, frozen=True, gc=False):
    """A content is what a body says, as bytes [start, end) of `data` after a `root`, which stands
    for `root_bytes` more before them."""

    data: bytes
    start: int
    end: int
    root: int
    root_bytes: int


class ContentTurn(msgspec.Struct, frozen=True, gc=False):
    """A content turn is a content with the chain of its chunks' `hashes`; it ends `offset` bytes
    past the last of them, and `key` is the key of that end."""

    content: Content
    hashes: list[int]
    offset: int
    key: int

    def tip(self, chunk: int, offset: int) -> int | None:
        """Return the key of an end `offset` bytes past a chunk, as this content would have it; None
        beyond its own end."""
        content = self.content
        begin = content.start + _start_of(chunk)
        if begin + offset > content.end:
            return None
        return _tip_key(content.data, begin, offset, chunk=self.hashes[chunk])


def turn_of(content: Content) -> ContentTurn | None:
    """Return the content as a turn; None when it is too short to tell sessions apart."""
    if content.end - content.start + content.root_bytes < CONTENT_MIN_BYTES:
        return None
    hashes = chunk_hashes(content)
    end = content.start + _start_of(len(hashes) - 1)
    offset = content.end - end
    return ContentTurn(
        content, hashes, offset, _tip_key(content.data, end, offset, chunk=hashes[-1])
    )


class ChainPlace(msgspec.Struct, frozen=True, gc=False):
    """A place says where a body belongs. `shared_bytes` of it are equal to the beginning of
    `parent`'s."""

    session: SessionId
    parent: SessionId | None = None
    shared_bytes: int = 0


class _Known(msgspec.Struct, gc=False):
    """A known session has its tenant, its turns so far, how many of them run, its keys in the
    tables, and its group, whose head has `group_bytes`."""

    tenant: str
    turn: int
    running: int
    tips: list[int]
    chunks: list[int]
    group: str | None = None
    group_bytes: int = 0


class _Head(NamedTuple):
    """A head is what a body shares with `session`'s: `shared_bytes`, of which `chunk` is the last
    whole one."""

    session: SessionId
    shared_bytes: int
    chunk: int


class _Tip(msgspec.Struct, frozen=True, gc=False):
    """A tip says that body `turn` of `session` ended `offset` bytes past the chunk `chunk`."""

    session: SessionId
    turn: int
    chunk: int
    offset: int


class _Mark(msgspec.Struct, gc=False):
    """A mark is a chunk that was seen. `session`: whose first body has it; `offsets`: where bodies
    ended past it."""

    session: SessionId | None
    offsets: tuple[int, ...] = ()


class ContentChain:
    """The chain finds sessions by content, and names the new ones."""

    def __init__(self, *, limit: int = SESSIONS_MAX) -> None:
        self._limit = limit
        self._sessions: dict[SessionId, _Known] = {}
        self._tips: dict[int, _Tip] = {}
        self._marks: dict[int, _Mark] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def arrive(self, content: Content, *, scope: Scope) -> ChainPlace | None:
        """Return the session that the body goes on with, or a new one; None when the body is too
        short to tell."""
        turn = turn_of(content)
        return None if turn is None else self.take(turn, scope=scope)

    def take(self, turn: ContentTurn, *, scope: Scope) -> ChainPlace:
        """Return the session that the turn goes on with, or a new one."""
        content, hashes, offset, key = turn.content, turn.hashes, turn.offset, turn.key
        length = content.end - content.start
        tip, at = self._longest_tip(content, hashes, scope)
        if tip is not None:
            known = self._sessions[tip.session]
            is_same = at == length
            if tip.turn == known.turn and not (is_same and known.running):
                self._touch(tip.session)
                if is_same:
                    known.running += 1
                else:
                    self._end_turn_at(tip.session, key, chunk=hashes[-1], offset=offset)
                return ChainPlace(tip.session)
        head = self._longest_chunk(hashes, content.root_bytes, scope)
        if tip is not None and (head is None or at + content.root_bytes > head.shared_bytes):
            head = _Head(tip.session, at + content.root_bytes, tip.chunk)
        self._made += 1
        name = scope.name("content", f"{key:016x}", str(self._made))
        self._begin(name, hashes, scope)
        self._end_turn_at(name, key, chunk=hashes[-1], offset=offset)
        if head is None:
            return ChainPlace(name)
        self._join(name, head, scope)
        return ChainPlace(name, head.session, head.shared_bytes)

    def first_turn(self, name: SessionId, content: Content, *, scope: Scope) -> ChainPlace:
        """Take in the first body of a session that has a name, and return which session it begins
        like."""
        hashes = chunk_hashes(content)
        head = self._longest_chunk(hashes, content.root_bytes, scope)
        if name not in self._sessions:
            self._begin(name, hashes, scope)
        if head is None or head.session == name:
            return ChainPlace(name)
        self._join(name, head, scope)
        return ChainPlace(name, head.session, head.shared_bytes)

    def group(self, session: SessionId) -> str | None:
        """Return the name of the group that the session belongs to; None when nobody else began
        like it."""
        known = self._sessions.get(session)
        return None if known is None else known.group

    def ended(self, session: SessionId) -> None:
        """Note that a turn of the session runs no more."""
        known = self._sessions.get(session)
        if known is not None and known.running:
            known.running -= 1

    def forget(self, session: SessionId) -> None:
        """Forget a session that is over."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        for key in known.tips:
            self._drop_tip(key)
        for key in known.chunks:
            mark = self._marks.get(key)
            if mark is not None and mark.session == session:
                mark.session = None
                self._drop_if_empty(key, mark)

    def check(self) -> None:
        """Raise InvariantViolated unless every key is some session's (for tests)."""
        tips = {key for known in self._sessions.values() for key in known.tips}
        if tips != set(self._tips):
            raise InvariantViolated("a tip of the content chain has no session")
        for key, mark in self._marks.items():
            if mark.session is not None and key not in self._sessions[mark.session].chunks:
                raise InvariantViolated("a chunk of the content chain is not its session's")
            if mark.session is None and not mark.offsets:
                raise InvariantViolated("a mark of the content chain stands for nothing")

    # ---- looking

    def _is_of(self, session: SessionId, scope: Scope) -> bool:
        """Return whether the session is the tenant's. The root of its hashes says so too, but 64
        bits can be met by who tries to."""
        return self._sessions[session].tenant == scope.tenant

    def _longest_tip(
        self, content: Content, hashes: list[int], scope: Scope
    ) -> tuple[_Tip | None, int]:
        """Return the tenant's tip that lies furthest in the body, and at which offset; (None, 0)
        when none is known."""
        marks, data = self._marks, content.data
        for chunk in range(len(hashes) - 1, -1, -1):
            mark = marks.get(hashes[chunk])
            if mark is None or not mark.offsets:
                continue
            at = _start_of(chunk)
            begin = content.start + at
            offsets: Iterable[int] = mark.offsets
            if len(mark.offsets) > 1:
                offsets = sorted(set(offsets), reverse=True)
            for offset in offsets:
                if begin + offset > content.end:
                    continue
                tip = self._tips.get(_tip_key(data, begin, offset, chunk=hashes[chunk]))
                if tip is not None and self._is_of(tip.session, scope):
                    return tip, at + offset
        return None, 0

    def _longest_chunk(self, hashes: list[int], root_bytes: int, scope: Scope) -> _Head | None:
        """Return the head shared with the tenant's session whose first body is equal for longest;
        None when there is none."""
        for chunk in range(len(hashes) - 1, -1, -1):
            mark = self._marks.get(hashes[chunk])
            shared = _start_of(chunk) + root_bytes
            if mark is None or mark.session is None or not self._is_of(mark.session, scope):
                continue
            if shared >= CHUNK_BYTES:
                self._touch(mark.session)
                return _Head(mark.session, shared, hashes[chunk])
        return None

    # ---- keeping

    def _join(self, name: SessionId, head: _Head, scope: Scope) -> None:
        """Put the session into the group of those that share that head, or let the two begin
        one."""
        known, like = self._sessions.get(name), self._sessions.get(head.session)
        if known is None or like is None or known.group is not None:
            return
        if like.group is not None and like.group_bytes <= head.shared_bytes:
            known.group, known.group_bytes = like.group, like.group_bytes
            return
        known.group = scope.name("group", "head", f"{head.chunk:016x}")
        known.group_bytes = head.shared_bytes
        if like.group is None:
            like.group, like.group_bytes = known.group, known.group_bytes

    def _begin(self, name: SessionId, hashes: list[int], scope: Scope) -> None:
        while len(self._sessions) >= self._limit:
            self.forget(next(iter(self._sessions)))
        known = self._sessions[name] = _Known(scope.tenant, 0, 0, [], [])
        for chunk in _kept_chunks(len(hashes) - 1):
            mark = self._mark(hashes[chunk])
            if mark.session is None:
                mark.session = name
                known.chunks.append(hashes[chunk])

    def _end_turn_at(self, name: SessionId, key: int, *, chunk: int, offset: int) -> None:
        """Note that the session's latest body ends here."""
        known = self._sessions[name]
        known.turn += 1
        known.running += 1
        before = self._tips.get(key)
        if before is not None:  # another sample of the same body: the newest is found from now on
            self._sessions[before.session].tips.remove(key)
            self._drop_tip(key)
        self._tips[key] = _Tip(name, known.turn, chunk, offset)
        known.tips.append(key)
        if len(known.tips) > TIPS_KEPT:
            self._drop_tip(known.tips.pop(0))
        mark = self._mark(chunk)
        mark.offsets = (*mark.offsets, offset)[-OFFSETS_MAX:]

    def _drop_tip(self, key: int) -> None:
        tip = self._tips.pop(key)
        mark = self._marks.get(tip.chunk)
        if mark is None:
            return
        offsets = list(mark.offsets)
        if tip.offset in offsets:
            offsets.remove(tip.offset)
            mark.offsets = tuple(offsets)
        self._drop_if_empty(tip.chunk, mark)

    def _drop_if_empty(self, key: int, mark: _Mark) -> None:
        if mark.session is None and not mark.offsets:
            del self._marks[key]

    def _mark(self, key: int) -> _Mark:
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = _Mark(None)
        return mark

    def _touch(self, name: SessionId) -> None:
        """Make the session the most recently used."""
        self._sessions[name] = self._sessions.pop(name)


def chunk_hashes(content: Content) -> list[int]:
    """Return the chain of hashes over the content: h(0) is the root, then one for each whole
    chunk."""
    data, digest, end = content.data, xxh3_64_intdigest, content.end
    coarse = content.start + FINE_CHUNKS * CHUNK_BYTES
    last = content.root
    hashes = [last]
    append = hashes.append
    for at in range(content.start, min(end, coarse) - CHUNK_BYTES + 1, CHUNK_BYTES):
        last = digest(data[at : at + CHUNK_BYTES], last)
        append(last)
    for at in range(coarse, end - COARSE_BYTES + 1, COARSE_BYTES):
        last = digest(data[at : at + COARSE_BYTES], last)
        append(last)
    return hashes


def _start_of(chunk: int) -> int:
    """Return how many bytes of the content lie before the chunk."""
    coarse = max(chunk - FINE_CHUNKS, 0)
    return (chunk - coarse) * CHUNK_BYTES + coarse * COARSE_BYTES


def root_of(scope: str, parts: Mapping[str, bytes]) -> tuple[int, int]:
    """Return the root's digest and how many bytes it stands for; `parts` come by name, in a fixed
    order."""
    digest, held = xxh3_64_intdigest(scope.encode()), 0
    for name, value in parts.items():
        digest = xxh3_64_intdigest(value, xxh3_64_intdigest(name.encode(), digest))
        held += len(value)
    return digest, held


def _tip_key(data: bytes, begin: int, offset: int, *, chunk: int) -> int:
    """Return the key of a tip, which differs from its chunk's own: a tip at offset 0 has one
    too."""
    return xxh3_64_intdigest(data[begin : begin + offset], ~chunk & 0xFFFFFFFFFFFFFFFF)


def _kept_chunks(last: int) -> list[int]:
    """Return those of the chunks 0..last that are kept: 0, 1 .. 8, 10, 12, 15, 18, 22 ..., and the
    last one."""
    kept, chunk = [], 0
    while chunk < last:
        kept.append(chunk)
        chunk += max(1, chunk // 4)
    return [*kept, last]


def content_of(body: BodyFields, *, tenant: str) -> Content | None:
    """Return the conversation in a body, after the root of what comes before its messages; None
    when it has none.

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
    scope, salt = f"{tenant}/{body.text('model')}", body.text("cache_salt")
    root, root_bytes = root_of(f"{scope}/{salt}" if salt else scope, before)
    if data.find(_CACHE_MARKER, start, end) >= 0:
        data = _CACHE_MARKERS.sub(b"", data[start:end])
        start, end = 0, len(data)
    while end > start and data[end - 1] in b" \t\r\n":
        end -= 1
    return Content(data, start, end, root, root_bytes)
