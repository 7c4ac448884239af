"""A pace says how fast one engine is: what a step takes, from a few coefficients, and what memory
it has.

    step ms = a                                    what a pass costs at all, weights read once
            + b * new                              tokens computed in the step
            + c * sum of new * (prefix + new / 2)  their attention to what stands before them
            + d * sum of decode contexts           state that the decoding sequences read
            + e * decode batch                     sequences that decode
            + x * (1 - (1 - share) ** (new + batch))    experts that are read, of a mixture

The last term is a mixture's: each token picks `share` = top_k / experts of them, so a step of one
token reads few weights and one of 64 nearly all. Without it no straight line fits both ends
(median error 19 % against 2 % for Qwen3-30B-A3B on H200). It is 0 for a dense model, and constant
while a batch decodes without joining or leaving.

Owns the shipped files in paces/ and the words for them; pace_fit makes their numbers. Must never
ask the machine it runs on for anything: a pace is data.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry, exact_replay_tokens
from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.plan.cost.roofline import LINK_EFFICIENCY, SURROUNDINGS, find_gpu
from ownerserve.router.worker import Speed

SCHEMA = "ownerserve.pace/1"
FOLDER = Path(__file__).resolve().parent / "paces"
CHUNK_TOKENS = 8192
"""What one step computes of a long prompt at most, where an engine is not told otherwise."""
SEQUENCE_TOKENS = 50_000
"""The length at which a Speed prices a decoding sequence, as router.worker.DEFAULT_SPEED does."""
SPEED_BATCH = 16
"""A Speed knows one line for decode steps: the one through batches of 1 and of this many."""
TIMES = ("a_ms", "b_ms", "c_ms", "d_ms", "e_ms", "experts_ms")


class Pace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A pace describes one engine on one set of GPUs.

    `kv_bytes_total` counts every byte of state once, as kv.geometry does: under tensor parallelism
    the GPUs' memories add up where heads are split, and do not where each holds a copy (MLA).
    `fit_error` is the median relative error of the fit at the points it was fitted to;
    `error_note` says what else is to be known, such as how far those points are from silicon.
    """

    name: str
    model: str
    gpu: str
    gpus: int
    engine: str
    config: str
    a_ms: float
    b_ms: float
    c_ms: float
    d_ms: float
    e_ms: float
    experts_ms: float = 0.0
    expert_share: float = 0.0
    fit_error: float
    source: str
    error_note: str
    kv_bytes_total: int

    def step_ms(self, new: int, weighted: float, decode_context: int, batch: int) -> float:
        """Return the ms of one step: `new` tokens computed whose new * (prefix + new / 2) add up to
        `weighted`, beside `batch` decoding sequences of `decode_context` tokens in all."""
        took = (
            self.a_ms
            + self.b_ms * new
            + self.c_ms * weighted
            + self.d_ms * decode_context
            + self.e_ms * batch
        )
        if self.experts_ms:
            took += self.experts_ms * (1.0 - (1.0 - self.expert_share) ** (new + batch))
        return took

    def prefill(self, chunk_tokens: int = CHUNK_TOKENS) -> Coefficients:
        """Return the coefficients of a whole prefill, alone on the engine, in steps of at most
        `chunk_tokens`: the first step pays `a` and all experts, and each token its share of what a
        further step pays."""
        fixed_ms = self.a_ms + self.experts_ms
        return Coefficients(fixed_ms, self.b_ms + fixed_ms / chunk_tokens, self.c_ms)

    def slowed(self, factor: float) -> Pace:
        """Return the same engine, each of whose steps takes `factor` times as long."""
        times = {field: factor * getattr(self, field) for field in TIMES}
        return msgspec.structs.replace(self, **times)

    def speed(self, geometry: Geometry, *, sequence_tokens: int = SEQUENCE_TOKENS) -> Speed:
        """Return the speed that a router is told. Media are the data sheet's: no pace measures a
        link."""
        alone_ms = self.step_ms(0, 0.0, sequence_tokens, 1)
        full_ms = self.step_ms(0, 0.0, sequence_tokens * SPEED_BATCH, SPEED_BATCH)
        sequence_ms = (full_ms - alone_ms) / (SPEED_BATCH - 1)
        link = find_gpu(self.gpu).link_gb_s * 1e6 * LINK_EFFICIENCY
        return Speed(
            prefill=self.prefill(),
            step_ms=max(alone_ms - sequence_ms, 0.0),
            step_ms_per_sequence=sequence_ms,
            media={Tier.HOST: Medium(0.05, link), **SURROUNDINGS},
            kv_bytes_per_token=geometry.bytes_per_token,
            kv_bytes_per_sequence=geometry.fixed_bytes_per_sequence,
            replay_tokens=exact_replay_tokens(geometry.spec) or 0,
        )


class PaceFile(Pace, frozen=True, kw_only=True, gc=False):
    """A pace file is a pace as it lies on disk, with how it came about."""

    schema: str = SCHEMA
    evidence: dict[str, Any] = {}


def paces() -> tuple[str, ...]:
    """Return the names of the shipped paces, `model@gpu`, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_pace(model: str, gpu: str) -> Pace:
    """Return the shipped pace of `model` on `gpu`. Raises InvalidInput listing those there are."""
    name = f"{model}@{gpu}".lower().replace(" ", "-")
    if name not in paces():
        raise InvalidInput(
            "pace",
            f"none is shipped for {name}",
            f"use one of {', '.join(paces())}, or pass a file that tools/fit_pace.py made",
        )
    return load_pace_file(FOLDER / f"{name}.json")


def load_pace_file(path: Path) -> PaceFile:
    """Return the pace in the file `path`, shipped or measured by whoever passes it.

    Raises InvalidInput naming the file and the field at fault.
    """
    mend = "pass a file that tools/fit_pace.py made"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=PaceFile)
    except (msgspec.MsgspecError, OSError) as error:
        raise InvalidInput(str(path), str(error), mend) from error
    _check(found, path.name)
    return found


def _check(pace: PaceFile, where: str) -> None:
    if pace.schema != SCHEMA:
        raise InvalidInput(f"{where}: schema", f"{pace.schema!r}", f"use {SCHEMA!r}")
    for field in (*TIMES, "fit_error"):
        value = getattr(pace, field)
        if value < 0.0 or not isfinite(value):
            raise InvalidInput(f"{where}: {field}", f"{value}", "use 0 or more")
    if not 0.0 <= pace.expert_share < 1.0:
        raise InvalidInput(
            f"{where}: expert_share", f"{pace.expert_share}", "use top_k / experts, below 1"
        )
    if pace.step_ms(1, 0.5, 0, 0) <= 0 or pace.step_ms(0, 0.0, 1, 1) <= 0:
        raise InvalidInput(f"{where}: a_ms", "a step would take no time", "give a_ms above 0")
    for field in ("gpus", "kv_bytes_total"):
        if getattr(pace, field) < 1:
            raise InvalidInput(f"{where}: {field}", f"{getattr(pace, field)}", "use 1 or more")
