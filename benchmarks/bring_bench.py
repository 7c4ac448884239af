"""What a turn costs where its session's state is here, moved here, at a peer, or nowhere: time to
first token.

    python benchmarks/bring_bench.py [--rounds 9] [--tokens 7000]

hf workers (tiny-qwen3, one thread each) as processes, which own under a directory in this one. A
session has left `--tokens` tokens on one; its next turn of 40 more runs

    append      where the state is
    in a gap    at another worker, which took the session over while it was idle
    on demand   at another worker, which reads the state with the turn, and owns the session then
    shm, readv, tcp     at another worker, which reads the state by that road, as a guest
    store       at another worker, from a directory that both share, where the first has put it away
    cold        at another worker, which computes all of it

by turns in each round, of a session of its own each. TTFT is the time of the first event of a
streamed answer, over HTTP. The machine's other work counts: compare within a run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch
from ownerserve.kv.wire.headers import TURN_HEADER, LenderAddress, TurnLine, encode_turn_line
from ownerserve.kv.wire.rpc import (
    AskSession,
    Released,
    ReleaseSession,
    SessionStands,
    SessionTaken,
    Suspend,
    Suspended,
    Take,
)
from result import report, smaller_is_better
from tests.support.hf.engine_rig import text
from tests.support.hf.owning_fleet import BootClock
from tests.support.hf.worker_process import WorkerProcess
from tests.support.waits import until

ROADS = ("shm", "readv", "tcp")
GAP, DEMAND, STORE = "in a gap", "on demand", "store"
WAYS = ("append", GAP, DEMAND, *ROADS, STORE, "cold")
KEPT = ("--host-cache", "1GiB", "--kv-memory", "1GiB", "--dear")


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=7000)
    options = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    directory = DirectoryServer(EmbeddedDirectory(BootClock(), TermFile(), opens_in_s=0.0))
    directory.start()
    workers: dict[str, WorkerProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in ("home", *ROADS):
                roads = () if name == "home" else ("--transfer-roads", name)
                workers[name] = WorkerProcess(Path(folder), name, directory.address, *KEPT, *roads)
            for name in ("keeper", STORE):
                remote = ("--remote", str(Path(folder) / "remote"))
                workers[name] = WorkerProcess(Path(folder), name, directory.address, *KEPT, *remote)
            for round_ in track(range(options.rounds), console=Console(stderr=True)):
                for number, way in enumerate(WAYS):
                    name = SessionId(f"{round_:016x}{number:016x}")
                    prompt = text(options.tokens, seed=1000 * round_ + number)
                    found[way].append(ttft_ms(workers, way, name, prompt))
        finally:
            for worker in workers.values():
                worker.stop()
            directory.stop()
    cold = median(found.pop("cold"))
    rows = [
        smaller_is_better(
            f"a turn behind {options.tokens} tokens, {way}",
            "ms",
            median(times),
            other=cold,
            other_name="computed anew",
        )
        for way, times in found.items()
    ]
    report("bring_bench", rows)


def ttft_ms(
    workers: dict[str, WorkerProcess], way: str, name: SessionId, prompt: list[int]
) -> float:
    """Return the time to first token of a session's second turn, served in that way."""
    home = workers["keeper" if way == STORE else "home"]
    lender = LenderAddress(home.unit, home.rpc)
    said = home.serve(prompt, name)
    longer = [*prompt, *said["tokens"], *text(40, seed=len(prompt))]
    epoch = owned(home, name)
    worker = workers.get(way, home if way == "append" else workers["shm"])
    line: dict[str, LenderAddress] = {}
    if way == GAP:
        taken = worker.asked(Take(name, lender))
        assert isinstance(taken, SessionTaken), taken
    elif way == DEMAND or way in ROADS:
        line = {"bring_from": lender}
    elif way == STORE:
        suspended = home.asked(Suspend(name))
        assert isinstance(suspended, Suspended), suspended
    ms, cached = first_token(worker, longer, name, **line)
    assert (cached < len(prompt) // 2) == (way == "cold"), (way, cached)
    if way == DEMAND:
        released = home.asked(ReleaseSession(name, epoch, worker.unit))
        assert isinstance(released, Released), released
        owned(worker, name)
    return ms


def owned(worker: WorkerProcess, name: SessionId) -> Epoch:
    """Return the epoch under which the worker owns the session, once it does."""
    found: list[Epoch] = []

    def is_owned() -> bool:
        stands = worker.asked(AskSession(name))
        if isinstance(stands, SessionStands) and stands.epoch is not None:
            found.append(stands.epoch)
        return bool(found)

    until(is_owned, what=f"{worker.name} owns {name}")
    return found[0]


def first_token(
    worker: WorkerProcess, prompt: list[int], name: SessionId, **line: LenderAddress
) -> tuple[float, int]:
    """Return how long the first event of the answer took, in ms, and how many tokens of the prompt
    were at hand."""
    told = encode_turn_line(TurnLine(name=name, target=worker.unit, **line)).decode()
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    started_s = time.perf_counter()
    headers = {TURN_HEADER: told}
    with worker.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        events = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(events)
        ms = (time.perf_counter() - started_s) * 1e3
        usage = msgspec.json.decode(list(events)[-1].removeprefix("data: "))["usage"]
    return ms, usage["prompt_tokens_details"]["cached_tokens"]


if __name__ == "__main__":
    main()
