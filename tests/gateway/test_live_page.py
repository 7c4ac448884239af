"""The admin port's live page in a real browser, over a gateway process and two engines.

`OWNERSERVE_SCREENSHOTS=FOLDER` keeps pictures of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.browser import LACKS, Browser, a_browser, engines_aside
from tests.support.gateway.process import GatewayProcess, gateway_process
from tests.support.gateway.world import FakeEngine
from tests.support.net import free_port
from tests.support.waits import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKS), reason=LACKS)]

EVIL = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
KEY = "sk-live-page"
MIB = 1 << 20


def statement(incarnation: int) -> bytes:
    """What an engine says that tells its memory by component, and a model with markup in it."""
    load = {
        "as_of_s": 1.0, "kv_bytes_free": 20 * MIB, "kv_bytes_evictable": 12 * MIB,
        "kv_bytes_total": 64 * MIB, "running_sequences": 3, "pending_prefill_tokens": 2048,
        "busy_share": 0.375, "refill_shares": [[1000, 0.0625], [64000, 2.5]],
    }  # fmt: skip
    device = {
        "slots": {"full": 32, "window" + EVIL: 8},
        "free_slots": {"full": 10, "window" + EVIL: 2},
        "slot_bytes": {"full": MIB, "window" + EVIL: MIB},
    }
    return json.dumps({
        "version": 1, "unit": {"worker": "w", "rank": 0, "incarnation": incarnation},
        "load": load, "profile": {"models": ["m", "n" + EVIL]}, "device": device,
    }).encode()  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with a_browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def browser(opened: Browser) -> Iterator[Browser]:
    """A browser that has left the page of the test before, whose gateway is gone."""
    yield opened
    opened.go("about:blank")
    opened.complaints()


def turn(running: GatewayProcess, session: str, tokens: int = 400) -> int:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * tokens}]})
    url, headers = f"{running.data_url}/v1/chat/completions", {"x-session-id": session}
    return httpx.post(url, content=body, headers=headers, timeout=60).status_code


def test_the_page_shows_what_the_gateway_knows(browser: Browser, tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    for number, engine in enumerate(engines):
        engine.cached_tokens = 0
        engine.states = statement(number + 1)
    words = [{"is": "has", "number": 1, "session": EVIL, "tier": "disk", "tokens": 1280}]
    engines[0].holds = json.dumps(words).encode()
    with ExitStack() as stack:
        loop = stack.enter_context(engines_aside(engines))
        running = stack.enter_context(
            gateway_process(tmp_path, [one.port for one in engines], "--policy", "sticky")
        )
        for session in ("a", "b", "c"):
            assert turn(running, session) == 200
            assert turn(running, session, 800) == 200
        engines[0].refuses = engines[1].refuses = (429, "queue_full")
        assert turn(running, "d") == 429
        engines[0].refuses = engines[1].refuses = None
        browser.go(running.admin_url + "/")
        browser.until_text("state", "● live, all 2 workers up")
        shown = browser.until_text("workers", "memory", f"127.0.0.1:{engines[1].port}", EVIL)
        assert "32.0 MiB in use, 12.0 MiB idle, 20.0 MiB free, of 64.0 MiB" in shown
        assert "full: 22.0 MiB of 32.0 MiB" in shown
        assert "busy: 38 %" in shown
        assert "refill share: 0.063 at 1,000, 2.5 at 64,000 tokens" in shown
        assert browser.text("workers").count("● up") == 2
        found = httpx.get(f"{running.admin_url}/sessions").json()["sessions"]
        shown = browser.until_text("sessions", EVIL, f"127.0.0.1:{engines[0].port} disk, 1,280")
        for one in found:
            assert one["session"] in shown
        assert len(found) >= 4
        assert "client" in browser.text("refusals") and "queue full" in browser.text("pressure")
        assert "cold prefill" in browser.text("latency") or "seed" in browser.text("latency")
        modes = httpx.get(f"{running.admin_url}/status").json()["latency"]
        assert sum(one["whole"]["count"] for one in modes) == 6
        assert browser.run("return window.hacked") is None
        assert browser.run("return document.querySelectorAll('script, img').length") == 1
        headless = "return [...document.querySelectorAll('table')].filter((one) => !one.tHead"
        assert browser.run(headless + ".rows[0].cells.length || !one.caption).length") == 0

        looks(browser)

        gone = next(one for one in engines if one.seen)
        owned = next(one for one in found if one["owner"] == f"127.0.0.1:{gone.port}")
        asyncio.run_coroutine_threadsafe(gone.kill(), loop).result(10)
        assert [turn(running, name, 900) for name in ("a", "b", "c")] == [200] * 3
        browser.until_text("state", "△ live, with 1 of 2 workers up")
        browser.until_text("workers", "✗ down", "nobody listens there")
        browser.until_text("changes", owned["session"], f"127.0.0.1:{gone.port} →", "it answered")
        assert browser.complaints() == []
        picture(browser, "one-down")


def test_the_page_shows_who_was_not_let_in_and_why(browser: Browser, tmp_path: Path) -> None:
    key = "sk-acme-0123456789"
    file = tmp_path / "tenants.toml"
    terms = f'[tenants.acme]\nkeys = ["{key}"]\nrequests_per_minute = 1\n'
    file.write_text(f'secret = "{"s" * 40}"\n{terms}')
    file.chmod(0o600)
    engine = FakeEngine()
    with ExitStack() as stack:
        stack.enter_context(engines_aside([engine]))
        words = ("--tenants-file", str(file))
        running = stack.enter_context(gateway_process(tmp_path, [engine.port], *words))
        url, headers = f"{running.data_url}/v1/chat/completions", {"x-api-key": key}
        told = [httpx.post(url, content=b"{}", headers=headers, timeout=60) for _ in range(2)]
        assert [one.status_code for one in told] == [200, 429]
        browser.go("about:blank")
        browser.complaints()  # of the test before, whose gateway has ended under its page
        browser.go(running.admin_url + "/")
        browser.until_text("refusals", "not let in: acme", "limit requests", "rate limit exceeded")
        assert browser.complaints() == []


def test_the_page_shows_who_waits_and_where_in_line(browser: Browser, tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.is_mute = True
    with ExitStack() as stack:
        loop = stack.enter_context(engines_aside([engine]))
        running = stack.enter_context(
            gateway_process(tmp_path, [engine.port], "--max-running", "1")
        )
        threads = stack.enter_context(ThreadPoolExecutor())
        asked = [threads.submit(turn, running, "a")]
        until(lambda: bool(engine.seen), what="the first turn at its worker")
        asked.append(threads.submit(turn, running, "b"))
        browser.go(running.admin_url + "/")
        browser.until_text("waiting", "for a running turn's place", "1 of 1")
        loop.call_soon_threadsafe(engine.go_on.set)
        assert [one.result(60) for one in asked] == [200, 200]
        browser.until_text("waiting", "Nobody waits.")


def looks(browser: Browser) -> None:
    """The page fits, from a phone's width to a screen's, and follows the system's colours."""
    papers = {}
    for width in (360, 768, 1440):
        for scheme in ("light", "dark"):
            browser.shine(width, scheme)
            wide = browser.run("return document.documentElement.scrollWidth")
            assert wide <= width, (width, scheme)
            papers[scheme] = browser.run("return getComputedStyle(document.body).backgroundColor")
            picture(browser, f"{width}-{scheme}")
    assert papers == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}


def picture(browser: Browser, name: str) -> None:
    if folder := os.environ.get("OWNERSERVE_SCREENSHOTS"):
        browser.picture(Path(folder) / f"{name}.png")


def test_a_gateway_that_is_gone_is_said_to_be_and_found_again(
    browser: Browser, tmp_path: Path
) -> None:
    admin, nobody = str(free_port()), free_port()
    browser.shine(1440, "light")
    with gateway_process(tmp_path, [nobody], "--admin-port", admin) as running:
        browser.go(running.admin_url + "/")
        browser.until_text("state", "✗ no workers: none of 1 is up")
        browser.until_text("workers", f"127.0.0.1:{nobody}", "✗ never up", "not known")
        assert "No session yet." in browser.text("sessions")
        picture(browser, "no-workers")
    said = browser.until_text("state", "✗ the gateway does not answer", "Trying again every 2 s")
    assert "what is below is of " in said
    assert browser.run("return document.title").startswith("✗")
    picture(browser, "gone")
    again = tmp_path / "again"
    again.mkdir()
    with gateway_process(again, [nobody], "--admin-port", admin):
        browser.until_text("state", "✗ no workers: none of 1 is up")


def test_with_a_key_the_page_asks_for_it(browser: Browser, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    with gateway_process(tmp_path, [free_port()], "--admin-key-file", str(key)) as running:
        assert httpx.get(f"{running.admin_url}/").status_code == 200
        assert httpx.get(f"{running.admin_url}/sessions").status_code == 401
        browser.go(running.admin_url + "/")
        browser.until_text("state", "△ the admin port asks for its key")
        assert browser.text("all") == ""
        picture(browser, "key")
        browser.type_key("another")
        browser.until_text("state", "✗ that is not the admin port's key")
        browser.type_key(KEY)
        browser.until_text("state", "✗ no workers")
        assert browser.text("ask") == ""
        browser.go(running.admin_url + "/")
        browser.until_text("state", "✗ no workers")
        assert browser.run("return [localStorage.length, document.cookie]") == [0, ""]
