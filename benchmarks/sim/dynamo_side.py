"""What of Dynamo the validation and the speed benchmark share: its environment, its cost function.

`make .venv-dynamo/.dynamo-1.6.1` makes the environment (ai-dynamo-runtime alone, --no-deps);
$OWNERSERVE_DYNAMO_VENV names another place.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim import build
from ownerserve.sim.engine.pace import Pace, load_pace
from ownerserve.sim.storage.layout import unit_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL, GPU = "qwen3-30b-a3b", "h200"
WORKERS, STEP_TOKENS, RUNNING = 8, 8192, 256
BLOCK_TOKENS = 512
MOONCAKE = "mooncake-fast25/conversation_trace.jsonl.zst"


def python() -> Path:
    """Dynamo's interpreter. Raises InvalidInput when its environment is not there."""
    venv = Path(os.environ.get("OWNERSERVE_DYNAMO_VENV", ".venv-dynamo"))
    found = (venv if venv.is_absolute() else ROOT / venv) / "bin" / "python"
    if not found.exists():
        raise InvalidInput("dynamo", f"no interpreter at {venv}", "make .venv-dynamo/.dynamo-1.6.1")
    return found


def unpack(trace: Path, folder: Path) -> Path:
    """Dynamo reads plain JSON lines."""
    target = folder / trace.name.removesuffix(".zst")
    with trace.open("rb") as packed, target.open("wb") as plain:
        zstandard.ZstdDecompressor().copy_stream(packed, plain)
    return target


def replay(
    trace: Path, router: str, *, blocks: int, requests: Path | None = None
) -> dict[str, Any]:
    """One replay in a process of its own; see dynamo_replay.py for what comes back."""
    command = [str(python()), str(HERE / "dynamo_replay.py"), str(trace), "--router", router]
    command += ["--workers", str(WORKERS), "--blocks", str(blocks)]
    command += ["--step-tokens", str(STEP_TOKENS), "--running", str(RUNNING)]
    command += [] if requests is None else ["--requests", str(requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = msgspec.json.decode(done.stdout.strip().splitlines()[-1])
    return found


def pool() -> tuple[int, int]:
    """(blocks of a worker, bytes of one): what the pace's GPU has for this model."""
    pace = load_pace(MODEL, GPU)
    components = unit_model(build.geometry_of(pace), BLOCK_TOKENS).layout.components
    slot_bytes = sum(component.slot_bytes for component in components)
    return pace.kv_bytes_total // slot_bytes, slot_bytes


class Polynomial(Pace, frozen=True, kw_only=True, gc=False):
    """Dynamo's built-in cost of a step over `pool_tokens` of KV, as its replays show it: single
    requests of 600, 6,000 and 20,000 tokens take these times to the nanosecond.

        prefill  4.209989e-7 T^2 + 1.518344e-2 T + 16.50142    T: tokens computed in the step
        decode   -25.74 x^2 + 54.01 x + 5.74, at least 1       x: share of the pool in use
        step     the sum of those that apply

    A context counts the token that a decode computes.
    """

    pool_tokens: int

    def step_ms(self, new: int, weighted: float, decode_context: int, batch: int) -> float:
        took = 0.0
        if new:
            took += 4.209989e-7 * new * new + 1.518344e-2 * new + 16.50142
        if batch:
            x = min(1.0, (decode_context + batch) / self.pool_tokens)
            took += max(1.0, -25.74 * x * x + 54.01 * x + 5.74)
        return took


def polynomial(blocks: int) -> Polynomial:
    """The same for `blocks` of BLOCK_TOKENS. A fold's steps grow by the line through x = 0."""
    base = load_pace(MODEL, GPU)
    own = {name: getattr(base, name) for name in Pace.__struct_fields__}
    pool_tokens = blocks * BLOCK_TOKENS
    own |= {
        "name": "dynamo-polynomial",
        "a_ms": 16.50142,
        "b_ms": 1.518344e-2,
        "c_ms": 0.0,
        "d_ms": 54.01 / pool_tokens,
        "e_ms": 0.0,
        "experts_ms": 0.0,
        "source": "ai-dynamo-runtime 1.6.1, timing_model polynomial",
    }
    return Polynomial(**own, pool_tokens=pool_tokens)
