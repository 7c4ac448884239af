"""A campaign opens many states of a recording and counts what they broke."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from tests.support.power.check import PLACES, Broken, check, lay_out
from tests.support.power.cuts import FILE_SYSTEMS, State
from tests.support.power.promises import Promise, Promises
from tests.support.power.recording import Recording
from tests.support.power.volume import Volume


class Case(NamedTuple):
    """A case is one state, where it came from, and what had been promised."""

    cut: int
    file_system: str
    state: State
    promised: dict[str, Promise]


class Finding(NamedTuple):
    """A finding is a state that broke a promise."""

    cut: int
    file_system: str
    broken: list[Broken]


class Tally(NamedTuple):
    """A tally counts the states that were opened, each once, and keeps what they broke."""

    states: int
    cuts: int
    findings: list[Finding]

    def kinds(self) -> Counter[str]:
        """Count what was broken, by kind."""
        return Counter(item.kind for finding in self.findings for item in finding.broken)


def draw(recording: Recording, seed: str, count: int) -> Iterator[Case]:
    """Yield `count` cases or so, half of each file system; equal states come once."""
    for name in FILE_SYSTEMS:
        rng = random.Random(f"{seed} {name}")
        cuts = spread(len(recording.events), count // len(FILE_SYSTEMS), rng)
        yield from at_cuts(recording, name, cuts, rng)


def spread(events: int, count: int, rng: random.Random) -> list[int]:
    """Choose `count` cuts: each point as often as the others, what is over by chance."""
    points = range(1, events + 1)
    each, over = divmod(count, events)
    return sorted([*points] * each + rng.sample(points, over))


def at_cuts(
    recording: Recording, name: str, cuts: Sequence[int], rng: random.Random
) -> Iterator[Case]:
    """Yield one case for each cut, ascending; a state that came before is drawn again a few times,
    then left out.
    """
    file_system = FILE_SYSTEMS[name]()
    volume = Volume(recording.root, file_system)
    promises = {place: Promises(place, recording.events) for place in PLACES}
    seen: set[tuple[int, tuple[Promise, ...]]] = set()
    played = 0
    for cut in cuts:
        for event in recording.events[played:cut]:
            volume.play(event)
        played = cut
        promised = {place: found.at(cut) for place, found in promises.items()}
        for _ in range(4):
            state = file_system.cut(volume, rng)
            mark = _digest(state), tuple(promised.values())
            if mark not in seen:
                seen.add(mark)
                yield Case(cut, name, state, promised)
                break


def _digest(state: State) -> int:
    total = xxhash.xxh3_128()
    for path, data in sorted(state.items()):
        total.update(f"{path} {-1 if data is None else len(data)}\n".encode())
        total.update(data or b"")
    return total.intdigest()


def run(cases: Iterator[Case], scratch: Path, rng: random.Random) -> Tally:
    """Open each case's state in `scratch`."""
    findings: list[Finding] = []
    states, cuts = 0, set()
    for case in cases:
        home = scratch / str(states)
        lay_out(case.state, home)
        broken = check(home, case.promised, rng)
        shutil.rmtree(home)
        states += 1
        cuts.add(case.cut)
        if broken:
            findings.append(Finding(case.cut, case.file_system, broken))
    return Tally(states, len(cuts), findings)
