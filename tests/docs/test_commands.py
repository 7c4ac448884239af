"""Every command and snippet of README.md and docs/*.md runs, or its source says why not.

A block is a fence, or lines indented by four that begin with a command. What is JSON stands in a
fence that says `json`, and is given to whoever reads it in a running process; so is what vLLM's
command is given, which does not run here. In front of a block may stand

    <!-- not run: REASON -->              nothing of it runs here
    <!-- not run "WORDS": REASON -->      its lines that contain WORDS don't

docs/evidence/ is left out: dated history, whose commands are those of the code of its day;
docs/design/ holds decisions and has no commands. A block runs as it is printed, in a folder with
the files of `files`, in a network of its own where that can be had, so that its ports are free.
Servers run until their block ends, then get SIGINT or SIGTERM and have to leave clean. A make
target takes minutes: it is marked, and stands in the Makefile.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import pytest

from ownerserve.cli.main import cli
from ownerserve.engines.vllm import settings
from ownerserve.kv.wire.inventory import decode_page
from ownerserve.trace.read import read_trace
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from ownerserve.trace.transform import keep
from ownerserve.trace.write import write_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SECONDS = 600.0
COMMAND = re.compile(
    r"(?:\$ )?(?:[A-Z_]+=\S+ )*"
    r"(?:ownerserve|make|pip|curl|vllm|python|\.venv/bin/python) (?!.*[│┌└])"
)
LOOKS_LIKE_JSON = re.compile(r'\s*(?:\{|\[\s*[\["{]|"\w+":)')
MARK = re.compile(r'<!-- not run(?: "([^"]+)")?: (\S.*) -->')
SERVERS = ("worker", "gateway", "directory serve", "transfer serve")
WORKER_PORT = "8100"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Block(NamedTuple):
    """Lines of a page that a reader may copy. `marks`: words that leave lines out, all by ""."""

    page: str
    line: int
    language: str
    text: str
    marks: tuple[str, ...]

    def commands(self) -> list[str]:
        """What is to be typed: with prompts all lines that have one, else all; joined at \\ ."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line.strip() for line in lines if line.strip()]

    def kept(self) -> list[str]:
        return [line for line in self.commands() if not any(word in line for word in self.marks)]


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page that have a command, or are Python or JSON."""
    lines = page.read_text().splitlines()
    at, marks = 0, []
    while at < len(lines):
        start, line, language = at, lines[at], ""
        at += 1
        if found := MARK.fullmatch(line.strip()):
            marks.append(found[1] or "")
            continue
        if line.startswith("```"):
            language = line[3:]
            at = next(n for n in range(at, len(lines)) if lines[n] == "```") + 1
            body = lines[start + 1 : at - 1]
        elif line.startswith("    ") and COMMAND.match(line.strip()):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            body = [one[4:] for one in lines[start:at]]
        else:
            marks = marks if not line.strip() else []
            continue
        if language in ("python", "json") or any(COMMAND.match(one) for one in body):
            where = page.relative_to(ROOT).as_posix()
            yield Block(where, start + 1, language, "\n".join(body), tuple(marks))
        marks = []


ALL = [block for page in PAGES for block in blocks(page)]


def words_of(line: str) -> list[str]:
    """A line's words without its comment and the variables before it."""
    words = shlex.split(line, comments=True)
    return words[next((n for n, word in enumerate(words) if "=" not in word), 0) :]


def is_server(line: str) -> bool:
    words = words_of(line)
    if words[:1] != ["ownerserve"] or "--check" in words:
        return False
    return " ".join(words[1:]).startswith(SERVERS)


def needs_engine(block: Block) -> bool:
    return any(line.startswith("ownerserve worker") for line in block.kept())


RUN = [
    pytest.param(
        block,
        id=f"{block.page}:{block.line}",
        marks=[pytest.mark.engine] if needs_engine(block) else [],
    )
    for block in ALL
    if "" not in block.marks and block.language != "json"
]


@pytest.fixture(scope="module")
def network() -> Iterator[list[str]]:
    """Words before a command that give it free ports, none where that is not allowed."""
    held = "ip link set lo up && echo up && exec sleep 1000"
    words = ["unshare", "--net", "sh", "-c", held]
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        yield []
        return
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        is_up = holder.stdout.readline() == "up\n"
        yield ["nsenter", "-t", str(holder.pid), "-n"] if is_up else []
        holder.kill()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The folder that commands run in: what a reader has, small."""
    trace = keep(generate("coding-agent", Options(sessions=4)), sessions=4, turns=8)
    for name in ("sessions.jsonl.zst", "conversation_trace.jsonl.zst"):
        write_trace(trace, tmp_path / name)
    return tmp_path


class Reader:
    """Who copies a block's lines: runs commands, keeps servers up until the block's end."""

    def __init__(self, folder: Path, network: list[str]) -> None:
        self.folder = folder
        self.network = network
        self.servers: list[tuple[str, subprocess.Popen[str]]] = []
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "HOME": str(folder)}

    def type(self, line: str) -> None:
        if is_server(line):
            self.serve(line)
            return
        done = self.start(line, self.folder)
        try:
            said, _ = done.communicate(timeout=SECONDS)
        finally:
            if done.returncode is None:  # it is late: what it says is of use, and it must not stay
                done.kill()
                done.communicate()
        assert done.returncode == 0 and "Traceback" not in said, f"{line}\n{said[-2000:]}"

    def start(self, line: str, folder: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.network, "bash", "-c", f"exec {line}" if is_server(line) else line],
            cwd=folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def serve(self, line: str) -> None:
        """Start it and wait for its ready file, its own or one named for it."""
        words = words_of(line)
        self.make_way(port_of(words))
        ready = self.folder / f"ready-{len(self.servers)}"
        if "--ready-file" in words:
            ready = self.folder / words[words.index("--ready-file") + 1]
        else:
            line = f"{line.partition('  #')[0]} --ready-file {ready.name}"
        if is_env := re.match(r"(?:[A-Z_]+=\S+ )+", line):
            line = f"env {is_env[0]}{line[is_env.end() :]}"
        server = self.start(line, self.folder)
        self.servers.append((line, server))
        deadline_s = time.monotonic() + SECONDS
        while not ready.exists() and server.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if not ready.exists():
            server.kill()
            pytest.fail(f"{line}\nis not ready:\n{server.communicate()[0][-2000:]}")

    def make_way(self, port: str) -> None:
        """Stop who has this port: lines of one port are choices, not companions."""
        for number, (line, server) in enumerate(self.servers):
            if server.poll() is None and port == port_of(words_of(line)) != "0":
                stop(line, server, (signal.SIGTERM, signal.SIGINT)[number % 2])

    def leave(self) -> None:
        """Stop all servers, the last one first, by SIGINT and SIGTERM in turn."""
        for number, (line, server) in enumerate(reversed(self.servers)):
            if server.poll() is None:
                stop(line, server, (signal.SIGINT, signal.SIGTERM)[number % 2])

    def kill(self) -> None:
        for _, server in self.servers:
            if server.poll() is None:
                server.kill()
                server.communicate()


def port_of(words: list[str]) -> str:
    if "--port" in words:
        return words[words.index("--port") + 1]
    return WORKER_PORT if "worker" in words else "0"


def stop(line: str, server: subprocess.Popen[str], by: signal.Signals) -> None:
    """Have a server end, which it does clean."""
    server.send_signal(by)
    said, _ = server.communicate(timeout=SECONDS)
    told = f"{line}, {by.name}: exit {server.returncode}\n{said[-2000:]}"
    assert server.returncode == 0 and "Traceback" not in said, told


@pytest.mark.parametrize("block", RUN)
def test_it_runs_as_printed(block: Block, files: Path, network: list[str]) -> None:
    reader = Reader(files, network)
    try:
        if block.language == "python":
            (files / "snippet.py").write_text(block.text)
            reader.type(f"{sys.executable} snippet.py")
        else:
            for line in block.kept():
                reader.type(line)
        reader.leave()
    finally:
        reader.kill()


def test_there_are_blocks_and_their_marks_are_of_use() -> None:
    """A mark that leaves nothing out is stale; one without a block stands in the wrong place."""
    assert len(ALL) > 20
    for block in ALL:
        for word in block.marks:
            assert word in block.text, f"{block.page}:{block.line}: nothing has {word!r}"
    written = sum(page.read_text().count("<!-- not run") for page in PAGES)
    assert written == sum(len(block.marks) for block in ALL)


@pytest.mark.parametrize("block", ALL, ids=lambda block: f"{block.page}:{block.line}")
def test_a_make_target_exists_and_says_why_it_is_not_run(block: Block) -> None:
    for line in block.commands():
        if line.startswith("make "):
            assert words_of(line)[1] in TARGETS, line
    kept = [] if "" in block.marks else block.kept()
    unmarked = [line for line in kept if line.startswith("make ")]
    assert not unmarked, f"{block.page}:{block.line}: a target takes minutes; mark it: {unmarked}"


def read_connector(text: str, folder: Path) -> None:
    """As vLLM decodes it, and as our connector decodes its part."""
    given = msgspec.json.decode(text)
    if given["kv_connector"] == "OwnerServeConnector":
        settings.decode(given["kv_connector_extra_config"])


def read_inventory(text: str, folder: Path) -> None:
    page = decode_page(text.encode())
    assert page is not None and page.words, text


def read_sessions(text: str, folder: Path) -> None:
    path = folder / "trace.jsonl"
    path.write_text(text)
    assert read_trace(path).sessions, text


READERS = {
    "kv_connector": read_connector,
    "ownerserve_trace": read_sessions,
    "words": read_inventory,
}
"""Who takes a snippet of JSON, by a key of its first object."""


def jsons(block: Block) -> list[str]:
    """The JSON of a block: all of it, or what vLLM's command is given in a block of commands."""
    if block.language == "json":
        return [] if "" in block.marks else [block.text]
    if block.language:
        return []
    words = shlex.split("\n".join(block.commands()), comments=True)  # a quote may span lines
    return [json_ for flag, json_ in pairwise(words) if flag == "--kv-transfer-config"]


JSON = [
    pytest.param(text, id=f"{block.page}:{block.line}") for block in ALL for text in jsons(block)
]


@pytest.mark.parametrize("text", JSON)
def test_json_is_taken_by_its_reader(text: str, tmp_path: Path) -> None:
    first, _ = json.JSONDecoder().raw_decode(text)
    readers = [reader for key, reader in READERS.items() if key in first]
    assert len(readers) == 1, f"nobody reads it, mark it or say who does:\n{text}"
    readers[0](text, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_json_stands_outside_of_a_json_block(page: Path) -> None:
    """Where nobody would read it: no other block begins like JSON."""
    before = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        is_first = before in ("```", "```text") or (line[:4].isspace() and not before.strip())
        where = f"{page.name}:{number}: {line}"
        assert not (is_first and LOOKS_LIKE_JSON.match(line)), where
        before = line


INLINE = re.compile(r"`((?:ownerserve|make) [^`]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_in_a_line_exists(page: Path) -> None:
    """Subcommands, options and make targets between backquotes."""
    for text in INLINE.findall(page.read_text()):
        program, *words = text.split()
        if program == "make":
            assert words[0] in TARGETS, text
            continue
        found: click.Command = cli
        options: set[str] = {"--help"}
        for word in words:
            word = word.strip("[](),")
            name, _, _ = word.partition("=")
            if word.startswith("--"):
                assert name in options, f"{text}: no {name}"
            elif isinstance(found, click.Group):
                below = found.get_command(click.Context(found), word)
                if below is not None:
                    found = below
            options |= {opt for one in found.params for opt in (*one.opts, *one.secondary_opts)}
        assert found is not cli or not words or words[0].isupper() or words[0] == "--help", text
