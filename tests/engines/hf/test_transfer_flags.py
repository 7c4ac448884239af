"""What an operator says of transfers on the command line is what the worker does."""

from __future__ import annotations

import threading

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.cli.worker import command
from ownerserve.engines.hf import build
from ownerserve.engines.hf.build import HfWorker, WorkerOptions
from ownerserve.node.transfers.prefills import AfterRead
from ownerserve.store.service.runtime import READERS

pytestmark = pytest.mark.engine

FLAGS = ("--model", "tiny-qwen3", "--kv-memory", "8MiB", "--port", "0", "--host-cache", "8MiB")


class Built(Exception):
    """The worker is built, and serves nobody."""


def readers() -> int:
    return sum(one.name.startswith("store-read-") for one in threading.enumerate())


def test_how_many_wait_for_peers_and_what_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, real = list[HfWorker](), build.build_worker

    def built(options: WorkerOptions) -> HfWorker:
        workers.append(real(options))
        raise Built

    monkeypatch.setattr(build, "build_worker", built)
    before = readers()
    run = CliRunner().invoke(command, [*FLAGS, "--brings", "3", "--prefilled", "free"])
    assert isinstance(run.exception, Built), run.output
    [worker] = workers
    transfers = worker.transfers
    assert transfers is not None and transfers.prefills is not None
    try:
        assert readers() - before == READERS + 3
        assert transfers.prefills.after_read is AfterRead.FREE
    finally:
        transfers.stop()


def test_without_memory_for_what_comes_a_worker_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would say that it reads of others, and bring nothing."""

    def built(options: WorkerOptions) -> HfWorker:
        raise Built

    monkeypatch.setattr(build, "build_worker", built)
    run = CliRunner().invoke(command, [*FLAGS, "--landing-memory", "0"])
    assert not isinstance(run.exception, Built)
    assert run.exit_code != 0 and "landing-memory" in f"{run.output} {run.exception}"
