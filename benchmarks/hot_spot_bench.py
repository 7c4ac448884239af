"""A hot spot relieved, on real hf workers and in the simulator, side by side: p95 of a step and the
share of turns that run elsewhere, under EAR with and without moves.

    python benchmarks/hot_spot_bench.py [--rounds 3] [--sessions 12]

Two workers of tiny-qwen3 as processes behind a gateway; each step takes a told time
(tests.support.hf.paced), so that a simulated worker's pace says what a real one's does. In each
round so many sessions have their first turn one after another while the second worker is drained
(simulated: dead), and come back all at once when it is there. Without moves T_hot is out of reach.

step    from a turn of theirs is sent until its answer is whole
moved   turns of those that ran at the second worker
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

import httpx
import msgspec
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moves_bench import WAIT_S, Member
from ownerserve.engines.hf.model.tiny import tiny_config
from ownerserve.sim.config.faults import Fault, FaultKind
from ownerserve.sim.config.setup import Links, SimSetup, Tiers
from ownerserve.sim.engine.pace import PaceFile
from ownerserve.sim.run import simulate
from ownerserve.sim.workload import Open, WorkloadShape
from ownerserve.trace.model import Trace, TraceRequest, TraceSession
from result import Row, report
from tests.support.hf.engine_rig import text
from tests.support.hf.paced import PEER, STEP_MS, TOKEN_MS
from tests.support.waits import until

MODEL, BLOCK_TOKENS, CHUNK_TOKENS = "tiny-qwen3", 16, 256
CONTEXT_TOKENS, MORE_TOKENS, ANSWER_TOKENS = 1520, 256, 16
APART_S = 0.02
"""Between two that come back, so that both worlds have them in one order."""
HOT_MS = {"with moves": 500.0, "without": 1e9}
MEMORY_BYTES = 256 << 20
SIM_FIRST_S, SIM_BACK_S = 4.0, 200.0


class Spot(NamedTuple):
    """What came of the turns that came back: their times in ms, and how many ran elsewhere."""

    took_ms: list[float]
    moved: int

    @property
    def share(self) -> float:
        """The share of them that ran elsewhere."""
        return self.moved / len(self.took_ms)

    @property
    def p95_ms(self) -> float:
        """Return the 95th percentile of their times."""
        return quantiles(self.took_ms, n=20, method="inclusive")[-1]


# -- real ------------------------------------------------------------------------------------------


class RealFleet:
    """Two workers, and a gateway for each way."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        def begun(name: str, *given: str, module: str) -> Member:
            member = Member(folder, name, given, module=module)
            stack.callback(member.stop)
            return member

        kept = ("--host-cache", "256MiB", "--kv-memory", "256MiB", "--chunk", str(CHUNK_TOKENS))
        begin = [
            begun(
                f"w{n}", "worker", "--model", MODEL, "--port", "0", "--rpc-port", "0",
                "--worker-id", f"w{n}", "--threads", "1", *kept, module="tests.support.hf.paced",
            )
            for n in range(2)
        ]  # fmt: skip
        self.urls = [one.serves()[0] for one in begin]
        over = [word for url in self.urls for word in ("--worker", url)]
        self.gateways: dict[str, list[str]] = {}
        self._seeds = 0
        for number, (way, hot_ms) in enumerate(HOT_MS.items()):
            flags = ("--port", "0", "--admin-port", "0", "--policy", "ear", "--seats", "0")
            flags = (*flags, "--receipts", "open")
            told = ("--hot-ms", str(hot_ms), "--cool-s", "0")
            gateway = begun(
                f"gateway{number}", "gateway", *flags, *told, *over, module="ownerserve.cli.main"
            )
            self.gateways[way] = gateway.serves()
        for way in self.gateways:
            until(lambda way=way: all(self._is_up(way, n) for n in (0, 1)), within_s=WAIT_S)

    def _is_up(self, way: str, number: int) -> bool:
        told = httpx.get(f"{self.gateways[way][1]}/workers", timeout=WAIT_S).json()["workers"]
        url = self.urls[number]
        return any(one["url"] == url and one["up"] and not one.get("draining") for one in told)

    def _tell(self, way: str, what: str) -> None:
        name = self.urls[1].removeprefix("http://")
        httpx.post(f"{self.gateways[way][1]}/workers/{name}/{what}", timeout=WAIT_S)

    def spot(self, way: str, number: int, sessions: int) -> Spot:
        """Play one round."""
        prompts = {
            f"{way} {number} {n}": text(CONTEXT_TOKENS, seed=self._seeds + n)
            for n in range(sessions)
        }
        self._seeds += 2 * sessions
        self._tell(way, "drain")
        for n, (name, prompt) in enumerate(prompts.items()):
            said = self._turn(way, name, prompt, final=False)
            prompts[name] = [
                *prompt,
                *said.tokens,
                *text(MORE_TOKENS, seed=1_000_000 + self._seeds + n),
            ]
        self._tell(way, "undrain")
        until(lambda: self._is_up(way, 1), within_s=WAIT_S)
        time.sleep(1.0)
        back: list[Turn] = []
        threads = []
        for name, prompt in prompts.items():
            turn = threading.Thread(
                target=lambda name=name, prompt=prompt: back.append(
                    self._turn(way, name, prompt, final=True)
                )
            )
            threads.append(turn)
            turn.start()
            time.sleep(APART_S)
        for turn in threads:
            turn.join()
        elsewhere = self.urls[1].removeprefix("http://")
        return Spot([one.took_ms for one in back], sum(one.at == elsewhere for one in back))

    def _turn(self, way: str, name: str, prompt: list[int], *, final: bool) -> Turn:
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        headers = {"x-session-id": name}
        if final:
            headers["x-ownerserve-session-final"] = "true"
        began_s = time.perf_counter()
        answer = httpx.post(
            f"{self.gateways[way][0]}/v1/completions", json=body, headers=headers, timeout=WAIT_S
        )
        took_ms = (time.perf_counter() - began_s) * 1e3
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        at = answer.headers["x-ownerserve-worker"]
        return Turn(took_ms, at, answer.headers["x-ownerserve-mode"], choice["token_ids"])


class Turn(NamedTuple):
    """What a client saw of a turn."""

    took_ms: float
    at: str
    mode: str
    tokens: list[int]


# -- simulated -------------------------------------------------------------------------------------


def simulated(way: str, sessions: int, pace: Path) -> Spot:
    """Play one round in the simulator."""
    setup = SimSetup(
        policy="ear",
        workers=2,
        pace=str(pace),
        kv_bytes=MEMORY_BYTES,
        step_tokens=CHUNK_TOKENS,
        hot_ms=HOT_MS[way],
        cool_s=0.0,
        abilities="hf",
        links=Links(nic_gb_s=PEER.bytes_per_ms / 1e6, nic_ms=PEER.latency_ms),
        tiers=Tiers(host_bytes=MEMORY_BYTES),
        shape=WorkloadShape(mode=Open()),
        faults=(Fault(kind=FaultKind.DEATH, at_s=0.0, lasts_s=SIM_BACK_S - 10.0, worker=1),),
    )
    table = simulate(all_back(sessions), setup).rows.table()
    back = table[table["position"] == 1]
    took_ms = (back["done_s"] - back["arrived_s"]) * 1e3
    return Spot(took_ms.tolist(), int((back["worker"] == 1).sum()))


def all_back(sessions: int) -> Trace:
    """The same sessions, as a trace."""
    made = []
    for number in range(sessions):
        first_s, ids = SIM_FIRST_S * (number + 1), 10_000 * (number + 1)
        context = (ids, CONTEXT_TOKENS // BLOCK_TOKENS)
        grown = (ids + 5000, (ANSWER_TOKENS + MORE_TOKENS) // BLOCK_TOKENS)
        first = TraceRequest(0.0, CONTEXT_TOKENS, ANSWER_TOKENS, runs=(context,))
        second = TraceRequest(
            SIM_BACK_S + APART_S * number - first_s,
            CONTEXT_TOKENS + ANSWER_TOKENS + MORE_TOKENS,
            ANSWER_TOKENS,
            runs=(context, grown),
            after=(0,),
        )
        made.append(TraceSession(f"s{number}", (first, second), first_s))
    return Trace("spot", "hand", BLOCK_TOKENS, "trace", "recorded", "recorded", tuple(made))


def write_pace(folder: Path) -> Path:
    """Write what tests.support.hf.paced does as a pace."""
    config = folder / "config.json"
    tiny_config(MODEL).to_json_file(config)
    pace = PaceFile(
        name="paced@cpu", model=MODEL, gpu="H200", gpus=1, engine="hf", config=str(config),
        a_ms=STEP_MS, b_ms=TOKEN_MS, c_ms=0.0, d_ms=0.0, e_ms=0.0,
        fit_error=0.0, source="tests/support/hf/paced.py", error_note="told, not measured",
        kv_bytes_total=MEMORY_BYTES,
    )  # fmt: skip
    path = folder / "paced.json"
    path.write_bytes(msgspec.json.encode(pace))
    return path


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=12)
    options = parser.parse_args()
    real: dict[str, list[Spot]] = {way: [] for way in HOT_MS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pace = write_pace(Path(folder))
        modelled = {way: simulated(way, options.sessions, pace) for way in HOT_MS}
        fleet = RealFleet(Path(folder), stack)
        told = Console(stderr=True)
        for number in track(range(options.rounds), console=told):
            ways = list(HOT_MS)
            for way in ways if number % 2 else reversed(ways):
                spot = fleet.spot(way, number, options.sessions)
                told.print(f"{way}: p95 {spot.p95_ms:.0f} ms, {spot.moved} elsewhere")
                real[way].append(spot)
    report("hot_spot_bench", rows(real, modelled))


def rows(real: dict[str, list[Spot]], modelled: dict[str, Spot]) -> list[Row]:
    """Return both worlds' p95 and shares, and whether they rank alike."""
    found = []
    whole = {
        way: Spot([ms for one in spots for ms in one.took_ms], sum(one.moved for one in spots))
        for way, spots in real.items()
    }
    for way, spot in whole.items():
        other = modelled[way]
        found += [
            Row(f"EAR {way}: p95 of a step", "ms", other.p95_ms, spot.p95_ms, "real workers",
                other.p95_ms / spot.p95_ms),
            Row(f"EAR {way}: moved", "share", other.share, spot.share, "real workers",
                None, "within 0.02"),
        ]  # fmt: skip
    better = [spots["with moves"].p95_ms < spots["without"].p95_ms for spots in (modelled, whole)]
    found.append(
        Row(
            "moves lower p95: 1 yes",
            "",
            float(better[0]),
            float(better[1]),
            "real workers",
            None,
            "equal",
        )
    )
    return found


if __name__ == "__main__":
    main()
