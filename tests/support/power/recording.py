"""A recording is the lives of one seed on a real file system, one after another, some of them
ended by kill -9 at a call that the seed draws.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from tests.support.power import trace
from tests.support.power.artifacts import PARENTS
from tests.support.power.cuts import Posix
from tests.support.power.trace import Event, Make, Sync
from tests.support.power.volume import Volume

LIVES = 3
_KILLS = {
    "pwritev2": 25,
    "pwrite64": 250,
    "fdatasync": 30,
    "fsync": 12,
    "fallocate": 15,
    "unlink": 8,
    "rename": 4,
}
"""Call -> about how many of them one life makes."""
CHILD = "tests.support.power.life"


class Recording(NamedTuple):
    """Everything that was asked of the disk, in order, and where."""

    root: str
    events: tuple[Event, ...]
    kills: int


def record(seed: int, folder: Path) -> Recording:
    """Live the lives of a seed in `folder`."""
    rng = random.Random(f"lives of {seed}")
    home, notes = folder / "home", folder / "notes"
    events: list[Event] = []
    for parent in PARENTS:
        (home / parent).mkdir(parents=True)
        events.append(Make(str(home / parent), is_folder=True))
    events.append(Sync(str(home), len(events), "before the lives"))
    kills = 0
    for number in range(LIVES):
        call = rng.choice(sorted(_KILLS))
        when = rng.randint(1, _KILLS[call])
        inject = f"{call}:signal=KILL:when={when}" if number < LIVES - 1 else None
        log = folder / f"{number}.strace"
        command = ["-m", CHILD, str(home), str(notes), str(seed), str(number)]
        kills += trace.run(command, log, inject) != 0
        trace.read(log, home, notes, events)
        log.unlink()
        assert_same(home, events)
    return Recording(str(home), tuple(events), kills)


def assert_same(home: Path, events: list[Event]) -> None:
    """The events, played, are the very bytes that stand: no call was overlooked. SQLite's shared
    memory is written through a mapping and made anew by whoever comes first.
    """
    volume = Volume(str(home), Posix())
    for event in events:
        volume.play(event)
    played = {path: data for path, data in volume.contents() if not path.endswith("-shm")}
    real = {
        str(path.relative_to(home)): None if path.is_dir() else path.read_bytes()
        for path in home.rglob("*")
        if not path.name.endswith("-shm")
    }
    different = [path for path in played.keys() | real.keys() if played.get(path) != real.get(path)]
    assert not different, sorted(different)
