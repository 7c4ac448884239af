"""A headless Chromium, driven over WebDriver, and engines that a gateway process can reach."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.gateway.world import FakeEngine
from tests.support.waits import until

LACKS = next((f"no {one}" for one in ("chromium", "chromedriver") if not shutil.which(one)), "")
"""What of a browser is not installed; empty: nothing."""
WITHIN_S = 60.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip
"""No name is resolved: a page that asked another host would be seen to fail."""


class Browser:
    """One window."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One WebDriver command; raises with its message when it fails."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from None

    def go(self, url: str) -> None:
        """Open a page."""
        self.ask("/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.ask("/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, place: str) -> str:
        """What a reader sees of the element with this id."""
        said = self.run(
            "const one = document.getElementById(arguments[0]);"
            "return one.checkVisibility() ? one.innerText : ''",
            place,
        )
        return " ".join(str(said).split())

    def until_text(self, place: str, *parts: str) -> str:
        """The text of an element, once it has all parts."""
        seen = ""

        def has() -> bool:
            nonlocal seen
            seen = self.text(place)
            return all(part in seen for part in parts)

        try:
            until(has, within_s=WITHIN_S)
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{place} lacks one of {parts}: {seen}") from error
        return seen

    def type_key(self, key: str) -> None:
        """Fill in the form that asks for the key, and send it."""
        self.run(
            "document.getElementById('key').value = arguments[0];"
            "document.getElementById('ask').requestSubmit()",
            key,
        )

    def shine(self, width: int, scheme: str) -> None:
        """Be so wide, on a system with that colour scheme."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        self._devtools(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        shot = self._devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What the console had to say since it was asked last."""
        return [one["message"] for one in self.ask("/se/log", {"type": "browser"})]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self.ask("/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextmanager
def a_browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, until the end."""
    said = folder / "chromedriver"
    command = ["chromedriver", "--port=0"]
    home = {**os.environ, "HOME": str(folder)}
    with said.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=home)
    browser = None
    try:
        sign = "started successfully on port "
        until(lambda: sign in said.read_text(), within_s=WITHIN_S)
        port = int(said.read_text().partition(sign)[2].split(".")[0])
        options = {
            "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"],
            "binary": shutil.which("chromium"),
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = Browser(f"http://127.0.0.1:{port}").ask(
            "/session", {"capabilities": {"alwaysMatch": wanted}}
        )
        browser = Browser(f"http://127.0.0.1:{port}/session/{made['sessionId']}")
        yield browser
    finally:
        if browser is not None:
            request = urllib.request.Request(browser.url, method="DELETE")
            urllib.request.urlopen(request, timeout=60).close()
        process.terminate()
        process.wait()


@contextmanager
def engines_aside(engines: Sequence[FakeEngine]) -> Iterator[asyncio.AbstractEventLoop]:
    """Engines that serve in a thread of their own, until the end; their loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        for engine in engines:
            asyncio.run_coroutine_threadsafe(engine.start(), loop).result(10)
        yield loop
    finally:
        for engine in engines:
            asyncio.run_coroutine_threadsafe(engine.kill(), loop).result(10)
        asyncio.run_coroutine_threadsafe(_end_all(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end_all() -> None:
    """Cancel what still serves."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
