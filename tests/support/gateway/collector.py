"""An OTLP/HTTP collector: it takes what exporters send and reads it with the official protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class SentSpan(NamedTuple):
    """A span as it was sent."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    failed: bool
    said: dict[str, Any]
    service: str


class Collector:
    """What came so far. While it `refuses`, exporters hear 503."""

    def __init__(self) -> None:
        self.spans: list[SentSpan] = []
        self.refuses = False
        self.asked = 0
        self.url = ""

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            about = {one.key: _value(one.value) for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        SentSpan(
                            span.name,
                            span.kind,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == span.status.STATUS_CODE_ERROR,
                            {one.key: _value(one.value) for one in span.attributes},
                            about.get("service.name", ""),
                        )
                    )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on loopback, until the end."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.asked += 1
            is_trace = self.path == "/v1/traces" and not made.refuses
            if is_trace:
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                made.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if is_trace else 503)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Be quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
