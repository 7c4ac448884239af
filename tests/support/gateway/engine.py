"""An engine as a process of its own that computes nothing and takes its time: `python -m
tests.support.gateway.engine` prints its port and speaks the dialects of OpenAI and Anthropic.

It keeps prompts as vLLM does: in the order in which they came, so many at once, a budget of tokens
a step; blocks are found again from the step on in which they are computed. What a step costs is
said by flags. `GET /counts` tells what it computed; a text that holds an order (`ORDERS`) is obeyed
instead.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.support.children import importing
from tests.support.gateway.world import header
from tests.support.net import free_port

BLOCK_BYTES = 256
TOKEN_BYTES = 4
STEP_TOKENS = 2048
"""How many prompt tokens a step takes at most."""
STEP_S = 0.001
SEND_BUFFER_BYTES = 64 << 10
"""The kernel's for each connection: on loopback it would take megabytes."""
MODEL = "model"
ORDERS = re.compile(r"<(refuse|drop|slow|fat)(?: (\d+))?(?: (\d+))?>")
"""`<refuse 429 2>` says no so many times; `<drop 3>` dies behind so many events, once; `<slow 50>`
waits so many ms before each event; with `<fat 999>` each has so many bytes more."""


class Engine:
    """The engine owns its blocks, its queue and its counts. A step takes `step_s`, and `token_s`
    for each prompt token in it."""

    def __init__(self, *, token_s: float, blocks: int, seats: int, queue: int) -> None:
        self.token_s = token_s
        self.counts: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        """How often each block was computed."""
        self._blocks: OrderedDict[str, None] = OrderedDict()
        self._blocks_max = blocks
        self._seats = seats
        self._queue_max = queue
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._came = asyncio.Event()

    def is_full(self) -> bool:
        return len(self._waiting) >= self._queue_max

    def submit(self, text: bytes, answer_tokens: int) -> Job:
        job = Job(text, answer_tokens)
        self._waiting.append(job)
        self.counts["prompts"] += 1
        self.counts["prompt_tokens"] += job.tokens
        self._came.set()
        return job

    async def run(self) -> None:
        """Step while there is anything to do."""
        while True:
            if not self._waiting and not self._running:
                self._came.clear()
                await self._came.wait()
            taken = self._take_in()
            await asyncio.sleep(STEP_S + taken * self.token_s)
            for job in [one for one in self._running if one.is_prefilled]:
                job.said.put_nowait(None)
                job.left -= 1
            gone = [one for one in self._running if one.left <= 0 or one.is_cancelled]
            self._running = [one for one in self._running if one not in gone]

    def _take_in(self) -> int:
        """Schedule one step; return how many prompt tokens it computes."""
        budget, taken = STEP_TOKENS, 0
        for job in self._running:
            taken += self._prefill(job, budget - taken)
        while self._waiting and len(self._running) < self._seats and taken < budget:
            job = self._waiting.popleft()
            if job.is_cancelled:
                continue
            job.done = min(self._found(job), len(job.blocks) - 1)
            job.cached_tokens = job.done * BLOCK_BYTES // TOKEN_BYTES
            self.counts["cached_tokens"] += job.cached_tokens
            self._running.append(job)
            self.counts["running_max"] = max(self.counts["running_max"], len(self._running))
            taken += self._prefill(job, budget - taken)
        return taken

    def _prefill(self, job: Job, budget: int) -> int:
        count = max(0, min(len(job.blocks) - job.done, budget * TOKEN_BYTES // BLOCK_BYTES))
        for block in job.blocks[job.done : job.done + count]:
            self.computed[block] += 1
            self._blocks[block] = None
            self._blocks.move_to_end(block)
            if len(self._blocks) > self._blocks_max:
                self._blocks.popitem(last=False)
        job.done += count
        self.counts["computed_tokens"] += count * BLOCK_BYTES // TOKEN_BYTES
        return count * BLOCK_BYTES // TOKEN_BYTES

    def _found(self, job: Job) -> int:
        for at, block in enumerate(job.blocks):
            if block not in self._blocks:
                return at
            self._blocks.move_to_end(block)
        return len(job.blocks)


class Job:
    """A job is one prompt, as a chain of blocks, and the tokens of its answer as they come."""

    def __init__(self, text: bytes, answer_tokens: int) -> None:
        chain, self.blocks = hashlib.blake2b(digest_size=12), []
        for at in range(0, max(len(text), 1), BLOCK_BYTES):
            chain.update(text[at : at + BLOCK_BYTES])
            self.blocks.append(chain.hexdigest())
        self.tokens = max(len(text) // TOKEN_BYTES, 1)
        self.done = self.cached_tokens = 0
        self.left = answer_tokens
        self.answer_tokens = answer_tokens
        self.is_cancelled = False
        self.said: asyncio.Queue[None] = asyncio.Queue()

    @property
    def is_prefilled(self) -> bool:
        return self.done >= len(self.blocks)


# ---- the dialects


def chat_events(job: Job) -> Iterator[dict[str, Any]]:
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    for n in range(job.answer_tokens):
        delta = {"content": f"w{n} "} | ({"role": "assistant"} if n == 0 else {})
        yield base | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield base | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    yield base | {"choices": [], "usage": _usage(job)}


def completion_events(job: Job) -> Iterator[dict[str, Any]]:
    base = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
    for n in range(job.answer_tokens):
        yield base | {"choices": [{"index": 0, "text": f"w{n} ", "finish_reason": None}]}
    yield base | {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    yield base | {"choices": [], "usage": _usage(job)}


def response_events(job: Job) -> Iterator[dict[str, Any]]:
    whole = response_whole(job)
    item, at = whole["output"][0], {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    part = {"type": "output_text", "text": "", "annotations": []}
    yield {"type": "response.created", "response": begun}
    opened = item | {"content": [], "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": 0, "item": opened}
    yield {"type": "response.content_part.added", "part": part, **at}
    for n in range(job.answer_tokens):
        delta = {"type": "response.output_text.delta", "delta": f"w{n} ", "logprobs": []}
        yield delta | at
    yield {"type": "response.output_text.done", "text": _text(job), "logprobs": [], **at}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": "response.completed", "response": whole}


def message_events(job: Job) -> Iterator[dict[str, Any]]:
    whole = message_whole(job)
    begun = whole | {"content": [], "stop_reason": None}
    yield {"type": "message_start", "message": begun}
    block = {"type": "text", "text": ""}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "ping"}
    for n in range(job.answer_tokens):
        delta = {"type": "text_delta", "text": f"w{n} "}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": job.answer_tokens}}
    yield {"type": "message_stop"}


def chat_whole(job: Job) -> dict[str, Any]:
    message = {"role": "assistant", "content": _text(job)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    base = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}
    return base | {"choices": [choice], "usage": _usage(job)}


def completion_whole(job: Job) -> dict[str, Any]:
    choice = {"index": 0, "text": _text(job), "finish_reason": "stop", "logprobs": None}
    base = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
    return base | {"choices": [choice], "usage": _usage(job)}


def response_whole(job: Job) -> dict[str, Any]:
    part = {"type": "output_text", "text": _text(job), "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": MODEL,
        "status": "completed", "output": [item | {"content": [part]}], "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True,
        "usage": {
            "input_tokens": job.tokens, "output_tokens": job.answer_tokens,
            "total_tokens": job.tokens + job.answer_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def message_whole(job: Job) -> dict[str, Any]:
    usage = {
        "input_tokens": job.tokens - job.cached_tokens, "output_tokens": job.answer_tokens,
        "cache_read_input_tokens": job.cached_tokens,
    }  # fmt: skip
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": MODEL,
        "content": [{"type": "text", "text": _text(job)}], "stop_reason": "end_turn",
        "stop_sequence": None, "usage": usage,
    }  # fmt: skip


def _text(job: Job) -> str:
    return "".join(f"w{n} " for n in range(job.answer_tokens))


def _usage(job: Job) -> dict[str, Any]:
    return {
        "prompt_tokens": job.tokens, "completion_tokens": job.answer_tokens,
        "total_tokens": job.tokens + job.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }  # fmt: skip


DIALECTS = {
    "/v1/chat/completions": (chat_events, chat_whole),
    "/v1/completions": (completion_events, completion_whole),
    "/v1/responses": (response_events, response_whole),
    "/v1/messages": (message_events, message_whole),
}
NAMED_EVENTS = ("/v1/responses", "/v1/messages")


def prompt_of(body: dict[str, Any]) -> bytes:
    """All text of a request that stands for tokens, in order."""
    parts = [body.get(name) for name in ("tools", "system", "instructions", "messages", "input")]
    return b"".join(json.dumps(one).encode() for one in (*parts, body.get("prompt")) if one)


# ---- over HTTP


class Telling(NamedTuple):
    """How a stream is told: behind how many events it dies, the pause before each, and what comes
    with each."""

    drop: int | None
    pause_s: float
    comment: bytes


class Server:
    """The server answers for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._obeyed: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await _body(reader, head)
                method, target, _ = head.split(b" ", 2)
                path = target.partition(b"?")[0].decode()
                if path in DIALECTS and method == b"POST":
                    await self._turn(path, json.loads(body), reader=reader, writer=writer)
                else:
                    writer.write(self._small(path, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    def _small(self, path: str, body: bytes) -> bytes:
        if path == "/health":
            return _reply(200, {})
        if path == "/v1/models":
            one = {"id": MODEL, "object": "model", "created": 1, "owned_by": "t"}
            return _reply(200, {"object": "list", "data": [one]})
        if path == "/counts":
            often = max(self._engine.computed.values(), default=0)
            return _reply(200, dict(self._engine.counts) | {"block_computed_max": often})
        if path == "/v1/embeddings":
            one = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            return _reply(200, {"object": "list", "data": [one], "model": MODEL, "usage": usage})
        if path == "/v1/messages/count_tokens":
            return _reply(200, {"input_tokens": len(prompt_of(json.loads(body))) // TOKEN_BYTES})
        return _reply(404, {"error": {"message": "not here", "type": "not_found", "code": 404}})

    async def _turn(
        self,
        path: str,
        body: dict[str, Any],
        *,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        text = prompt_of(body)
        order = ORDERS.search(text.decode("utf-8", "replace"))
        what, first, second = order.groups() if order else ("", "0", "0")
        if what == "refuse" and self._obeyed[text.decode()] < int(second or 1):
            self._obeyed[text.decode()] += 1
            writer.write(_reply(int(first), {"error": {"message": "no"}}, "retry-after: 1\r\n"))
            return
        if self._engine.is_full():
            self._engine.counts["refused"] += 1
            writer.write(_reply(429, {"error": {"message": "full"}}, "retry-after: 1\r\n"))
            return
        tokens = body.get("max_tokens") or body.get("max_output_tokens") or 8
        tokens = body.get("max_completion_tokens") or tokens
        job = self._engine.submit(text, int(tokens))
        watch = asyncio.ensure_future(_gone(reader, writer, job))
        try:
            if body.get("stream"):
                drop = int(first or 1) if what == "drop" else None
                pause_s = int(first or 0) / 1000 if what == "slow" else 0.0
                fat = int(first or 0) if what == "fat" else 0
                told = Telling(drop, pause_s, b":%b\n" % (b"x" * fat) if fat else b"")
                await self._stream(path, job, writer, told)
            else:
                for _ in range(job.answer_tokens):
                    await job.said.get()
                writer.write(_reply(200, DIALECTS[path][1](job)))
        finally:
            watch.cancel()

    async def _stream(
        self, path: str, job: Job, writer: asyncio.StreamWriter, told: Telling
    ) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        async for number, event in _paced(path, job):
            if number == told.drop:
                writer.transport.abort()
                raise ConnectionError
            name = b"event: %b\n" % event["type"].encode() if path in NAMED_EVENTS else b""
            if path == "/v1/responses":
                event = event | {"sequence_number": number}
            _chunk(writer, b"%b%bdata: %b\n\n" % (told.comment, name, json.dumps(event).encode()))
            await writer.drain()
            await asyncio.sleep(told.pause_s)
        if path not in NAMED_EVENTS:
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


async def _paced(path: str, job: Job) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """A dialect's events, each that holds a token when that is there."""
    for _ in range(job.answer_tokens):
        await job.said.get()
        if not job.is_cancelled:
            break
    for number, event in enumerate(DIALECTS[path][0](job)):
        yield number, event


async def _gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, job: Job) -> None:
    """Cancel the job when its client hangs up."""
    while not (reader.at_eof() or writer.transport.is_closing()):
        await asyncio.sleep(0.02)
    job.is_cancelled = True


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """The request's body; one in chunks is put together."""
    if (header(head, b"transfer-encoding") or b"").lower() != b"chunked":
        return await reader.readexactly(int(header(head, b"content-length") or 0))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _reply(status: int, said: dict[str, Any], lines: str = "") -> bytes:
    text = json.dumps(said).encode()
    head = f"HTTP/1.1 {status} X\r\n{lines}content-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(text), text)


# ---- as a process


async def _main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--port", type=int, default=0)
    ask.add_argument("--token-us", type=float, default=0.0)
    ask.add_argument("--blocks", type=int, default=1 << 20)
    ask.add_argument("--seats", type=int, default=256)
    ask.add_argument("--queue", type=int, default=1 << 20)
    said = ask.parse_args()
    engine = Engine(
        token_s=said.token_us / 1e6, blocks=said.blocks, seats=said.seats, queue=said.queue
    )
    running = asyncio.ensure_future(engine.run())
    listener = socket.create_server(("127.0.0.1", said.port), backlog=4096)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    server = await asyncio.start_server(
        Server(engine).serve, sock=listener, backlog=4096, limit=1 << 24
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await running


class EngineProcess:
    """A running engine at a port that is its own: it can be killed and come back there."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.port = free_port()
        self._flags = flags
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        command = [sys.executable, "-m", "tests.support.gateway.engine", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, *self._flags], env=importing(), stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert int(self._process.stdout.readline()) == self.port

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@contextmanager
def engine_processes(count: int, *flags: str) -> Iterator[list[EngineProcess]]:
    """So many engines that listen, until the end."""
    engines = [EngineProcess(flags) for _ in range(count)]
    try:
        for engine in engines:
            engine.start()
        yield engines
    finally:
        for engine in engines:
            engine.kill()


if __name__ == "__main__":
    asyncio.run(_main())
