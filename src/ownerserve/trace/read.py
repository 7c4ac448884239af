"""This module is the one way in: a path becomes a Trace, its format named or sniffed from its
content."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.trace.lines import Collected, OnBytes, Problems, TraceLine, read_lines
from ownerserve.trace.model import Trace
from ownerserve.trace.readers.aiperf import AiperfReader
from ownerserve.trace.readers.azure import AzureReader
from ownerserve.trace.readers.bailian import BailianReader
from ownerserve.trace.readers.base import Reader, head_of
from ownerserve.trace.readers.llmservingsim import LlmServingSimReader, VllmTimingsReader
from ownerserve.trace.readers.lmcache import LmcacheReader, LmcacheTextReader
from ownerserve.trace.readers.mooncake import MooncakeReader
from ownerserve.trace.readers.own import OwnReader
from ownerserve.trace.readers.weka import WekaReader

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        OwnReader(),
        WekaReader(),
        MooncakeReader(),
        AiperfReader(),
        BailianReader(),
        LmcacheReader(),
        LmcacheTextReader(),
        AzureReader(),
        LlmServingSimReader(),
        VllmTimingsReader(),
    )
}
SNIFF_LINES = 20


def read_trace(
    path: Path | str,
    *,
    format_name: str | None = None,
    problems: Problems | None = None,
    on_bytes: OnBytes | None = None,
) -> Trace:
    """Read the trace in a file or folder, plain or zstd.

    Broken records go to `problems` (default: left out silently; pass `lines.Collected` to see
    them or `lines.Fatal` to stop at the first). `on_bytes` hears of progress in bytes of disk.
    Raises InvalidInput when the format can't be told or nothing in the file is usable.
    """
    path = Path(path)
    problems = problems if problems is not None else Collected()
    lines = read_lines(path, problems, on_bytes=on_bytes)
    if format_name is None:
        first = list(islice(lines, SNIFF_LINES))
        reader = sniff(first, path)
        lines = chain(first, lines)
    else:
        reader = named(format_name)
    trace = reader.read(lines, problems)
    if not trace.sessions:
        raise InvalidInput(
            str(path), f"no usable record of format {reader.name}", "check it or name its --format"
        )
    return msgspec.structs.replace(trace, name=trace.name or _stem(path))


def named(format_name: str) -> Reader:
    """Return the reader of that name. Raises InvalidInput for a name that none has."""
    if format_name not in READERS:
        raise InvalidInput(
            "--format", f"{format_name!r} is unknown", f"use one of {', '.join(READERS)}"
        )
    return READERS[format_name]


def sniff(lines: list[TraceLine], path: Path) -> Reader:
    """Return the reader that claims the first record which is not broken. Raises InvalidInput when
    none does."""
    for line in lines:
        head = head_of(line)
        if head is None:
            continue
        for reader in READERS.values():
            if reader.claims(head):
                return reader
    raise InvalidInput(
        str(path),
        "its format is none that is known" if lines else "holds no records",
        f"name one with --format: {', '.join(READERS)}",
    )


def _stem(path: Path) -> str:
    name = path.name
    for suffix in (".zst", ".jsonl", ".json", ".csv"):
        name = name.removesuffix(suffix)
    return name
