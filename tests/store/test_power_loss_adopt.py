"""A power cut amid an adoption, and after it: what FROM's mark says stands in INTO, for good."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.node.storage.adopting import take_over
from ownerserve.node.storage.journal import tips_in, write_tips
from ownerserve.node.vocabulary.records import Tip
from ownerserve.store.disk.snapshot import DeadStore
from ownerserve.store.disk.tier import DiskOptions
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from tests.support.power import faults
from tests.support.power.after import Killed, cuts, recorded
from tests.support.power.campaign import at_cuts
from tests.support.power.check import lay_out
from tests.support.power.cuts import FILE_SYSTEMS
from tests.support.power.recording import Recording

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]
TENANTS = {number: (b"t" * 32, b"")[number % 2] for number in range(6)}
ALL = tuple(TENANTS)
JOURNAL = "sessions-0123456789abcdef.jsonl"
OPTIONS = DiskOptions(limits=TierLimits(KindLimits(8 << 20), KindLimits(1 << 20)))
SCRIPT = """
import sys
sys.argv = ["adopt", {source!r}, {into!r}]
import runpy
runpy.run_module("tests.support.store.adopt_child", run_name="__main__")
"""


def check(place: Path, samples) -> bool:
    """Whoever finds the mark may remove FROM; else FROM has all, and the same call goes on. Returns
    whether there was a mark.
    """
    is_marked = (place / "from" / "ADOPTED").exists()
    if is_marked:
        shutil.rmtree(place / "from")
    else:
        with closing(DeadStore(place / "from")) as source:
            assert samples.read(source, *range(4)) == [samples.payload(n) for n in range(4)]
        assert take_over(place / "from", place / "into", OPTIONS).records.is_marked
    with closing(DeadStore(place / "into")) as into:
        assert samples.read(into, *ALL) == [samples.payload(number) for number in ALL]
        assert len(list(into.entries())) == len(ALL)
    assert set(tips_in(place / "into" / JOURNAL)[0]) == {"theirs", "ours"}
    return is_marked


@pytest.fixture
def home(open_disk, samples, tmp_path) -> Path:
    """Two closed stores, FROM of artifacts 0 to 3 and INTO of 2 to 5, each with a session."""
    home = tmp_path / "home"
    for name, numbers in (("from", range(4)), ("into", range(2, 6))):
        tier = open_disk(home / name, segment_bytes=32 * 4096)
        for number in numbers:
            meta = samples.meta(number, tenant=TENANTS[number])
            put(tier, meta, samples.payload(number))
        tier.close()
    for name, session in (("from", "theirs"), ("into", "ours")):
        tip = Tip(SessionId(session), 3, {2: PrefixHash(bytes(32))})
        write_tips(home / name / JOURNAL, {tip.session_id: tip})
    return home


class States:
    """The states that cuts of one adoption may leave, laid out one by one."""

    def __init__(self, home: Path, scratch: Path) -> None:
        script = SCRIPT.format(source=str(home / "from"), into=str(home / "into"))
        self.recording, self._before = recorded(home, script, scratch / "log", killed=Killed())
        self._scratch = scratch

    def anywhere(self, recording: Recording) -> Iterator[tuple[Path, bool]]:
        """Of a cut at any point, and at the end; with each whether all had been acknowledged."""
        last = len(recording.events)
        points = [*cuts(recording, self._before, 1), *[last] * 8]
        for name in FILE_SYSTEMS:
            for at, case in enumerate(at_cuts(recording, name, points, random.Random(name))):
                place = self._scratch / f"{name} {at}"
                lay_out(case.state, place)
                yield place, case.cut == last
                shutil.rmtree(place)


def test_what_the_mark_says_stands_after_a_power_cut_at_any_point(home, samples, tmp_path):
    states = States(home, tmp_path)
    cases = states.anywhere(states.recording)
    marked = [check(place, samples) >= is_over for place, is_over in cases]
    assert all(marked), "acknowledged, and no mark"
    assert len(marked) > 60


@pytest.mark.parametrize("sync", ["append._sync", "journal.write_tips", "home._write_once"])
def test_a_disk_that_passes_over_a_sync_is_noticed(home, samples, tmp_path, sync):
    states = States(home, tmp_path)
    sites = [site for site in faults.sites([states.recording]) if sync in site]
    assert sites

    def is_broken(place: Path, is_over: bool) -> bool:
        try:
            return check(place, samples) < is_over
        except (AssertionError, OwnerServeError):
            return True

    recording = states.recording
    for site in sites:
        recording = faults.dropped(recording, site)
    assert any(is_broken(*state) for state in states.anywhere(recording)), sites
