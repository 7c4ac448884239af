"""What stating the refill and busy share costs the engine's thread, at production shape.

    python benchmarks/refill_cost.py [--json PATH]

A device of 734,000 tokens in blocks of 16 (72 GB of Qwen3-30B-A3B), full:

    long         sessions of 100,000 tokens, one interval each
    fragmented   sessions of 64 to 640 tokens on heads that they share: thousands of intervals
    came back    the same, all of which had a turn since the order was last looked at

A step is what the cache does for 16 decodes (reserve, advance), then a stamp: without the shares,
and with them, looked at anew each LOOK_EVERY_S of steps of STEP_MS. Medians of CPU time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, Turn
from ownerserve.cache.turnover import LOOK_INTERVALS
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import pack
from ownerserve.kv.specs import Coverage
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.runtime.busy import BusyMeter
from ownerserve.node.runtime.node_runtime import UNMEASURED
from ownerserve.node.runtime.refill import LOOK_EVERY_S, RefillGauge
from ownerserve.plan.cost.model import CostModel

B = 16
BLOCKS = 734_000 // B
LAYOUT = Layout(B, (Component("kv", Coverage.RANGE, 98_304 * B, 98_304 * B),))
DECODES = 16
STEP_MS = 10.0
"""A step of 16 decodes at 50,000 tokens each on one H200 takes longer."""
STEPS = 400


class Device:
    """A device with its cache, on a clock of its own."""

    def __init__(self) -> None:
        self.cache = HeteroCache(LAYOUT, {"kv": BLOCKS}, 64)
        self.now = 0.0
        self._turns = 0

    def turn(self, session: str, tokens: list[int]) -> None:
        """Serve a turn of a session, as far as the cache sees it."""
        self.now += 1.0
        turn_id = self.begin(session, tokens)
        self.cache.finish(turn_id, self.now)

    def begin(self, session: str, tokens: list[int]) -> TurnId:
        """Begin a turn and compute its prompt."""
        self._turns += 1
        turn_id = TurnId(f"t{self._turns}")
        begun = self.cache.begin(Turn(turn_id, SessionId(session), pack(tokens)), self.now)
        assert isinstance(begun, Begun)
        self.cache.reserve(turn_id, len(tokens), self.now)
        self.cache.advance(turn_id, pack(tokens[begun.restored :]), self.now)
        return turn_id


def long_sessions() -> Device:
    """Return a device full of sessions of 100,000 tokens."""
    device = Device()
    for number in range(9):
        base = number * 200_000
        device.turn(f"long{number}", list(range(base, base + 100_000)))
    return device


def fragments() -> tuple[Device, list[tuple[str, list[int]]]]:
    """Return a device full of short sessions on shared heads, and all of them."""
    device, rng = Device(), random.Random(1)
    heads = [list(range(h * 10_000, h * 10_000 + 1024)) for h in range(40)]
    sessions: list[tuple[str, list[int]]] = []
    held = 0
    while held < BLOCKS * B * 1.1:
        number, own = len(sessions), rng.randrange(64, 640)
        tail = list(range(10_000_000 + number * 1000, 10_000_000 + number * 1000 + own))
        tokens = rng.choice(heads) + tail
        sessions.append((f"s{number}", tokens))
        device.turn(*sessions[-1])
        held += own
    return device, sessions


def median_us(work: Callable[[], object], times: int) -> float:
    """Return the median CPU time of so many calls, in us."""
    took = []
    for _ in range(times):
        start = time.process_time_ns()
        work()
        took.append((time.process_time_ns() - start) / 1000.0)
    return statistics.median(took)


def look_us(device: Device) -> float:
    """Return what a look at the device takes, in us."""
    gauge = RefillGauge(device.cache, Inventory(), CostModel(UNMEASURED))

    def look() -> None:
        device.now += LOOK_EVERY_S
        gauge.shares(device.now)

    return median_us(look, 50)


def first_look_us(device: Device) -> float:
    """Return what the very next look takes, in us."""
    gauge = RefillGauge(device.cache, Inventory(), CostModel(UNMEASURED))
    return median_us(lambda: gauge.shares(device.now), 1)


def step_us(device: Device, *, states: Callable[[], object]) -> float:
    """Return what a step takes on the engine's thread in the mean, its stamp included, in us."""
    turns = [device.begin(f"run{n}", [90_000_000 + n] * 64) for n in range(DECODES)]
    ends = dict.fromkeys(turns, 64)
    start = time.process_time_ns()
    for _ in range(STEPS):
        device.now += STEP_MS / 1000.0
        for turn_id in turns:
            ends[turn_id] += 1
            device.cache.reserve(turn_id, ends[turn_id], device.now)
            device.cache.advance(turn_id, pack([7]), device.now)
        states()
    took_us = (time.process_time_ns() - start) / 1000.0 / STEPS
    for turn_id in turns:
        device.cache.finish(turn_id, device.now)
    return took_us


def with_shares(device: Device) -> Callable[[], object]:
    """Return what a stamp makes of the shares."""
    gauge = RefillGauge(device.cache, Inventory(), CostModel(UNMEASURED))
    meter = BusyMeter(device.now)
    return lambda: (gauge.shares(device.now), meter.read(device.now / 2, device.now))


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, float] = {}
    long, (short, sessions) = long_sessions(), fragments()
    found["look, long, us"] = look_us(long)
    found["look, fragmented, us"] = look_us(short)
    firsts = []
    for _ in range(5):
        for name, tokens in sessions[-1500:]:
            short.turn(name, tokens)
        firsts.append(first_look_us(short))
    found["look, came back, us"] = max(firsts)
    for name, device in (("long", long), ("fragmented", short)):
        pairs = [
            (
                step_us(device, states=lambda: None),
                step_us(device, states=with_shares(device)),
            )
            for _ in range(7)
        ]
        plain = statistics.median(one for one, _ in pairs)
        found[f"step, {name}, us"] = plain
        found[f"step with shares, {name}, us"] = statistics.median(two for _, two in pairs)
        more_us = statistics.median(two - one for one, two in pairs)
        found[f"more, of a step of {STEP_MS:g} ms, {name}, %"] = more_us / (STEP_MS * 10.0)
    for name, value in found.items():
        print(f"{name:48} {value:10.3f}")
    print(f"a look takes {LOOK_INTERVALS} entries at most, once in {LOOK_EVERY_S} s")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
