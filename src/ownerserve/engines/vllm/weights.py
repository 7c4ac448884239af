"""This module decides whether vLLM's weights may be others after a call to its workers. Pure.

State is stored under the name of the weights that computed it. vLLM tells a connector of a cache
reset, but neither why nor what became of the weights: a sleep of level 1 keeps them, a trainer's
update follows a reset or comes without one. What does reach the workers is a call by name, so the
rule goes by names, and an unknown one counts as an update:

    a call in KEEPS_WEIGHTS              the same weights
    sleep(level <= 1)                    the same: they wait in host memory
    discard(tags without "weights")      the same
    any other name, and any function     others, from this call on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class WorkerCall(msgspec.Struct, frozen=True):
    """A `WorkerCall` is one call to all workers: a method's name, "" for a function, and what it
    was given."""

    method: str
    arguments: Sequence[Any] = ()
    named: Mapping[str, Any] = {}


KEEPS_WEIGHTS = frozenset(
    {
        "add_lora",  # requests with an adapter have no identity; the base stays
        "check_health",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "execute_model",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "initialize_from_config",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "save_tensorized_model",
        "set_kv_cache_layout",
        "shutdown",
        "supports_draft_weight_updates",  # each server of 0.30 asks that once, as it starts
        "synchronize_device",
        "take_draft_token_ids",
        "update_max_model_len",
        "wake_up",
    }
)
"""vLLM's own calls, 0.30 to 0.32, that leave the weights as they are."""

DEEPEST_KEEPING_LEVEL = 1


def may_change(call: WorkerCall) -> bool:
    """Return whether the workers' weights may be others once this call is made."""
    if call.method in KEEPS_WEIGHTS:
        return False
    given = [*call.arguments, *call.named.values()]
    if call.method == "sleep":
        return len(given) != 1 or given[0] not in range(DEEPEST_KEEPING_LEVEL + 1)
    if call.method == "discard":
        return len(given) != 1 or "weights" in given[0]
    return True
