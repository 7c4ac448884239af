"""Power cuts: the states that one may leave of a life's files, opened by the real classes.

The short form of `tools/power_loss.py`: what was acknowledged stands, nothing is wrong, everything
opens.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.support.power.campaign import draw, run
from tests.support.power.recording import Recording, record

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]
SEEDS = (2, 4)
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
