"""Who is measured: each contender is a name, an environment and a way to make engine arguments.

    none         vLLM alone, its own prefix cache (LRU)
    noop         a connector that does nothing but exist: in the overhead table only
    offloading   vLLM's OffloadingConnector: host memory, then its `fs` tier (cpu_offload_spec.py)
    lmcache      LMCache 0.5.6 in multi-process mode; its server and its DRAM outlive the engine
    ours         OwnerServe's connector over a store on disk, with a host cache

All run the same vLLM on the same checkpoints; `lmcache` from an environment that has it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.vllm import connectors, tiny  # noqa: E402
from tests.support.vllm.fleet import VllmWorker, Zygote  # noqa: E402
from tests.support.vllm.wire import Boot  # noqa: E402

GIB = 1 << 30
HOST_BYTES = GIB
SERVER_START_S = 240.0
NAMES = ("none", "offloading", "lmcache", "ours")


class Contender(msgspec.Struct, frozen=True):
    """A contender that is ready to run: `engine_args` over its data folder."""

    name: str
    zygote: Zygote
    engine_args: dict[str, Any]
    data: Path

    def worker(self, model: Path, log: Path, **engine_args: Any) -> VllmWorker:
        """A fresh engine of the contender; what its tiers hold it finds again."""
        arguments = {**self.engine_args, **engine_args}
        imports = ["lmcache_dodge"] if self.name == "lmcache" else []
        boot = Boot(model=str(model), log=str(log), engine_args=arguments, imports=imports)
        return self.zygote.fork(boot)

    def stored_bytes(self) -> int:
        """What lies on disk, in whole pages as `du` counts them; 0 for who keeps nothing there."""
        files = (path for path in self.data.rglob("*") if path.is_file())
        total = 0
        for path in files:
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_blocks * 512
        return total

    def leave_page_cache(self) -> None:
        """Make what lies on disk be read from there: a host that starts again has no page cache.
        Ours is written and read past it anyway."""
        for path in (path for path in self.data.rglob("*") if path.is_file()):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Arena:
    """Zygotes by environment and a scratch folder; makes contenders by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._zygotes: dict[str, Zygote] = {}

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def checkpoint(self, family: str) -> Path:
        folder = self.folder / family
        if not folder.exists():
            tiny.write_checkpoint(family, folder)
        return folder

    @contextlib.contextmanager
    def contender(self, name: str) -> Iterator[Contender]:
        """A contender with empty tiers, which are removed at the end."""
        data = self.folder / f"data-{name}"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(parents=True)
        try:
            with _backend(name, data) as engine_args:
                venv = ".venv-lmcache" if name == "lmcache" else ".venv-vllm"
                yield Contender(name, self._zygote(venv), engine_args, data)
        finally:
            shutil.rmtree(data, ignore_errors=True)

    def _zygote(self, venv: str) -> Zygote:
        if venv not in self._zygotes:
            folder = self.folder / f"zygote{venv}"
            folder.mkdir(exist_ok=True)
            python = ROOT / venv / "bin" / "python"
            self._zygotes[venv] = self._stack.enter_context(Zygote(folder, python=python))
        return self._zygotes[venv]


@contextlib.contextmanager
def _backend(name: str, data: Path) -> Iterator[dict[str, Any]]:
    """Engine arguments, with what they talk to running meanwhile."""
    if name == "none":
        yield connectors.none()
    elif name == "noop":
        yield connectors.noop()
    elif name == "offloading":
        yield connectors.offloading(data, host_bytes=HOST_BYTES)
    elif name == "ours":
        yield connectors.ours(data / "store", host_cache_bytes=HOST_BYTES, restores="by-cost")
    elif name == "lmcache":
        with _lmcache_server(data) as port:
            yield connectors.lmcache(port)
    else:
        raise ValueError(f"no contender {name!r}; there are {', '.join(NAMES)}")


@contextlib.contextmanager
def _lmcache_server(data: Path) -> Iterator[int]:
    """LMCache's cache server with the transfer mode that works on a CPU; yields its port."""
    port, http_port = _free_port(), _free_port()
    command = [str(ROOT / ".venv-lmcache" / "bin" / "lmcache"), "server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)]
    command += ["--supported-transfer-mode", "engine_driven", "--l1-size-gb", "2"]
    command += ["--eviction-policy", "LRU", "--chunk-size", "256", "--disable-observability"]
    with (data / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"},
            start_new_session=True,
        )
        try:
            _wait_for_port(port, server, data / "server.log")
            yield port
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no server on port {port}:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
