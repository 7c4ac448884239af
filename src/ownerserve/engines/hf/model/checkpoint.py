"""This module finds models by name or folder: a tiny random one, or a Hugging Face checkpoint on
local disk.

Must never fetch anything: a folder holds config.json, safetensors and a tokenizer, or is refused.
Weights are read from safetensors only; no pickle, no remote code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from ownerserve.engines.hf.model.tiny import TINY_MODELS, attention_for, random_model, tiny_config
from ownerserve.engines.hf.model.tokenizer import byte_tokenizer
from ownerserve.engines.hf.state.states import FAMILIES
from ownerserve.kv.errors import InvalidInput

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class LoadedCheckpoint(msgspec.Struct, frozen=True):
    """A `LoadedCheckpoint` is a model ready for a ModelRunner, and how to speak to it. `eos_ids`
    end an answer; `folder` is where its weights were read, None when they were drawn."""

    name: str
    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    folder: Path | None = None


def load_checkpoint(
    name_or_folder: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LoadedCheckpoint:
    """Load the checkpoint in a folder, or draw a tiny model ("tiny-v4", ...) from `seed`. Raises
    InvalidInput for a name that is neither.

    `dtype` None: float32 for a tiny model, the checkpoint's own for a folder.
    """
    _check_device(device)
    if name_or_folder in TINY_MODELS:
        config = tiny_config(name_or_folder)
        model = random_model(config, seed=seed, dtype=dtype or torch.float32, device=device)
        return _checkpoint(name_or_folder, model, byte_tokenizer())
    folder = Path(name_or_folder)
    if not (folder / "config.json").is_file():
        raise InvalidInput(
            "model",
            f"{name_or_folder!r} is no tiny model and no folder with a config.json",
            f"use {', '.join(TINY_MODELS)}, or a checkpoint folder",
        )
    return _load_folder(folder, device=device, dtype=dtype)


def save_tiny(name: str, folder: Path, *, seed: int = 0) -> None:
    """Write a tiny model as a checkpoint folder (config, safetensors, tokenizer)."""
    checkpoint = load_checkpoint(name, seed=seed)
    checkpoint.model.save_pretrained(folder)
    checkpoint.tokenizer.save_pretrained(folder)


def _load_folder(folder: Path, *, device: str, dtype: torch.dtype | None) -> LoadedCheckpoint:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    _check_family(folder / "config.json")
    _check_files(folder)
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        attention = attention_for(config)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            use_safetensors=True,
            **({"attn_implementation": attention} if attention else {}),
            **local,
        )
    except (OSError, ValueError) as error:
        raise InvalidInput("model", f"{folder}: {error}", "mend the checkpoint folder") from error
    if config.model_type == "deepseek_v4":
        _unify_dtype(model)
    loaded = _checkpoint(folder.name, model.to(device).eval(), tokenizer)
    return msgspec.structs.replace(loaded, folder=folder)


def _check_family(config_file: Path) -> None:
    """Refuse a model we have no adapter for, before transformers looks at it."""
    families = ", ".join(FAMILIES)
    try:
        config = msgspec.json.decode(config_file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidInput("config.json", str(error), "give a JSON object") from error
    if config.get("model_type") not in FAMILIES:
        raise InvalidInput(
            "model_type",
            f"{config.get('model_type')!r} has no adapter in the hf engine",
            f"use one of {families}",
        )


def _check_files(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        raise InvalidInput(
            "model", f"{folder} has no *.safetensors", "convert the weights: nothing else is read"
        )
    # Without one transformers makes up an empty tokenizer for the family and says nothing.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidInput(
            "model", f"{folder} has no tokenizer", f"add one of {', '.join(TOKENIZER_FILES)}"
        )


def _check_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput("device", f"{device}: torch sees no CUDA device here", "use cpu")


def _unify_dtype(model: Any) -> None:
    """Cast parameters to the model's dtype.

    transformers 5.19 keeps V4's norms in float32; a bfloat16 model then fails in the first linear
    layer after one. Buffers (rotary frequencies) stay as they are.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(model.dtype)


def _checkpoint(name: str, model: Any, tokenizer: Any) -> LoadedCheckpoint:
    configured = model.generation_config.eos_token_id
    if configured is None:
        configured = tokenizer.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return LoadedCheckpoint(name, model, tokenizer, frozenset(i for i in ids if i is not None))
