"""This module measures what a model would hold and compute on a trace: KV bytes, and prefill's
share of compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec
from ownerserve.kv.specs import Coverage
from ownerserve.trace.flops import active_parameters, flops_of
from ownerserve.trace.model import Trace
from ownerserve.trace.reuse import by_arrival, ideal_reuse
from ownerserve.trace.stats import Distribution, spread


class ModelCost(msgspec.Struct, frozen=True):
    """A model cost is what a trace takes on one model.

    `prefill_share_of_compute` counts whole prompts; `..._uncached` only what a session's own
    infinite cache would leave to compute. Both None, with `note`, when the configuration does not
    tell the active parameters.
    """

    model: str
    family: str
    kv_descriptor: str
    bytes_per_token: float
    fixed_bytes_per_sequence: int
    kv_bytes_per_request: Distribution
    prefill_share_of_compute: float | None
    prefill_share_of_compute_uncached: float | None
    active_parameters: float | None
    note: str


def read_config(path: Path) -> dict[str, Any]:
    """Read a model's config.json. Raises InvalidInput naming the file."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise InvalidInput("--model", f"{path} is no file", "pass a config.json") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), str(error), "pass a Hugging Face config.json") from error
    return config


def model_cost(
    trace: Trace,
    config: Mapping[str, Any],
    *,
    model: str,
    kv: KvDescriptor | None = None,
    parameters: float | None = None,
) -> ModelCost:
    """Measure `trace` on the model that `config` describes.

    `parameters`: active parameters a token, when the configuration does not tell them.
    """
    spec = build_spec(config, kv)
    geometry = Geometry.of(spec)
    requests = [request for _, request in by_arrival(trace)]
    inputs = np.array([r.input_tokens for r in requests], dtype=np.float64)
    ends = inputs + np.array([r.output_tokens for r in requests], dtype=np.float64)
    kv_bytes = spread(_kv_bytes(geometry, ends))
    assert kv_bytes is not None, "a trace has requests"
    note, share, uncached = "", None, None
    try:
        parameters = active_parameters(config) if parameters is None else parameters
    except InvalidInput as missing:
        note = f"prefill share of compute is unknown: {missing}"
    if parameters is not None:
        flops = flops_of(config, spec, parameters)
        decode = float(flops.between(inputs, ends).sum())
        share = _share(float(flops.between(np.zeros_like(inputs), inputs).sum()), decode)
        reuse = ideal_reuse(trace)
        if reuse is not None:
            cached = reuse.intra_tokens.astype(np.float64)
            uncached = _share(float(flops.between(cached, inputs).sum()), decode)
    return ModelCost(
        model=model,
        family=spec.family,
        kv_descriptor=spec.kv_descriptor,
        bytes_per_token=geometry.bytes_per_token,
        fixed_bytes_per_sequence=geometry.fixed_bytes_per_sequence,
        kv_bytes_per_request=kv_bytes,
        prefill_share_of_compute=share,
        prefill_share_of_compute_uncached=uncached,
        active_parameters=parameters,
        note=note,
    )


def _kv_bytes(geometry: Geometry, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `Geometry.range_bytes` and fixed state, in bytes, for many lengths at once."""
    by_stride: dict[int, int] = {}
    for state in geometry.spec.states:
        if state.coverage is Coverage.RANGE:
            stride = state.tokens_per_entry
            by_stride[stride] = by_stride.get(stride, 0) + state.entry.payload_bytes
    held = np.full_like(tokens, geometry.fixed_bytes_per_sequence)
    for stride, size in by_stride.items():
        held += tokens // stride * size
    return held


def _share(prefill: float, decode: float) -> float | None:
    return prefill / (prefill + decode) if prefill + decode else None
