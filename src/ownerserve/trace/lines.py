"""This module makes numbered lines of files, plain or zstd, one file or a folder; and says what
becomes of a broken line.

Knows nothing of any trace format. Reads a file once, in pieces; never holds more than a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import zstandard

from ownerserve.kv.errors import InvalidInput

PIECE_BYTES = 1 << 18
SUFFIXES = (".json", ".jsonl", ".csv", ".json.zst", ".jsonl.zst", ".csv.zst")

OnBytes = Callable[[int], None]
"""Told how many more bytes were read from disk."""


class TraceLine(NamedTuple):
    """A line is one record of a file. A `.json` file is one record however many lines it has."""

    file: str
    number: int
    data: bytes


class Problem(NamedTuple):
    """A problem says why one record could not be used."""

    file: str
    line: int
    reason: str


class Problems(Protocol):
    """The problems are where readers send what they could not use."""

    def report(self, line: TraceLine, reason: str) -> None:
        """Take in what is wrong with a line."""
        ...


class Collected:
    """Counts problems, keeps the first few, and lets reading go on."""

    KEEP = 5

    def __init__(self) -> None:
        self.count = 0
        self.first: list[Problem] = []

    def report(self, line: TraceLine, reason: str) -> None:
        """Count what is wrong with a line, and keep the first of them."""
        self.count += 1
        if len(self.first) < self.KEEP:
            self.first.append(Problem(line.file, line.number, reason))


class Fatal:
    """Makes the first problem an error."""

    def report(self, line: TraceLine, reason: str) -> None:
        """Raise InvalidInput for what is wrong with a line."""
        raise InvalidInput(
            f"{line.file}:{line.number}",
            reason,
            "mend or remove the line, or read without --strict",
        )


def trace_files(path: Path) -> list[Path]:
    """Return the file, or every trace file in the folder by name. Raises InvalidInput for a folder
    that holds none."""
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.is_file() and f.name.endswith(SUFFIXES))
        if not files:
            raise InvalidInput(str(path), "holds no trace files", f"expected {', '.join(SUFFIXES)}")
        return files
    if not path.is_file():
        raise InvalidInput(str(path), "is no file or folder", "give the path of a trace")
    return [path]


def disk_bytes(path: Path) -> int:
    """Return what `read_lines` will report through `on_bytes` in all."""
    return sum(file.stat().st_size for file in trace_files(path))


def read_lines(
    path: Path, problems: Problems, *, on_bytes: OnBytes | None = None
) -> Iterator[TraceLine]:
    """Yield every non-empty line, in order; of a damaged zstd stream what precedes the damage."""
    for file in trace_files(path):
        pieces = _pieces(file, problems, on_bytes=on_bytes or _ignore)
        if file.name.removesuffix(".zst").endswith(".json"):
            yield TraceLine(file.name, 1, b"".join(pieces))
            continue
        number, rest = 0, b""
        for piece in pieces:
            whole = (rest + piece if rest else piece).split(b"\n")
            rest = whole.pop()
            for data in whole:
                number += 1
                if data and not data.isspace():
                    yield TraceLine(file.name, number, data)
        if rest and not rest.isspace():
            yield TraceLine(file.name, number + 1, rest)


def _ignore(_: int) -> None:
    pass


def _pieces(file: Path, problems: Problems, *, on_bytes: OnBytes) -> Iterator[bytes]:
    """Yield the plain bytes of a file, whatever its compression."""
    with file.open("rb") as stream:
        head = stream.read(4)
        stream.seek(0)
        compressed = head == zstandard.FRAME_HEADER
        decoder = zstandard.ZstdDecompressor().decompressobj()
        while piece := stream.read(PIECE_BYTES):
            on_bytes(len(piece))
            if not compressed:
                yield piece
                continue
            try:
                while piece:
                    if decoder.eof:  # the next frame of a concatenated file
                        decoder = zstandard.ZstdDecompressor().decompressobj()
                    yield decoder.decompress(piece)
                    piece = decoder.unused_data if decoder.eof else b""
            except zstandard.ZstdError as error:
                problems.report(TraceLine(file.name, 0, b""), f"damaged zstd stream: {error}")
                return
        if compressed and not decoder.eof:
            problems.report(TraceLine(file.name, 0, b""), "the zstd stream ends early")
