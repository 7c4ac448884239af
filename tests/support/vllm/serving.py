"""A real `vllm serve` and a real gateway in front of it, as an operator starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from ownerserve.cli.demo.processes import FREE_PORTS, Child
from tests.support.children import ROOT
from tests.support.net import free_port, is_free
from tests.support.vllm import tiny
from tests.support.vllm.fleet import vllm_python
from tests.support.vllm.warm_server import Order, Prices
from tests.support.waits import until

SERVE_S = 480.0
END_S = 30.0
PROMPT_TOKENS = 1200
"""Those of an agent's first turn."""
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32"]
FLAGS += ["--num-gpu-blocks-override", "300", "--kv-cache-memory-bytes", str(1 << 30)]
FLAGS += ["--generation-config", "vllm", "--served-model-name", "tiny"]
FLAGS += ["--enable-prompt-tokens-details"]


@contextmanager
def serve(
    model: Path,
    connector: dict[str, Any],
    log: Path,
    *more: str,
    installed: Path | None = None,
    port: int = 0,
) -> Iterator[Server]:
    """The real OpenAI server as an operator starts it, with `more` flags. `installed`: a folder
    with our distribution, whose plug-ins are allowed."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    # `vllm serve` of the CPU wheel asks for a package called vllm and dies; this is its server.
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server"]
    command += [*_given(model, connector, port), *more]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=_settings(installed), start_new_session=True
        )
        try:
            _wait_healthy(url, lambda: process.poll() is not None, log)
            yield Server(url, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _given(model: Path, connector: dict[str, Any], port: int) -> list[str]:
    config = msgspec.json.encode(connector["kv_transfer_config"]).decode()
    given = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), *FLAGS]
    return [*given, "--kv-transfer-config", config]


def _settings(installed: Path | None) -> dict[str, str]:
    # Beside our source, out-of-tree parts for vLLM's own connectors.
    path = [ROOT / "src", ROOT / "benchmarks" / "vllm", *([installed] if installed else [])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        **({"VLLM_PLUGINS": "ownerserve"} if installed else {}),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        # Of a server that is told --otlp-traces-endpoint.
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }


class WarmServers:
    """`vllm serve`, again and again, of one warm process that has imported vLLM (`warm_server`). A
    context manager; every server ends with it. `environment`: more of the servers'."""

    def __init__(self, installed: Path, log: Path, **environment: str) -> None:
        settings = {**_settings(installed), **environment}
        settings["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [str(vllm_python()), "-m", "tests.support.vllm.warm_server"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=settings,
            )  # fmt: skip
        self._log = log
        self._servers: list[Server] = []

    def __enter__(self) -> WarmServers:
        assert self._said() == b"ready", self._log.read_text()[-4000:]
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            with suppress(ProcessLookupError):
                server.kill()
        self._process.kill()
        self._process.communicate()

    @contextmanager
    def serve(
        self,
        model: Path,
        connector: dict[str, Any],
        log: Path,
        *more: str,
        port: int = 0,
        prices: Prices = "measured",
    ) -> Iterator[Server]:
        """The function `serve`, but for the imports of its processes."""
        port = port or free_port()
        server = self.begin(model, connector, log, *more, port=port, prices=prices)
        try:
            yield server
        finally:
            server.end()

    def begin(
        self,
        model: Path,
        connector: dict[str, Any],
        log: Path,
        *more: str,
        port: int,
        prices: Prices = "measured",
    ) -> Server:
        """A server that answers."""
        assert self._process.stdin is not None
        order = Order([*_given(model, connector, port), *more], str(log), prices)
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        server = Server(f"http://127.0.0.1:{port}", int(self._said()))
        self._servers.append(server)
        _wait_healthy(server.url, server.is_over, log)
        return server

    def _said(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Server(NamedTuple):
    """A server that answers; it leads its own process group."""

    url: str
    pid: int

    def kill(self) -> None:
        """kill -9 to all of it. The next server may have its port: what vLLM forked holds it too,
        and so do threads of what is a zombie by name. All are gone when this returns."""
        os.killpg(self.pid, signal.SIGKILL)
        until(lambda: not _runs(self.pid), what="its processes to go")
        port = int(self.url.rpartition(":")[2])
        until(lambda: is_free(port), what="its port, which threads hold until all have ended")

    def end(self) -> None:
        """SIGTERM, and kill -9 to all that is left when it takes too long."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while not self.is_over() and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            self.kill()

    def is_over(self) -> bool:
        """Whether its first process has ended; what nobody waits for yet is a zombie."""
        state, _, _ = _stat_of(Path(f"/proc/{self.pid}"))
        return state in GONE


GONE = ("", "Z", "X")


def _runs(group: int) -> bool:
    """Whether a process group has processes that run."""
    stats = map(_stat_of, Path("/proc").glob("[0-9]*"))
    return any(state not in GONE and int(own) == group for state, _, own in stats)


def _stat_of(process: Path) -> tuple[str, str, str]:
    """A process's state, its parent and its group; empty: it has gone."""
    try:
        state, parent, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return "", "", ""
    return state, parent, group


def _wait_healthy(url: str, is_over: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + SERVE_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if is_over() or time.monotonic() > deadline:
            pytest.fail(f"vllm serve did not come up\n{log.read_text()[-4000:]}")
        time.sleep(0.2)


@contextmanager
def gateway(workers: Sequence[str], folder: Path, *more: str) -> Iterator[tuple[str, str]]:
    """One in front of `workers`: its URL and its admin port's."""
    folder.mkdir()
    over = [word for url in workers for word in ("--worker", url)]
    fixed = [*FREE_PORTS, "--opening", "0", "--receipts", "open"]
    child = Child("gateway", ["gateway", *fixed, *over, *more], folder)
    try:
        url, admin = child.wait_ready(60)
        yield url, admin
    finally:
        child.stop()


class Agent:
    """A session that goes on from its own answers."""

    def __init__(self, url: str, name: str, seed: int) -> None:
        self.url = url
        self.name = name
        self.tokens = tiny.prompt(PROMPT_TOKENS, seed=seed)

    def turn(self, *, answer_tokens: int = 4, **more: str) -> dict[str, str]:
        """The answer's header lines, and `cached`."""
        body = {
            "model": "tiny", "prompt": self.tokens, "max_tokens": answer_tokens, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        headers = {"x-session-id": self.name, **more}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        read = answer.json()
        self.tokens += read["choices"][0]["token_ids"] + tiny.prompt(40, seed=len(self.tokens))
        details = read["usage"]["prompt_tokens_details"] or {}
        prefix = "x-ownerserve-"
        told = {
            key.removeprefix(prefix): value
            for key, value in answer.headers.items()
            if key.startswith(prefix)
        }
        return {**told, "cached": str(details.get("cached_tokens") or 0)}
