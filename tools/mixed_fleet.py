"""Two versions in one fleet, as processes: workers, a directory and a gateway of this tree and of
another revision, in every mix that an upgrade passes through.

    python tools/mixed_fleet.py REVISION [--json PATH]

For each mix: sessions of several turns through the gateway, each answer beside the one that the
same worker gives cold under a salt of its own; the sessions go on when one worker is replaced by
the other version on the same store. It says what was cached, who owns, what was not understood. The
other tree is a `git worktree`, which goes at the end; everything else lies in a temporary folder.
Exit 1 when a request fails, an answer differs or nothing is cached.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "tests/support/versions/wire_samples.py"
SESSIONS, TURNS, NEW_TOKENS = 4, 3, 6
FIRST_TOKENS, MORE_TOKENS = 192, 64
WAIT_S = 180.0
OWNED_WITHIN_S = 30.0


class Mix(NamedTuple):
    """Which tree each process is of: `new` is this one."""

    name: str
    directory: str
    gateway: str
    workers: tuple[str, str]


MIXES = (
    Mix("all of the other version", "old", "old", ("old", "old")),
    Mix("all of this version", "new", "new", ("new", "new")),
    Mix("the directory first", "new", "old", ("old", "old")),
    Mix("then one worker", "new", "old", ("new", "old")),
    Mix("then all workers", "new", "old", ("new", "new")),
    Mix("the gateway first", "old", "new", ("old", "old")),
    Mix("workers before the directory", "old", "old", ("new", "old")),
    Mix("gateway and workers before the directory", "old", "new", ("new", "new")),
)


class Failed(Exception):
    """A mix does not serve as it should."""


@contextmanager
def running(tree: Path, folder: Path, *words: str) -> Iterator[list[str]]:
    """`ownerserve WORDS` of a tree until the end, and the lines of its ready file."""
    folder.mkdir(exist_ok=True)
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    path = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ownerserve.cli.main", *words, "--ready-file", str(ready)],
            env={**os.environ, **path}, stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip
    try:
        end_s = time.monotonic() + WAIT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end_s:
                raise Failed(f"{words[0]} did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield ready.read_text().split()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def tree_of(revision: str, folder: Path) -> Iterator[Path]:
    """The tree at a revision, until the end."""
    tree = folder / "tree"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", str(tree), revision], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def messages_read(writer: Path, reader: Path) -> str:
    """What the reader's tree says of the messages that the writer's tree writes."""

    def spoken(tree: Path, *words: str, said: bytes = b"") -> bytes:
        env = {**os.environ, "PYTHONPATH": str(tree / "src")}
        command = [sys.executable, str(SAMPLES), *words]
        return subprocess.run(command, input=said, env=env, capture_output=True, check=False).stdout

    return spoken(reader, "--read", said=spoken(writer)).decode().strip()


class Fleet:
    """The processes of a mix; a worker's store outlives it."""

    def __init__(self, mix: Mix, trees: dict[str, Path], folder: Path) -> None:
        self.mix = mix
        self._trees, self._folder = trees, folder
        self._stack = ExitStack()
        serve = ("directory", "serve", "--port", "0", "--new-fleet", "--home", str(folder / "home"))
        (self.directory,) = self._start("directory", mix.directory, *serve)[:1]
        self.workers: list[str] = []
        self._stops: list[ExitStack] = []
        for number, version in enumerate(mix.workers):
            self._worker(number, version)
        named = [word for url in self.workers for word in ("--worker", url)]
        ports = ("--port", "0", "--admin-port", "0", "--receipts", "open")
        said = self._start(
            "gateway", mix.gateway, "gateway", *ports, "--directory", self.directory, *named
        )
        self.gateway, self.admin = said[:2]

    def _start(self, name: str, version: str, *words: str) -> list[str]:
        return self._stack.enter_context(running(self._trees[version], self._folder / name, *words))

    def _worker(self, number: int, version: str, port: str = "0") -> None:
        stop = self._stack.enter_context(ExitStack())
        name = f"w{number}"
        words = ["worker", "--model", "tiny-qwen3", "--kv-memory", "8MiB", "--port", port]
        words += ["--worker-id", name, "--threads", "1", "--directory", self.directory]
        words += ["--rpc-port", "0", "--store", str(self._folder / f"store{number}")]
        started = running(self._trees[version], self._folder / name, *words)
        url = stop.enter_context(started)[0]
        self.workers[number : number + 1] = [url]
        self._stops[number : number + 1] = [stop]

    def replace_worker(self, number: int) -> None:
        """The worker stops, and comes back as the other version: same port, same store."""
        port = self.workers[number].rpartition(":")[2]
        self._stops[number].close()
        other = "old" if self.mix.workers[number] == "new" else "new"
        self._worker(number, other, port)

    def close(self) -> None:
        self._stack.close()


class Session:
    """A session, its prompt so far, and where its last turn ran."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        self.name, self.prompt = name, prompt
        self.worker = ""


def complete(url: str, prompt: list[int], **headers: str) -> tuple[httpx.Response, list[int]]:
    """One greedy answer to a prompt of token ids."""
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True}
    salt = headers.pop("salt", None)
    said = body if salt is None else {**body, "cache_salt": salt}
    answer = httpx.post(f"{url}/v1/completions", json=said, headers=headers, timeout=WAIT_S)
    if answer.status_code != httpx.codes.OK:
        raise Failed(f"{answer.status_code}: {answer.text[:300]}")
    return answer, answer.json()["choices"][0]["token_ids"]


def metric(url: str, start: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=WAIT_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))


def play(fleet: Fleet, sessions: list[Session], turns: int) -> tuple[int, int]:
    """Turns of all sessions; prompt tokens and cached ones. Raises Failed for a wrong answer."""
    prompts = cached = 0
    for turn in range(turns):
        for session in sessions:
            answer, tokens = complete(
                fleet.gateway, session.prompt, **{"x-session-id": session.name}
            )
            session.worker = f"http://{answer.headers['x-ownerserve-worker']}"
            _, cold = complete(
                session.worker, session.prompt, salt=f"{session.name}-{turn}-{time.time()}"
            )
            if tokens != cold:
                raise Failed(f"{session.name}: {tokens}, and cold {cold}")
            usage = answer.json()["usage"]
            prompts += usage["prompt_tokens"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            seed = len(session.prompt)
            session.prompt.extend(tokens)
            session.prompt.extend(7 + (seed + n) % 200 for n in range(MORE_TOKENS))
    return prompts, cached


def owned(tree: Path, fleet: Fleet) -> int:
    """How many sessions the directory says are owned, once all are, or it has had time."""
    end_s = time.monotonic() + OWNED_WITHIN_S
    while True:
        said = subprocess.run(
            [sys.executable, "-m", "ownerserve.cli.main", "directory", "status",
             fleet.directory, "--json", "-"],
            env={**os.environ, "PYTHONPATH": str(tree / "src")}, capture_output=True, check=True,
        )  # fmt: skip
        sessions = int(json.loads(said.stdout)["records"]["sessions"])
        if sessions >= SESSIONS or time.monotonic() > end_s:
            return sessions
        time.sleep(0.5)


def tried(mix: Mix, trees: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Play one mix; what came of it."""
    folder.mkdir()
    fleet = Fleet(mix, trees, folder)
    try:
        sessions = [
            Session(f"s{number}", [7 + (13 * number + n) % 200 for n in range(FIRST_TOKENS)])
            for number in range(SESSIONS)
        ]
        prompts, cached = play(fleet, sessions, TURNS)
        row: dict[str, Any] = mix._asdict() | {"prompt_tokens": prompts, "cached_tokens": cached}
        row["owned"] = owned(trees["new"], fleet)
        row["replaced_sessions"] = sum(one.worker == fleet.workers[0] for one in sessions)
        fleet.replace_worker(0)
        end_s = time.monotonic() + WAIT_S
        while metric(fleet.admin, "ownerserve_gateway_worker_up") < len(fleet.workers):
            if time.monotonic() > end_s:
                raise Failed("the worker that was replaced is not up")
            time.sleep(0.1)
        prompts, cached = play(fleet, sessions, 1)
        row |= {"after_replacing_prompt_tokens": prompts, "after_replacing_cached_tokens": cached}
        row["line_problems"] = metric(fleet.admin, "ownerserve_gateway_answer_line_problems_total")
        row["statement_problems"] = metric(
            fleet.admin, "ownerserve_gateway_worker_statement_problems_total"
        )
        if not row["cached_tokens"] or not row["after_replacing_cached_tokens"]:
            raise Failed(f"nothing is cached: {row}")
        return row
    finally:
        fleet.close()


def main() -> int:
    """Play all mixes, a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its processes and tree go too
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home, tree_of(words.revision, Path(home)) as old:
        trees = {"old": old, "new": ROOT}
        read = {
            f"{reader} reads what {writer} wrote": messages_read(trees[writer], trees[reader])
            for writer, reader in (("old", "new"), ("new", "old"))
        }
        for what, said in read.items():
            print(f"{what}: {said}", flush=True)
        for number, mix in enumerate(MIXES):
            try:
                row = tried(mix, trees, Path(home) / f"mix{number}")
            except Failed as error:
                row = mix._asdict() | {"failed": str(error)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if words.json is not None:
        found = {"revision": words.revision, "messages": read, "mixes": rows}
        words.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
