"""This module begins the demo's processes as forks of one that has imported what they run: a worker
is there after a tenth of a second of CPU, and not after ten.

A fork is a process of its own: nothing but imports is shared, and nothing was computed before. The
process that it comes of runs no other code and no thread, and ends when the demo does; so do its
forks, however that comes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import get_context, parent_process
from pathlib import Path

from ownerserve.cli.demo.processes import ChildProcess, die_with_parent

PRELOADED = "ownerserve.cli.demo.preload"
_context = get_context("forkserver")


def forked(arguments: Sequence[str], log_path: Path) -> ChildProcess:
    """Begin a child as a fork, which has the engine imported."""
    return _Fork(arguments, log_path)


class _Fork:
    def __init__(self, arguments: Sequence[str], log_path: Path) -> None:
        _context.set_forkserver_preload([PRELOADED])
        told = (list(arguments), str(log_path))
        self._process = _context.Process(target=_become, args=told, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "it was started"
        return pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired([str(self._process.name)], timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _become(arguments: list[str], log_path: str) -> None:
    """Run the command in this process, in a group of its own, with its output in the file.

    Of what it was begun with nothing stays open: the process that it comes of lives for as long as
    somebody holds a certain pipe, and that is to be the demo alone.
    """
    from ownerserve.cli.main import main

    os.setsid()
    die_with_parent()
    demo = parent_process()
    if demo is not None and not demo.is_alive():
        return  # so quickly that the parent may have gone before it was watched
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    main(arguments)
