"""What a client asks for whose turn moves amid its answer, and what it reads of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

TOKENS = 240
MOVES_AFTER, AGAIN_AFTER = 12, 80
"""Events that a client has read when its turn's worker is drained, and when the next one is."""
WORDS = "Tell me a long story about " + " ".join(f"item {n}" for n in range(40))


def chat(**more: Any) -> dict[str, Any]:
    """A long answer to a long question, seeded."""
    return {
        "messages": [{"role": "user", "content": WORDS}],
        "max_tokens": TOKENS, "temperature": 1.0, "seed": 11, "ignore_eos": True,
        "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip


class Read:
    """What a client reads of a streamed answer; `at` is called with its first worker's name, once
    after so many events, and so is `again`."""

    def __init__(
        self,
        http: httpx.Client,
        body: dict[str, Any],
        at: Callable[[str], object] | None = None,
        again: Callable[[str], object] | None = None,
        *,
        path: str = "/v1/chat/completions",
        session: str = "s",
    ) -> None:
        calls = {MOVES_AFTER: at, AGAIN_AFTER: again}
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        headers = {"x-session-id": session}
        with http.stream("POST", path, json=body, headers=headers) as answer:
            self.headers = answer.headers
            try:
                for line in answer.iter_lines():
                    self.lines.append(line)
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                    if (call := calls.pop(len(self.events), None)) is not None:
                        call(answer.headers.get("x-ownerserve-worker", ""))
            except httpx.RemoteProtocolError:  # an answer that ends short has no end
                self.lines.append("")

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def tokens(self) -> list[int]:
        return [token for choice in self.choices for token in choice.get("token_ids", ())]

    @property
    def said(self) -> str:
        parts = (one.get("delta", one) for one in self.choices)
        return "".join(part.get("content", part.get("text", "")) for part in parts)

    @property
    def logprobs(self) -> list[Any]:
        """Of chat and of completions alike, token by token; offsets into the text too."""
        found: list[Any] = []
        for one in self.choices:
            said = one.get("logprobs") or {}
            found += said.get("content") or zip(
                said.get("tokens", ()), said.get("token_logprobs", ()), said.get("text_offset", ()),
                strict=True,
            )  # fmt: skip
        return found

    @property
    def finish(self) -> list[str]:
        return [one["finish_reason"] for one in self.choices if one["finish_reason"]]

    @property
    def usage(self) -> list[dict[str, Any]]:
        return [event["usage"] for event in self.events if event.get("usage")]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]

    @property
    def is_whole(self) -> bool:
        return "data: [DONE]" in self.lines
