"""A tiny LLaVA: images through a vision tower, over full attention.

Qwen2.5-VL's processor, for one, wants torchvision, which vLLM's CPU environment does not have.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ownerserve.engines.hf.model.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    PRINTABLE_IDS,
    VOCAB_SIZE,
    byte_tokenizer,
)

SEEING = "llava"
IMAGE = VOCAB_SIZE - 1
"""The byte tokenizer's last reserved token."""
PATCH, IMAGE_SIDE = 14, 112
IMAGE_TOKENS = (IMAGE_SIDE // PATCH) ** 2
"""Placeholders of an image."""
WIDTH = 128


def config() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=False,
    )
    tower = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=IMAGE_SIDE,
        patch_size=PATCH,
    )
    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def write_seeing(folder: Path, *, seed: int = 0) -> Path:
    """The checkpoint and all that its processor needs; returns the folder."""
    from transformers import (
        CLIPImageProcessor,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    model = LlavaForConditionalGeneration(config()).to(torch.float32)
    dice = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.ndim > 1:
            fan_in = 1 if "embed" in name else weight[0].numel()
            weight.copy_(torch.randn(weight.shape, generator=dice) / math.sqrt(fan_in))
    silent = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    silent[list(PRINTABLE_IDS)] = False
    model.lm_head.weight[silent] = 0
    model.save_pretrained(folder)
    _name_the_tower(folder / "model.safetensors")
    tokenizer = byte_tokenizer()
    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": IMAGE_SIDE}, crop_size=side),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=tokenizer.convert_ids_to_tokens(IMAGE),
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    return folder


def _name_the_tower(file: Path) -> None:
    """Name the tower's weights as published checkpoints do, which is what vLLM reads."""
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1): weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def picture(seed: int) -> Any:
    """A picture of noise."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3))
    return Image.fromarray(pixels.astype("uint8"))
