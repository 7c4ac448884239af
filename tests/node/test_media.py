"""The operator's words for where state goes: read right, or refused with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.storage.media import open_remote, write_policy
from ownerserve.store.tiers.placement import OnEviction, WriteBack, WriteThrough

ALL = ("memory", "disk", "remote")


@pytest.mark.parametrize(
    ("text", "tiers", "policy"),
    [
        ("write-through", ALL, WriteThrough(2)),
        ("write-through", ("memory", "disk"), WriteThrough(1)),
        ("write-through:disk", ALL, WriteThrough(1)),
        ("write-through:disk", ("memory", "remote"), WriteThrough(1)),
        ("write-through:remote", ("memory", "disk"), WriteThrough(1)),
        ("write-through:memory", ALL, WriteThrough(0)),
        ("write-back", ALL, WriteBack(2)),
        ("write-back:disk", ALL, WriteBack(1)),
        ("write-back", ("disk",), WriteBack(0)),
        ("on-eviction", ALL, OnEviction()),
    ],
)
def test_words(text: str, tiers: tuple[str, ...], policy: object) -> None:
    assert write_policy(text, tiers) == policy


@pytest.mark.parametrize(
    "text", ["", "through", "write-through:", "write-back:tape", "on-eviction:disk", "WRITE-BACK"]
)
def test_other_words_are_refused_before_anything_is_opened(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="write"):
        open_backing(tmp_path / "store", MIB, write=text)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("where", ["s3://", "s3:///prefix", "http://host/bucket", "gs://bucket"])
def test_what_names_no_shared_medium_is_refused(where: str) -> None:
    with pytest.raises(InvalidInput, match="remote"):
        open_remote(where, ManualClock(0.0))


def test_a_shared_directory_that_cannot_be_made_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    backing = open_backing(tmp_path / "store", 0, remote=str(tmp_path / "file" / "shared"))
    assert backing is not None
    assert [tier.name for tier in backing.tiers.tiers] == ["disk"]
    assert [record.message for record in caplog.records if "without it" in record.message]
    backing.close()
