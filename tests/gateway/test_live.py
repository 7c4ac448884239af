"""What the live page is made of: its policy, and the JSON that it reads."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources

import httpx
import pytest

from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.histograms import Histogram
from ownerserve.gateway.live import SESSIONS_TOLD_MAX, at_most
from ownerserve.gateway.workers.components import ComponentMemory, read_components
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, Term
from ownerserve.router.messages import Claimed
from tests.support.gateway.world import FakeEngine, Play, World
from tests.support.router.answer_lines import LIFE, said


async def admin(world: World, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(admin_app(world.gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.get(path)


def test_the_page_may_ask_nobody_but_its_own_port(play: Play) -> None:
    async def scenario(world: World) -> None:
        answer = await admin(world, "/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(
            part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
        for one in ("script-src", "style-src"):
            assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[one])
        assert not re.search(r"https?://|//[a-z]|innerHTML|\sstyle=|\son[a-z]+=", answer.text)

    play(scenario)


def test_the_page_has_the_reports_colours() -> None:
    def roots(text: str) -> list[str]:
        return [" ".join(one.split()) for one in re.findall(r":root \{(.*?)\}", text, re.DOTALL)]

    page = resources.files("ownerserve.gateway").joinpath("live.html").read_text()
    css = resources.files("ownerserve.report").joinpath("page.css").read_text()
    assert roots(page) == roots(css) != []


def test_sessions_tell_where_their_state_lies(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for name in ("a", "b", "a"):
            answer = await client.post("/v1/chat/completions", b'{"a":1}', x__session__id=name)
        found = (await admin(world, "/sessions?last=1")).json()
        assert (found["known"], len(found["sessions"])) == (2, 1)
        (newest,) = found["sessions"]
        owner = answer["x-ownerserve-worker"]
        assert (newest["owner"], newest["home"], newest["turns"]) == (owner, owner, 2)
        assert newest["copies"] == [{"worker": owner, "tier": "device", "tokens": 4}]
        assert newest["moved_s_ago"] is None and newest["live"] == 0
        assert found["owner_changes"] == []
        first = (await admin(world, "/sessions?last=2")).json()["sessions"]
        assert first[0]["session"] == newest["session"] != first[1]["session"]

    play(scenario, policy="sticky")


def test_no_answer_has_more_sessions_than_turns_can_wait_for(play: Play) -> None:
    async def scenario(world: World) -> None:
        for number in range(SESSIONS_TOLD_MAX + 5):
            world.gateway.state.sessions.touch(SessionId(f"s{number}"), world.gateway.now())
        found = (await admin(world, "/sessions?last=999999999")).json()
        assert found["known"] == SESSIONS_TOLD_MAX + 5
        assert len(found["sessions"]) == SESSIONS_TOLD_MAX
        assert found["sessions"][0]["session"] == f"s{SESSIONS_TOLD_MAX + 4}"

    play(scenario)


def test_a_session_whose_owner_is_lost_changes_its_owner(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        answer = await client.post("/v1/chat/completions", b'{"a":1}', x__session__id="a")
        former = answer["x-ownerserve-worker"]
        await world.engine_of(answer).kill()
        answer = await client.post("/v1/chat/completions", b'{"a":1}', x__session__id="a")
        found = (await admin(world, "/sessions")).json()
        (change,) = found["owner_changes"]
        assert change["session"] == found["sessions"][0]["session"]
        assert (change["from"], change["to"]) == (former, answer["x-ownerserve-worker"])
        assert change["from"] != change["to"] and change["how"] == "answered"
        status = (await admin(world, "/status")).json()
        assert status["owner_changes"] == {"answered": 1}
        assert status["probes"][former]["cause"] == ""  # a turn found it out, no probe so far

    play(scenario, policy="sticky")


def test_an_owner_that_is_told_is_a_change_once(play: Play) -> None:
    """The word of another worker, or the directory, that a session is somebody else's now."""

    def tell_lives(engines: Sequence[FakeEngine]) -> None:
        for number, engine in enumerate(engines):
            engine.says = said(LIFE + number)

    async def scenario(world: World) -> None:
        client, turns = await world.client(), world.gateway.turns
        answer = await client.post("/v1/chat/completions", b'{"a":1}', x__session__id="a")
        ((name, session),) = turns.state.sessions.items()
        former = session.live_owner
        assert former is not None and former.id == answer["x-ownerserve-worker"]
        (other,) = [one for one in world.gateway.state.fleet if one is not former]
        assert other.unit is not None and former.unit is not None
        for unit, counter in ((former.unit, 1), (other.unit, 2), (other.unit, 2)):
            turns.told(Claimed(name, unit, Epoch(Term(1, 1), counter), 1))
        found = (await admin(world, "/sessions")).json()
        (change,) = found["owner_changes"]
        assert (change["from"], change["to"], change["how"]) == (former.id, other.id, "told")
        assert found["sessions"][0]["owner"] == found["sessions"][0]["granted_to"] == other.id

    play(scenario, policy="sticky", prepare=tell_lives)


def test_latency_is_counted_by_the_mode_that_was_seen(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        await client.post("/v1/chat/completions", b'{"a":1}', x__session__id="a")
        for engine in world.engines:
            engine.cached_tokens = 0
        await client.post("/v1/chat/completions", b'{"a":1}', x__session__id="b")
        rows = (await admin(world, "/status")).json()["latency"]
        assert [row["mode"] for row in rows] == [None, "cold_prefill"]
        for row in rows:
            first, whole = row["first_byte"], row["whole"]
            assert first["count"] == whole["count"] == 1
            assert 0 <= first["mean_s"] <= whole["mean_s"]

    play(scenario)


@pytest.mark.parametrize("path", ["/decisions", "/sessions"])
@pytest.mark.parametrize("last", ["x", "-1", "²", "9" * 5000, "1.5"])
def test_a_count_that_is_none_is_refused(play: Play, path: str, last: str) -> None:
    async def scenario(world: World) -> None:
        answer = await admin(world, f"{path}?last={last}")
        assert answer.status_code == 400 and "is no count" in answer.json()["error"]["message"]

    play(scenario)


def test_a_quantile_is_the_edge_of_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 3.0))
    assert at_most(histogram, 0.5) is None
    for value in (0.5, 1.5, 1.5, 9.0):
        histogram.observe(value)
    assert [at_most(histogram, share) for share in (0.25, 0.5, 0.75, 0.95)] == [1.0, 2.0, 2.0, None]


def test_components_are_read_or_not_told() -> None:
    device = {"slots": {"a": 4, "b": 2, "c": 1}, "free_slots": {"a": 1, "b": 9}}
    device["slot_bytes"] = {"a": 10, "b": 5}
    told = read_components(json.dumps({"device": device, "more": 1}).encode())
    assert told == (ComponentMemory("a", 40, 10), ComponentMemory("b", 10, 10))
    for bad in (
        b"{}",
        b"x",
        b"[]",
        b'{"device": 1}',
        b'{"device": {"slots": {"a": -1}}}',
        b"[" * 9999,
    ):
        assert read_components(bad) == ()
