"""Whatever the gateway refuses itself has the form of the API that was asked, at each stage of a
request: in its head, in its body, before a decision, after one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.gateway.world import World

PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/chat/completions")
ANTHROPIC = {
    400: "invalid_request_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    431: "invalid_request_error",
    501: "api_error",
    503: "overloaded_error",
}
END = "Content-Length: 2\r\n\r\n{{}}"
STAGES: dict[str, tuple[str, int, str]] = {
    "a method": ("GET {path} HTTP/1.1\r\nHost: t\r\n\r\n", 405, "method"),
    "a coding": (
        "POST {path} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        501,
        "transfer_encoding",
    ),
    "an upgrade": (
        "POST {path} HTTP/1.1\r\nHost: t\r\nUpgrade: x\r\n" + END,
        400,
        "upgrade",
    ),
    "a doubled header": (
        "POST {path} HTTP/1.1\r\nHost: t\r\nHost: u\r\n" + END,
        400,
        "duplicate_header",
    ),
    "a long body": (
        "POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: 999999999\r\n\r\n",
        413,
        "body_too_large",
    ),
    "a long head": ("POST {path} HTTP/1.1\r\nHost: t\r\nX: {long}\r\n\r\n", 431, "head_too_large"),
    "a packed body": (
        "POST {path} HTTP/1.1\r\nHost: t\r\nContent-Encoding: gzip\r\n" + END,
        415,
        "content_encoding",
    ),
    "a doubled field": (
        'POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: 13\r\n\r\n{{"a":1,"a":2}}',
        400,
        "invalid_body",
    ),
    "nobody": (
        "POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{{}}",
        503,
        "no_worker",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_refusal_has_the_form_of_the_api_that_was_asked(
    play: Callable[..., None], stage: str
) -> None:
    lines, status, code = STAGES[stage]

    async def scenario(world: World) -> None:
        if stage == "nobody":
            await world.engines[0].kill()
        for path in PATHS:
            client = await world.client()
            client.writer.write(lines.format(path=path, long="x" * 70_000).encode())
            answer = await client.read()
            assert answer.status == status, (path, answer.body)
            check(path, status, code, json.loads(answer.body))
            assert answer["content-type"] == "application/json" and answer["x-request-id"]

    play(scenario, engines=1, health_interval_s=60.0)


def check(path: str, status: int, code: str, told: dict[str, Any]) -> None:
    error = told["error"]
    assert error["message"]
    if path.startswith("/v1/messages"):
        assert told["type"] == "error" and error["type"] == ANTHROPIC[status]
        assert error["details"]["error_code"] == code
    else:
        assert set(told) == {"error"} and set(error) == {"message", "type", "code", "param"}
        assert error["code"] == code
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
