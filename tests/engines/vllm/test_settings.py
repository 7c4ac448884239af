"""What an operator writes in kv_connector_extra_config, and what a slip of the pen says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ownerserve.engines.vllm.scheduler_side.owning import opener
from ownerserve.engines.vllm.settings import decode
from ownerserve.kv.errors import InvalidInput


def test_defaults_need_a_store_only(tmp_path: Path) -> None:
    settings = decode({"store": str(tmp_path)})
    assert settings.restore_deadline_s == 5.0
    assert settings.soft_reference.ttl_s == 300.0


def test_what_waits_for_the_drive_follows_from_what_waits_for_its_copy(tmp_path: Path) -> None:
    given = {"store": str(tmp_path), "copy_bytes": 1000}
    assert decode(given).buffer_bytes == 4000
    assert decode({**given, "save_buffer_bytes": 7}).buffer_bytes == 7


def test_stores_to_adopt_are_a_list(tmp_path: Path) -> None:
    assert decode({"store": str(tmp_path)}).adopt == ()
    assert decode({"store": str(tmp_path), "adopt": ["/kv/a", "/kv/b"]}).adopt == ("/kv/a", "/kv/b")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "store: is missing"),
        ({"store": ""}, "store"),
        ({"store": "x", "restore_dedline_s": 1}, "did you mean restore_deadline_s"),
        ({"store": "x", "soft_reference": {"ttl": 1}}, "did you mean soft_reference.ttl_s"),
        ({"store": "x", "adopt": "y"}, "adopt"),
        ({"store": "x", "readers": 0}, "readers: 0"),
        ({"store": "x", "store_bytes": 0}, "store_bytes: 0"),
        ({"store": "x", "save_buffer_bytes": -1}, "save_buffer_bytes: -1"),
        ({"store": "x", "staging_bytes": 0}, "staging_bytes: 0"),
        ({"store": "x", "host_cache_bytes": "1GB"}, "host_cache_bytes"),
        ({"store": "x", "checkpoints": "often"}, "use one of branches"),
        ({"store": "x", "drafter": "right"}, "use one of left-out, kept"),
        ({"store": "x", "restores": "never"}, "use one of by-cost, always"),
        ({"store": "x", "soft_reference": {"pool_fraction": 2}}, "pool_fraction"),
    ],
)
def test_a_bad_setting_is_named(extra: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(says)):
        decode(extra)


@pytest.mark.parametrize(
    "address", ["tcp:/127.0.0.1:7700", "tcp://127.0.0.1", "7700", "curve://127.0.0.1:7700"]
)
def test_an_address_of_no_directory_is_refused_at_the_start(address: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"^kv_connector_extra_config\.directory: .*; (write|set)"
    ):
        opener(address)
