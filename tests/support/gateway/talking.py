"""A running gateway over talkers, each a process: for turns that run at more than one of them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.support.gateway.process import GatewayProcess, gateway_process
from tests.support.gateway.talker import TalkerProcess, talker_process

MESSAGES = [{"role": "user", "content": "go on"}]


class TalkingFleet(NamedTuple):
    """Talkers, and a gateway over them."""

    talkers: Sequence[TalkerProcess]
    gateway: GatewayProcess

    def ask(self, **fields: Any) -> httpx.Response:
        """The whole answer to a turn."""
        body = {"messages": MESSAGES, **fields}
        return httpx.post(f"{self.gateway.data_url}/v1/chat/completions", json=body, timeout=30)

    def begin(self, **fields: Any) -> http.client.HTTPConnection:
        """The client of a turn that was sent."""
        where = self.gateway.data_url.removeprefix("http://")
        client = http.client.HTTPConnection(where, timeout=30)
        said = {"content-type": "application/json"}
        body = json.dumps({"messages": MESSAGES, **fields})
        client.request("POST", "/v1/chat/completions", body, said)
        return client

    def who_has(self) -> list[int]:
        """How many turns each talker has seen."""
        return [len(one.tell()["seen"]) for one in self.talkers]

    def legs(self, leg: str) -> dict[str, int]:
        """What became of legs of that kind."""
        text, counts = httpx.get(f"{self.gateway.admin_url}/metrics", timeout=30).text, {}
        for line in text.splitlines():
            if line.startswith(f'ownerserve_gateway_legs_total{{leg="{leg}"'):
                counts[line.split('outcome="')[1].partition('"')[0]] = int(float(line.split()[-1]))
        return counts

    def live(self) -> int:
        """How many dispatches are live."""
        status = httpx.get(f"{self.gateway.admin_url}/status", timeout=30).json()
        return sum(worker["requests"] for worker in status["workers"])


@contextmanager
def talking_fleet(folder: Path, roles: Sequence[str], *more: str) -> Iterator[TalkingFleet]:
    """A talker for each of `roles` ("" for none), and a gateway with `more` options."""
    with ExitStack() as stack:
        talkers = [stack.enter_context(talker_process()) for _ in roles]
        config = folder / "g.toml"
        config.write_text(
            "".join(
                f'[[worker]]\nurl = "http://127.0.0.1:{one.port}"\n'
                + (f'role = "{role}"\n' if role else "")
                for one, role in zip(talkers, roles, strict=True)
            )
        )
        gateway = stack.enter_context(gateway_process(folder, [], "--config", str(config), *more))
        yield TalkingFleet(talkers, gateway)


def text_in(stream: str) -> str:
    """The text of a stream of chat events that came to its end. Each has one id; none is an
    error."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert lines[-1] == "[DONE]", stream[-300:]
    events = [json.loads(line) for line in lines[:-1]]
    assert len({(event["id"], event["created"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice.get("finish_reason") for choice in choices].count("stop") == 1
    return "".join(choice["delta"].get("content") or "" for choice in choices)
