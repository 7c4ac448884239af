"""The closed-loop client starts a turn when what it waits for has ended, plus the tool gap.

Speaks plain OpenAI chat completions with SSE, as an agent would. Knows nothing of workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from ownerserve.cli.demo.workload import Conversation, DemoTurn, Transcript
from ownerserve.kv.wire.headers import (
    BROUGHT_HEADER,
    FINAL_HEADER,
    MODE_HEADER,
    WORKER_HEADER,
    read_brought,
)

REQUEST_TIMEOUT_S = 120.0


class TurnAnswer(msgspec.Struct):
    """An answer is what one turn gave. `logprobs` has one entry an output token; `brought` are the
    tokens of the prompt that were loaded, by where they came from; `error` is empty on success."""

    session: str
    turn: int
    text: str = ""
    tokens: list[str] = []
    logprobs: list[float] = []
    runner_up_logprobs: list[float] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    tpot_ms: float = 0.0
    mode: str = ""
    worker: str = ""
    brought: dict[str, int] = {}
    error: str = ""


class SessionResult(msgspec.Struct):
    """A session's result has its answers and its wall time, tool gaps included."""

    session: str
    answers: list[TurnAnswer]
    e2e_s: float


class _Token(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Token] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


async def run_conversations(
    base_url: str,
    conversations: Sequence[Conversation],
    *,
    model: str,
    transcript: Transcript,
    on_turn: Callable[[TurnAnswer], None],
) -> list[SessionResult]:
    """Drive all conversations at once against `base_url`; return results in the given order.

    `transcript` supplies the assistant text that goes into the next prompt where an earlier run
    recorded it, and records it where none did: every policy so sees the same prompts.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        driver = _Driver(client, model, transcript, on_turn)
        return list(await asyncio.gather(*(driver.session(c) for c in conversations)))


class _Driver:
    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        transcript: Transcript,
        on_turn: Callable[[TurnAnswer], None],
    ) -> None:
        self._client = client
        self._model = model
        self._transcript = transcript
        self._on_turn = on_turn

    async def session(self, conversation: Conversation) -> SessionResult:
        await asyncio.sleep(conversation.start_s)
        started = time.perf_counter()
        contexts: dict[str, list[dict[str, str]]] = {}
        tasks: list[asyncio.Task[TurnAnswer]] = []
        async with asyncio.TaskGroup() as group:
            for index in range(len(conversation.turns)):
                turn = self._turn(conversation, index, contexts, tasks=tasks)
                tasks.append(group.create_task(turn))
        answers = [task.result() for task in tasks]
        return SessionResult(conversation.session, answers, time.perf_counter() - started)

    async def _turn(
        self,
        conversation: Conversation,
        index: int,
        contexts: dict[str, list[dict[str, str]]],
        *,
        tasks: list[asyncio.Task[TurnAnswer]],
    ) -> TurnAnswer:
        """Wait for what the turn waits for and its tool gap, ask, and keep what was said."""
        turn = conversation.turns[index]
        if turn.after:
            await asyncio.wait([tasks[position] for position in turn.after])
        await asyncio.sleep(turn.gap_s)
        if turn.restart:
            contexts[turn.agent] = []
        messages = contexts[turn.agent]
        messages += [{"role": m.role, "content": m.text} for m in turn.messages]
        answer = await self._ask(
            TurnAnswer(session=conversation.session, turn=index), turn, messages
        )
        self._on_turn(answer)
        said = self._transcript.setdefault((conversation.session, index), answer.text)
        messages.append({"role": "assistant", "content": said})
        return answer

    async def _ask(
        self, answer: TurnAnswer, turn: DemoTurn, messages: list[dict[str, str]]
    ) -> TurnAnswer:
        headers = {"x-session-id": turn.agent} | ({FINAL_HEADER: "true"} if turn.is_last else {})
        asked = {"model": self._model, "messages": messages, "max_tokens": turn.output_tokens}
        return await ask(self._client, answer, asked, headers)


async def ask(
    client: httpx.AsyncClient,
    answer: TurnAnswer,
    asked: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    on_line: Callable[[str], object] = len,
) -> TurnAnswer:
    """Ask for a streamed greedy answer with logprobs, and fill `answer` with what comes; `on_line`
    is told each line of it, once that is in the answer. Errors are written there."""
    body = {
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        **asked,
    }
    started = time.perf_counter()
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            answer.mode = response.headers.get(MODE_HEADER, "")
            answer.worker = response.headers.get(WORKER_HEADER, "")
            answer.brought = read_brought(response.headers.get(BROUGHT_HEADER, ""))
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"HTTP {response.status_code}: {text[:200]}"
                return answer
            async for line in response.aiter_lines():
                _absorb(answer, line, elapsed_ms=(time.perf_counter() - started) * 1e3)
                on_line(line)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.e2e_ms = (time.perf_counter() - started) * 1e3
    if len(answer.tokens) > 1:
        answer.tpot_ms = (answer.e2e_ms - answer.ttft_ms) / (len(answer.tokens) - 1)
    return answer


def _absorb(answer: TurnAnswer, line: str, *, elapsed_ms: float) -> None:
    """Fold one SSE line into the answer."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    chunk = _chunk_decoder.decode(line[6:])
    for choice in chunk.choices:
        if choice.delta.content:
            answer.text += choice.delta.content
        for token in (choice.logprobs.content or []) if choice.logprobs else []:
            answer.ttft_ms = answer.ttft_ms or elapsed_ms
            answer.tokens.append(token.token)
            answer.logprobs.append(token.logprob)
            others = [top.logprob for top in token.top_logprobs if top.token != token.token]
            answer.runner_up_logprobs.append(max(others, default=float("-inf")))
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
