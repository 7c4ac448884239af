"""A term is on the drive, and so is its name, before anybody is given an epoch of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ownerserve.directory.terms import FILE_NAME, TermFile
from ownerserve.kv.messages import Term


def test_a_term_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are synced under another name; then comes the new name, and its folder is synced.
    A power cut at any point leaves the former term or this one.
    """
    synced: list[tuple[str, bool]] = []
    sync, target = os.fsync, tmp_path / FILE_NAME

    def spy(fd: int) -> None:
        sync(fd)
        synced.append((Path(f"/proc/self/fd/{fd}").readlink().name, target.exists()))

    monkeypatch.setattr(os, "fsync", spy)
    TermFile(tmp_path).start()
    part = Path(FILE_NAME).with_suffix(".part").name
    assert synced[-2:] == [(part, False), (tmp_path.name, True)]


def test_a_term_is_above_all_that_were_started_or_heard_of(tmp_path: Path) -> None:
    terms = TermFile(tmp_path)
    assert terms.is_new and terms.start().ordinal == 1
    assert TermFile(tmp_path).start().ordinal == 2
    assert TermFile(tmp_path).start(above=Term(7, 0)).ordinal == 8
    assert TermFile(tmp_path).start(above=Term(7, 0)).ordinal == 9
