"""Real servers for the remote tier's tests: processes of their own, on a free port of 127.0.0.1."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from ownerserve.kv.units import MIB
from tests.support.net import free_port

HOST = "127.0.0.1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "NO_PROXY": HOST,
}


def _answers(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def server(command: Sequence[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process from when it listens until the end of the block."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 60
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{command[0]} does not listen: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """moto's S3 in a process; its endpoint."""
    os.environ.update(CREDENTIALS)
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    with server(command, port, log):
        yield f"http://{HOST}:{port}"


_SEGMENT_BYTES = 64 * MIB
_LEASE_MS = 200


class MooncakeCluster:
    """A master that can die and come back on its port, and one client that lends memory."""

    def __init__(self, folder: Path) -> None:
        import mooncake
        from mooncake.store import MooncakeDistributedStore

        self._binary = str(Path(mooncake.__path__[0]) / "mooncake_master")
        self._log = folder / "master.log"
        self._port, self._admin = free_port(), free_port()
        self._running = ExitStack()
        self.start()
        self.client = MooncakeDistributedStore()
        self.address = f"{HOST}:{self._port}"
        status = self.client.setup(
            HOST, "P2PHANDSHAKE", _SEGMENT_BYTES, 32 * MIB, "tcp", "", self.address
        )
        assert status == 0

    def start(self) -> None:
        options = {
            "rpc_port": self._port,
            "metrics_host": HOST,
            "metrics_port": self._admin,
            "default_kv_lease_ttl": _LEASE_MS,
        }
        command = [self._binary, *(f"-{name}={value}" for name, value in options.items())]
        self.master = self._running.enter_context(server(command, self._port, self._log))

    def kill_master(self) -> None:
        self.master.kill()
        self.master.wait()

    def close(self) -> None:
        self.client.close()
        self._running.close()


class Fault(Enum):
    """What happens to a request between client and server."""

    NONE = auto()
    BUSY = auto()  # 503 SlowDown, never forwarded
    BROKEN = auto()  # 500, never forwarded
    SLOW = auto()  # no answer within the client's patience
    CUT = auto()  # half of the answer's body, then the connection ends
    LOST_ANSWER = auto()  # done by the server, the client never hears of it


SLOW_S = 6.0
_XML = "<?xml version='1.0'?><Error><Code>{}</Code><Message>by the test</Message></Error>"
_CODES = {Fault.BUSY: (503, "SlowDown"), Fault.BROKEN: (500, "InternalError")}


class FaultProxy(ThreadingHTTPServer):
    """Stands before an S3 server. `fault` befalls the requests that `which` picks."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__((HOST, 0), _Relay)
        self.upstream = urlsplit(upstream)
        self.fault = Fault.NONE
        self.which: Callable[[str, str], bool] = lambda method, path: True
        self.seen: list[str] = []
        self.endpoint = f"http://{HOST}:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gives up is what the tests are about."""


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream)
    thread = Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(f"{self.command} {self.path}")
        chosen = self.server.which(self.command, self.path)
        fault = self.server.fault if chosen else Fault.NONE
        if fault in _CODES:
            status, code = _CODES[fault]
            self._answer(status, [], _XML.format(code).encode())
            return
        if fault is Fault.SLOW:
            time.sleep(SLOW_S)
            self.close_connection = True
            return
        at = self.server.upstream
        upstream = http.client.HTTPConnection(at.hostname or HOST, at.port, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        answer = upstream.getresponse()
        data, headers = answer.read(), answer.getheaders()
        upstream.close()
        if fault is Fault.LOST_ANSWER:
            self.close_connection = True
        else:
            self._answer(answer.status, headers, data, cut=fault is Fault.CUT)

    def _answer(
        self, status: int, headers: Sequence[tuple[str, str]], data: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        own = {"content-length", "connection", "date", "server", "transfer-encoding"}
        for name, value in headers:
            if name.lower() not in own:
                self.send_header(name, value)
        length = {n.lower(): v for n, v in headers}.get("content-length", str(len(data)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay
