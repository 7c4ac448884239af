"""Scenarios in a small world of `tests.support.gateway`."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import uvloop

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.logs import JsonLines
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from tests.support.gateway.world import FakeEngine, Scenario, World


@pytest.fixture
def play() -> Callable[..., None]:
    """Run a scenario in a world of `engines` engines; further arguments are Config's.

    `states`: what each engine says on /ownerserve/status, from before it is asked first;
    `prepare` does what else is to be done to them before, `reach` makes their addresses and `tls`
    is theirs.
    """

    def run(
        scenario: Scenario,
        *,
        engines: int = 2,
        states: Sequence[bytes] = (),
        prepare: Callable[[Sequence[FakeEngine]], None] = lambda _: None,
        reach: Callable[[int, int], Address] = lambda _, port: Address("127.0.0.1", port),
        tls: ssl.SSLContext | None = None,
        **settings: Any,
    ) -> None:
        async def world() -> None:
            fakes = [FakeEngine() for _ in range(engines)]
            for fake in fakes:
                await fake.start(tls=tls)
            for fake, said in zip(fakes, states, strict=False):
                fake.states = said
            prepare(fakes)
            addresses = tuple(reach(number, fake.port) for number, fake in enumerate(fakes))
            gateway = Gateway(
                Config(workers=addresses, **{"receipts": ReceiptForm.OPEN, **settings})
            )
            made = World(fakes, gateway)
            try:
                await gateway.start()
                async with asyncio.timeout(60):  # hangs end; a busy machine does not count
                    await scenario(made)
                    await made.settled()
            finally:
                await made.close()

        uvloop.run(world())

    return run


@pytest.fixture
def entries() -> Iterator[list[dict[str, Any]]]:
    """What the gateway's log says in this process, as JSON has it."""
    said: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(json.loads(JsonLines().format(record)))

    log, handler = logging.getLogger("ownerserve"), Keep()
    level = log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    yield said
    log.removeHandler(handler)
    log.setLevel(level)
