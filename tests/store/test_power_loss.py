"""Power cuts: the states that one may leave of a life's files, opened by the real classes.

The short form of `tools/power_loss.py`: what was acknowledged stands, nothing is wrong, everything
opens.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.support.power import faults
from tests.support.power.campaign import Case, draw, run
from tests.support.power.known_syncs import COVERED, DIRECTED, LATE, NOTICED, SELDOM
from tests.support.power.recording import Recording, record

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]
SEEDS = (4, 5)
STATES = 500


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    return [record(seed, tmp_path_factory.mktemp(f"seed{seed}")) for seed in SEEDS]


def test_what_a_power_cut_leaves_opens_and_holds_what_was_acknowledged(recordings, scratch):
    states, kills = 0, 0
    for seed, recording in zip(SEEDS, recordings, strict=True):
        cases = draw(recording, f"seed {seed}", 20 + STATES // len(SEEDS))
        tally = run(cases, scratch / str(seed), random.Random(seed))
        assert tally.findings == [], (seed, tally.findings[0])
        states += tally.states
        kills += recording.kills
    assert states >= STATES
    assert kills > 0


@pytest.fixture
def scratch(tmp_path: Path):
    """Memory, where there is some: a state is written, opened once and thrown away."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    folder = memory / f"power-{tmp_path.parent.name}-{tmp_path.name}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def broken_by(cases: Iterator[Case], scratch: Path) -> bool:
    """Whether one of the states breaks a promise; the first that does ends it."""
    return any(run(iter([case]), scratch, random.Random(1)).findings for case in cases)


def test_every_sync_of_the_lives_is_known(recordings):
    known = NOTICED.keys() | COVERED.keys() | SELDOM.keys() | DIRECTED.keys()
    assert faults.sites(recordings) <= known


def test_a_sync_that_the_disk_passes_over_is_noticed(recordings, scratch):
    """Each in turn: `known_syncs` says what is broken then."""
    for site in sorted(NOTICED.keys() & faults.sites(recordings)):
        cases = chain.from_iterable(faults.without(r, site) for r in recordings)
        assert broken_by(cases, scratch), f"nothing is lost without {site}"


def test_a_sync_after_what_it_should_come_before_is_noticed(recordings, scratch):
    for site in LATE:
        cases = chain.from_iterable(faults.late(r, site) for r in recordings)
        assert broken_by(cases, scratch), f"nothing is lost when late: {site}"
