"""An identity names the state that vLLM computes, as its artifacts bear it, or there is a reason
why it has none.

The same names as the hf engine's, so that equal weights with equal numerics meet in one store.
Weights are named by what the checkpoint's files hold, never by a path.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from ownerserve.kv.payload import Payload
from ownerserve.kv.prefix import SALT_BYTES, Identity, Numerics
from ownerserve.node.storage.weights import weight_files_digest


def identity_of(vllm_config: Any, payload: Payload, *, weights: str, cache: Path) -> Identity:
    """Return the identity of what this engine serves. `cache` keeps digests of files between
    starts."""
    model = vllm_config.model_config
    config = model.hf_text_config
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)
    quantization = getattr(config, "quantization_config", None)
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return Identity(
        model_id=str(config.model_type),
        weights=weights or weights_of(vllm_config, cache=cache),
        tokenizer=tokenizer_digest(model),
        spec_digest=payload.digest(),
        numerics=Numerics(
            dtype=str(model.dtype).removeprefix("torch.")
            + ("" if cache_dtype == "auto" else f"/kv:{cache_dtype}"),
            quantization=_canonical(quantization) if quantization else "",
            rope_scaling=_canonical(rope) if rope else "",
        ),
        tenant_salt=bytes(SALT_BYTES),
    )


def weights_of(vllm_config: Any, *, cache: Path) -> str:
    """Return a digest of the checkpoint's weight files; a fixed name where vLLM makes the weights
    up."""
    if str(vllm_config.load_config.load_format) == "dummy":
        return "vllm dummy weights"
    return weight_files_digest(_folder(vllm_config.model_config), cache=cache)


def _folder(model: Any) -> Path:
    local = Path(model.model)
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))


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
    if speculative is not None and (is_recurrent or speculative.method != "ngram"):
        # A draft model's layers keep KV too, and recurrent state can't be rolled back.
        return "speculative_decoding"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "dynamic_kv_scales"
    return None


def why_bypassed(request: Any) -> str | None:
    """Return why a request's state has no identity here, so that it runs as if there were no
    connector; None when it has one."""
    params = request.kv_transfer_params or {}
    reasons = {
        "lora": request.lora_request is not None,
        "multimodal": bool(request.mm_features),
        "embeddings": getattr(request, "prompt_embeds", None) is not None,
        "pooling": request.pooling_params is not None,
        "streaming": bool(getattr(request, "resumable", False)),
        "handed_over": bool(params.get("do_remote_prefill") or params.get("do_remote_decode")),
        "not_wanted": bool(getattr(request, "skip_reading_prefix_cache", False)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _canonical(value: object) -> str:
    plain = value.to_dict() if hasattr(value, "to_dict") else value
    return msgspec.json.encode(plain, order="sorted", enc_hook=str).decode()
