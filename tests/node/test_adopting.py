"""A worker's store is taken over: the sessions that its journal knows come with its records."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.node.storage.adopting import take_over, take_over_at_start
from ownerserve.node.storage.journal import Journal, tips_in, write_tips
from ownerserve.node.storage.limits import StoreLimits
from ownerserve.node.vocabulary.records import Tip
from ownerserve.store.disk.snapshot import view_of
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import WriteDone
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import put
from tests.support.store.samples import Samples

JOURNAL, OTHER_MODEL = "sessions-0123456789abcdef.jsonl", "sessions-fedcba9876543210.jsonl"
OPTIONS = StoreLimits(disk_bytes=64 << 20).on_disk()


def tip(session: str, depth: int) -> Tip:
    return Tip(SessionId(session), depth, {depth - 1: PrefixHash(bytes(32))})


def store(directory: Path, *numbers: int) -> Path:
    tier = DiskTier(directory, WallClock(), options=OPTIONS)
    for number in numbers:
        stored = put(tier, Samples.meta(number), Samples.payload(number))
        assert isinstance(stored, WriteDone)
    tier.close()
    return directory


def journal(directory: Path, name: str, *tips: Tip) -> None:
    write_tips(directory / name, {one.session_id: one for one in tips})


def known(directory: Path, name: str = JOURNAL) -> dict[str, int]:
    return {session: one.depth for session, one in tips_in(directory / name)[0].items()}


def test_of_a_session_that_both_know_the_longer_tip_stays(tmp_path: Path) -> None:
    source, into = store(tmp_path / "from", 1), store(tmp_path / "into", 2)
    journal(source, JOURNAL, tip("theirs", 3), tip("shorter", 2), tip("longer", 9))
    journal(into, JOURNAL, tip("longer", 4), tip("shorter", 5), tip("ours", 1))
    journal(source, OTHER_MODEL, tip("another model's", 2))
    done = take_over(source, into, OPTIONS)
    assert (done.records.adopted, done.sessions, done.sessions_added) == (1, 4, 2)
    assert known(into) == {"theirs": 3, "longer": 9, "shorter": 5, "ours": 1}
    assert known(into, OTHER_MODEL) == {"another model's": 2}
    assert known(source) == {"theirs": 3, "shorter": 2, "longer": 9}, "FROM keeps its own"
    life = Journal(into / JOURNAL)
    assert {one.session_id for one in life.found} == {"theirs", "longer", "shorter", "ours"}
    life.close()


def test_a_journal_with_bad_lines_gives_its_good_ones(tmp_path: Path) -> None:
    source, into = store(tmp_path / "from", 1), store(tmp_path / "into")
    journal(source, JOURNAL, tip("theirs", 3))
    with (source / JOURNAL).open("ab") as file:
        file.write(b'{"session_id": "cut off')
    assert take_over(source, into, OPTIONS).sessions_added == 1
    assert known(into) == {"theirs": 3}


def test_a_write_budget_keeps_nothing_out(tmp_path: Path) -> None:
    """Else what was over it would be left behind, and FROM marked as done with."""
    limits = StoreLimits(disk_bytes=64 << 20, disk_bytes_per_day=1)
    source = store(tmp_path / "from", *range(8))
    options = limits.on_disk()
    assert options.write_budget is not None
    options.write_budget.spend(1 << 40, 0.0)
    assert take_over(source, tmp_path / "into", options).records.adopted == 8


def test_what_can_t_be_adopted_at_a_start_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, into = store(tmp_path / "good", 1), store(tmp_path / "into")
    living = DiskTier(tmp_path / "living", WallClock(), options=DiskOptions())
    dead = (tmp_path / "none", tmp_path / "living", good)
    with caplog.at_level(logging.INFO, logger="ownerserve"):
        take_over_at_start(dead, into, OPTIONS)
        take_over_at_start(dead[2:], into, OPTIONS)
    living.close()
    said = [record.getMessage() for record in caplog.records if record.name == "ownerserve.node"]
    assert "holds no store" in said[0]
    assert "is written by process" in said[1]
    assert "is adopted: 1 records, 0 sessions; it may be removed" in said[2]
    assert "was adopted before" in said[3]
    view = view_of(into)
    assert Samples.read(view, 1) == [Samples.payload(1)]
    view.close()
