"""This module says whose state is neither kept nor restored here: vLLM serves it as if there were
no connector. Pure.

    config.json             check_config: the same for the connector and for `ownerserve doctor`
    parallelism             check_parallel
    KV groups, drafters     layout.shape, compat: vLLM knows them once it has started
    pages in memory         layout.codec, on workers: they report it (worker_side.unable)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerserve.kv.errors import InvalidInput

REBUILT_WINDOWS = ("deepseek_v41",)
"""Models whose windows vLLM rebuilds by computing them again."""
SHARES_BLOCKS = ("decode_context_parallel_size", "prefill_context_parallel_size")


class NotServed(InvalidInput):
    """A `NotServed` is raised for a model whose state is neither kept nor restored here; vLLM
    serves it as if there were no connector."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raise NotServed for a model of whose state the config.json says that it can't be kept. What
    it does not say only a start shows."""
    text = config.get("text_config")
    kinds = [config.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else ""]
    if any(kind in REBUILT_WINDOWS for kind in kinds):
        problem = f"{config.get('model_type')}'s windows are rebuilt by computing them again"
        raise NotServed("model", problem, "serve it without this connector")
    if config.get("is_encoder_decoder"):
        raise NotServed("model", "reads an encoder's state", "serve it without this connector")


def check_parallel(parallel: Any) -> None:
    """Raise NotServed where ranks hold parts of a block's tokens between them: no rank's bytes are
    a block's heads."""
    for field in SHARES_BLOCKS:
        size = int(getattr(parallel, field, 1) or 1)
        if size > 1:
            raise NotServed(field, f"{size} ranks share each block's tokens", "use 1")
