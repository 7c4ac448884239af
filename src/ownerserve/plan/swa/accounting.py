"""Accounting counts what checkpointing wears and what it was good for.

Write amplification = bytes that reach the drive / payload of range state sealed: 1.0 would be
global KV alone, without headers, padding or any point state. Zero comes near it, full is near 9 on
DeepSeek-V4 (window rows are 8x the compressed KV).
"""

from __future__ import annotations

import msgspec

RECORD_ALIGN = 4096
"""A record is a 4 KiB header and a payload padded to 4 KiB (docs/format.md)."""


def stored_bytes(payload: int, *, records: int = 1) -> int:
    """Return the bytes that `payload` bytes in `records` equal records take on disk."""
    if payload <= 0 or records <= 0:
        return 0
    each = -(-payload // records)
    return records * (RECORD_ALIGN + -(-each // RECORD_ALIGN) * RECORD_ALIGN)


class WriteAccount(msgspec.Struct):
    """A write account counts a policy's writes and what of them was read back."""

    range_payload_bytes: int = 0
    point_payload_bytes: int = 0
    drive_bytes: int = 0
    point_read_bytes: int = 0

    def wrote_range(self, payload: int) -> None:
        """Count the global KV of one turn as written, in one record."""
        self.range_payload_bytes += payload
        self.drive_bytes += stored_bytes(payload)

    def wrote_points(self, payload: int, *, records: int) -> None:
        """Count point state as written, in `records` records."""
        self.point_payload_bytes += payload
        self.drive_bytes += stored_bytes(payload, records=records)

    def read_point(self, payload: int) -> None:
        """Count one checkpoint as loaded for a restore."""
        self.point_read_bytes += payload

    @property
    def write_amplification(self) -> float:
        """Return drive bytes for each byte of range state; 0 before any was written."""
        return self.drive_bytes / self.range_payload_bytes if self.range_payload_bytes else 0.0

    @property
    def point_bytes_written_per_read(self) -> float:
        """Return checkpoint bytes written for each one that was of use: infinite when none was, 0
        when none were written.
        """
        if not self.point_payload_bytes:
            return 0.0
        if not self.point_read_bytes:
            return float("inf")
        return self.point_payload_bytes / self.point_read_bytes
