"""A session is taken over or put away, and one of both workers dies or stands still amid it: one
may write, no answer is wrong, and the session is somebody's. Over real processes; all else:
test_moves.py.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.directory import messages as ask  # noqa: E402
from ownerserve.directory.embedded import EmbeddedDirectory  # noqa: E402
from ownerserve.directory.rpc.client import DirectoryClient  # noqa: E402
from ownerserve.directory.rpc.server import DirectoryServer  # noqa: E402
from ownerserve.directory.terms import TermFile  # noqa: E402
from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.messages import RoutingUnit  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from ownerserve.kv.wire.refusals import WorkerRefusal  # noqa: E402
from ownerserve.kv.wire.rpc import Reject, RpcAnswer, RpcRequest, Suspend, Take  # noqa: E402
from ownerserve.node.rpc.server import RpcClient  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.owning_fleet import BootClock  # noqa: E402
from tests.support.hf.worker_process import Wire, WorkerProcess  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

AGENT = SessionId("a" * 32)
MODEL = "tiny-qwen3"
KEPT = ("--host-cache", "64MiB", "--dear")
LEASE_S = 15.0
WAIT_S = 300.0


class Rig:
    """A directory, a worker that owns a session, whose word to it can be held, and another."""

    def __init__(self, folder: Path) -> None:
        directory = EmbeddedDirectory(BootClock(), TermFile(), lease_s=LEASE_S, opens_in_s=0.0)
        self.server = DirectoryServer(directory)
        self.server.start()
        self._stack = ExitStack()
        self._stack.callback(self.server.stop)
        self.wire = Wire(self.server.address)
        self.here = self._started(WorkerProcess(folder, "here", self.wire.address, *KEPT))
        self.there = self._started(WorkerProcess(folder, "there", self.server.address, *KEPT))
        prompt = text(600, seed=3)
        self.longer = [*prompt, *self.here.serve(prompt, AGENT)["tokens"], *text(20, seed=9)]
        until(lambda: self.owner() == self.here.unit, what="the session is owned")
        leased = 'ownerserve_directory_answers_total{answer="leased"}'
        until(lambda: self.there.metric(leased) > 0, what="the other may own too")
        self.said: list[RpcAnswer] = []

    def _started(self, worker: WorkerProcess) -> WorkerProcess:
        self._stack.callback(worker.stop)
        return worker

    def owner(self) -> RoutingUnit | None:
        client = DirectoryClient(self.server.address)
        try:
            (found,) = client.execute([ask.FindSession(AGENT)])
        finally:
            client.close()
        return found.owner if isinstance(found, ask.SessionIs) and found.version else None

    def take(self) -> threading.Thread:
        """The other worker is told to take the session over; its answer goes to `said`."""
        return self._tell(self.there, Take(AGENT, LenderAddress(self.here.unit, self.here.rpc)))

    def suspend(self) -> threading.Thread:
        """The owner is told to put the session away; its answer goes to `said`."""
        return self._tell(self.here, Suspend(AGENT))

    def _tell(self, worker: WorkerProcess, asked: RpcRequest) -> threading.Thread:
        def asking() -> None:
            client = RpcClient(worker.rpc, timeout_s=WAIT_S)
            try:
                self.said.append(client.ask(asked))  # type: ignore[arg-type]
            except TimeoutError:
                pass
            finally:
                client.close()

        thread = threading.Thread(target=asking, daemon=True)
        thread.start()
        return thread

    def asks_for_the_move(self) -> bool:
        """The owner's word to the directory is on its way, and does not arrive."""
        return b"transfer" in self.wire.held

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


def test_an_owner_that_stands_still_keeps_its_session(rig: Rig) -> None:
    rig.here.freeze()
    rig.take().join(WAIT_S)
    assert rig.said == [Reject(WorkerRefusal.NO_ANSWER)]
    rig.here.thaw()
    answer = rig.here.serve(rig.longer, AGENT)
    assert answer["mode"] == "direct_append"
    assert_cold(MODEL, rig.longer, answer)
    until(lambda: rig.owner() == rig.here.unit)


def test_a_target_that_dies_amid_it_leaves_the_session_where_it_is(rig: Rig) -> None:
    rig.here.freeze()  # so that it is still asked as the other one dies
    rig.take()
    kill(rig.there)
    rig.here.thaw()
    answer = rig.here.serve(rig.longer, AGENT)
    assert answer["mode"] == "direct_append"
    assert_cold(MODEL, rig.longer, answer)
    until(lambda: rig.owner() == rig.here.unit)


@pytest.mark.parametrize("end", ["dies", "stands_still"])
def test_an_owner_that_dies_as_it_is_asked_leaves_it_to_who_has_the_state(
    rig: Rig, end: str
) -> None:
    rig.wire.hold()
    taking = rig.take()
    until(rig.asks_for_the_move, what="the owner stops, and asks the directory")
    if end == "dies":
        kill(rig.here)
    else:
        rig.here.freeze()
    taking.join(WAIT_S)
    assert rig.said == [Reject(WorkerRefusal.NO_ANSWER)]
    until(lambda: rig.owner() == rig.there.unit, what="the lease is over, the other binds")
    answer = rig.there.serve(rig.longer, AGENT)
    assert answer["cached"] >= 592
    assert_cold(MODEL, rig.longer, answer)
    if end == "stands_still":
        rig.here.thaw()
        rig.wire.let_go()  # its word comes late, and changes nothing
        assert_cold(MODEL, rig.longer, rig.here.serve(rig.longer, AGENT))
        assert rig.owner() == rig.there.unit
        assert rig.here.metric("ownerserve_sessions_owned") == 0


def test_a_target_that_dies_as_it_is_moved_owns_until_its_lease_is_over(rig: Rig) -> None:
    rig.wire.hold()
    rig.take()
    until(rig.asks_for_the_move, what="the owner stops, and asks the directory")
    kill(rig.there)
    rig.wire.let_go()
    assert_cold(MODEL, rig.longer, rig.here.serve(rig.longer, AGENT))  # a guest's, or its own again
    until(lambda: rig.owner() == rig.here.unit, what="the former owner has it again")
    longest = [*rig.longer, *text(20, seed=12)]
    answer = rig.here.serve(longest, AGENT)
    assert answer["cached"] >= 592
    assert_cold(MODEL, longest, answer)


@pytest.mark.parametrize("end", ["dies", "stands_still"])
def test_an_owner_that_dies_as_it_puts_a_session_away_leaves_it_to_whose_turn_comes(
    rig: Rig, end: str
) -> None:
    rig.wire.hold()
    rig.suspend()
    until(rig.asks_for_the_move, what="the owner stops, and gives it up to nobody")
    if end == "dies":
        kill(rig.here)
    else:
        rig.here.freeze()
    assert_cold(MODEL, rig.longer, rig.there.serve(rig.longer, AGENT))  # a guest's, at first
    until(lambda: rig.owner() == rig.there.unit, what="the lease is over, the other binds")
    if end == "stands_still":
        rig.here.thaw()
        rig.wire.let_go()  # its word comes late, and changes nothing
        assert_cold(MODEL, rig.longer, rig.here.serve(rig.longer, AGENT))
        assert rig.owner() == rig.there.unit
        assert rig.here.metric("ownerserve_sessions_owned") == 0
