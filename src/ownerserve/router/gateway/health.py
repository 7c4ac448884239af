"""Who is up, and in which life: asks each worker's /health from time to time and tells the state.

A worker is up with its first good answer, and down after two bad ones in a row; when nobody
listens at its port any more, at once. Its stamp on that answer says its life and its load, so that
an idle worker's load is known too. What it serves is asked for once a life. Owns nothing but
counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httptools
import msgspec

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.ids import Incarnation
from ownerserve.kv.units import KIB
from ownerserve.router.gateway.config import Address, Config
from ownerserve.router.gateway.heads import Header, read_response_head
from ownerserve.router.gateway.stamps import number, read_stamp
from ownerserve.router.messages import Down, Stamped, WorkerDown, WorkerUp
from ownerserve.router.profile import Profile

BAD_ANSWERS_UNTIL_DOWN = 2
ANSWER_MAX_BYTES = 256 * KIB

News = WorkerUp | WorkerDown | Stamped


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Answer:
    """A small answer, read whole."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.body = b""
        self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True


class HealthMonitor:
    """Probes one worker."""

    def __init__(self, address: Address, config: Config, *, tell: Callable[[News], None]) -> None:
        self._address = address
        self._config = config
        self._tell = tell
        self._bad = 0
        self._life: Incarnation | None = None
        self._profile: Profile | None = None

    async def run(self) -> None:
        """Probe until cancelled; the first time after one interval."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            for news in await self.probe():
                self._tell(news)

    async def probe(self) -> list[News]:
        """Ask once; nothing when one bad answer says nothing yet."""
        worker = self._address.worker
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                answer = await self._ask(b"/health")
                if 200 <= answer.status < 300:
                    self._bad = 0
                    return await self._up(answer)
        except ConnectionRefusedError:
            self._bad = BAD_ANSWERS_UNTIL_DOWN
            self._profile = None
            return [WorkerDown(worker, Down.UNREACHABLE)]
        except OSError:  # TimeoutError too
            pass
        self._bad += 1
        if self._bad < BAD_ANSWERS_UNTIL_DOWN:
            return []
        self._profile = None
        return [WorkerDown(worker, Down.UNHEALTHY)]

    async def _up(self, answer: _Answer) -> list[News]:
        worker = self._address.worker
        headers = read_response_head(answer.status, b"", answer.headers).stamp
        stamp = read_stamp(worker, headers)
        life = None if stamp is None else stamp.unit.incarnation
        if self._profile is None or life != self._life:
            self._life, self._profile = life, await self._ask_profile(headers)
        rank = 0 if stamp is None else stamp.unit.dp_rank
        news: list[News] = [WorkerUp(worker, rank, life, self._profile)]
        if stamp is not None and stamp.status is not None:
            news.append(Stamped(stamp.status))
        return news

    async def _ask_profile(self, headers: dict[bytes, bytes]) -> Profile:
        """What the worker serves: its own word, else the engine's list of models."""
        total = number(headers, b"kv-bytes-total") or 0
        told = headers.get(b"model")
        if told is not None:
            return self._profile_of([told.decode("latin-1")], total)
        answer = await self._ask(b"/v1/models")
        try:
            models = msgspec.json.decode(answer.body, type=_Models) if answer.body else _Models()
        except UNREADABLE:
            models = _Models()
        names = [model.id for model in models.data] if answer.status == 200 else []
        return self._profile_of(names or [""], total)

    def _profile_of(self, names: list[str], kv_bytes_total: int) -> Profile:
        return Profile(
            model=names[0],
            adapters=frozenset(names[1:]),
            speed=self._config.speed,
            kv_bytes_total=kv_bytes_total,
        )

    async def _ask(self, target: bytes) -> _Answer:
        """GET `target`; status 0 when the answer is none."""
        answer, host, port = _Answer(), self._address.host, self._address.port
        parser = httptools.HttpResponseParser(answer)
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(
                b"GET %b HTTP/1.1\r\nHost: %b:%d\r\nConnection: close\r\n\r\n"
                % (target, host.encode(), port)
            )
            read_bytes = 0
            while not answer.is_whole and read_bytes < ANSWER_MAX_BYTES:
                data = await reader.read(16 * KIB)
                if not data:
                    break
                read_bytes += len(data)
                parser.feed_data(data)
            answer.status = parser.get_status_code()
        except httptools.HttpParserError:
            answer.status = 0
        finally:
            writer.close()
        return answer
