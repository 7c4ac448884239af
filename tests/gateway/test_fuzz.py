"""Damaged requests and answers raise nothing but refusals. Five thousand in CI; more by hand:

python -m tests.gateway.test_fuzz 0 1000000
"""

from __future__ import annotations

import sys
import traceback

import pytest

from tests.support.gateway.fuzz import Fuzz


@pytest.mark.parametrize("first", range(0, 5000, 1000))
def test_no_damaged_input_raises(first: int) -> None:
    fuzz = Fuzz()
    for seed in range(first, first + 1000):
        fuzz.one(seed)
    assert fuzz.came["read"] > 100 and fuzz.came["invalid_body"] > 50  # it is no idle talk
    assert fuzz.came["answer"] > 20 and fuzz.came["a field refused"] > 20


def main(low: int, high: int) -> int:
    """Play the seeds from `low` to `high`; print what came of them, and each traceback."""
    fuzz, failed = Fuzz(), 0
    for seed in range(low, high):
        try:
            fuzz.one(seed)
        except Exception:  # noqa: BLE001 - what is looked for
            failed += 1
            print(f"seed {seed}:", file=sys.stderr)
            traceback.print_exc(limit=-3)
        if seed % 50_000 == 0 and sys.stderr.isatty():
            print(f"{seed - low} of {high - low}", end="\r", file=sys.stderr)
    print(f"{high - low} cases, {failed} tracebacks:", dict(fuzz.came.most_common()))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:3])))
