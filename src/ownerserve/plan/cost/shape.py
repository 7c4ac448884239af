"""This module has a model's arithmetic as the roofline needs it: a cost a token, and one for each
token before it.

Counted by trace.flops; here its terms are sorted by whether they grow with the position. A term
with a cap (a window, a chosen top-k) is taken at its cap, so short prompts are priced too high.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry import find_family
from ownerserve.kv.specs import ModelSpec
from ownerserve.plan.cost.roofline import Shape
from ownerserve.trace import flops

PARAMETERS_PER_HIDDEN_SQUARED = 12.0
"""Active parameters are assumed to be 12 * layers * hidden^2 where neither the configuration nor
the caller tells them: a plain transformer's, and within 1.5x of the MoE models in
examples/configs (Qwen3-30B-A3B 2.4 of 3.3 billion, gpt-oss-120b 3.6 of 5.1, V3.2 37.6 of 37)."""


def shape_of(
    spec: ModelSpec, config: Mapping[str, Any], *, active_parameters: float | None = None
) -> Shape:
    """Return the arithmetic of the model that `config` describes and `spec` was built from."""
    if active_parameters is None:
        active_parameters = _assumed_parameters(spec, config)
    counted = flops.flops_of(config, spec, active_parameters)
    capped = sum(term.ops * term.cap for term in counted.terms if term.cap < inf)
    growing = sum(term.ops / term.stride for term in counted.terms if term.cap == inf)
    constant = counted.per_token - 2.0 * active_parameters
    return Shape(active_parameters, constant + capped, growing)


def _assumed_parameters(spec: ModelSpec, config: Mapping[str, Any]) -> float:
    try:
        return flops.active_parameters(config)
    except InvalidInput:
        fields, _ = find_family(config)
        hidden = fields.integer("hidden_size")
        return PARAMETERS_PER_HIDDEN_SQUARED * len(spec.layers) * hidden**2
