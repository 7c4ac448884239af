"""This module reads Azure's LLM inference traces (2023, 2024): arrivals and lengths, nothing else.

CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`. No sessions and no prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Trace, TraceRequest, TraceSession
from ownerserve.trace.readers.base import FirstRecord

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureReader:
    """This reader reads Azure's LLM inference traces."""

    name = "azure"
    about = "Azure LLM inference CSV: arrivals and lengths"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return "ContextTokens" in head.text and "GeneratedTokens" in head.text

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        rows: list[tuple[datetime, int, int]] = []
        for line in lines:
            cells = [cell.strip() for cell in line.data.decode("utf-8", "replace").split(",")]
            if cells[0].lstrip("\ufeff") == COLUMNS[0]:
                continue
            try:
                moment = datetime.fromisoformat(cells[0])
                prompt, answer = int(cells[1]), int(cells[2])
            except (ValueError, IndexError):
                problems.report(line, f"expected {','.join(COLUMNS)}, got {cells!r}")
                continue
            if prompt < 0 or answer < 0:
                problems.report(line, "a length is negative")
                continue
            rows.append((moment if moment.tzinfo else moment.replace(tzinfo=UTC), prompt, answer))
        rows.sort(key=lambda row: row[0])
        sessions = tuple(
            TraceSession(
                f"r{number}",
                (TraceRequest(0.0, prompt, answer),),
                (moment - rows[0][0]).total_seconds(),
            )
            for number, (moment, prompt, answer) in enumerate(rows)
        )
        return Trace("", self.name, 0, "none", "unknown", "recorded", sessions)
