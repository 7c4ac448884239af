"""What one more process asks of a disk on which another was killed: a recording that begins with
the folder as the kill left it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.power import trace
from tests.support.power.recording import Recording, assert_same
from tests.support.power.trace import Event, Make, Name, Sync, Unlink, Write

KILLED = "before the lives"
_NAMED = """
from pathlib import Path
from tests.support.power.life import Teller
Teller(Path({notes!r})).name_syncs()
"""


class Killed(NamedTuple):
    """What a killed process had asked of the disk and not synced, by paths below its home: of a
    file in `tails` all but so many bytes, of one in `made` also its name, of one in `named` no more
    than that, and that those of `gone` are unlinked, which held these bytes.
    """

    tails: Mapping[str, int] = {}
    made: Sequence[str] = ()
    named: Sequence[str] = ()
    gone: Mapping[str, bytes] = {}


def recorded(home: Path, script: str, log: Path, *, killed: Killed) -> tuple[Recording, int]:
    """Run `script`, Python, over `home` as it stands; returns the recording and how many events
    there were before it ran.
    """
    events: list[Event] = []
    pending: list[Event] = []
    for path in sorted(home.rglob("*")):
        name = str(path.relative_to(home))
        if name in killed.named:
            written = f"{path}.written"
            events.append(Make(written, is_folder=False))
            _stand(Path(written), path.read_bytes(), events)
            pending += [Name(written, str(path), is_link=True), Unlink(written)]
            continue
        is_new = name in killed.made
        (pending if is_new else events).append(Make(str(path), is_folder=path.is_dir()))
        if path.is_file():
            data = path.read_bytes()
            count = 0 if is_new else killed.tails.get(name, len(data))
            if count:
                _stand(path, data[:count], events)
            if count < len(data):
                pending.append(Write(str(path), count, data[count:]))
    for name, data in killed.gone.items():
        events.append(Make(str(home / name), is_folder=False))
        _stand(home / name, data, events)
        pending.append(Unlink(str(home / name)))
    standing = (path for path in home.rglob("*") if path.is_dir())
    folders = [home, *(p for p in standing if str(p.relative_to(home)) not in killed.made)]
    events += [Sync(str(folder), len(events), KILLED) for folder in folders]
    events += pending
    before = len(events)
    notes = log.with_suffix(".notes")
    script = _NAMED.format(notes=str(notes)) + script
    assert trace.run(["-c", script], log) == 0
    trace.read(log, home, notes, events)
    assert_same(home, events)
    return Recording(str(home), tuple(events), 1), before


def _stand(path: Path, data: bytes, events: list[Event]) -> None:
    events += [Write(str(path), 0, data), Sync(str(path), len(events) + 1, KILLED)]


def cuts(recording: Recording, before: int, each: int) -> Sequence[int]:
    """Every point since the kill, `each` times."""
    return sorted([*range(before, len(recording.events) + 1)] * each)
