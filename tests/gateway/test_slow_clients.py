"""Clients that read a byte a second and heads that never end, beside agents at work: the agents
lose nothing and the gateway holds little. The full form, which also holds the wait for the first
event:

OWNERSERVE_SLOW_CLIENTS=1000 pytest -s tests/gateway/test_slow_clients.py
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.gateway.agents import Agent
from tests.support.gateway.engine import engine_processes
from tests.support.gateway.process import GatewayProcess, gateway_process

pytestmark = pytest.mark.slow

EACH = int(os.environ.get("OWNERSERVE_SLOW_CLIENTS", "100"))
"""Slow readers, and as many heads."""
IS_FULL = "OWNERSERVE_SLOW_CLIENTS" in os.environ
RSS_MAX_MIB = 256 if IS_FULL else 48
AGENTS, TURNS, ROUNDS = 8, (25 if IS_FULL else 5), (3 if IS_FULL else 1)
PAIRED_TURNS = 250 if IS_FULL else 3
TOLD_BYTES, EVENTS = 16_384, 128
"""What a slow reader asks for: 2 MiB in so many events."""
MSS_BYTES = 1448
"""As between hosts: by loopback's 64 KiB a socket takes megabytes of the kernel's."""
SLOW = json.dumps({"prompt": f"<fat {TOLD_BYTES}>", "stream": True, "max_tokens": EVENTS}).encode()


class SlowClients:
    """So many connections that read a byte a second, and so many in the middle of a head."""

    def __init__(self, port: int) -> None:
        self.sockets: list[socket.socket] = []
        self.lost = 0
        """Readers that were cut off."""
        self._port = port
        self._reading: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(SLOW)}\r\n\r\n"
        for number in range(2 * EACH):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, MSS_BYTES)
            one.setblocking(False)
            await loop.sock_connect(one, ("127.0.0.1", self._port))
            whole = head.encode() + SLOW
            await loop.sock_sendall(one, whole if number < EACH else whole[:40])
            self.sockets.append(one)
        self._reading = loop.create_task(self._read(self.sockets[:EACH]))

    async def _read(self, readers: Sequence[socket.socket]) -> None:
        while True:
            for reader in readers:
                with suppress(BlockingIOError):
                    try:
                        self.lost += reader.recv(1) == b""
                    except ConnectionError:
                        self.lost += 1
            await asyncio.sleep(1.0)

    async def end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        for one in self.sockets:
            one.close()
        self.sockets.clear()


def rss_mib(running: GatewayProcess) -> float:
    for line in Path(f"/proc/{running.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def cpu_s(running: GatewayProcess) -> float:
    fields = Path(f"/proc/{running.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def until_quiet(running: GatewayProcess) -> None:
    """Until the slow readers' answers stand still, a second long."""
    busy_s = -1.0
    while cpu_s(running) - busy_s > 0.15:
        busy_s = cpu_s(running)
        await asyncio.sleep(1.0)


def p99_ms(agents: Sequence[Agent], first: int) -> float:
    waits = sorted(t.first_byte_s for agent in agents for t in agent.turns[first:])
    return waits[int(len(waits) * 0.99)] * 1000


async def until_live(running: GatewayProcess, low: int, high: int) -> None:
    """Until at least `low` and at most `high` turns run."""

    def told() -> int:
        with urllib.request.urlopen(f"{running.admin_url}/status", timeout=60) as answer:
            return int(json.loads(answer.read())["live"])

    async with asyncio.timeout(120):
        while not low <= await asyncio.to_thread(told) <= high:
            await asyncio.sleep(0.1)


async def scenario(running: GatewayProcess) -> None:
    port = int(running.data_url.rpartition(":")[2])
    agents = [Agent(f"a{n}", port, context=b"x" * 4096, growth=512) for n in range(AGENTS)]
    await asyncio.gather(*(agent.play(TURNS) for agent in agents))  # warm
    slow = SlowClients(port)
    try:
        await beside(slow, running, agents)
    finally:
        await slow.end()


async def beside(slow: SlowClients, running: GatewayProcess, agents: Sequence[Agent]) -> None:
    before_mib, ratios, most_mib = rss_mib(running), [], 0.0
    for _ in range(ROUNDS):
        said: list[tuple[float, float]] = []
        for is_beside in (False, True):
            if is_beside:
                await slow.begin()
                await until_live(running, EACH, EACH)
                await until_quiet(running)
            done, busy_s = len(agents[0].turns), cpu_s(running)
            await asyncio.gather(*(agent.play(TURNS) for agent in agents))
            said.append((p99_ms(agents, done), cpu_s(running) - busy_s))
            most_mib = max(most_mib, rss_mib(running))
        assert slow.lost == 0
        await slow.end()
        await until_live(running, 0, 0)
        ratios.append(said[1][0] / said[0][0])
        print(
            f"\n{EACH} readers of a byte a second, {EACH} heads: first event, p99 of"
            f" {AGENTS * TURNS} turns, without {said[0][0]:.1f} ms, with {said[1][0]:.1f} ms"
            f" ({ratios[-1]:.2f}); CPU of the gateway {said[0][1]:.2f} and {said[1][1]:.2f} s;"
            f" RSS {before_mib:.0f} MiB before, {most_mib:.0f} at most"
        )
    assert all(not agent.met for agent in agents), [agent.met for agent in agents]
    assert most_mib - before_mib <= RSS_MAX_MIB


async def turn_about(crowded: GatewayProcess, calm: GatewayProcess) -> None:
    """Agents ask two gateways by turns, of which one has the slow clients: whatever else the
    machine does meets both alike."""
    ports = [int(one.data_url.rpartition(":")[2]) for one in (crowded, calm)]
    pairs = [
        [Agent(f"a{n}-{port}", port, context=b"x" * 4096, growth=64) for port in ports]
        for n in range(AGENTS)
    ]

    async def play(pair: Sequence[Agent], turns: int) -> None:
        for number in range(turns):
            for agent in pair if number % 2 else reversed(pair):
                await agent.turn()

    slow = SlowClients(ports[0])
    try:
        await asyncio.gather(*(play(pair, 3) for pair in pairs))  # warm
        await slow.begin()
        await until_live(crowded, EACH, EACH)
        await until_quiet(crowded)
        await asyncio.gather(*(play(pair, PAIRED_TURNS) for pair in pairs))
        assert slow.lost == 0
    finally:
        await slow.end()
    assert all(not agent.met for pair in pairs for agent in pair)
    with_ms, without_ms = (p99_ms(side, 3) for side in zip(*pairs, strict=True))
    print(
        f"\n{EACH} readers of a byte a second, {EACH} heads at one of two gateways: first event,"
        f" p99 of {AGENTS * PAIRED_TURNS} turns at each, by turns: {with_ms:.1f} ms with,"
        f" {without_ms:.1f} ms without ({with_ms / without_ms:.2f})"
    )
    if IS_FULL:
        assert with_ms <= 1.2 * without_ms


def test_slow_clients_are_not_felt_at_their_gateway_more_than_at_another(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    folders = [tmp_path / name for name in ("crowded", "calm")]
    for folder in folders:
        folder.mkdir()
    try:
        with (
            engine_processes(2, "--seats", "4096") as engines,
            gateway_process(folders[0], [engine.port for engine in engines]) as crowded,
            gateway_process(folders[1], [engine.port for engine in engines]) as calm,
        ):
            asyncio.run(asyncio.wait_for(turn_about(crowded, calm), 500))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_slow_clients_cost_others_nothing_and_the_gateway_little(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with (
            engine_processes(2, "--seats", "4096") as engines,
            gateway_process(tmp_path, [engine.port for engine in engines]) as running,
        ):
            asyncio.run(asyncio.wait_for(scenario(running), 500))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
