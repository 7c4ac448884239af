"""A model's config says what is computed with its weights, so it is part of the state's name.

Everything in it counts but what is known to leave the state alone (BOOKKEEPING): a field that
nobody thought of makes another name, which is a miss, and never wrong state. The file is taken as
it lies beside the weights, so that two engines and two versions of transformers, whose defaults
differ, name it alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ownerserve.kv.errors import InvalidInput

FILES = ("config.json", "params.json")
"""The second is Mistral's own form; where both stand, an engine may read either."""

BOOKKEEPING = frozenset(
    {
        # who wrote it, and with what
        "_name_or_path",
        "transformers_version",
        "_commit_hash",
        # the dtype of computing has a place of its own in the name
        "torch_dtype",
        "dtype",
        # how a run is driven, and what it returns
        "_attn_implementation",
        "_attn_implementation_internal",
        "_attn_implementation_autoset",
        "_experts_implementation_internal",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
        # training
        "attention_dropout",
        "embd_pdrop",
        "hidden_dropout",
        "initializer_range",
        "resid_pdrop",
        "router_aux_loss_coef",
        # which tokens end an answer, and labels
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
        "label2id",
        "problem_type",
    }
)
"""Fields that never change state, at any depth."""


def config_facts(folder: Path) -> str:
    """Return what a checkpoint's config says of its state, canonically; empty where the folder has
    none. Raises InvalidInput for a file that is no JSON object."""
    found = {name: _read(folder / name) for name in FILES if (folder / name).is_file()}
    return canonical({name: state_facts(config) for name, config in found.items()}) if found else ""


def state_facts(config: Any) -> Any:
    """Return a config without what never changes state."""
    if isinstance(config, Mapping):
        kept = ((str(key), value) for key, value in config.items() if key not in BOOKKEEPING)
        return {key: state_facts(value) for key, value in kept}
    return config


def canonical(value: Any) -> str:
    """Return a value as JSON whose order says nothing; what JSON lacks is written as text."""
    plain = value.to_dict() if hasattr(value, "to_dict") else value
    return msgspec.json.encode(plain, order="sorted", enc_hook=str).decode()


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput("model", f"{path}: {error}", "mend the checkpoint's folder") from error
    if not isinstance(config, dict):
        raise InvalidInput("model", f"{path} is no JSON object", "mend the checkpoint's folder")
    return config
