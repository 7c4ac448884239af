"""Imported by a worker before its engine is built: vLLM's LLaVA without Pixtral's vision tower, the
one of its towers whose import wants torchvision, which vLLM's CPU environment does not have."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

PIXTRAL = "vllm.model_executor.models.pixtral"


def _register() -> None:
    if PIXTRAL not in sys.modules:
        tower: Any = ModuleType(PIXTRAL)
        for name in ("PixtralHFEncoderInfo", "PixtralHFVisionModel", "PixtralVisionConfig"):
            setattr(tower, name, type(name, (), {}))
        sys.modules[PIXTRAL] = tower
    from vllm import ModelRegistry
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    ModelRegistry.register_model("LlavaForConditionalGeneration", LlavaForConditionalGeneration)


_register()
