"""Helpers beside the tests, and every example figure written once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ownerserve.report.figures.style import Written, write

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Name of an example -> its files."""
    from figure_examples import EXAMPLES

    folder = tmp_path_factory.mktemp("figures")
    return cache(lambda name: write(name, *EXAMPLES[name], folder))
