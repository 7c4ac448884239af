"""This module makes the tracer of a gateway: the OpenTelemetry SDK is imported where traces are
exported, and nowhere else."""

from __future__ import annotations

from urllib.parse import urlsplit

from ownerserve.gateway.tracing.trace import FollowingTracer, Tracer
from ownerserve.kv.errors import InvalidInput


def open_tracer(endpoint: str | None, *, share: float) -> Tracer:
    """Return a tracer that sends to the collector at `endpoint`; None: one that records nothing.
    Raises InvalidInput where that is no URL, or the SDK is missing."""
    if endpoint is None:
        return FollowingTracer()
    if not _is_url(endpoint):
        raise InvalidInput("otlp-endpoint", f"{endpoint!r} is no http or https URL", _MEND)
    try:
        from ownerserve.gateway.tracing.otel import OtelTracer
    except ImportError as error:
        mend = "pip install 'ownerserve[otel]'"
        raise InvalidInput("otlp-endpoint", f"needs OpenTelemetry: {error}", mend) from error
    return OtelTracer(endpoint, share=share)


def _is_url(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that don't close, a port that is no number
        return False


_MEND = "write it like http://127.0.0.1:4318"
