"""This module has what the `plan` commands share: whose costs to price with, and how counts are
written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import parse_bytes
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.roofline import GPUS, Shape, defaults, find_gpu

GPU_NAMES = ", ".join(gpu.name for gpu in GPUS.values())


def costs_of(text: Mapping[str, str | None], shape: Shape) -> CostModel:
    """Return measured costs when a file was named, a GPU's defaults otherwise."""
    if (measured := text["costs"]) is not None:
        return CostModel.restore(Path(measured).read_bytes())
    gpu = find_gpu(str(text["gpu"]))
    return CostModel(defaults(shape, gpu, gpus=int(str(text["gpus"]))))


def tokens_of(text: Mapping[str, str | None], name: str, *, least: int = 1) -> int:
    """Read tokens as `64K` (binary) or `65536`. Raises InvalidInput below `least`."""
    flag = "--new" if name == "new_tokens" else f"--{name.replace('_', '-')}"
    count = parse_bytes(str(text[name]), field=flag)
    if count < least:
        raise InvalidInput(flag, f"{count}", f"use {least} or more")
    return count


def number_of(text: str | None) -> float | None:
    """Return a number that click has checked."""
    return None if text is None else float(text)
