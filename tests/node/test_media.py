"""The operator's words for where state goes: read right, or refused with what would be right."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace

import pytest

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.node.storage import media
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.storage.media import open_remote, write_policy
from ownerserve.store.tiers.blobs import DirectoryBlobs
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


@pytest.mark.parametrize(
    "where",
    ["s3://", "s3:///prefix", "http://host/bucket", "gs://bucket", "mooncake://", "mooncake://a/b"],
)
def test_what_names_no_shared_medium_is_refused(where: str) -> None:
    with pytest.raises(InvalidInput, match="remote"):
        open_remote(where, ManualClock(0.0))


class Joined:
    """A client of Mooncake Store that notes how it was set up."""

    set_up: tuple[object, ...] = ()
    status = 0

    def setup(self, *given: object) -> int:
        Joined.set_up = given
        return Joined.status

    def get(self, key: str) -> bytes:
        return b""

    def is_exist(self, key: str) -> int:
        return 0


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Mooncake's package, with its own reading of its settings and `Joined` as its store."""

    def load_from_env() -> SimpleNamespace:
        if "MOONCAKE_MASTER" not in os.environ:
            raise ValueError("neither is set")
        return SimpleNamespace(
            local_hostname="here", metadata_server="P2PHANDSHAKE", global_segment_size=0,
            local_buffer_size=MIB, protocol="tcp", device_name="",
            master_server_address=os.environ["MOONCAKE_MASTER"],
        )  # fmt: skip

    config = SimpleNamespace(MooncakeConfig=SimpleNamespace(load_from_env=load_from_env))
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.mooncake_config", config)
    store = SimpleNamespace(MooncakeDistributedStore=Joined)
    monkeypatch.setitem(sys.modules, "mooncake.store", store)
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    monkeypatch.setattr(Joined, "status", 0)
    yield monkeypatch


def test_a_mooncake_store_is_joined_as_its_own_settings_say(
    package: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidInput, match="MOONCAKE_MASTER"):
        open_remote("mooncake://kv", ManualClock(0.0))
    package.setenv("MOONCAKE_MASTER", "10.0.0.5:50051")
    open_remote("mooncake://kv", ManualClock(0.0))
    assert Joined.set_up == ("here", "P2PHANDSHAKE", 0, MIB, "tcp", "", "10.0.0.5:50051")
    package.setattr(Joined, "status", -900)
    backing = open_backing(tmp_path / "store", 0, remote="mooncake://kv")
    assert backing is not None and [tier.name for tier in backing.tiers.tiers] == ["disk"]
    assert [record.message for record in caplog.records if "without it" in record.message]
    backing.close()


def test_without_its_package_a_mooncake_store_names_what_to_install(
    package: pytest.MonkeyPatch,
) -> None:
    package.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(InvalidInput, match=r"ownerserve\[mooncake\]"):
        open_remote("mooncake://kv", ManualClock(0.0))


def test_a_shared_directory_that_cannot_be_made_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    backing = open_backing(tmp_path / "store", 0, remote=str(tmp_path / "file" / "shared"))
    assert backing is not None
    assert [tier.name for tier in backing.tiers.tiers] == ["disk"]
    assert [record.message for record in caplog.records if "without it" in record.message]
    backing.close()


def test_a_medium_that_never_answers_does_not_keep_a_worker_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Event()

    class Silent(DirectoryBlobs):
        def get_into(self, key: str, offset: int, into: memoryview) -> int:
            answer.wait()
            return super().get_into(key, offset, into)

    monkeypatch.setattr(media, "DirectoryBlobs", Silent)
    monkeypatch.setattr(media, "AGREE_S", 0.05)
    assert open_remote(str(tmp_path / "shared"), ManualClock(0.0)).name == "remote"
    answer.set()
