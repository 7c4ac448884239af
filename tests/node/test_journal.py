"""The file that tells a worker's next life whose state its store holds."""

from __future__ import annotations

from pathlib import Path
from stat import S_IMODE

import msgspec
import pytest

from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.node.storage import journal as module
from ownerserve.node.storage.journal import Journal
from ownerserve.node.vocabulary.records import Tip

END = PrefixHash(bytes(range(32)))


def tip(name: str, depth: int = 8) -> Tip:
    return Tip(SessionId(name), depth, {depth - 1: END} if depth else {}, (depth,) if depth else ())


def written(path: Path, *tips: Tip) -> tuple[Tip, ...]:
    """What a life finds that comes after one that wrote these."""
    journal = Journal(path)
    for one in tips:
        journal.write(one)
    journal.close()
    after = Journal(path)
    after.close()
    return after.found


def test_the_last_line_of_a_session_stands(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    assert written(path, tip("a"), tip("b"), tip("a", 16)) == (tip("b"), tip("a", 16))
    assert S_IMODE(path.stat().st_mode) == 0o600
    assert written(path, tip("b", 0), tip("c")) == (tip("a", 16), tip("c"))


def test_what_can_not_be_read_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    whole = msgspec.json.encode(tip("a"))
    path.write_bytes(b"\xff\n{}\n[1]\n" + whole + b"\n" + msgspec.json.encode(tip("b"))[:-9])
    journal = Journal(path)
    journal.close()
    assert journal.found == (tip("a"),)
    assert journal.unreadable == 4
    assert written(path, tip("c")) == (tip("a"), tip("c"))


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIPS_KEPT", 10)
    monkeypatch.setattr(module, "LINES_MAX", 30)
    path = tmp_path / "sessions.jsonl"
    found = written(path, *(tip(f"s{n % 25}", 8 + n) for n in range(200)))
    assert [one.session_id for one in found] == [f"s{n % 25}" for n in range(190, 200)]
    assert len(path.read_bytes().splitlines()) <= 31


def test_a_directory_that_can_not_be_written_costs_nothing_else(tmp_path: Path) -> None:
    assert written(tmp_path / "missing" / "sessions.jsonl", tip("a")) == ()
