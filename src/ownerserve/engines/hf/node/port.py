"""The port shows the reference engine to its node: what it can do, and its slots as bytes.

Also what its state is called: the identity that stored artifacts bear. A model's weights are
named by a digest of what was loaded, never by a path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from xxhash import xxh3_128_digest

from ownerserve.cache.effects import MoveBorder
from ownerserve.engines.hf.model.checkpoint import LoadedCheckpoint
from ownerserve.engines.hf.model.runner import ModelRunner
from ownerserve.kv.frame import FORMAT
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import SALT_BYTES, Identity, Numerics
from ownerserve.kv.regions import Region
from ownerserve.node.storage.model_config import canonical, config_facts, state_facts
from ownerserve.node.storage.weights import weight_files_digest
from ownerserve.node.vocabulary.engine_port import LayerProgress, LayersTold
from ownerserve.plan.inputs import HF, Abilities

SLOT_FORMAT = FORMAT
"""How a slot's bytes lie (engines.hf.pools): as the canonical payload does."""


class HfPort:
    """An `HfPort` is a ModelRunner as an EnginePort."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def abilities(self) -> Abilities:
        return HF

    def read_slots(self, component: str, slots: Sequence[int]) -> memoryview:
        return self._runner.read_slots(component, slots)

    def write_slots(self, component: str, slots: Sequence[int], data: memoryview) -> None:
        self._runner.write_slots(component, slots, data)

    def apply(self, effects: Sequence[MoveBorder]) -> None:
        self._runner.apply(effects)

    def regions(self) -> tuple[Region, ...]:
        return self._runner.allocated.regions()

    def watch_layers(self, turn_id: TurnId, told: LayersTold) -> None:
        self._runner.watches.watch(turn_id, told)

    def unwatch_layers(self, turn_id: TurnId) -> None:
        self._runner.watches.unwatch(turn_id)

    def layers_done(self, turn_id: TurnId) -> LayerProgress | None:
        return self._runner.watches.of(turn_id)


def identity_of(checkpoint: LoadedCheckpoint, runner: ModelRunner) -> Identity:
    """Return the identity that names a worker's state. Reads every weight once, which takes as long
    as loading took.

    Weights that were read from files are named by them, as other engines name them too.
    """
    config, folder = checkpoint.model.config, checkpoint.folder
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)
    quantization = getattr(config, "quantization_config", None)
    return Identity(
        model_id=str(config.model_type),
        weights=weight_files_digest(folder) if folder else weights_digest(checkpoint.model),
        tokenizer=tokenizer_digest(checkpoint.tokenizer),
        spec_digest=runner.spec_digest(),
        numerics=Numerics(
            dtype=str(checkpoint.model.dtype).removeprefix("torch."),
            quantization=canonical(quantization) if quantization else "",
            rope_scaling=canonical(rope) if rope else "",
        ),
        tenant_salt=bytes(SALT_BYTES),
        config=config_facts(folder) if folder else canonical(state_facts(config.to_dict())),
    )


def weights_digest(model: Any) -> str:
    """Return a SHA-256, in hex, over every parameter and buffer: name, shape, dtype, and XXH3-128
    of its bytes."""
    digest = hashlib.sha256(b"ownerserve/weights/1")
    for name, tensor in sorted(model.state_dict().items()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(xxh3_128_digest(data))
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a SHA-256, in hex, over the vocabulary and the special tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    special = sorted(map(str, tokenizer.all_special_tokens))
    return hashlib.sha256(msgspec.json.encode([vocabulary, special])).hexdigest()
