"""Coverage-guided fuzzing of every decoder, by atheris.

python -m tests.support.store.fuzz_decoders header -max_total_time=600 -max_len=8192

The first word names one of `decoders.DECODERS`; what follows is libFuzzer's. Ends with the input
that made a decoder raise what it should not. The short form runs in test_fuzz.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tests.support.store.decoders", "ownerserve"]):
    from tests.support.store.decoders import DECODERS


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name not in DECODERS:
        raise SystemExit(f"error: name one of {', '.join(DECODERS)}")
    decoder, good = DECODERS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as corpus:
        Path(corpus, "good").write_bytes(good)
        atheris.Setup([sys.argv[0], *options, corpus], decoder)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
