"""An identity names the state that vLLM computes, as its artifacts bear it, or there is a reason
why it has none.

The same names as the hf engine's, so that equal weights with equal numerics meet in one store.
Weights are named by what the checkpoint's files hold, never by a path, and so is the config, with
what flags make of it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from ownerserve.engines.vllm import compat, media
from ownerserve.kv.frame import Payload
from ownerserve.kv.prefix import SALT_BYTES, Identity, Numerics
from ownerserve.node.storage.model_config import canonical, config_facts, state_facts
from ownerserve.node.storage.weights import weight_files_digest


def identity_of(vllm_config: Any, payload: Payload, *, weights: str, cache: Path) -> Identity:
    """Return the identity of what this engine serves. `cache` keeps digests of files between
    starts."""
    model = vllm_config.model_config
    config = model.hf_text_config
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return Identity(
        model_id=str(config.model_type),
        weights=weights or weights_of(vllm_config, cache=cache),
        tokenizer=tokenizer_digest(model),
        spec_digest=payload.digest(),
        numerics=Numerics(
            dtype=str(model.dtype).removeprefix("torch.")
            + ("" if cache_dtype == "auto" else f"/kv:{cache_dtype}"),
            quantization=compat.quantization_of(model),
            rope_scaling=canonical(rope) if rope else "",
        ),
        tenant_salt=bytes(SALT_BYTES),
        config=config_of(model),
    )


def config_of(model: Any) -> str:
    """Return what the model's config says of its state, canonically, and what the operator changed
    of it: as the hf engine does where nothing is changed."""
    try:
        folder = _folder(model, getattr(model, "hf_config_path", None) or model.model)
        facts = config_facts(folder)
    except (OSError, ValueError):  # no folder here: what vLLM read of it, from wherever it is
        facts = ""
    facts = facts or canonical(state_facts(model.hf_config.to_dict()))
    return "\n".join(filter(None, [facts, _overrides(model), _long_rope(model)]))


def _overrides(model: Any) -> str:
    """Return --hf-overrides; of a function, what it made of the config."""
    given = getattr(model, "hf_overrides", None)
    if callable(given):
        return "overridden: " + canonical(state_facts(model.hf_config.to_dict()))
    return "overridden: " + canonical(given) if given else ""


def _long_rope(model: Any) -> str:
    """Return which factors of a LongRoPE vLLM takes: for all prompts alike, by --max-model-len."""
    text = model.hf_text_config
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    return f"positions: {model.max_model_len}" if '"longrope"' in canonical(ropes) else ""


PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a checkpoint that say what becomes of an image before the model sees it."""
MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
)
"""What of vLLM's settings does so; what a request says of its own is in its images' hashes."""


def processing_of(vllm_config: Any) -> bytes:
    """Return a digest of what this engine does with images and other media before it computes:
    files, settings, and the versions of the code that does it; empty for a model of text alone."""
    model = vllm_config.model_config
    settings = getattr(model, "multimodal_config", None)
    if settings is None:
        return b""
    try:
        folder = _folder(model, model.model)
        files = [(folder / name).read_text() for name in PROCESSORS if (folder / name).is_file()]
    except (OSError, ValueError):  # no folder here: the versions and the model's name are left
        files = [str(model.model), str(model.revision)]
    facts = {name: str(getattr(settings, name, None)) for name in MEDIA_SETTINGS}
    told = [list(compat.media_versions()), facts, files]
    return hashlib.sha256(msgspec.json.encode(told, order="sorted")).digest()


def weights_of(vllm_config: Any, *, cache: Path) -> str:
    """Return a digest of the checkpoint's weight files; where vLLM makes the weights up, its
    version and seed."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        return f"vllm {compat.version()} dummy weights, seed {model.seed}"
    return weight_files_digest(_folder(model, model.model), cache=cache)


def _folder(model: Any, name: str) -> Path:
    local = Path(name)
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=model.revision, local_files_only=True))


def tokenizer_digest(model: Any) -> str:
    """Return a SHA-256, in hex, over the vocabulary and the special tokens; without a tokenizer,
    "token ids": tokens are the prompt then."""
    if model.skip_tokenizer_init:
        return "token ids"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer,
        revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
    )
    vocabulary = sorted(tokenizer.get_vocab().items())
    special = sorted(map(str, tokenizer.all_special_tokens))
    return hashlib.sha256(msgspec.json.encode([vocabulary, special])).hexdigest()


def why_not(vllm_config: Any, *, is_recurrent: bool) -> str | None:
    """Return why no state of this engine may be shared at all; None when it may."""
    speculative = vllm_config.speculative_config
    if speculative is not None and is_recurrent:
        return "speculative_decoding"  # recurrent state can't be rolled back behind drafts
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "dynamic_kv_scales"
    return None


def why_bypassed(request: Any) -> str | None:
    """Return why a request's state has no identity here, so that it runs as if there were no
    connector; None when it has one."""
    params = request.kv_transfer_params or {}
    reasons = {
        "lora": request.lora_request is not None,
        "multimodal": not media.can_name(request.mm_features),
        "embeddings": getattr(request, "prompt_embeds", None) is not None,
        "pooling": request.pooling_params is not None,
        "streaming": bool(getattr(request, "resumable", False)),
        "handed_over": bool(params.get("do_remote_prefill") or params.get("do_remote_decode")),
        "not_wanted": bool(getattr(request, "skip_reading_prefix_cache", False)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
