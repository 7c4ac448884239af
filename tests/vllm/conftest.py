"""The one zygote of a test run, and rigs of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm.fleet import Zygote, vllm_python
from tests.support.vllm.installed import distribution
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import WarmServers


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    python = vllm_python()
    if not python.exists():
        pytest.skip(f"no vLLM at {python.parent.parent}: make bench-envs")
    with Zygote(tmp_path_factory.mktemp("zygote")) as warm:
        yield warm


@pytest.fixture(scope="session")
def shared_rig(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(zygote, tmp_path_factory.mktemp("rig"))


@pytest.fixture
def rig(shared_rig: Rig) -> Iterator[Rig]:
    yield shared_rig
    shared_rig.end_test()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmServers]:
    """Real servers whose processes import nothing."""
    if not vllm_python().exists():
        pytest.skip(f"no vLLM at {vllm_python().parent.parent}: make bench-envs")
    folder = tmp_path_factory.mktemp("warm")
    site, log = distribution(folder / "site"), folder / "warm.log"
    with WarmServers(site, log, VLLM_SERVER_DEV_MODE="1") as servers:
        yield servers


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"
