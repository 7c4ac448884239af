"""This module reads a config.json: every field that is missing, of the wrong type or in
contradiction is named in the error, with the mend. Nothing here has a default that a caller did not
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ownerserve.kv.errors import InvalidInput


class Fields:
    """Fields reads a model's configuration, a mapping, field by field. `prefix` names it in
    errors.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def name(self, field: str) -> str:
        """Return the field's name as errors have it, with the objects that it lies in."""
        return f"{self._prefix}{field}"

    def has(self, field: str) -> bool:
        """Tell whether `field` is present and not null: a null is how configs say "not set"."""
        return self._values.get(field) is not None

    def raw(self, field: str) -> object:
        """Return whatever stands under `field`; None when it is absent."""
        return self._values.get(field)

    def first_of(self, *spellings: str) -> str:
        """Return the first spelling that is present. Raises InvalidInput naming them all."""
        for field in spellings:
            if self.has(field):
                return field
        raise InvalidInput(
            self.name(spellings[0]),
            "is missing",
            f"add it to the configuration{_or_spelled(spellings[1:])}",
        )

    def integer(self, *spellings: str, least: int = 1) -> int:
        """Return the whole number, `least` or more, under the first spelling present."""
        field = self.first_of(*spellings)
        value = self._values[field]
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInput(self.name(field), f"{value!r} is no whole number", "write one")
        if value < least:
            raise InvalidInput(self.name(field), f"{value}", f"use {least} or more")
        return value

    def integer_or(self, field: str, otherwise: int, *, least: int = 1) -> int:
        """Return the whole number under `field`, `least` or more; `otherwise` when it is absent."""
        return self.integer(field, least=least) if self.has(field) else otherwise

    def text(self, field: str) -> str:
        """Return the text under `field`. Raises InvalidInput for anything else."""
        value = self._values[self.first_of(field)]
        if not isinstance(value, str):
            raise InvalidInput(self.name(field), f"{value!r} is no text", "write a string")
        return value

    def integers(self, *spellings: str) -> tuple[int, ...]:
        """Return the list of whole numbers, none negative, under the first spelling present."""
        field = self.first_of(*spellings)
        value = self._values[field]
        whole = isinstance(value, Sequence) and not isinstance(value, str)
        if not whole or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
            raise InvalidInput(
                self.name(field), "is no list of whole numbers", "list one number for each item"
            )
        return tuple(value)

    def texts(self, field: str) -> tuple[str, ...]:
        """Return the list of texts under `field`. Raises InvalidInput for anything else."""
        value = self._values[self.first_of(field)]
        if not isinstance(value, Sequence) or any(not isinstance(v, str) for v in value):
            raise InvalidInput(self.name(field), "is no list of texts", "list one for each layer")
        return tuple(value)

    def nested(self, field: str) -> Fields:
        """Return the object under `field`, to be read likewise."""
        value = self._values[self.first_of(field)]
        if not isinstance(value, Mapping):
            raise InvalidInput(self.name(field), f"{value!r} is no object", "write an object")
        return Fields(value, f"{self.name(field)}.")

    def unknown(self, field: str, value: object, known: Iterable[str]) -> InvalidInput:
        """Return the error for a word that is not one of `known`."""
        return InvalidInput(self.name(field), f"{value!r} is unknown", f"use {', '.join(known)}")

    def contradiction(self, field: str, other: str, *, problem: str) -> InvalidInput:
        """Return the error for two fields that can't both be right."""
        return InvalidInput(
            self.name(field), f"contradicts {self.name(other)}: {problem}", "correct one of them"
        )


def by_layer(fields: Fields, field: str) -> dict[int, Fields]:
    """Return the object under `field`, whose keys are layer numbers and whose values are
    objects.
    """
    nested = fields.nested(field)
    if bad := [key for key in nested if not key.isdigit()]:
        raise InvalidInput(nested.name(bad[0]), "is no layer number", "use 0, 1, ...")
    return {int(key): nested.nested(key) for key in nested}


def _or_spelled(spellings: Sequence[str]) -> str:
    return f" (or as {', '.join(spellings)})" if spellings else ""


def layer_types(
    fields: Fields, layers: int, allowed: Iterable[str], *, field: str = "layer_types"
) -> tuple[str, ...]:
    """Return the per-layer list `field`, checked for its length and its words."""
    types = fields.texts(field)
    if len(types) != layers:
        raise fields.contradiction(
            field, "num_hidden_layers", problem=f"{len(types)} entries for {layers} layers"
        )
    words = tuple(allowed)
    for index, word in enumerate(types):
        if word not in words:
            raise fields.unknown(f"{field}[{index}]", word, words)
    return types


def flagged_layers(
    fields: Fields, layers: int, *spellings: str, flagged: str, others: str
) -> tuple[str, ...]:
    """Return one type a layer from a list of numbers under the first spelling present: `flagged`
    where it is not 0. Raises InvalidInput for a list of another length."""
    flags = fields.integers(*spellings)
    if len(flags) != layers:
        raise fields.contradiction(
            spellings[0], "num_hidden_layers", problem=f"{len(flags)} entries for {layers} layers"
        )
    return tuple(flagged if flag else others for flag in flags)


def every_nth(layers: int, period: int, *, nth: str, others: str) -> tuple[str, ...]:
    """Return one type a layer: `nth` at layers period-1, 2·period-1, ..., `others` elsewhere."""
    return tuple(others if (index + 1) % period else nth for index in range(layers))


def ratios_of_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return `compress_ratios` of the model's own layers; zeros beyond them belong to draft
    layers.
    """
    ratios = fields.integers("compress_ratios")
    if len(ratios) < layers or any(ratios[layers:]):
        raise fields.contradiction(
            "compress_ratios",
            "num_hidden_layers",
            problem=f"{len(ratios)} entries for {layers} layers (a surplus may only be 0)",
        )
    return ratios[:layers]


def agree(fields: Fields, found: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the one layer pattern that all spellings in `found` give. Raises InvalidInput on the
    first difference.
    """
    (first, pattern), *others = found.items()
    for field, other in others:
        for index, (mine, theirs) in enumerate(zip(pattern, other, strict=True)):
            if mine != theirs:
                raise fields.contradiction(
                    field, first, problem=f"layer {index} is {theirs}, there {mine}"
                )
    return pattern
