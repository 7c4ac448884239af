"""Steps at which a worker stops for a test, so that it or its peer can be killed or frozen there,
or stays silent at that one.

    look, order, lend, more, return, status   a question of a peer: `asked`, before anything is done
                                              for it, or `answered`, before its answer is sent
    compute                                   the engine's thread, in a prompt for another worker
    compute on                                the same, once the prompt is lent
    bytes                                     the road's thread, before it sends any
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Lock, Thread, current_thread
from typing import Any

from ownerserve.kv.wire.rpc import AskLender, AskPrefix, Prefill, RpcAnswer, RpcRequest, Status
from ownerserve.node.transfers.frames import decode_question
from ownerserve.node.transfers.lending import Lending
from ownerserve.node.transfers.opening import Answerer
from ownerserve.transfer.control.messages import Lend, More, ReturnLend
from ownerserve.transfer.vocabulary import FramePiece, Runs
from tests.support.waits import WAIT_S

NO_STEP = ""


class Traps:
    """One step can be armed at a time, for so many times that it comes."""

    def __init__(self, reached: Callable[[str], None]) -> None:
        self._reached = reached
        self._armed, self._times = NO_STEP, 0
        self._lock, self._may_go = Lock(), Event()
        self._is_lend_asked = Event()

    def arm(self, step: str, times: int) -> None:
        self._armed, self._times = step, times

    def go_on(self) -> None:
        self._may_go.set()

    def pass_by(self, step: str) -> None:
        """Stop here, where this is the step."""
        if self._is_it(step):
            self._stop(step)

    def computing(self, start: int) -> None:
        """A prompt for another worker is computed from there on."""
        if self._armed == "compute on" and not start:
            self._is_lend_asked.wait(WAIT_S)  # it is opened before the next step
        else:
            self.pass_by("compute on" if start else "compute")

    def _is_it(self, step: str) -> bool:
        with self._lock:
            is_armed = step == self._armed
            self._times -= is_armed
            if not self._times:
                self._armed = NO_STEP
        return is_armed

    def _stop(self, step: str) -> None:
        self._reached(step)
        self._may_go.wait()

    def answering(self, others: Answerer) -> Answerer:
        """What answers as `others` do, but for the step."""

        def answer(request: RpcRequest) -> Future[RpcAnswer]:
            name = _name_of(request)
            if self._is_it(step := f"{name} asked"):
                return self._later(step, lambda: others(request))
            answered = others(request)
            if name == "lend":
                self._is_lend_asked.set()
            if self._is_it(step := f"{name} answered"):
                return self._later(step, lambda: answered)
            return answered

        return answer

    def _later(self, step: str, work: Callable[[], Future[RpcAnswer]]) -> Future[RpcAnswer]:
        later: Future[RpcAnswer] = Future()
        later.set_running_or_notify_cancel()

        def run() -> None:
            self._stop(step)
            later.set_result(work().result())

        Thread(target=run, daemon=True).start()
        return later


def _name_of(request: RpcRequest) -> str:
    match request:
        case AskPrefix():
            return "look"
        case Prefill():
            return "order"
        case Status():
            return "status"
        case AskLender(frame):
            match decode_question(frame):
                case Lend():
                    return "lend"
                case More():
                    return "more"
                case ReturnLend():
                    return "return"
    return "other"


class TrappedLending(Lending):
    """What lends, and stops before bytes are sent. Digests are another step's."""

    def __init__(self, traps: Traps, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._traps = traps

    def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
        if not current_thread().name.startswith("transfer-digest"):
            self._traps.pass_by("bytes")
        return super().runs(ticket, piece)
