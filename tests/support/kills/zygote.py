"""A warm process that has imported what a fleet's members import, and forks one for each asker.

    python -m tests.support.kills.zygote SOCKET

A worker takes seconds of CPU to import torch and transformers; forked it takes none. A member is a
process like any other: it leads a session of its own, writes to its own log, and dies by SIGKILL.
The zygote ends with whoever holds its standard input, and each member with the zygote: a run that
is killed leaves no process.

    asker ── {"given", "log"} ──> fork ── pid ──> asker ── exit code, or nothing: it was killed
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec


class Order(msgspec.Struct):
    """`ownerserve GIVEN...`, whose output goes to `log`."""

    given: list[str]
    log: str


def _import_all() -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import ownerserve.cli.directory.command
    import ownerserve.cli.gateway
    import ownerserve.cli.worker
    import ownerserve.engines.hf.build
    import ownerserve.engines.hf.http.serve
    import ownerserve.engines.hf.http.server  # noqa: F401
    from tests.support.kills.checked import watch

    watch()


def main(path: str) -> None:
    _import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the members here
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.part")
        listener.listen()
        Path(f"{path}.part").rename(path)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                Path(path).unlink()
                Path(path).parent.rmdir()
                return
            asker, _ = listener.accept()
            with asker:
                if os.fork() == 0:
                    listener.close()
                    _member(asker)


PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def _member(asker: socket.socket) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    order = msgspec.json.decode(asker.recv(1 << 16), type=Order)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Path(order.log).open("ab") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    asker.send(f"{os.getpid()}\n".encode())
    code = 1
    try:
        from ownerserve.cli.main import main as command

        sys.argv = ["ownerserve", *order.given]
        command()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        asker.send(f"{code}\n".encode())
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
