"""This module writes our own JSONL (docs/traces.md). `.zst` at the end of the name compresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zstandard

from ownerserve.trace.model import Trace
from ownerserve.trace.readers.own import VERSION, TraceHeader

ZSTD_LEVEL = 10


def trace_lines(trace: Trace) -> Iterator[bytes]:
    """Yield the header, then each session, each as a line of JSON."""
    header = TraceHeader(
        ownerserve_trace=VERSION,
        name=trace.name,
        origin=trace.origin,
        block_tokens=trace.block_tokens,
        ids=trace.ids,
        grouping=trace.grouping,
        arrivals=trace.arrivals,
    )
    encoder = msgspec.json.Encoder()
    yield encoder.encode(header) + b"\n"
    for session in trace.sessions:
        yield encoder.encode(session) + b"\n"


def write_trace(
    trace: Trace, path: Path | str, *, on_session: Callable[[], None] | None = None
) -> None:
    """Write `trace` to `path`; equal traces give equal bytes."""
    path = Path(path)
    with path.open("wb") as file:
        if path.suffix == ".zst":
            with zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(file) as stream:
                _write(trace, stream.write, on_session)
        else:
            _write(trace, file.write, on_session)


def _write(
    trace: Trace, write: Callable[[bytes], object], on_session: Callable[[], None] | None
) -> None:
    for number, line in enumerate(trace_lines(trace)):
        write(line)
        if number and on_session is not None:
            on_session()
