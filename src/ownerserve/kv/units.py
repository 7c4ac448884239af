"""Sizes are read as people write them, and written back."""

from __future__ import annotations

import re

from ownerserve.kv.errors import InvalidInput

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

LARGEST_BYTES = 1_000_000 * TIB
"""More than any medium holds, and small enough to be multiplied."""

_FACTOR = {
    "": 1,
    "B": 1,
    "K": KIB,
    "KIB": KIB,
    "KB": 1000,
    "M": MIB,
    "MIB": MIB,
    "MB": 1000**2,
    "G": GIB,
    "GIB": GIB,
    "GB": 1000**3,
    "T": TIB,
    "TIB": TIB,
    "TB": 1000**4,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, *, field: str = "size") -> int:
    """Return the bytes that `text` states: "96GiB", "80 GB" (decimal), "512M" (binary), "4096".

    Raises InvalidInput naming `field` when the text is no size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTOR.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise InvalidInput(
            field, f"{text[:80]!r} is not a size", "write it like 96GiB, 80GB or 4096"
        )
    count = float(match[1]) * factor
    if count > LARGEST_BYTES:
        raise InvalidInput(field, f"{text[:80]!r} is too large", "use at most 1000000 TiB")
    return int(count)


def format_bytes(count: float) -> str:
    """Write `count` bytes in the largest binary unit that leaves at least 1, with three digits."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= factor:
            scaled = count / factor
            return f"{scaled:,.0f} {unit}" if abs(scaled) >= 1000 else f"{scaled:.3g} {unit}"
    return f"{count:.0f} B"
