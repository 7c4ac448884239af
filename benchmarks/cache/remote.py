"""A measuring process in an environment of its own, asked over pipes.

It imports its engine once and then answers one request at a time, so that repeats of different
systems can be interleaved in one run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT / "benchmarks"),
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Measurer:
    """One process; `ask` blocks until it has answered."""

    def __init__(self, module: str, venv: str) -> None:
        """`module` of benchmarks/, run by the Python of the checkout's folder `venv`."""
        self._name = f"{venv}: {module}"
        self._process = subprocess.Popen(
            [str(python(venv)), "-W", "ignore", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
        )

    def ask(self, measurement: str, **arguments: Any) -> Any:
        """What the measurement returned. Raises RuntimeError with the process' last words."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([measurement, arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            _, said = self._process.communicate()
            raise RuntimeError(f"{self._name} ended:\n{said[-3000:]}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()


def python(venv: str) -> Path:
    """The interpreter of an environment in the checkout."""
    return ROOT / venv / "bin" / "python"


def installed(venv: str, *packages: str) -> dict[str, str]:
    """Versions of `packages` in that environment."""
    script = (
        "import json,sys;from importlib.metadata import version;"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(python(venv)), "-c", script, *packages], check=True, capture_output=True, text=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found
