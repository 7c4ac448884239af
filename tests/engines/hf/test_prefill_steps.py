"""Whoever computes a prompt, or answers its turn, is killed or frozen at a step, or says nothing
there: the turn has a cold engine's answer in time, its worker says what came of it, and whoever
lives has nothing left of it. tests/support/hf/aborts/worker.py says what of the processes is real.

    step                 who waits for it, in what                            the row that is it
    look, its answer     D or P: Peers.look > TargetSide.look                 look, source's look
    order, its answer    D: Orders.placed > TargetSide.order                  order
    status, its answer   D: Orders.placed > TargetSide.least_pending          status
    lend, its answer     D or P: Peers.read > TargetSide.bring; where it is   lend, source's lend,
                         lent, SourceSide: its engine                         compute
    more, its answer     the same; there, digests and the next step           more, compute on
    bytes                the same, a mover's read                             bytes, source's bytes
    return, its answer   nobody: it is told                                   return
    a reader             P: Prefills (30 s), a ticket (5 s)                   D killed, frozen
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

from tests.support.hf.aborts.process import ToyProcess
from tests.support.hf.aborts.storm import ANSWER_TOKENS
from tests.support.hf.aborts.worker import Arm, GoOn, Know, RunTurn, WorkerSetting
from tests.support.node.lending_nodes import B
from tests.support.node.toy import VOCABULARY, cold
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

TOKEN_MS = 10.0
BLOCKS = 18
FROZEN_S = 6.5
"""Longer than a ticket stands without a word."""
REST_S = 150.0
ANSWER_S = 60.0
"""By the deadlines of each step a turn takes some 20 s at most; machines may be slow beside it."""
SESSION = "5e" * 16


class Row(NamedTuple):
    """At `step` of P, `fate` is whose and what. In D's books is then one of `says`: `of: outcome`,
    or nothing went wrong there."""

    step: str
    fate: str
    says: tuple[str, ...]


ALWAYS = 1 << 20
PLAYS = 5
"""An order that was answered too late on a busy machine says nothing of a later step."""
ORDER_LATE = {"orders: refused", "orders: late"}
LOST = ("brings: silent", "brings: failed", "brings: gone", "brings: slow", "brings: short")
BROUGHT = ("brings: brought",)
LIVES = ("P killed", "P frozen", "P silent")
FOR_GOOD = ("P killed", "P frozen", "P mute")
"""One that is silent does not answer once, one that is mute never."""
READER_STEPS = ("lend asked", "lend answered", "more asked", "compute on", "bytes")
"""D reads from then on, or was to: P keeps what it lends until the ticket ends, and no longer."""
ROWS = [
    *(Row("look asked", fate, ("looks: silent",)) for fate in LIVES),
    *(Row("order asked", fate, ("orders: refused",)) for fate in LIVES),
    *(Row("order answered", fate, ("orders: refused",)) for fate in LIVES),
    *(Row("status asked", fate, ("orders: refused",)) for fate in LIVES),
    *(Row("lend asked", fate, ("brings: no_peer",)) for fate in FOR_GOOD),
    *(Row("lend answered", fate, ("brings: no_peer",)) for fate in FOR_GOOD),
    *(Row("more asked", fate, ("brings: silent",)) for fate in FOR_GOOD),
    # One answer that is lost is asked for again.
    *(Row(step, "P silent", BROUGHT) for step in ("lend asked", "lend answered", "more asked")),
    *(Row("compute", fate, ("brings: no_peer",)) for fate in LIVES),
    *(Row("compute on", fate, (*LOST, "brings: no_peer")) for fate in LIVES),
    *(Row("bytes", fate, LOST) for fate in LIVES),
    *(Row("return asked", fate, BROUGHT) for fate in LIVES),
    *(
        Row(step, fate, ())
        for step in ("order asked", "order answered")
        for fate in ("D killed", "D frozen")
    ),
    *(Row(step, "D killed", ()) for step in READER_STEPS),
    *(Row(step, "D frozen", ()) for step in ("lend answered", "more asked", "bytes")),
]
SOURCE_ROWS = [
    *(Row("look asked", fate, ()) for fate in ("P killed", "P frozen", "D silent")),
    *(Row("lend asked", fate, ()) for fate in ("P killed", "P frozen", "D silent")),
    *(Row("bytes", fate, ()) for fate in ("P killed", "P frozen", "D silent")),
]


def name_of(row: Row) -> str:
    return f"{row.step}, {row.fate}"


class Pair:
    """P, which computes, and D, which answers, and orders of P where nobody is named."""

    def __init__(self) -> None:
        self.p, self.d = (
            ToyProcess(WorkerSetting(name, 1, ("tcp",), token_ms=TOKEN_MS)) for name in "pd"
        )
        self.draw = random.Random(3)
        self.prompt: list[int] = []
        self.numbers = 0

    def text(self, blocks: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(blocks * B)]

    def turn(self, at: ToyProcess, blocks: int, **whom: object) -> int:
        """Begin a turn of the session, whose prompt is so much longer than what was said."""
        self.numbers += 1
        self.prompt = [*self.prompt, *self.text(blocks)]
        at.run(RunTurn(self.numbers, self.prompt, SESSION, ANSWER_TOKENS, **whom))  # type: ignore[arg-type]
        return self.numbers

    def is_answered(self, at: ToyProcess, number: int, within_s: float = ANSWER_S) -> str:
        """The turn has its answer, a cold engine's; returns its mode."""
        over = at.answer(number, within_s)
        assert not over.failed, over
        assert over.tokens == cold(self.prompt, ANSWER_TOKENS)
        self.prompt = [*self.prompt, *over.tokens]
        return over.mode

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def reaches(worker: ToyProcess, step: str, *, unless: Callable[[], bool] = lambda: False) -> None:
    def has() -> bool:
        worker.hear()
        return step in worker.reached or unless()

    until(has, what=f"{worker.setting.name} comes to {step}")


def befalls(pair: Pair, fate: str, at: ToyProcess) -> ToyProcess | None:
    """What the fate does, at the step where `at` has stopped; returns who lives no more."""
    name, _, what = fate.partition(" ")
    whose = pair.p if name == "P" else pair.d
    if what == "killed":
        whose.kill()
    elif what == "frozen":
        whose.freeze()
    if whose is not at and what in ("killed", "frozen"):
        at.tell(GoOn())
    return whose if what == "killed" else None


def rests(worker: ToyProcess) -> None:
    worker.comes_to_rest(REST_S)
    left = worker.rest()
    assert not any(left.values()), f"{worker.setting.name}: {left}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_whoever_stops_at_a_step_costs_time_and_no_answer(row: Row) -> None:
    for _ in range(PLAYS):
        with closing(Pair()) as pair:
            told = plays(pair, row)
        if not row.says or not ORDER_LATE & told or ORDER_LATE & set(row.says):
            break
    assert not row.says or told & set(row.says), told


def plays(pair: Pair, row: Row) -> set[str]:
    """What D says came of it, unless it is dead."""
    p, d = pair.p, pair.d
    if row.step == "look asked":  # a fetch: P has had the session's last turn
        pair.is_answered(p, pair.turn(p, BLOCKS // 2))
    p.tell(Arm(row.step, ALWAYS if row.fate == "P mute" else 1))
    whom = {"bring_from": p.address} if row.step == "look asked" else {"decode_from": p.address}
    if row.step == "status asked":
        d.tell(Know(p.address.address))
        whom = {}
    number = pair.turn(d, BLOCKS, **whom)
    reaches(p, row.step, unless=lambda: d.has_ended(number))
    dead = befalls(pair, row.fate, p)
    if row.fate == "D frozen":
        time.sleep(FROZEN_S)
        d.thaw()
    told = set[str]()
    if dead is not d:
        mode = pair.is_answered(d, number)
        counts = d.books().counts
        told = {f"{of}: {outcome}" for of, found in counts.items() for outcome in found}
        brought = row.says == BROUGHT and not ORDER_LATE & told
        assert (mode == "remote_prefill") == brought or not row.says, mode
    if row.fate == "P frozen":
        p.thaw()
    if dead is not p:
        p.tell(GoOn())
    for worker in (p, d):
        if worker is not dead:
            rests(worker)
    if dead is d and row.step in READER_STEPS:
        ends = p.books().counts
        assert ends["lends"] == {"expired": 1}, "the ticket's deadline frees what nobody reads"
        assert ends["prefills"].keys() - {"accepted"} <= {"left", "read"}, ends
    return told


@pytest.mark.parametrize("row", SOURCE_ROWS, ids=name_of)
def test_whoever_stops_while_p_reads_the_beginning_costs_time_and_no_answer(
    pair: Pair, row: Row
) -> None:
    """D has had the session's last turn, and P reads what it left; D stops at the step."""
    p, d = pair.p, pair.d
    pair.is_answered(d, pair.turn(d, BLOCKS // 2 - 1))
    d.tell(Arm(row.step))
    number = pair.turn(d, BLOCKS, decode_from=p.address)
    reaches(d, row.step)
    dead = befalls(pair, row.fate, d)
    mode = pair.is_answered(d, number)
    assert mode == "remote_prefill" or row.fate != "D silent", "P computes what it can't read"
    if row.fate == "P frozen":
        p.thaw()
    d.tell(GoOn())
    for worker in (p, d):
        if worker is not dead:
            rests(worker)
