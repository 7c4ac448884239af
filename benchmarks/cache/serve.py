"""The measuring side of `remote`: answers one JSON line for each on standard input.

Runs in any environment. The engines print to standard output, so that is pointed at standard
error and the answers go to a copy of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Measurements = Mapping[str, Callable[..., Any]]


def serve(measurements: Measurements) -> None:
    """Answer `["name", {arguments}]` with what that measurement returns, until input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answers.write(json.dumps(measurements[name](**arguments)) + "\n")
        answers.flush()
