"""Makes SGLang's caches importable without torchvision. Runs in .venv-sglang.

SGLang imports torchvision at top level for its multimodal models; the cache needs none of it.
Transformers is asked first, so that it does not take the stub for the real one.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

NAMES = ("", ".transforms", ".transforms.functional", ".io", ".ops")


class _Stub(types.ModuleType):
    """A module that has every attribute."""

    __path__: list[str] = []  # noqa: RUF012 - what the import system wants

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def stub_torchvision() -> None:
    """Call before anything of sglang is imported."""
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():
        return
    for suffix in NAMES:
        name = f"torchvision{suffix}"
        stub = _Stub(name)
        stub.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = stub


class Allocator:
    """Stands for SGLang's page allocator: counts what is given back."""

    device = "cpu"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.freed = 0

    def free(self, indices: object) -> None:
        self.freed += len(indices)  # type: ignore[arg-type]

    def free_segment(self, indices: object, *, start_pos: int) -> None:
        self.freed += len(indices)  # type: ignore[arg-type]
