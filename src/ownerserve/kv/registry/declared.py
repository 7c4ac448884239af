"""A declared model states its layers itself, for models that no family reads: `model_type` is
"declared", and `layers` lists `LayerSpec`s in the order of the model (docs/model-state.md).

    model_type = "declared"
    [[layers]]
    repeat = 3
    type = "sliding_attention"
    dense_bytes = 4096
    [[layers.states]]
    role = "swa"
    kind = { type = "window", tokens = 1024 }
    entry = { parts = [{ name = "keys", elements = 1024, precision = "bf16" }, ...] }
    sharding = "by_head"
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry.family import Family
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.specs import LayerSpec, StateSpec


class DeclaredLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `DeclaredLayer` is a `LayerSpec` without its index, `repeat` times over.

    `dense_bytes` is what the layer would keep for a token if it were plain attention. `kv_source`
    and `index_source` count layers from 0, repeats included.
    """

    type: str
    dense_bytes: int
    states: tuple[StateSpec, ...] = ()
    repeat: int = 1
    kv_source: int | None = None
    index_source: int | None = None


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config lists, first to last; precisions are those that it states.
    Raises InvalidInput naming the field.
    """
    fields.first_of("layers")
    try:
        declared = msgspec.convert(fields.raw("layers"), tuple[DeclaredLayer, ...])
    except msgspec.ValidationError as error:
        raise InvalidInput(
            "layers", str(error), "write layers as docs/model-state.md does"
        ) from error
    layers: list[LayerSpec] = []
    for layer in declared:
        if layer.repeat < 1:
            raise InvalidInput("layers.repeat", f"{layer.repeat}", "use 1 or more")
        for _ in range(layer.repeat):
            index = len(layers)
            for name, source in (("kv", layer.kv_source), ("index", layer.index_source)):
                if source is not None and not 0 <= source < index:
                    raise InvalidInput(
                        f"layers.{name}_source",
                        f"layer {index} reads layer {source}",
                        "name a layer before it",
                    )
            layers.append(
                LayerSpec(
                    index,
                    layer.type,
                    layer.states,
                    layer.dense_bytes,
                    kv_source=layer.kv_source,
                    index_source=layer.index_source,
                )
            )
    if not layers:
        raise InvalidInput("layers", "is empty", "list one for each layer")
    return layers


FAMILY = Family("declared", ("declared",), "bf16", make_layers)
