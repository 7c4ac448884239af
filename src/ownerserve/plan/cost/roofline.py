"""The roofline gives defaults before anything is measured: a GPU's data sheet and a model's
arithmetic.

    b = 2 * active parameters / matrix FLOP/s        what a token costs wherever it stands
    c = attention FLOPs for each pair / attention FLOP/s   for each token before it
    a = weights read once / memory bandwidth + what a pass costs at all

Data-sheet peaks are never reached; the efficiencies below bring Qwen3-30B-A3B on H200 within
1.5x of the operator table in research/simulators-traces.md §4 and the TP8 models within about 2x.
Everything made here is labelled a default and gives way to the first measurements.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.model import Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium

MATRIX_EFFICIENCY = 0.40
ATTENTION_EFFICIENCY = 0.55
LINK_EFFICIENCY = 0.80
PARALLEL_EFFICIENCY = 0.60
"""What tensor parallelism leaves of the sum of its GPUs (from the TP8 rows of that table)."""
PASS_OVERHEAD_MS = 5.0
PARALLEL_OVERHEAD_MS = 25.0
"""Collectives and small kernels of a pass over several GPUs (same rows, 713 new tokens)."""
WEIGHT_BYTES = 2.0


class Gpu(msgspec.Struct, frozen=True):
    """A Gpu is a data sheet: dense BF16 TFLOP/s, memory and host-link bandwidth in GB/s, one
    direction.
    """

    name: str
    tflops: float
    memory_gb_s: float
    link_gb_s: float


GPUS = {
    gpu.name.lower().replace(" ", "-"): gpu
    for gpu in (
        Gpu("H20", 148.0, 4000.0, 64.0),
        Gpu("H100", 989.0, 3350.0, 64.0),
        Gpu("H200", 989.0, 4800.0, 64.0),
        Gpu("B200", 2250.0, 8000.0, 64.0),
        Gpu("A100", 312.0, 2039.0, 32.0),
        Gpu("L40S", 362.0, 864.0, 32.0),
        Gpu("RTX PRO 6000", 503.0, 1792.0, 64.0),
    )
}

# Not of a GPU but of its surroundings: one NVMe drive, a 100 Gbit/s link, an object store.
SURROUNDINGS = {
    Tier.DISK: Medium(0.3, 3.0e6),
    Tier.PEER: Medium(0.5, 10.0e6),
    Tier.REMOTE: Medium(8.0, 1.0e6),
}


class Shape(msgspec.Struct, frozen=True):
    """A shape is a model's arithmetic: FLOPs for a token, and for a token and each token before
    it.
    """

    active_parameters: float
    fixed_flops_per_token: float
    flops_per_pair: float


def find_gpu(name: str) -> Gpu:
    """Return the data sheet of that name. Raises InvalidInput listing the known ones."""
    key = name.lower().replace(" ", "-").replace("_", "-")
    if key not in GPUS:
        known = ", ".join(gpu.name for gpu in GPUS.values())
        raise InvalidInput("--gpu", f"{name!r} has no data sheet here", f"use one of {known}")
    return GPUS[key]


def defaults(shape: Shape, gpu: Gpu, *, gpus: int = 1) -> Defaults:
    """Return what a prefill and a load are assumed to take on `gpus` of `gpu` with tensor
    parallelism.
    """
    if gpus < 1:
        raise InvalidInput("gpus", f"{gpus}", "use 1 or more")
    scale = gpus * (PARALLEL_EFFICIENCY if gpus > 1 else 1.0)
    flops_per_ms = gpu.tflops * 1e9 * scale
    token_flops = 2.0 * shape.active_parameters + shape.fixed_flops_per_token
    weights_ms = WEIGHT_BYTES * shape.active_parameters / (gpu.memory_gb_s * 1e6 * gpus)
    overhead_ms = PASS_OVERHEAD_MS + (PARALLEL_OVERHEAD_MS if gpus > 1 else 0.0)
    coefficients = Coefficients(
        overhead_ms + weights_ms,
        token_flops / (flops_per_ms * MATRIX_EFFICIENCY),
        shape.flops_per_pair / (flops_per_ms * ATTENTION_EFFICIENCY),
    )
    host = Medium(0.05, gpu.link_gb_s * 1e6 * LINK_EFFICIENCY)
    label = f"roofline of {gpus} x {gpu.name} (data sheet, not measured)"
    return Defaults(label, coefficients, {Tier.HOST: host, **SURROUNDINGS})
