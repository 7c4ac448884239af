"""The routes that clients may ask for are a list: what an engine has beside them (adapters loaded,
caches reset, profiles) is its operator's.

A path is compared whole, once its query is off; `*` stands for one segment. Whoever asks with
another method hears 405, for another path 404; nothing of that reaches a worker.
"""

from __future__ import annotations

import re
from functools import lru_cache
from http import HTTPStatus

from ownerserve.gateway.http.replies import Rejected

_ROUTES: dict[bytes, tuple[bytes, ...]] = {
    b"/health": (b"GET", b"HEAD"),
    b"/v1/models": (b"GET",),
    b"/v1/models/*": (b"GET",),
    b"/v1/models/*/*": (b"GET",),
    b"/v1/chat/completions": (b"POST",),
    b"/v1/completions": (b"POST",),
    b"/v1/responses": (b"POST",),
    b"/v1/responses/*": (b"GET", b"DELETE"),
    b"/v1/responses/*/cancel": (b"POST",),
    b"/v1/messages": (b"POST",),
    b"/v1/messages/count_tokens": (b"POST",),
    b"/v1/embeddings": (b"POST",),
    b"/v1/rerank": (b"POST",),
    b"/v1/score": (b"POST",),
    b"/v1/audio/speech": (b"POST",),
    b"/v1/audio/transcriptions": (b"POST",),
    b"/v1/audio/translations": (b"POST",),
}
"""Paths of OpenAI's and Anthropic's APIs that engines serve, with their methods."""

_PATTERNS = tuple(
    (re.compile(re.escape(path).replace(rb"\*", rb"[^/]+")), methods)
    for path, methods in _ROUTES.items()
)
_UNSAFE_PATH = re.compile(rb"\.\.|//|\\|%(?:2e|2f|5c)", re.IGNORECASE)


@lru_cache(maxsize=256)
def check_route(method: bytes, target: bytes) -> None:
    """Raise Rejected unless clients may ask for `target` with `method`."""
    path = target.partition(b"?")[0]
    if _UNSAFE_PATH.search(path):
        raise Rejected(
            HTTPStatus.BAD_REQUEST,
            "unsafe_path",
            "path: has dot segments or encoded separators; send it plain",
        )
    for pattern, methods in _PATTERNS:
        if pattern.fullmatch(path):
            if method in methods:
                return
            wanted = b", ".join(methods).decode()
            raise Rejected(
                HTTPStatus.METHOD_NOT_ALLOWED, "method", f"method: this path takes {wanted}"
            )
    raise Rejected(
        HTTPStatus.NOT_FOUND,
        "unknown_path",
        "path: this gateway serves the inference routes of /v1/ and /health"
        " (docs/gateway.md lists them)",
    )
