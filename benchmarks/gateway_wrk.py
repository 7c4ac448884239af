"""The gateway under wrk, in front of two fake engines: CPU per request, beside two floors.

    python benchmarks/gateway_wrk.py [--seconds 3]

CPU per request is user + system time of the router's processes (/proc/PID/stat) over answered
requests; of ROUNDS interleaved rounds the cheapest counts. It suffers less from a busy machine than
throughput and latency do, but it does suffer: read it beside the floors of the same run.
The router has a core of its own; wrk and the engines share another.
- nginx (least_conn, keep-alive upstream): a C relay that decides nothing about sessions;
- bare: this file's uvloop + httptools relay without decisions, errors, limits or metrics.
Needs wrk; nginx is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import httptools
import uvloop

from result import Row, larger_is_better, report, smaller_is_better, versions

CONNECTIONS = 64
ROUNDS = 2
LOAD_CORE, ROUTER_CORE = 0, 1
SESSIONS = 64
EVENTS, EVENT_GAP_S = 64, 0.005
TICKS = os.sysconf("SC_CLK_TCK")


class Load(NamedTuple):
    """One kind of traffic. `events` per request, 0 for an answer in one piece."""

    name: str
    path: str
    body_bytes: int
    events: int


LOADS = (
    Load("200 B", "/v1/chat/completions", 200, 0),
    Load("32 KB", "/v1/chat/completions", 32 * 1024, 0),
    Load("stream", "/v1/completions?stream", 200, EVENTS),
)
GOALS = {"200 B": "<= 40", "32 KB": "<= 60", "stream": "<= 15"}


class Measured(NamedTuple):
    """What wrk and /proc said."""

    requests: int
    errors: int
    seconds: float
    p50_us: float
    p99_us: float
    cpu_s: float
    rss_mb: float

    def cpu_us(self, load: Load) -> float:
        """CPU microseconds a request, or an event when the load is a stream."""
        return self.cpu_s * 1e6 / max(self.requests * max(load.events, 1), 1)


# The fake engine: answers at once, or streams events.


class Engine(asyncio.Protocol):
    """Reads requests by Content-Length only; as cheap as it can be in Python."""

    ANSWER = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok " * 20}}],
            "usage": {"prompt_tokens": 50, "completion_tokens": 20, "total_tokens": 70},
        }
    ).encode()
    WHOLE = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nserver: fake\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
    )
    HEAD = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    EVENT = b'data: {"choices": [{"delta": {"content": "hello"}}]}\n\n'

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            found = re.search(rb"content-length: (\d+)", head)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self.buffer) < whole:
                return
            self.buffer = self.buffer[whole:]
            if b" /v1/completions?stream" in head:
                asyncio.get_running_loop().create_task(self.stream())
            else:
                self.transport.write(self.WHOLE)

    async def stream(self) -> None:
        self.transport.write(self.HEAD)
        for _ in range(EVENTS):
            if self.transport.is_closing():
                return
            self.transport.write(b"%x\r\n%b\r\n" % (len(self.EVENT), self.EVENT))
            await asyncio.sleep(EVENT_GAP_S)
        if not self.transport.is_closing():
            self.transport.write(b"0\r\n\r\n")


# The bare relay: the least that two parsers and four socket calls cost in Python.


class BareUpstream(asyncio.Protocol):
    """Passes an answer on; back in the idle list at its end."""

    def __init__(self, idle: list[BareUpstream]) -> None:
        self.idle, self.client, self.whole = idle, cast(asyncio.Transport, None), False
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def on_message_complete(self) -> None:
        self.whole = True

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        if not self.client.is_closing():
            self.client.write(data)
        if self.whole:
            self.whole = False
            self.idle.append(self)


class BareClient(asyncio.Protocol):
    """Passes a request to the engine its session hashes to."""

    def __init__(self, idle: dict[int, list[BareUpstream]]) -> None:
        self.idle, self.buffer, self.whole, self.session = idle, b"", False, b""
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-session-id":
            self.session = value

    def on_message_complete(self) -> None:
        self.whole = True

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        self.buffer += data
        if not self.whole:
            return
        request, self.buffer, self.whole = self.buffer, b"", False
        port = list(self.idle)[hash(self.session) % len(self.idle)]
        if self.idle[port]:
            upstream = self.idle[port].pop()
            upstream.client = self.transport
            upstream.transport.write(request)
        else:
            asyncio.get_running_loop().create_task(self.connect(port, request))

    async def connect(self, port: int, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(
            lambda: BareUpstream(self.idle[port]), "127.0.0.1", port
        )
        upstream.client = self.transport
        upstream.transport.write(request)


async def serve(port: int, engines: list[int]) -> None:
    """The bare relay over `engines`, or a fake engine when there are none."""
    idle: dict[int, list[BareUpstream]] = {engine: [] for engine in engines}
    make = (lambda: BareClient(idle)) if engines else Engine
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", port)
    await server.serve_forever()


# Processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_port(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nobody listens on port {port} after 10 s")


def placed(core: int, *command: str) -> list[str]:
    """`command` on one core, ahead of the machine's other work where we may."""
    core %= os.cpu_count() or 1
    ahead = ["nice", "-n", "-15"] if os.geteuid() == 0 else []
    return [*ahead, "taskset", "-c", str(core), *command]


@contextmanager
def running(*command: str, core: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(placed(core, *command), stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(40)


def family(pid: int) -> list[int]:
    """The process and its children."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [pid, *map(int, found.stdout.split())]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


@contextmanager
def gateway(folder: Path, ports: list[int]) -> Iterator[tuple[int, int]]:
    """OwnerServe's gateway: (port, pid)."""
    ready = folder / "gateway.ready"
    workers = [part for port in ports for part in ("--worker", f"http://127.0.0.1:{port}")]
    module = ["-m", "ownerserve.cli.main", "gateway", "--ready-file", str(ready)]
    module += ["--port", "0", "--admin-port", "0"]
    command = [sys.executable, *module, "--drain-timeout", "1", *workers]
    with running(*command, core=ROUTER_CORE) as process:
        while not ready.exists():
            time.sleep(0.02)
        yield int(ready.read_text().split()[0].rpartition(":")[2]), process.pid


@contextmanager
def served(ports: list[int]) -> Iterator[tuple[int, int]]:
    """This file as a server: a fake engine (no `ports`), or the bare relay over them."""
    port = free_port()
    command = [sys.executable, __file__, "--serve", str(port), *map(str, ports)]
    with running(*command, core=ROUTER_CORE if ports else LOAD_CORE) as process:
        wait_port(port)
        yield port, process.pid


@contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[tuple[int, int]]:
    """nginx as the floor: one worker, least_conn, keep-alive upstream."""
    port = free_port()
    servers = "".join(f"server 127.0.0.1:{one};" for one in ports)
    config = folder / "nginx.conf"
    config.write_text(
        f"""worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{ access_log off; client_body_buffer_size 64k; keepalive_requests 1000000000;
 client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
 uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
 upstream engines {{ least_conn; {servers} keepalive 256; keepalive_requests 1000000000; }}
 server {{ listen 127.0.0.1:{port};
  location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_buffering off;
   proxy_set_header Connection ""; }} }} }}
"""
    )
    binary = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or "nginx"
    with running(binary, "-p", str(folder), "-c", str(config), core=ROUTER_CORE) as process:
        wait_port(port)
        yield port, process.pid


# Measuring


def lua(folder: Path, load: Load) -> Path:
    """wrk's script: the load's requests, over SESSIONS sessions in turn."""
    frame = '{"model": "fake", "messages": [{"role": "user", "content": ""}]}'
    text = ("hello " * (load.body_bytes // 6 + 1))[: load.body_bytes - len(frame)]
    body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": text}]})
    script = folder / "load.lua"
    script.write_text(
        f"""local body = '{body}'
local requests, at = {{}}, 0
init = function()
  for i = 1, {SESSIONS} do
    requests[i] = wrk.format("POST", "{load.path}",
      {{["content-type"] = "application/json", ["x-session-id"] = "s" .. i}}, body)
  end
end
request = function() at = at % {SESSIONS} + 1; return requests[at] end
done = function(summary, latency)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %f %f %f\\n", summary.requests,
    e.connect + e.read + e.write + e.status + e.timeout, summary.duration / 1e6,
    latency:percentile(50), latency:percentile(99)))
end
"""
    )
    return script


def measure(folder: Path, load: Load, seconds: float, *, port: int, pid: int) -> Measured:
    """One run of wrk against `port`; CPU of `pid` and its children."""
    pids = family(pid)
    before = sum(map(cpu_s, pids))
    connections = str(CONNECTIONS * (4 if load.events else 1))
    script, url = str(lua(folder, load)), f"http://127.0.0.1:{port}"
    wrk = [
        "wrk",
        "-t1",
        "--timeout",
        "20s",
        "-c",
        connections,
        "-d",
        f"{seconds:g}s",
        "-s",
        script,
        url,
    ]
    output = subprocess.run(
        placed(LOAD_CORE, *wrk), capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"RESULT (\d+) (\d+) ([\d.]+) ([\d.]+) ([\d.]+)", output)
    if found is None:
        raise SystemExit(f"wrk said:\n{output}")
    return Measured(
        requests=int(found[1]),
        errors=int(found[2]),
        seconds=float(found[3]),
        p50_us=float(found[4]),
        p99_us=float(found[5]),
        cpu_s=sum(map(cpu_s, pids)) - before,
        rss_mb=sum(map(rss_mb, pids)),
    )


def rows(load: Load, measured: dict[str, Measured]) -> list[Row]:
    """The result rows of one load."""
    ours, bare, theirs = measured["ours"], measured["bare"], measured.get("nginx")
    name = f"{load.name}: cpu per {'event' if load.events else 'request'}"
    result = [
        smaller_is_better(
            name, "us", ours.cpu_us(load), other=other.cpu_us(load), other_name=label, goal=goal
        )
        for label, other, goal in (("nginx", theirs, GOALS[load.name]), ("bare relay", bare, ""))
        if other is not None
    ]
    beside = theirs or bare
    rate, other_rate = ours.requests / ours.seconds, beside.requests / beside.seconds
    label = "nginx" if theirs else "bare relay"
    result += [
        larger_is_better(
            f"{load.name}: throughput", "requests/s", rate, other=other_rate, other_name=label
        ),
        smaller_is_better(
            f"{load.name}: p50", "us", ours.p50_us, other=beside.p50_us, other_name=label
        ),
        smaller_is_better(
            f"{load.name}: p99", "us", ours.p99_us, other=beside.p99_us, other_name=label
        ),
        smaller_is_better(
            f"{load.name}: rss", "MB", ours.rss_mb, other=beside.rss_mb, other_name=label
        ),
        Row(f"{load.name}: errors", "requests", ours.errors, beside.errors, label, goal="0"),
    ]
    return result


def run(seconds: float) -> list[Row]:
    """Every load against every router, by turns."""
    result: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [stack.enter_context(served([]))[0] for _ in range(2)]
        routers = {
            "ours": stack.enter_context(gateway(folder, ports)),
            "bare": stack.enter_context(served(ports)),
        }
        if shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"):
            routers["nginx"] = stack.enter_context(nginx(folder, ports))
        for load in LOADS:
            rounds = [
                (name, measure(folder, load, seconds, port=port, pid=pid))
                for _ in range(ROUNDS)
                for name, (port, pid) in routers.items()
            ]
            cheapest = {
                name: min(
                    (one for other, one in rounds if other == name),
                    key=lambda one: one.cpu_us(load),
                )
                for name in routers
            }
            errors = sum(one.errors for name, one in rounds if name == "ours")
            cheapest["ours"] = cheapest["ours"]._replace(errors=errors)
            result += rows(load, cheapest)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--serve", type=int, nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        uvloop.run(serve(given.serve[0], given.serve[1:]))
        return
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing; apt-get install wrk")
    report("gateway_wrk", run(given.seconds), others=versions(["uvloop", "httptools"]))


if __name__ == "__main__":
    main()
