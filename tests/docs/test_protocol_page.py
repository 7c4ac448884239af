"""docs/protocol.md: each message that is spoken has a row, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from ownerserve.directory.messages import Request as DirectoryRequest
from ownerserve.kv.wire.rpc import Cancel
from ownerserve.kv.wire.rpc import RpcRequest as NodeRequest
from tests.kills.test_killed_at_messages import ALL, IN_CI

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`(\w[\w/]*/test_\w+\.py)(?:::(test_\w+))?`")
KILL = re.compile(r"`(\w+)-(request|answer)-(directory|w0|w1|gateway|command)`")

PAGE = (ROOT / "docs" / "protocol.md").read_text()


def test_each_message_has_a_row() -> None:
    spoken = {one.__name__ for one in (*get_args(DirectoryRequest), *get_args(NodeRequest), Cancel)}
    section = PAGE.split("\n## Messages\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == spoken


def test_each_test_that_is_named_exists() -> None:
    found = TEST.findall(PAGE)
    assert len(found) > 15
    for file, test in found:
        source = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test}(" in source, f"{file} has no {test}"


def test_each_kill_that_is_named_is_played() -> None:
    found = {"-".join(one): one for one in KILL.findall(PAGE)}
    played, in_ci = {str(one) for one in ALL}, {str(one) for one in IN_CI}
    assert len(found) > 10
    for kill in found:
        by_hand = f"`{kill}`, by hand" in PAGE
        assert kill in (played - in_ci if by_hand else in_ci), kill
