"""Two gateways that begin together send sessions that nobody knows to the same workers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import Arrive, Dispatch, WorkerUp
from ownerserve.router.opening import NEVER_OPENING, OpeningRule
from ownerserve.router.policies import make_policy
from ownerserve.router.state import RouterState
from tests.gateway.test_session_names import CHAT, conversation
from tests.support.gateway.world import FakeEngine, World

SESSIONS, WORKERS = 40, 4
RULES = NEVER_OPENING, OpeningRule(1e9)


async def both(opening_s: float) -> tuple[int, Counter[str]]:
    """Forty sessions whose first turn comes to both gateways at once: how many of them the two send
    to one worker, and how many sessions the first sends to each."""
    engines = [FakeEngine() for _ in range(WORKERS)]
    for engine in engines:
        await engine.start()
    addresses = tuple(Address("127.0.0.1", engine.port) for engine in engines)
    config = Config(workers=addresses, receipts=ReceiptForm.OPEN, opening_s=opening_s)
    worlds = [World(engines, Gateway(config)) for _ in range(2)]
    try:
        for world in worlds:
            await world.gateway.start()

        async def sent(world: World, session: int) -> str:
            # Each gateway has sessions of its own, too: their tables never are the same.
            client = await world.client()
            if (session + worlds.index(world)) % 3 == 0:
                own = f"{worlds.index(world)}/{session}"
                await client.post(CHAT, conversation(own, 1), X__Session__Id=own)
            answer = await client.post(
                CHAT, conversation(f"task {session}", 1), X__Session__Id=str(session)
            )
            return answer["x-ownerserve-worker"] or ""

        asked = [sent(world, session) for session in range(SESSIONS) for world in worlds]
        went = await asyncio.gather(*asked)
        one, two = went[::2], went[1::2]
        return sum(a == b for a, b in zip(one, two, strict=True)), Counter(one)
    finally:
        for world in worlds:
            await world.close()


def test_two_that_begin_together_agree() -> None:
    agreed, spread = asyncio.run(both(60.0))
    assert agreed >= SESSIONS - 2  # one may find its worker crowded
    assert len(spread) == WORKERS and max(spread.values()) <= SESSIONS * 3 // 4


def test_behind_the_window_each_goes_by_its_own_tables() -> None:
    agreed, _ = asyncio.run(both(0.0))
    assert agreed < SESSIONS * 3 // 4  # or there would be nothing to agree on


def router(opening: OpeningRule, workers: int = 4) -> RouterState:
    state = RouterState(make_policy("ownerserve"), opening=opening)
    for number in range(workers):
        state.handle(WorkerUp(WorkerId(f"w{number}:1"), 0, None), 0.0)
    return state


def arrive(state: RouterState, session: str, now: float, *, size: int = 4000) -> Dispatch:
    outcome = state.handle(Arrive(SessionId(session), size), now)
    assert isinstance(outcome, Dispatch)
    return outcome


def test_the_rule_ends_and_says_that_it_held() -> None:
    state = router(OpeningRule(10.0))
    assert arrive(state, "a", 9.9).reason is DispatchReason.OPENING
    assert arrive(state, "b", 10.0).reason is DispatchReason.NEW_SESSION
    again = arrive(state, "a", 9.99)  # known by now
    assert again.reason is DispatchReason.OWNER


def test_it_spreads_and_a_worker_more_moves_only_its_own() -> None:
    names = [f"s{n}" for n in range(400)]
    places = []
    for workers in (4, 5):
        found = {}
        for name in names:  # each as the first session of a gateway
            found[name] = arrive(router(OpeningRule(10.0), workers), name, 1.0).worker
        places.append(found)
    four, five = places
    assert all(60 < count < 140 for count in Counter(four.values()).values())
    moved = {name for name in names if four[name] != five[name]}
    assert {five[name] for name in moved} == {"w4:1"} and 40 < len(moved) < 130


def test_a_busy_or_crowded_worker_is_not_named() -> None:
    state = router(OpeningRule(1e9))
    named = arrive(state, "hot", 1.0, size=40_000_000).worker  # much pending there
    for number in range(200):
        assert arrive(state, f"s{number}", 1.0, size=100).worker != named
    state = router(OpeningRule(1e9), workers=2)
    homes = Counter(arrive(state, f"s{number}", 1.0, size=10).worker for number in range(300))
    assert min(homes.values()) > 80


@pytest.mark.parametrize("policy", ["round_robin", "least_load"])
def test_a_baseline_stays_what_it_is(policy: str) -> None:
    states = [
        RouterState(make_policy(policy), opening=rule) for rule in (NEVER_OPENING, OpeningRule(1e9))
    ]
    went = []
    for state in states:
        for number in range(3):
            state.handle(WorkerUp(WorkerId(f"w{number}:1"), 0, None), 0.0)
        went.append([arrive(state, f"s{n}", 1.0).worker for n in range(20)])
    assert went[0] == went[1]
