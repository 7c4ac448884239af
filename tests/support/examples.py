"""How many examples a property is tried on: all in `make test`, a third in the core suite."""

from __future__ import annotations

LETTERS = "aZ09 _-./:\\\"'{}[],\0\t\n\x7f\u0085é漢\u200b\u2028\ufeff\ufffd😀"
"""What texts are made of: with all of Unicode to choose from, Hypothesis reads its tables first,
which takes a second where none are kept."""
divisor = 1
"""What every number of examples is divided by; `core_suite` sets it before tests are imported."""


def examples(number: int) -> int:
    """`number` of examples (or of seeds), or the core suite's part of them; at least one."""
    return max(number // divisor, 1)
