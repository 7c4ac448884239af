"""Faults put into a recording: a sync that the disk passes over, or that comes too late."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tests.support.power.campaign import Case, at_cuts
from tests.support.power.recording import Recording
from tests.support.power.trace import Event, Name, Note, Sync, Unlink

NEAR = 30
"""Cuts come so many events after a fault at most: there it shows, if it does."""


def sites(recordings: Sequence[Recording]) -> set[str]:
    """The code that asks for syncs, as the lives noted it."""
    return {e.site for r in recordings for e in r.events if isinstance(e, Sync)}


def without(recording: Recording, site: str) -> Iterator[Case]:
    """States of a disk that passes over the syncs of `site`, cut soon after one. Something else
    stands in their places, since events are known by their numbers.
    """
    yield from _near(dropped(recording, site), _places(recording, site))


def dropped(recording: Recording, site: str) -> Recording:
    """The same life on a disk that passes over the syncs of `site`."""
    places = _places(recording, site)
    events = tuple(Note("dropped -") if at in places else e for at, e in _numbered(recording))
    return recording._replace(events=events)


def late(recording: Recording, site: str) -> Iterator[Case]:
    """States of a life that acknowledges or goes on before the syncs of `site`: each comes right
    after the note that it should have come before.
    """
    events = list(recording.events)
    noted = []
    for place in sorted(_places(recording, site), reverse=True):
        note = next((at for at, e in _numbered(recording, place) if _is_told(e)), None)
        if note is None:
            continue
        sync = events.pop(place)
        assert isinstance(sync, Sync)
        path = sync.path
        for at in range(place, note):
            moved = events[at]
            if isinstance(moved, Sync):
                events[at] = moved._replace(since=min(moved.since, at))
            if isinstance(moved, Name) and moved.path == path:
                path = moved.to
        if any(isinstance(e, Unlink) and e.path == path for e in events[place:note]):
            events.insert(note, Note("too late -"))
        else:
            events.insert(note, sync._replace(path=path, since=note))
        noted.append(note)
    cuts = sorted(noted * 8)
    rng = random.Random(site)
    yield from at_cuts(recording._replace(events=tuple(events)), "posix", cuts, rng)


def _is_told(event: Event) -> bool:
    return isinstance(event, Note) and event.text.startswith("done")


def _places(recording: Recording, site: str) -> set[int]:
    return {at for at, e in _numbered(recording) if isinstance(e, Sync) and e.site == site}


def _numbered(recording: Recording, start: int = 0) -> Iterator[tuple[int, Event]]:
    yield from ((at, e) for at, e in enumerate(recording.events) if at >= start)


def _near(recording: Recording, places: set[int]) -> Iterator[Case]:
    rng = random.Random(len(recording.events))
    end = len(recording.events)
    cuts = sorted(
        min(end, place + 1 + rng.randint(0, NEAR))
        for place in places
        for _ in range(max(4, 120 // len(places)))
    )
    yield from at_cuts(recording, "posix", cuts, rng)
