"""Shared by all tests."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ENGINE_FILE = re.compile(r"^pytestmark = .*\bpytest\.mark\.engine\b", re.MULTILINE)


def pytest_configure() -> None:
    """Have no property fail for being slow, and have Ctrl-C mean something.

    On a busy machine any example may take long. In a run begun as `nohup ... &` Ctrl-C is ignored,
    by whatever a test starts too.
    """
    slow = [HealthCheck.too_slow]
    settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=slow)
    settings.load_profile("unhurried")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Look for no garbage among what collection makes, then or later: it stays to the end. That
    took a fifth of the CPU time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


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
