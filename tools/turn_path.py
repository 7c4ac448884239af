"""Which files of ours one warm turn passes: the second turn of a session, over real processes.

A directory, a worker of the reference engine and a gateway are started by their commands, each
with a profile function in it (tools/turn_probe). A session's first turn is asked, then what runs
between the second turn's first byte and its last is noted in the gateway and in the worker. Timers
run in that time too, so several sessions are measured and what *every* one of them passed counts.

    python tools/turn_path.py [FOLDER]      one line a file, from the checkout FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROBE = Path(__file__).resolve().parent / "turn_probe"
SESSIONS = 6
START_S = 120.0
SETTLE_S = 1.0
"""Between two turns, so that what a turn leaves to be done is done: spills, published extents."""
TOOL_TEXT = "the tool answered with a line of text like this one. " * 12


class TurnPath(NamedTuple):
    """What every measured warm turn passed. `all_files`: what any of them did."""

    files: list[str]
    records: list[str]
    all_files: list[str]


class _Fleet:
    """The three processes over a folder for their logs and ready files."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._source = checkout / "src"
        self._folder = folder
        self._children: list[subprocess.Popen[bytes]] = []
        self.probe = folder / "probe"
        self.probe.mkdir()

    def start(self) -> str:
        """The gateway's URL, once all of them are ready."""
        [directory] = self._spawn("directory", "directory", "serve", "--port", "0", "--new-fleet")
        worker = self._spawn(
            *("worker", "worker", "--model", "tiny-qwen3", "--port", "0"),
            *("--kv-memory", "16MiB", "--host-cache", "16MiB", "--worker-id", "worker-0"),
            *("--store", str(self._folder / "store"), "--directory", directory),
        )[0]
        gateway = self._spawn(
            *("gateway", "gateway", "--port", "0", "--admin-port", "0"),
            *("--directory", directory, "--worker", worker),
        )
        return gateway[0]

    def stop(self) -> None:
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _spawn(self, name: str, *arguments: str) -> list[str]:
        ready = self._folder / f"{name}.ready"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(PROBE), str(self._source))),
            "TURN_SOURCE": str(self._source / "ownerserve"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if name != "directory":
            environment["TURN_PROBE"] = str(self.probe)
        command = [sys.executable, "-m", "ownerserve.cli.main"]
        log = self._folder / f"{name}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                [*command, *arguments, "--ready-file", str(ready)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self._children.append(child)
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        return ready.read_text().split()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What runs inside is noted by the gateway and the worker."""
        marker = self.probe / "on"
        marker.touch()
        _until(lambda: len(list(self.probe.glob("*.ready"))) == 2)
        yield
        before = len(list(self.probe.glob("*.json")))
        marker.unlink()
        _until(lambda: len(list(self.probe.glob("*.json"))) == before + 2)
        for ready in self.probe.glob("*.ready"):
            ready.unlink()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("waited too long")
        time.sleep(0.005)


def _ask(url: str, session: str, messages: list[dict[str, str]]) -> tuple[str, int]:
    """One turn to its last byte: what was said, and the cached prompt tokens."""
    body = {
        "model": "tiny-qwen3",
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-session-id": session},
    )
    text, cached = "", 0
    with urllib.request.urlopen(request, timeout=START_S) as response:
        for line in response.read().decode().splitlines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return text, cached


def measure(checkout: Path = ROOT) -> TurnPath:
    """Start a fleet from `checkout`, take SESSIONS warm turns, stop it. About 30 s."""
    source = checkout / "src" / "ownerserve"
    with tempfile.TemporaryDirectory(prefix="turn-path-") as name:
        fleet = _Fleet(checkout, Path(name))
        try:
            url = fleet.start()
            for index in range(SESSIONS):
                session = f"session-{index}"
                messages = [{"role": "user", "content": f"task {index}: {TOOL_TEXT * 4}"}]
                said, _ = _ask(url, session, messages)
                messages += [{"role": "assistant", "content": said}]
                messages += [{"role": "user", "content": TOOL_TEXT}]
                time.sleep(SETTLE_S)
                with fleet.noted():
                    _, cached = _ask(url, session, messages)
                if not cached:
                    raise RuntimeError("the second turn was not warm")
            return _common(fleet.probe, source)
        finally:
            fleet.stop()


def _common(probe: Path, source: Path) -> TurnPath:
    """What the noted turns have in common, each turn being what both processes wrote of it."""
    turns: dict[str, tuple[set[str], set[str]]] = {}
    for path in sorted(probe.glob("*.json")):
        noted = json.loads(path.read_text())
        files, records = turns.setdefault(path.stem.split("-")[1], (set(), set()))
        files.update(Path(file).relative_to(source).as_posix() for file in noted["files"])
        records.update(noted["records"])
    files_of = [files for files, _ in turns.values()]
    records_of = [records for _, records in turns.values()]
    return TurnPath(
        sorted(set.intersection(*files_of)),
        sorted(set.intersection(*records_of)),
        sorted(set.union(*files_of)),
    )


def main(arguments: Sequence[str]) -> int:
    checkout = Path(arguments[0]).resolve() if arguments else ROOT
    path = measure(checkout)
    for file in path.files:
        lines = len((checkout / "src" / "ownerserve" / file).read_text().splitlines())
        print(f"{lines:5d} {file}")
    print(f"{len(path.files)} files; {len(path.all_files)} with what timers did")
    print(f"{len(path.records)} record types: {', '.join(path.records)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
