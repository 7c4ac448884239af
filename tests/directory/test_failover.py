"""A few rounds of each fault on real servers.

A hundred by `python -m tests.support.directory.failover`.
"""

from __future__ import annotations

import pytest

from tests.support.directory.failover import Sites, play
from tests.support.directory.servers import find_binary

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(
        find_binary() is None,
        reason="no valkey-server and no redis-server on PATH (apt-get install redis-server)",
    ),
]


def test_no_epoch_comes_twice_when_acknowledged_by_the_primary_alone() -> None:
    ledger = play(3, min_replicas=0)
    assert ledger.control_twice() > 0, "the faults did nothing to a plain counter"
    assert len(ledger.epochs) > 20
    assert (ledger.twice(), ledger.out_of_order) == (0, 0)
    assert ledger.restored_s, "grants again"


def test_nothing_is_acknowledged_that_no_replica_has() -> None:
    ledger = play(3, min_replicas=1)
    assert ledger.refused >= 10
    assert (ledger.twice(), ledger.out_of_order) == (0, 0)


def test_two_primaries_that_do_not_hear_each_other() -> None:
    if not Sites.possible():
        pytest.skip("needs root, `ip` (iproute2) and network namespaces")
    ledger = play(1, min_replicas=0, cut=True)
    assert ledger.control_twice() > 0
    assert (ledger.twice(), ledger.out_of_order) == (0, 0)
