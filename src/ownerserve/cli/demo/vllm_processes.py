"""This module runs real `vllm serve` processes for the demo, in the Python that vLLM lives in.

OwnerServe need not be installed there: a folder with one link to this package goes on its path,
never this Python's own packages.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import httpx
import msgspec

import ownerserve
from ownerserve.cli.demo.processes import FREE_PORTS, Child, die_with_parent
from ownerserve.engines.vllm.flags import SERVER_MODULE, transfer_config
from ownerserve.kv.errors import InvalidInput, PeerLost

READY_S = 300.0
STOP_S = 20.0
BLOCK_TOKENS = 32
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


class VllmSetup(msgspec.Struct, frozen=True):
    """The setup is what every worker gets: Python, checkpoint, longest context and its pool, in
    tokens."""

    python: Path
    model: Path
    context_tokens: int
    pool_tokens: int

    @property
    def blocks(self) -> int:
        """The blocks of the pool: room for one longest context at least, and vLLM's null block."""
        return 2 + max(self.pool_tokens, self.context_tokens) // BLOCK_TOKENS

    def arguments(self, port: int, store: Path | None) -> list[str]:
        """Return the arguments of vLLM's server; without a store it is vLLM alone."""
        fixed = [
            *("--model", str(self.model), "--served-model-name", "demo"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(self.context_tokens)),
            *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "8"),
            *("--num-gpu-blocks-override", str(self.blocks)),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
        ]
        if store is None:
            return fixed
        # A tiny model computes as fast as it loads: by cost nothing would be loaded.
        transfer = transfer_config(str(store), restores="always")
        return [*fixed, "--kv-transfer-config", json.dumps(transfer)]


class VllmWorker:
    """A worker is one `vllm serve` and the processes it starts. Owns them."""

    def __init__(self, name: str, setup: VllmSetup, folder: Path, store: Path | None) -> None:
        self.name = name
        self.store = store
        self._port = _free_port()
        self._log_path = folder / f"{name}.log"
        self._log = self._log_path.open("wb")
        self.process = subprocess.Popen(
            [setup.python, "-m", SERVER_MODULE, *setup.arguments(self._port, store)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(_path_of_us(folder))},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    @property
    def url(self) -> str:
        """`url` is where the worker serves."""
        return f"http://127.0.0.1:{self._port}"

    def wait_ready(self) -> str:
        """Return the URL, once it answers. Raises PeerLost with the end of its log."""
        deadline = time.monotonic() + READY_S
        while True:
            if self.process.poll() is not None:
                raise PeerLost(f"{self.name} exited with {self.process.returncode}:\n{self._end()}")
            if time.monotonic() > deadline:
                raise PeerLost(f"{self.name} not ready after {READY_S:.0f} s:\n{self._end()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return self.url
            except httpx.HTTPError:
                time.sleep(0.2)

    def stop(self) -> None:
        """Ask the worker to stop, wait, then kill it with all it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()

    def kill(self) -> None:
        """Kill the process group as a crash would: no part of it gets to say goodbye."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _end(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if "Error: " in line][:3] or lines[-15:])


class VllmFleet:
    """The fleet is vLLM workers and the gateway in front. Leaving it stops all."""

    def __init__(self, setup: VllmSetup, folder: Path) -> None:
        self._setup = setup
        self._folder = folder
        self._gateway: Child | None = None
        self.workers: list[VllmWorker] = []
        self.gateway_url = ""

    def start(self, stores: list[Path | None]) -> None:
        """Start one worker for each entry, then the gateway. Raises PeerLost."""
        for store in stores:
            self.spawn(store)
        urls = [worker.wait_ready() for worker in self.workers]
        over = [part for url in urls for part in ("--worker", url)]
        self._gateway = Child(
            "gateway", ["gateway", *FREE_PORTS, "--policy", "sticky", *over], self._folder
        )
        self.gateway_url = self._gateway.wait_ready(60)[0]

    def spawn(self, store: Path | None) -> VllmWorker:
        """Start one more worker, which is not waited for."""
        name = f"vllm-{len(self.workers)}"
        worker = VllmWorker(name, self._setup, self._folder, store)
        self.workers.append(worker)
        return worker

    def __enter__(self) -> VllmFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._gateway is not None:
            self._gateway.stop()
        for worker in self.workers:
            worker.stop()


def find_python(given: Path | None) -> Path:
    """Find a Python with vLLM: the one given, .venv-vllm of this folder, or this one. Raises
    InvalidInput when none has it."""
    import sys

    candidates = [given] if given is not None else [Path(".venv-vllm/bin/python").absolute()]
    for python in candidates:
        if python.exists():
            probe = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
            if subprocess.run([python, "-c", probe], capture_output=True).returncode == 0:
                return python.absolute()
    if given is None and find_spec("vllm") is not None:
        return Path(sys.executable)
    problem = f"{given} has no vLLM" if given is not None else "no Python with vLLM was found"
    mend = "name one that has it; `ownerserve doctor vllm` says more"
    raise InvalidInput("--vllm-python", problem, mend)


def _path_of_us(folder: Path) -> Path:
    path = folder / "path"
    path.mkdir(exist_ok=True)
    link = path / "ownerserve"
    if not link.exists():
        link.symlink_to(Path(ownerserve.__file__).parent)
    return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
