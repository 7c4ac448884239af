"""Shared by all tests."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

ENGINE_FILE = re.compile(r"^pytestmark = .*\bpytest\.mark\.engine\b", re.MULTILINE)


def pytest_configure() -> None:
    """Have Ctrl-C mean something: in a run begun as `nohup ... &` it is ignored, by whatever a test
    starts too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "not engine"`, do not import torch only to deselect what needs it."""
    if "not engine" not in config.option.markexpr:
        return None
    files = [collection_path]
    if collection_path.is_dir():
        files = list(collection_path.rglob("test_*.py"))
    elif not collection_path.name.startswith("test_"):
        return None
    return (bool(files) and all(ENGINE_FILE.search(file.read_text()) for file in files)) or None
