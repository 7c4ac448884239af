"""Shared by the tests of kv: the shipped example configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ownerserve.kv.descriptor import load_descriptor
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config


@pytest.fixture(scope="session")
def example() -> Callable[[str], dict[str, Any]]:
    """A shipped example by name; each call gives a fresh object, free to be broken."""
    return lambda name: read_config(find_config(name))


@pytest.fixture(scope="session")
def geometry() -> Callable[..., Geometry]:
    """Geometry of a shipped example under a named descriptor (None: the family's default)."""

    def make(name: str, kv: str | None = None, block_tokens: int | None = None) -> Geometry:
        descriptor = None if kv is None else load_descriptor(kv)
        return Geometry.of(build_spec(read_config(find_config(name)), descriptor), block_tokens)

    return make
