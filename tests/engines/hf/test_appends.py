"""How turns are taken in by real workers: begin or append, at which version, with which answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.cache.tree.prefix_tree import PrefixTree
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.kv.wire.headers import ANSWER_HEADER, TURN_HEADER, read_answer_line
from ownerserve.node.ownership.ownership import boot_time_s
from ownerserve.node.vocabulary.settings import NodeSettings
from tests.support.children import importing
from tests.support.hf.engine_rig import TOLERANCE, reference, text
from tests.support.hf.fleet_rig import WAIT_S, ServedGateway, ServedWorker
from tests.support.metric_lines import summed
from tests.support.waits import until

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"


class BootClock:
    def now(self) -> float:
        return boot_time_s()


class Talk:
    """One session: what was said so far. Each answer is compared with a cold run's. `name`: what a
    gateway calls it, which speaks to the worker itself."""

    def __init__(self, prompt: list[int], session: str = "s", *, name: str = "") -> None:
        self.said = prompt
        self._headers = {"x-session-id": session}
        if name:
            self._headers = {TURN_HEADER: json.dumps({"name": name})}

    def turn(self, http: httpx.Client, more: list[int], *, new: int = 20) -> httpx.Response:
        self.said = [*self.said, *more]
        body: dict[str, Any] = {"prompt": self.said, "max_tokens": new, "temperature": 0}
        body |= {"logprobs": 1, "return_token_ids": True}
        answer = http.post("/v1/completions", json=body, headers=self._headers).raise_for_status()
        choice = answer.json()["choices"][0]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        rows = reference(MODEL, self.said, tokens)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            assert abs(float(row[token]) - logprob) <= TOLERANCE
            assert float(row.max() - row[token]) <= TOLERANCE
        self.said = [*self.said, *tokens]
        return answer


def taken_in(http: httpx.Client) -> dict[str, int]:
    """Turns by how they were opened."""
    counts = {"append": 0, "begin": 0}
    for line in http.get("/metrics").text.splitlines():
        for kind in counts:
            if line.startswith(f'ownerserve_turn_intake_seconds_count{{kind="{kind}"}}'):
                counts[kind] = int(float(line.rsplit(" ", 1)[1]))
    return counts


def test_turns_that_go_on_are_appends_and_an_edited_history_begins() -> None:
    worker = ServedWorker(WorkerOptions(model=MODEL, kv_bytes=8 << 20))
    try:
        talk = Talk(text(150))
        talk.turn(worker.http, [])
        assert taken_in(worker.http) == {"append": 0, "begin": 1}
        talk.turn(worker.http, text(40, seed=1))
        answer = talk.turn(worker.http, text(7, seed=2))
        assert taken_in(worker.http) == {"append": 2, "begin": 1}
        assert answer.headers["x-ownerserve-mode"] == "direct_append"
        edited = [*talk.said[:100], *text(120, seed=3)]
        talk.said = edited
        talk.turn(worker.http, [])
        assert taken_in(worker.http) == {"append": 2, "begin": 2}
        talk.turn(worker.http, text(3, seed=4))
        assert taken_in(worker.http) == {"append": 3, "begin": 2}, "it goes on from the edit"
        Talk(edited, "another").turn(worker.http, text(9, seed=5))
        assert taken_in(worker.http) == {"append": 3, "begin": 3}
        assert worker.metric("ownerserve_turn_intake_seconds_sum") > 0
    finally:
        worker.close()


@pytest.mark.parametrize("has_store", [False, True])
def test_an_append_compares_nothing_of_what_its_session_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_store: bool
) -> None:
    """On the engine's thread: each walk along the tree begins where the session stands."""
    compared: list[int] = []
    walk = PrefixTree.walk

    def counted(tree: PrefixTree, tokens: bytes, limit: int, **more: Any) -> Any:
        compared.append(
            len(tokens) // tree.block_bytes - more.get("depth", 0) + more.get("skip", 0)
        )
        return walk(tree, tokens, limit, **more)

    node = NodeSettings(spill_after_s=1e6)
    options = WorkerOptions(model=MODEL, kv_bytes=16 << 20, node=node)
    if has_store:
        options = msgspec.structs.replace(options, store=tmp_path)
    worker = ServedWorker(options)
    try:
        talk = Talk(text(1600))
        talk.turn(worker.http, [])
        monkeypatch.setattr(PrefixTree, "walk", counted)
        talk.turn(worker.http, text(40, seed=1))
        assert taken_in(worker.http) == {"append": 1, "begin": 1}
        assert compared and max(compared) <= 4, "of a hundred blocks"
        edited = [*talk.said[:1500], *text(40, seed=2)]
        talk.said = edited
        talk.turn(worker.http, [])
        assert max(compared) >= 93, "a begin compares all"
    finally:
        worker.close()


class Life:
    """`ownerserve worker` over a store, in a process of its own."""

    def __init__(self, folder: Path, number: int, *flags: str) -> None:
        ready = folder / f"{number}.url"
        self.process = subprocess.Popen([
            sys.executable, "-m", "tests.support.hf.assumed", "worker", "--model", MODEL,
            "--kv-memory", "8MiB", "--port", "0", "--threads", "1", "--store",
            str(folder / "store"), "--spill-after", "0.01", "--ready-file", str(ready), *flags,
        ], env=importing())  # fmt: skip
        until(lambda: ready.exists() or self.process.poll() is not None)
        self.http = httpx.Client(base_url=ready.read_text().strip(), timeout=WAIT_S)

    def is_stored(self, tokens: int) -> bool:
        """Whether the session is below the device that far."""
        words = self.http.get("/ownerserve/inventory").json()["words"]
        return any(word["tier"] == "disk" and word.get("tokens", 0) >= tokens for word in words)

    def metric(self, start: str) -> float:
        return summed(self.http.get("/metrics").text, start)

    def advanced(self, turns: int) -> bool:
        """Whether the directory has taken so many reports of turns."""
        return self.metric('ownerserve_directory_answers_total{answer="advanced"}') >= turns

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[list[Life]]:
    begun = [Life(tmp_path, 0)]
    yield begun
    for life in begun:
        life.kill()


@pytest.mark.crash
def test_after_kill_9_the_stored_session_begins_and_then_goes_on(
    tmp_path: Path, lives: list[Life]
) -> None:
    talk = Talk(text(300))
    talk.turn(lives[0].http, [])
    talk.turn(lives[0].http, text(40, seed=1))
    assert taken_in(lives[0].http) == {"append": 1, "begin": 1}
    until(lambda: lives[0].is_stored(336))
    lives[0].kill()
    lives.append(Life(tmp_path, 1))
    answer = talk.turn(lives[1].http, text(30, seed=2))
    assert answer.headers["x-ownerserve-mode"] == "fetch"
    assert taken_in(lives[1].http) == {"append": 0, "begin": 1}
    answer = talk.turn(lives[1].http, text(30, seed=3))
    assert answer.headers["x-ownerserve-mode"] == "direct_append"
    assert taken_in(lives[1].http) == {"append": 1, "begin": 1}


@pytest.fixture
def directory() -> Iterator[DirectoryServer]:
    server = DirectoryServer(EmbeddedDirectory(BootClock(), TermFile(), opens_in_s=0.0))
    server.start()
    yield server
    server.stop()


@pytest.mark.crash
def test_after_kill_9_the_version_goes_on_where_the_directory_says(
    tmp_path: Path, directory: DirectoryServer
) -> None:
    """The new life of the worker finds the session counted, and its state in the store."""
    flags = ("--worker-id", "w", "--directory", directory.address)
    begun = [Life(tmp_path, 0, *flags)]
    try:
        talk = Talk(text(300), name="5" * 32)
        talk.turn(begun[0].http, [])
        until(lambda: begun[0].advanced(1))
        talk.turn(begun[0].http, text(40, seed=1))
        until(lambda: begun[0].advanced(2) and begun[0].is_stored(336))
        begun[0].kill()
        begun.append(Life(tmp_path, 1, *flags))
        talk.turn(begun[1].http, text(30, seed=2))
        until(lambda: begun[1].advanced(1))
        for version, seed in ((3, 3), (4, 4)):
            answer = talk.turn(begun[1].http, text(30, seed=seed))
            line = read_answer_line(answer.headers[ANSWER_HEADER].encode()).line
            assert line.version == version
        assert taken_in(begun[1].http) == {"append": 2, "begin": 1}
        assert begun[1].metric("ownerserve_versions_installed_total") == 1
    finally:
        for life in begun:
            life.kill()


def test_after_a_move_the_version_goes_on(directory: DirectoryServer) -> None:
    """What another worker counted is told by the directory, and is the version here too."""
    workers = [
        ServedWorker(
            WorkerOptions(
                model=MODEL, kv_bytes=8 << 20, directory=directory.address, worker_id=f"w{n}"
            )
        )
        for n in range(2)
    ]
    gateway = ServedGateway(*workers, directory=directory.address)
    try:
        talk = Talk(text(150))
        first = talk.turn(gateway.http, [])
        talk.turn(gateway.http, text(20, seed=1))
        workers.sort(key=lambda one: one.name == first.headers["x-ownerserve-worker"])
        workers.pop().close()  # it gives its sessions free
        [there] = workers
        moved = talk.turn(gateway.http, text(20, seed=2))
        assert moved.headers["x-ownerserve-worker"] == there.name
        assert taken_in(there.http) == {"append": 0, "begin": 1}
        until(lambda: there.metric('ownerserve_directory_answers_total{answer="advanced"}'))
        for version, seed in ((3, 3), (4, 4)):
            answer = talk.turn(gateway.http, text(20, seed=seed))
            assert answer.headers["x-ownerserve-version"] == str(version)
            assert answer.headers["x-ownerserve-mode"] == "direct_append"
        assert taken_in(there.http) == {"append": 2, "begin": 1}
        assert there.metric("ownerserve_versions_installed_total") == 1, "told once, then counted"
    finally:
        for one in (gateway, *workers):
            one.close()
