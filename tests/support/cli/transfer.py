"""`ownerserve transfer` as a user runs it, and what may be at the port that he names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ownerserve.cli.main import cli
from tests.support.children import importing
from tests.support.waits import WAIT_S, until


def check(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code of `transfer check`, and what it says of each road."""
    result = CliRunner().invoke(cli, ["transfer", "check", *arguments, "--json", "-"])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    assert report["schema"] == "ownerserve.transfer.check/1"
    return result.exit_code, {road["road"]: road for road in report["roads"]}


@contextmanager
def impostor(said: bytes, *, then: str) -> Iterator[str]:
    """A port that is no lender's: it says something to each who comes, and `then` it "closes" or
    "waits"."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(said)
                    while then == "waits" and connection.recv(1024):
                        pass

        def until_closed() -> None:
            with suppress(OSError):
                serve()

        thread = threading.Thread(target=until_closed)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def begun(
    *arguments: str, before: Sequence[str] = (), cwd: Path | None = None
) -> subprocess.Popen[str]:
    """`ownerserve transfer ...`, running, in a session of its own; `before` are words before it."""
    command = [*before, sys.executable, "-m", "ownerserve.cli.main", "transfer", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=importing(),
        cwd=cwd,
        start_new_session=True,
    )


class Ended:
    """How a command ended: its code, what it printed, and its one line of error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.out, self.err = process.communicate(timeout=WAIT_S)
        self.code = process.returncode

    @property
    def json(self) -> dict[str, Any]:
        report = json.loads(self.out)
        assert isinstance(report, dict)
        return report

    @property
    def line(self) -> str:
        [line] = self.err.strip().splitlines()
        return line


def ended(*arguments: str, before: Sequence[str] = ()) -> Ended:
    """`ownerserve transfer ...`, to its end."""
    return Ended(begun(*arguments, before=before))


@contextmanager
def serving(
    folder: Path, *arguments: str, before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`ownerserve transfer serve ...` and its address, killed at the end if it still runs."""
    ready = folder / f"ready-{time.monotonic_ns()}"
    process = begun("serve", *arguments, "--ready-file", str(ready), before=before)
    try:
        until(lambda: ready.exists() or process.poll() is not None, what="a test pool")
        assert process.poll() is None, process.communicate()
        yield process, ready.read_text().strip()
    finally:
        process.kill()
        process.communicate()


def children_of(pid: int) -> list[int]:
    """The pids of a process's children now."""
    with suppress(FileNotFoundError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def cpu_s(pid: int) -> float:
    """The CPU seconds that a process has had."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")


def lives(pid: int) -> bool:
    """Whether the process has not ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
