"""What an operator is told of requests that are refused before anything of them is decided: a line
of the access log and a span each, over a gateway's own process."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.gateway.collector import collector
from tests.support.gateway.process import gateway_process, worker_process
from tests.support.waits import until

KEY, CHAT = "acme-key-of-16-and-more", "/v1/chat/completions"
TENANTS = f"""secret = "0123456789abcdef0123456789abcdef"
[tenants.acme]
keys = ["{KEY}"]
requests_per_minute = 0.1
"""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def request(name: str, *lines: str, key: str | None = KEY, path: str = CHAT) -> bytes:
    """A request for a turn with this id, up to its body."""
    said = [f"POST {path} HTTP/1.1", "Host: t", f"x-request-id: {name}", *lines]
    said += [] if key is None else [f"Authorization: Bearer {key}"]
    return "\r\n".join([*said, "", ""]).encode()


def whole(name: str, body: str = "{}", **more: Any) -> bytes:
    return request(name, f"Content-Length: {len(body)}", **more) + body.encode()


ASKED = {
    "no-http": (b"nonsense\r\n\r\n", 400, "malformed"),
    "long-head": (request("long-head", "x-long: " + "x" * 70_000), 431, "head_too_large"),
    "no-key": (
        whole("no-key", key=None, path=CHAT + "?secret=no").replace(
            b"Host: t", f"Host: t\r\ntraceparent: 00-{TRACE}-00f067aa0ba902b7-01".encode()
        ),
        401,
        "invalid_api_key",
    ),
    "no-route": (whole("no-route", path="/v1/nowhere"), 404, "unknown_path"),
    "long-body": (request("long-body", "Content-Length: 99999999"), 413, "body_too_large"),
    "wrong": (whole("wrong", path="/v1/../" + "x" * 900), 400, "unsafe_path"),
    "bad-body": (whole("bad-body", '{"model":"a","model":"b"}'), 400, "invalid_body"),
    "well": (whole("well"), 200, ""),
    "over-limit": (whole("over-limit"), 429, "rate_limit_exceeded"),
}
"""What is sent, in this order, and what becomes of it. The limit is of one turn in ten minutes, and
one with a bad body takes none."""


def ask(url: str, sent: bytes) -> int:
    """The status of the answer to what is sent."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    with socket.create_connection((host, port), timeout=60.0) as client:
        client.sendall(sent)
        return int(client.recv(65536).split(b" ", 2)[1])


@pytest.mark.slow
def test_every_refused_request_has_a_line_and_a_span(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.touch(mode=0o600)
    tenants.write_text(TENANTS)
    with ExitStack() as stack:
        to = stack.enter_context(collector())
        worker = stack.enter_context(worker_process())
        options = ["--log-format", "json", "--access-log", "--otlp-endpoint", to.url]
        options += ["--tenants-file", str(tenants)]
        running = stack.enter_context(gateway_process(tmp_path, [worker.port], *options))
        for name, (sent, status, _) in ASKED.items():
            assert ask(running.data_url, sent) == status, name

        def lines() -> list[dict[str, Any]]:
            said = [line for line in running.said.read_text().splitlines() if line[0] == "{"]
            return [one for one in map(json.loads, said) if one["event"] == "turn"]

        refused = {name: told for name, told in ASKED.items() if told[2]}
        until(lambda: len([one for one in lines() if one["end"] == "refused"]) == len(refused))
        by_reason = {one["reason"]: one for one in lines() if one["end"] == "refused"}
        for name, (_, status, reason) in refused.items():
            line = by_reason[reason]
            assert line["status"] == status and line["client"] == "127.0.0.1"
            assert name == "no-http" or line["request_id"] == name
        assert "path" not in by_reason["malformed"], "it was not read so far"
        assert by_reason["unknown_path"]["path"] == "/v1/nowhere"
        assert len(by_reason["unsafe_path"]["path"]) == 200
        no_key = by_reason["invalid_api_key"]
        assert no_key["path"] == CHAT and no_key["trace_id"] == TRACE and "tenant" not in no_key
        for reason in ("body_too_large", "invalid_body", "rate_limit_exceeded"):
            assert by_reason[reason]["tenant"] == "acme"
        assert KEY not in running.said.read_text()

        def spans() -> dict[str, Any]:
            ended = [one for one in to.spans if one.said.get("ownerserve.end") == "refused"]
            return {one.said["ownerserve.reason"]: one for one in ended}

        running.process.terminate()
        until(lambda: len(spans()) == len(refused), within_s=60.0)
        for name, (_, status, reason) in refused.items():
            span = spans()[reason]
            assert span.failed and span.said["http.response.status_code"] == status
            assert name == "no-http" or span.said["ownerserve.request_id"] == name
        assert spans()["invalid_api_key"].trace_id == TRACE
        assert {one.name for one in spans().values()} == {"chat", "refused"}
