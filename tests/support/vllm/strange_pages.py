"""Imported by a worker before its engine is built: its CPU's kernels lay keys in an order that we
don't know, which only a worker finds out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ownerserve.engines.vllm import compat


def _reversed(spec: Any) -> Sequence[int]:
    return range(spec.block_size * spec.head_size - 1, -1, -1)


compat.cpu_key_order = _reversed
