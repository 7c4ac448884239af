"""State that is brought for no turn is given up where who asked for it is called off."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from ownerserve.kv.ids import Incarnation, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.node.runtime.comings import Comings
from ownerserve.node.transfers.state_brings import StateBrings
from ownerserve.node.vocabulary import events as node
from ownerserve.node.vocabulary.chains import prefix_of
from tests.support.node.lending_nodes import AGENT, PROMPT, B
from tests.support.waits import WAIT_S

LENDER = LenderAddress(RoutingUnit(WorkerId("s"), 0, Incarnation(1)), "tcp://127.0.0.1:9")


def test_what_is_called_off_as_its_engine_begins_to_bring_it_is_given_up() -> None:
    begins, may, told = Event(), Event(), list[node.Event]()

    def handle(event: node.Event) -> None:
        told.append(event)
        if isinstance(event, node.SessionComing):
            begins.set()
            assert may.wait(WAIT_S)

    async def call_off(brings: StateBrings) -> None:
        hashed = prefix_of(PROMPT, B).hashed
        assert hashed is not None
        bring = asyncio.ensure_future(brings.bring(AGENT, hashed, LENDER))
        await asyncio.to_thread(begins.wait, WAIT_S)
        bring.cancel()
        await asyncio.wait([bring])
        may.set()

    with ThreadPoolExecutor(1) as engine:
        asyncio.run(call_off(StateBrings(Comings(handle), engine.submit, kind="replica")))
    assert [type(event) for event in told] == [node.SessionComing, node.TurnGone]
    assert told[-1] == node.TurnGone(TurnId("replica-1"))
