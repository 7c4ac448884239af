"""`ownerserve COMMAND` in processes, as an operator runs them, and what their metrics say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.metric_lines import summed
from tests.support.waits import WAIT_S, until


@contextmanager
def running(home: Path, *command: str) -> Iterator[tuple[list[str], subprocess.Popen[bytes]]]:
    """`ownerserve COMMAND` until SIGTERM, and the lines of its ready file."""
    home.mkdir()
    ready, log = home / "ready", home / "log"
    words = [sys.executable, "-m", "ownerserve.cli.main", *command, "--ready-file", str(ready)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output
        )
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield ready.read_text().split(), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


def counted(url: str, start: str) -> float:
    """The sum of a process's metric."""
    return summed(httpx.get(f"{url}/metrics", timeout=WAIT_S).text, start)
