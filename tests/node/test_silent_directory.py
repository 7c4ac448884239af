"""A node before a directory that takes every frame and never answers: it serves, and it ends."""

from __future__ import annotations

import time
from functools import partial

import zmq

from ownerserve.directory.owner.state import OwnerPhase
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import pack
from ownerserve.node.ownership.ownership import Ownership, TurnCame, TurnLeft

WAIT_S = 60.0
NAME = SessionId("a")


def test_a_silent_directory_keeps_no_turn_and_no_end_waiting() -> None:
    silent = zmq.Context.instance().socket(zmq.ROUTER)
    silent.linger = 0
    url = f"tcp://127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}"
    node = Ownership(
        RoutingUnit(WorkerId("w"), 0, Incarnation(1)),
        partial(DirectoryClient, url, timeout_s=0.2),
        block_tokens=16,
        scope=bytes(32),
    )
    node.start()
    try:
        until_s = time.monotonic() + WAIT_S
        while node.answers["unreachable"] < 2:  # it goes on asking
            assert time.monotonic() < until_s
            node.tell(TurnCame(NAME))
            assert node.standing(NAME) is None
            node.tell(TurnLeft(NAME, pack(range(32))))
            time.sleep(0.01)
        assert node.phase is not OwnerPhase.LIVE
    finally:
        node.close(within_s=WAIT_S)
        silent.close()
    assert time.monotonic() < until_s, "giving back waits for an answer that does not come"
