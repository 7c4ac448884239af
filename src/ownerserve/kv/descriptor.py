"""The engine KV descriptor states what an engine chose, and a model's config.json can't say.

Owns precision and layout of every kind of entry, page size, alignment, lookahead. Must never
decide which states a layer has: that is the model's business (kv.registry).

One is named (`--kv fp8_ds_mla`) or read from a JSON file; a file may start from a name:

    {"base": "fp8_ds_mla", "index": "fp4", "page_tokens": 256}
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.specs import Precision


class KvFormat(StrEnum):
    """A KvFormat is the layout of a key-value entry. The last three exist for latents only (MLA,
    DeepSeek-V4).
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"  # uniform E4M3; its scale is one a tensor, not one an entry
    FP8_DS_MLA = "fp8_ds_mla"  # FlashMLA: FP8 NoPE, BF16 RoPE, scales in the entry
    MXFP8 = "mxfp8"  # FP8 throughout, a UE8M0 scale for 32
    NVFP4 = "nvfp4"  # FP4 throughout, an E4M3 scale for 16

    @property
    def latent_only(self) -> bool:
        """Tell whether the format exists for latents only."""
        return self in (KvFormat.FP8_DS_MLA, KvFormat.MXFP8, KvFormat.NVFP4)


class IndexFormat(StrEnum):
    """An IndexFormat is the layout of an indexer key."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"  # and one FP32 scale
    FP4 = "fp4"  # MXFP4: a UE8M0 scale for 32


class TailForm(StrEnum):
    """A TailForm says how an HCA tail is held: as the waiting rows, or as an online softmax (max,
    sum, value).
    """

    RAW_ROWS = "raw_rows"
    ONLINE = "online"


class KvDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A descriptor states an engine's choices. `window` and `ssm` None: as `kv`, and as the model's
    config says (FP32 when it is silent).

    `page_tokens`: boundaries are multiples of it too. `align_bytes`: what a kernel wants the
    entries of one layer in one block, and its window, rounded up to. `lookahead_tokens`:
    speculated tokens, which widen all live state.
    """

    name: str = "custom"
    kv: KvFormat = KvFormat.BF16
    window: KvFormat | None = None
    index: IndexFormat = IndexFormat.BF16
    tail: TailForm = TailForm.RAW_ROWS
    tail_precision: Precision = Precision.FP32
    ssm: Precision | None = None
    conv: Precision = Precision.BF16
    page_tokens: int = 1
    align_bytes: int = 1
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        for field, least in (("page_tokens", 1), ("align_bytes", 1), ("lookahead_tokens", 0)):
            value = getattr(self, field)
            if value < least:
                raise InvalidInput(f"kv.{field}", f"{value}", f"use {least} or more")


_MLA_FP8 = KvDescriptor(name="fp8_ds_mla", kv=KvFormat.FP8_DS_MLA, index=IndexFormat.FP8)

NAMED = {
    descriptor.name: descriptor
    for descriptor in (
        KvDescriptor(name="bf16"),
        KvDescriptor(name="fp16", kv=KvFormat.FP16, index=IndexFormat.FP16, conv=Precision.FP16),
        KvDescriptor(name="fp32", kv=KvFormat.FP32, index=IndexFormat.FP32, conv=Precision.FP32),
        KvDescriptor(name="fp8", kv=KvFormat.FP8, index=IndexFormat.FP8),
        _MLA_FP8,
        msgspec.structs.replace(_MLA_FP8, name="fp8_ds_mla-fp4-indexer", index=IndexFormat.FP4),
        KvDescriptor(name="bf16-fp8-indexer", index=IndexFormat.FP8),
        KvDescriptor(name="bf16-ssm-bf16", ssm=Precision.BF16),
        # vLLM 0.32 on FlashMLA: pages of 256 tokens, 576-byte alignment.
        msgspec.structs.replace(_MLA_FP8, name="vllm-v4", page_tokens=256, align_bytes=576),
        msgspec.structs.replace(
            _MLA_FP8,
            name="vllm-v4-fp4-indexer",
            index=IndexFormat.FP4,
            page_tokens=256,
            align_bytes=576,
        ),
        # SGLang 0.5.23 with SGLANG_OPT_USE_ONLINE_COMPRESS.
        msgspec.structs.replace(_MLA_FP8, name="sglang-v4-online", tail=TailForm.ONLINE),
        # DeepSeek-V4.1's own numerics: main KV in FP4, window in MXFP8.
        KvDescriptor(
            name="v41-fp4", kv=KvFormat.NVFP4, window=KvFormat.MXFP8, index=IndexFormat.FP4
        ),
    )
}


def load_descriptor(name_or_path: str) -> KvDescriptor:
    """Return a named descriptor, or the one in a JSON file. Raises InvalidInput naming the
    field.
    """
    if name_or_path in NAMED:
        return NAMED[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise InvalidInput(
            "--kv",
            f"{name_or_path!r} is neither a named descriptor nor a file",
            f"name one of {', '.join(NAMED)}, or pass a JSON file",
        )
    return parse_descriptor(path.read_bytes(), source=path.name)


def parse_descriptor(text: bytes, *, source: str) -> KvDescriptor:
    """Return the descriptor in JSON `text`; `base` in it names the one whose fields it changes.
    Raises InvalidInput naming the field in `source`.
    """
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
        base = fields.pop("base", None)
        if base is not None and (not isinstance(base, str) or base not in NAMED):
            raise InvalidInput(f"{source}: base", f"{base!r} is unknown", f"use {', '.join(NAMED)}")
        start = msgspec.to_builtins(NAMED[base]) if isinstance(base, str) else {}
        return msgspec.convert({**start, "name": source, **fields}, KvDescriptor)
    except msgspec.MsgspecError as error:
        known = ", ".join(("base", *KvDescriptor.__struct_fields__))
        raise InvalidInput(source, str(error), f"fields are {known}") from error
