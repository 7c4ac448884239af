"""Every example figure, written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from ownerserve.report.figures.style import Written, write


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Name of an example -> its files."""
    from tests.support.report.figure_examples import EXAMPLES

    folder = tmp_path_factory.mktemp("figures")
    return cache(lambda name: write(name, *EXAMPLES[name], folder))
