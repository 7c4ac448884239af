"""A worker process (worker.py), as a test has it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection, wait

import msgspec

from ownerserve.kv.wire.headers import LenderAddress
from tests.support.hf.aborts.worker import (
    AskBooks,
    BooksAre,
    HangUp,
    Reached,
    Rest,
    Rested,
    RunTurn,
    Said,
    Serves,
    Told,
    TurnOver,
    WorkerSetting,
    serve,
)
from tests.support.waits import WAIT_S, until


class ToyProcess:
    """Serves when made. Close it."""

    def __init__(self, setting: WorkerSetting) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.hf.aborts.worker"])
        self.pipe, theirs = context.Pipe()
        self.setting = setting
        self._process = context.Process(target=serve, args=(theirs, setting), daemon=True)
        self._process.start()
        theirs.close()
        self._decoder = msgspec.msgpack.Decoder(Said)
        self.over: dict[int, TurnOver] = {}
        """Turns that ended, until somebody takes them."""
        self.reached: list[str] = []
        """Steps at which it stopped."""
        serves = self._next()
        assert isinstance(serves, Serves)
        self.address: LenderAddress = serves.address

    def tell(self, told: Told) -> None:
        self.pipe.send_bytes(msgspec.msgpack.encode(told))

    def run(self, turn: RunTurn) -> None:
        self.tell(turn)

    def hang_up(self, number: int) -> None:
        self.tell(HangUp(number))

    def hear(self) -> None:
        """Take in what it has said."""
        while self.pipe.poll():
            self._note(self._next())

    def _note(self, said: Said) -> None:
        if isinstance(said, Reached):
            self.reached.append(said.step)
        else:
            assert isinstance(said, TurnOver), said
            self.over[said.number] = said

    def answer(self, number: int, within_s: float = WAIT_S) -> TurnOver:
        """Wait for the end of a turn."""
        until(
            lambda: self.has_ended(number),
            within_s=within_s,
            what=f"{self.setting.name} ends turn {number}",
        )
        return self.over.pop(number)

    def has_ended(self, number: int) -> bool:
        """Whether a turn has ended whose end nobody has taken yet."""
        self.hear()
        return number in self.over

    def books(self) -> BooksAre:
        self.tell(AskBooks())
        while not isinstance(said := self._next(), BooksAre):
            self._note(said)
        return said

    def rest(self) -> dict[str, int]:
        """What is left when all that may be evicted is, and what was wrong."""
        self.tell(Rest())
        said = self._next()
        assert isinstance(said, Rested), said
        return said.left

    def comes_to_rest(self, within_s: float = WAIT_S) -> BooksAre:
        """Wait until nobody has anything, or waits."""
        last = self.books()

        def rests() -> bool:
            nonlocal last
            last = self.books()
            return not any(last.open.values())

        try:
            until(rests, within_s=within_s)
        except AssertionError as error:
            error.add_note(f"{self.setting.name} still has {last.open}")
            raise
        return last

    def _next(self) -> Said:
        assert self.pipe.poll(WAIT_S), f"{self.setting.name} is silent"
        return self._decoder.decode(self.pipe.recv_bytes())

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it; returns when it is dead."""
        self._process.kill()
        self._process.join(WAIT_S)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        """End it, whatever became of it."""
        if self._process.exitcode is None:
            self.kill()
        self.pipe.close()
        self._process.close()


def hear_any(processes: list[ToyProcess], within_s: float) -> None:
    """Take in what they say, waiting a while for the first word."""
    pipes: list[Connection] = [one.pipe for one in processes]
    if wait(pipes, max(0.0, within_s)):
        for one in processes:
            one.hear()
