"""An engine that answers with words that follow from the prompt and the seed alone, in OpenAI's
form: equal at each worker, as a seeded model's are. In this process, or as one of its own
(`python -m tests.support.gateway.talker` prints its port), to be told by `tell` what to do."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.gateway.world import header

WORDS = 24
_CUES = ("", " ", "é", "🙂", '"', "\\", "\n")


def words_of(prompt: object, seed: object, count: int = WORDS) -> list[str]:
    """What is answered to a prompt, token by token."""
    draw = random.Random(json.dumps([prompt, seed]))
    return [f"{draw.choice(_CUES)}{draw.randrange(1000)} " for _ in range(count)]


class Talker:
    """One engine. `does` says how it behaves; the names of its keys are all that there is."""

    def __init__(self) -> None:
        self.does: dict[str, Any] = {
            "mute": False,  # a turn gets no answer until `go`
            "go": False,  # what waits goes on
            "holds_at": None,  # a stream waits before this word until `go`
            "dies_at": None,  # a stream's connection is closed before this word
            "ends_at": None,  # a stream ends well before this word
            "other_from": None,  # from this word on it says something else
            "together": 1,  # words an event
            "by_close": False,  # a stream has no frames, and ends by close
            "refuses": 0,  # status of every turn
            "refuses_prefill": 0,
            "torn": False,  # an answer of a prefill stops in its middle
            "params": True,  # whether a prefill's answer says kv_transfer_params
            "tools": False,  # whether it calls a tool
        }
        self.seen: list[tuple[str, dict[str, Any]]] = []
        """(head, body) of each turn."""
        self.hung_up = 0
        """How many turns' clients went away before the end."""
        self.go_on = asyncio.Event()
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As SIGKILL looks from outside."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                data = await reader.readexactly(int(header(head, b"content-length") or 0))
                path = head.split(b" ", 2)[1].partition(b"?")[0]
                if path == b"/test":
                    self.does |= json.loads(data)
                    self.go_on.set() if self.does["go"] else self.go_on.clear()
                    told = {"seen": self.seen, "hung_up": self.hung_up}
                    writer.write(_whole(200, told))
                elif path == b"/v1/models":
                    writer.write(_whole(200, {"data": [{"id": "m", "max_model_len": 4096}]}))
                elif path == b"/health":
                    writer.write(_whole(200, {}))
                elif b"\r\nx-request-id:" not in head or not data:
                    writer.write(_whole(404, {}))
                else:
                    self.seen.append((head.decode("latin-1"), json.loads(data)))
                    await self._turn(json.loads(data), path, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _turn(
        self,
        body: dict[str, Any],
        path: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        params = body.get("kv_transfer_params") or {}
        if self.does["mute"]:
            await self._until_gone(reader, writer)
        if params.get("do_remote_decode"):
            self._prefill(writer)
            return
        if self.does["refuses"]:
            writer.write(_whole(self.does["refuses"], {}))
            return
        id = f"id-{self.port}-{len(self.seen)}"
        words = words_of(body.get("messages") or body.get("prompt"), body.get("seed"))
        if self.does["other_from"] is not None:
            at = self.does["other_from"]
            words = [*words[:at], *(f"other{n} " for n in range(WORDS - at))]
        usage = {"prompt_tokens": 50, "completion_tokens": len(words)}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(words)}
            answer = {"id": id, "choices": [{"index": 0, "message": message}], "usage": usage}
            writer.write(_whole(200, answer))
            return
        await self._stream(body, words, usage, id=id, path=path, reader=reader, writer=writer)

    async def _stream(
        self,
        body: dict[str, Any],
        words: list[str],
        usage: dict[str, int],
        *,
        id: str,
        path: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            + (b"" if self.does["by_close"] else b"transfer-encoding: chunked\r\n")
            + b"\r\n"
        )
        is_chat = path.endswith(b"/chat/completions")
        envelope = {"id": id, "object": "chunk", "created": self.port, "model": "m"}

        def piece(data: bytes) -> None:
            writer.write(data) if self.does["by_close"] else _chunk(writer, data)

        async def event(choices: list[dict[str, Any]], **more: Any) -> None:
            said = json.dumps({**envelope, "choices": choices, **more}, ensure_ascii=False).encode()
            piece(b"data: %b\n\n" % said)
            await self._drained(writer)

        if is_chat:
            await event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        if self.does["tools"]:
            call = {"index": 0, "id": id, "function": {"name": "f", "arguments": "{}"}}
            await event([{"index": 0, "delta": {"tool_calls": [call]}}])
        at = 0
        while at < len(words):
            until = min(at + self.does["together"], len(words))
            for name in ("holds_at", "dies_at", "ends_at"):
                if self.does[name] is not None and at < self.does[name] < until:
                    until = self.does[name]
            if self.does["holds_at"] == at:
                await self._until_gone(reader, writer)
            if self.does["dies_at"] == at:
                raise ConnectionError
            if self.does["ends_at"] == at:
                break
            text = "".join(words[at:until])
            await event(
                [{"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}]
            )
            at = until
        last = {"delta": {}} if is_chat else {"text": ""}
        await event([{"index": 0, **last, "finish_reason": "stop"}])
        if (body.get("stream_options") or {}).get("include_usage"):
            await event([], usage=usage)
        piece(b"data: [DONE]\n\n")
        if self.does["by_close"]:
            raise ConnectionError
        writer.write(b"0\r\n\r\n")

    def _prefill(self, writer: asyncio.StreamWriter) -> None:
        if self.does["refuses_prefill"]:
            writer.write(_whole(self.does["refuses_prefill"], {}))
            return
        where = {"do_remote_prefill": True, "remote_port": self.port, "remote_block_ids": [[1, 2]]}
        answer = {
            "id": "p",
            "choices": [],
            **({"kv_transfer_params": where} if self.does["params"] else {}),
        }
        data = _whole(200, answer)
        writer.write(data[:-5] if self.does["torn"] else data)
        if self.does["torn"]:
            raise ConnectionError

    async def _drained(self, writer: asyncio.StreamWriter) -> None:
        """Wait until what was written may go; its client may be gone, before the turn holds."""
        try:
            await writer.drain()
        except ConnectionError:
            self.hung_up += 1
            raise
        await asyncio.sleep(0)

    async def _until_gone(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wait for `go`; end the turn when its client is gone."""
        while not self.go_on.is_set():
            await asyncio.sleep(0.002)
            if reader.at_eof() or writer.transport.is_closing():
                self.hung_up += 1
                raise ConnectionError


def _whole(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(data),
        data,
    )


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


class TalkerProcess:
    """A running talker."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.port = port
        self._process = process

    def tell(self, **does: Any) -> dict[str, Any]:
        """Set what it does, and return what it has seen."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("POST", "/test", json.dumps(does))
        said: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return said

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()


@contextmanager
def talker_process() -> Iterator[TalkerProcess]:
    """A talker that listens, until the end."""
    command = [sys.executable, "-m", "tests.support.gateway.talker"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield TalkerProcess(process, int(process.stdout.readline()))
        finally:
            process.kill()


async def _main() -> None:
    talker = Talker()
    await talker.start()
    print(talker.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
