"""A process that runs `ownerserve` commands, each in a fork of itself: cheap real processes.

Each line on stdin is a JSON object: `arguments`, `folder` (where it runs), `seconds` (then it is
killed), `blocked` (a package whose import fails), `broken` (an error that `inspect`
meets) and `uid`. Each answer is a line on stdout:
`code` (null when it was killed), `out` and `err`. Modules named as arguments are imported first.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import tempfile
from functools import partial
from typing import Any


class Blocked:
    """A finder by which a package seems not to be installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def broken(error: str, _: str) -> None:
    """What `inspect` meets instead of a configuration."""
    raise eval(error)


def child(asked: dict[str, Any], out: int, err: int) -> None:
    """The command itself. Never returns."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.setsid()
    code = 99
    try:
        os.chdir(asked["folder"])
        os.environ["HOME"] = asked["folder"]
        if package := asked["blocked"]:
            for name in [name for name in sys.modules if name.split(".")[0] == package]:
                del sys.modules[name]
            for name in [name for name in sys.modules if name.startswith("ownerserve")]:
                del sys.modules[name]
            sys.meta_path.insert(0, Blocked(package))
        if error := asked["broken"]:
            importlib.import_module("ownerserve.cli.inspect").find_config = partial(broken, error)
        if asked["uid"]:
            os.setresuid(*[asked["uid"]] * 3)
        main = importlib.import_module("ownerserve.cli.main").main
        main(asked["arguments"])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:  # noqa: BLE001 - the root of the process
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """One command, waited for; killed with all its children when its time is over."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (pid := os.fork()):
            child(asked, out.fileno(), err.fileno())
        watched = os.pidfd_open(pid)
        ended, _, _ = select.select([watched], [], [], asked["seconds"])
        os.close(watched)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status) if ended else None
    return {"code": code, "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()
