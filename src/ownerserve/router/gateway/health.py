"""Who is up: asks each worker's /health from time to time and tells the state.

A worker is up with its first good answer, and down after two bad ones in a row; when nobody
listens at its port any more, at once. Owns nothing but those counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ownerserve.router.gateway.config import Address, Config
from ownerserve.router.messages import Down, WorkerDown, WorkerUp

BAD_ANSWERS_UNTIL_DOWN = 2


class HealthMonitor:
    """Probes one worker."""

    def __init__(
        self, address: Address, config: Config, *, tell: Callable[[WorkerUp | WorkerDown], None]
    ) -> None:
        self._address = address
        self._config = config
        self._tell = tell
        self._bad = 0

    async def run(self) -> None:
        """Probe until cancelled; the first time after one interval."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            news = await self.probe()
            if news is not None:
                self._tell(news)

    async def probe(self) -> WorkerUp | WorkerDown | None:
        """Ask once; None when one bad answer says nothing yet."""
        worker = self._address.worker
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                status = await self._ask()
        except ConnectionRefusedError:
            self._bad = BAD_ANSWERS_UNTIL_DOWN
            return WorkerDown(worker, Down.UNREACHABLE)
        except OSError:  # TimeoutError too
            status = 0
        if 200 <= status < 300:
            self._bad = 0
            return WorkerUp(worker)
        self._bad += 1
        return WorkerDown(worker, Down.UNHEALTHY) if self._bad >= BAD_ANSWERS_UNTIL_DOWN else None

    async def _ask(self) -> int:
        """The status of GET /health; 0 when the answer is none."""
        host, port = self._address.host, self._address.port
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(
                b"GET /health HTTP/1.1\r\nHost: %b:%d\r\nConnection: close\r\n\r\n"
                % (host.encode(), port)
            )
            words = (await reader.read(256)).split(b" ", 2)
            return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        finally:
            writer.close()
