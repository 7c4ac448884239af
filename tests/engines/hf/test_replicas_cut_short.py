"""A replica of a prefix is made, and one of both workers dies or stands still amid it: there is
none, nothing is left of it but cached state, and no answer is wrong. Over real processes; all else:
test_replicas.py.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from ownerserve.kv.wire.refusals import WorkerRefusal  # noqa: E402
from ownerserve.kv.wire.rpc import PrefixTaken, Reject, Said, TakePrefix  # noqa: E402
from ownerserve.node.rpc.server import RpcClient  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.worker_process import Wire, WorkerProcess  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

PARENT, FORK = SessionId("a" * 32), SessionId("b" * 32)
MODEL = "tiny-qwen3"
PROMPT = text(600, seed=3)
SEALED = 592
KEPT = ("--host-cache", "64MiB", "--dear")
WAIT_S = 300.0


class Rig:
    """A worker that has the parent's prefix, which is asked over a wire that can be held, and
    another that is told to copy it."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self.here = self._started(WorkerProcess(folder, "here", None, *KEPT))
        self.there = self._started(WorkerProcess(folder, "there", None, *KEPT))
        self.wire = Wire(self.here.rpc)
        self.here.serve(PROMPT, PARENT)
        self.said: list[Said] = []

    def _started(self, worker: WorkerProcess) -> WorkerProcess:
        self._stack.callback(worker.stop)
        return worker

    def copy(self) -> threading.Thread:
        """The other worker is told to copy the prefix; its answer goes to `said`."""
        source = LenderAddress(self.here.unit, self.wire.address)

        def asking() -> None:
            client = RpcClient(self.there.rpc, timeout_s=WAIT_S)
            try:
                self.said.append(client.ask(TakePrefix(PARENT, SEALED, source)))
            except TimeoutError:
                pass
            finally:
                client.close()

        thread = threading.Thread(target=asking, daemon=True)
        thread.start()
        return thread

    def copy_until(self, word: bytes) -> threading.Thread:
        """The same, until the other worker asks that of this one, which does not hear it."""
        self.wire.hold_at(word)
        copying = self.copy()
        until(lambda: word in self.wire.held, what=f"{word!r} to be said")
        return copying

    def fork(self, at: WorkerProcess, seed: int) -> dict[str, Any]:
        """The first turn of a fork, whose answer is a cold engine's."""
        prompt = [*PROMPT[:SEALED], *text(20, seed=seed)]
        answer = at.serve(prompt, FORK)
        assert_cold(MODEL, prompt, answer)
        return answer

    def close(self) -> None:
        self.wire.let_go()
        self._stack.close()
        self.wire.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    one = Rig(tmp_path)
    yield one
    one.close()


def kill(worker: WorkerProcess) -> None:
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait(WAIT_S)


def test_one_that_nobody_disturbs_is_made(rig: Rig) -> None:
    rig.copy().join(WAIT_S)
    (said,) = rig.said
    assert isinstance(said, PrefixTaken) and said.tokens == SEALED
    assert rig.fork(rig.there, 9)["cached"] == SEALED


def test_of_a_holder_that_stands_still_nothing_is_copied(rig: Rig) -> None:
    rig.here.freeze()
    rig.copy().join(WAIT_S)
    rig.here.thaw()
    assert rig.said == [Reject(WorkerRefusal.NO_ANSWER)]
    rig.fork(rig.there, 9)
    assert rig.fork(rig.here, 10)["cached"] == SEALED


@pytest.mark.parametrize("end", ["dies", "stands_still"])
def test_a_holder_that_dies_as_it_is_read_costs_a_replica(rig: Rig, end: str) -> None:
    copying = rig.copy_until(b"ask_lender")
    if end == "dies":
        kill(rig.here)
    else:
        rig.here.freeze()
    copying.join(WAIT_S)
    assert rig.said == [Reject(WorkerRefusal.NOT_BROUGHT)]
    if end == "stands_still":
        rig.here.thaw()
        rig.wire.let_go()
        assert rig.fork(rig.here, 10)["cached"] == SEALED
    rig.fork(rig.there, 9)
    assert rig.there.metric('ownerserve_replicas_total{end="not_brought"}') == 1


def test_a_target_that_dies_amid_it_leaves_the_holder_as_it_was(rig: Rig) -> None:
    rig.copy_until(b"ask_lender")
    kill(rig.there)
    rig.wire.let_go()
    assert rig.fork(rig.here, 9)["cached"] == SEALED
