"""What a request says to a worker that only computes its prompt, and what that worker says to the
one that answers. Pure.

This is how vLLM's own connectors part a turn (NIXL, Mooncake): the worker that prefills gets the
client's request for one token that nobody reads, with `kv_transfer_params` that ask it to keep the
state; its answer's `kv_transfer_params` say where the state lies, and go to the other worker as
they came. A connector that finds state by content (a shared store) answers none, and needs none.

    client's body ── one token, no stream, do_remote_decode ──> P
                                          kv_transfer_params <── P's answer
    client's body ── kv_transfer_params ──> D
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.errors import UNREADABLE
from ownerserve.router.requests.body import BodyFields, Said

_PARAMS = "kv_transfer_params"
_KEEP = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_LIMIT = {
    b"/v1/chat/completions": "max_tokens",
    b"/v1/completions": "max_tokens",
    b"/v1/messages": "max_tokens",
    b"/v1/responses": "max_output_tokens",
}
"""The field by which each API says how long an answer may be; other paths have no turns."""
_INSTEAD = {
    "max_completion_tokens": b"1",
    "min_tokens": b"0",
    "n": b"1",
    "session_id": b"null",
    "store": b"false",
    "stream_options": b"null",
}
"""What a body says elsewise to who only prefills, where it says it at all. It has no name there: a
worker that prefills for another binds no session."""


class _Answer(msgspec.Struct):
    """This is what is read of an answer of a worker that prefilled."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def prefill_saids(target: bytes, fields: BodyFields) -> list[Said]:
    """Return what the body is to say to a worker that only computes its prompt; nothing for a
    request whose prompt can't be computed apart."""
    saids = one_token_saids(target, fields)
    return [Said(_PARAMS, None, _KEEP), *saids] if saids else []


def one_token_saids(target: bytes, fields: BodyFields) -> list[Said]:
    """Return what the body is to say so that nobody computes more of an answer than a token;
    nothing for a request that is no turn."""
    limit = _LIMIT.get(target.partition(b"?")[0])
    if limit is None or not fields.body:
        return []
    spans = fields.spans
    saids = [
        Said(limit, spans.get(limit), b"1"),
        Said("stream", spans.get("stream"), b"false"),
    ]
    saids += [Said(key, spans[key], value) for key, value in _INSTEAD.items() if key in spans]
    return saids


def handed_over(answer: bytes) -> list[Said] | None:
    """Return what the body is to say to the worker that answers, by the whole answer of the one
    that prefilled; None when that can't be read."""
    try:
        params = bytes(msgspec.json.decode(answer, type=_Answer).kv_transfer_params)
    except UNREADABLE:
        return None
    return [Said(_PARAMS, None, params)] if params.startswith(b"{") else []
