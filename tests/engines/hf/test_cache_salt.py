"""`cache_salt` parts what the hf engine keeps, as it does vLLM's: on the device, in stores, in
names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import HfWorker, WorkerOptions, build_worker  # noqa: E402
from ownerserve.engines.hf.http.server import make_app  # noqa: E402
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from tests.support.waits import until_async  # noqa: E402

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
TOKENS = [17 * n % 251 for n in range(400)]


class Client:
    """A worker's application, asked without a socket."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, salt: str | None, prompt: list[int], **more: Any) -> tuple[int, str]:
        """Cached tokens and the answer."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, **more}
        if salt is not None:
            body["cache_salt"] = salt
        headers = {"x-session-id": more.pop("session")} if "session" in more else {}
        body.pop("session", None)
        answer = await self._http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        read = answer.json()
        cached = int(answer.headers["x-ownerserve-cached-tokens"])
        assert read["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        return cached, read["choices"][0]["text"]

    async def get(self, path: str) -> Any:
        return (await self._http.get(path)).json()


def played(scenario: Any, **options: Any) -> HfWorker:
    """Run a scenario over one worker's whole life."""
    torch.set_num_threads(1)
    worker = build_worker(WorkerOptions(model=MODEL, kv_bytes=16 << 20, max_running=4, **options))

    async def life() -> None:
        app = make_app(worker)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://w", timeout=60) as http,
        ):
            await scenario(Client(http))

    asyncio.run(life())
    return worker


def test_equal_prompts_of_two_salts_never_meet() -> None:
    async def scenario(client: Client) -> None:
        first, text = await client.ask("a", TOKENS)
        assert first == 0
        again, same = await client.ask("a", TOKENS)
        assert again > 300 and same == text
        for salt in ("b", None, "A", "a "):
            cached, other = await client.ask(salt, TOKENS)
            assert (cached, other) == (0, text), salt  # it is not told, and gets the same answer
            cached, _ = await client.ask(salt, TOKENS)
            assert cached == again, salt

    played(scenario)


@pytest.mark.parametrize("length", [1, 7, 16, 20, 60])
def test_short_prompts_and_their_answers_are_parted_too(length: int) -> None:
    """An answer of A's goes on where its prompt ended, also within the salted tokens."""

    async def scenario(client: Client) -> None:
        prompt = TOKENS[:length]
        _, said = await client.ask("a", prompt, max_tokens=80, return_token_ids=True)
        body = prompt + list(said.encode())  # tiny models' tokens are bytes
        cached, _ = await client.ask("b", [*body, 1])
        assert cached == 0
        mine, _ = await client.ask("a", [*body, 1])
        assert mine > 0

    played(scenario)


def test_a_session_named_alike_under_two_salts_shares_nothing() -> None:
    async def scenario(client: Client) -> None:
        await client.ask("a", TOKENS, session="s")
        cached, _ = await client.ask("b", [*TOKENS, 1, 2, 3], session="s")
        assert cached == 0
        cached, _ = await client.ask("a", [*TOKENS, 1, 2, 3], session="s")
        assert cached > 300

    played(scenario)


def test_nor_do_they_meet_in_a_store(tmp_path: Path) -> None:
    """What A's session left below comes back to A in the worker's next life, and to nobody else."""
    options = {"store": tmp_path / "kv", "node": NodeSettings(spill_after_s=0.05)}

    async def kept(client: Client) -> None:
        await client.ask("a", TOKENS, session="s")

        async def on_disk() -> bool:
            page = await client.get("/ownerserve/inventory")
            return any(word["is"] == "has" and word["tier"] == "disk" for word in page["words"])

        told = [False]

        async def look() -> None:
            while not told[0]:
                told[0] = await on_disk()
                await asyncio.sleep(0.05)

        looking = asyncio.create_task(look())
        await until_async(lambda: told[0], what="it is on disk")
        await looking

    async def later(client: Client) -> None:
        cached, _ = await client.ask("b", TOKENS, session="t")
        assert cached == 0
        cached, _ = await client.ask(None, TOKENS)
        assert cached == 0
        cached, _ = await client.ask("a", TOKENS, session="s")
        assert cached > 300

    played(kept, **options)
    played(later, **options)


@pytest.mark.parametrize("salt", ["", "x" * 129, 7, ["a"]])
def test_a_salt_that_vllm_would_refuse_is_refused(salt: object) -> None:
    async def scenario(client: Client) -> None:
        body = {"model": MODEL, "prompt": TOKENS, "cache_salt": salt}
        answer = await client._http.post("/v1/completions", content=json.dumps(body))  # noqa: SLF001
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"

    played(scenario)
