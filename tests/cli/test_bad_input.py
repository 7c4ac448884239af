"""Every command and subcommand against what a new user gets wrong, parameter by parameter.

The tries come from click's own tree, so a new command or option is tried without being named
here. A refusal is exit code 1 or 2 and one line that names the parameter; never a traceback.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from ownerserve.cli.failures import EXTRAS, REPORT
from ownerserve.cli.main import COMMANDS, cli
from ownerserve.cli.output import OutputFile, OutputFolder
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.service.runtime import WallClock
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from ownerserve.trace.write import write_trace
from tests.support.children import importing

pytestmark = pytest.mark.slow

SECONDS = 60.0
NOBODY = 65534
HUGE = "99999999999999999999"


class Command(NamedTuple):
    """A command without subcommands: its words and its click object."""

    words: tuple[str, ...]
    made: click.Command

    @property
    def name(self) -> str:
        return " ".join(self.words)


def leaves(group: click.Command, words: tuple[str, ...] = ()) -> Iterator[Command]:
    if not isinstance(group, click.Group):
        yield Command(words, group)
        return
    if words and group.invoke_without_command:
        yield Command(words, group)
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield from leaves(found, (*words, name))


ALL = tuple(leaves(cli))

CHEAP = {
    "demo": ["--engine", "vllm", "--vllm-python", "no-python"],  # refused before any process
    "gateway": ["--port", "TAKEN", "--worker", "http://127.0.0.1:1"],
    "directory serve": ["--port", "TAKEN"],
    "worker": ["--port", "TAKEN"],
    "simulate": ["--sessions", "1", "--policy", "round_robin", "--workers", "2", "--jobs", "1"],
    "evaluate": ["--only", "000-state", "--quick", "--jobs", "1"],
    "store bench": ["--size", "1", "--rounds", "1"],
    "directory rebuild": ["--wait", "0"],
    "transfer serve": ["--port", "TAKEN", "--size", "64KiB"],
    "transfer bench": ["--size", "64KiB", "--rounds", "1"],
}
"""Options with which a command that takes what it should refuse is over soon: a server, since its
port is taken."""

REPORTS = {"doctor", "doctor vllm"}
"""Commands whose refusals are lines of a report that begin with `fail`."""


class Shop(NamedTuple):
    """The folder of all tries, and the processes that run them."""

    folder: Path
    light: subprocess.Popen[str]
    taken_port: int
    directory: str
    """Address of a directory that answers: one that does not is waited for each time."""

    def run(
        self, words: list[str], *, blocked: str = "", broken: str = "", uid: int = 0
    ) -> dict[str, Any]:
        asked = {
            "arguments": words,
            "folder": str(self.folder),
            "seconds": SECONDS,
            "blocked": blocked,
            "broken": broken,
            "uid": uid,
        }
        assert self.light.stdin is not None and self.light.stdout is not None
        self.light.stdin.write(json.dumps(asked) + "\n")
        self.light.stdin.flush()
        answer = json.loads(self.light.stdout.readline())
        assert isinstance(answer, dict)
        return answer


@contextmanager
def serving(server: DirectoryServer) -> Iterator[str]:
    server.start()
    yield server.address
    server.stop()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    for name in ("a-folder", "locked", "store", "model", "new"):
        (folder / name).mkdir()
    (folder / "garbage").write_bytes(bytes(range(256)) * 4)
    (folder / "empty").write_bytes(b"")
    (folder / "sealed").write_text("{}")
    DiskTier(folder / "store", WallClock()).close()
    write_trace(generate("chat", Options(sessions=2)), folder / "trace.jsonl")
    folder.chmod(0o755)
    for name in ("locked", "sealed"):
        (folder / name).chmod(0o500)
    modules = [f"ownerserve.cli.{module}" for module, _ in COMMANDS.values()]
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serving(DirectoryServer(EmbeddedDirectory(WallClock(), TermFile()))) as address,
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.cli.fork_commands", *modules],
            env=importing(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as light,
    ):
        try:
            yield Shop(folder, light, taken.getsockname()[1], address)
        finally:
            light.kill()


FILLED = {
    "config": "qwen3-30b-a3b",
    "path": "trace.jsonl",
    "source": "trace.jsonl",
    "target": "new/made.jsonl",
    "workload": "chat",
    "directory": "store",
    "tenant": "ab" * 32,
    "model": "model",
    "store": "store",
    "prefix": "ab" * 32,
    "place": "w1",
    "out": "new/fleet.key",
    "plan placement workers": "owner holds=1K",
    "gateway workers": "http://127.0.0.1:1",
    "store new-key file": "new/medium.key",
    "store adopt source": "store",
    "store adopt into": "new",
    "directory rebuild address": "tcp://127.0.0.1:1",  # else it waits as long as it is told
}
"""A right value for each required parameter, by name, or by command and name."""

NOT_FILES = ("", "missing/x", "a-folder", "garbage", "empty")
NOT_OUTPUTS = ("missing/x", "a-folder", "garbage/x", "")
NOT_FOLDERS = ("garbage", "garbage/x")
NOT_NUMBERS = ("", "text", "nan", "inf", "8GiBB")
NOT_SIZES = ("", "8GiBB", "nan", "-1", "text")
NOT_ADDRESSES = (
    "",
    "text",
    "tcp://",
    "http://[",
    "tcp://127.0.0.1:99999999",
    "http://a:b",
    "tcp://a:b",
)
ODD_NUMBERS = ("-1", "-0.5", HUGE, "1e308", "0")
ODD_TEXTS = ("\x1b[31m[/red]", "a" * 5000, "\udcff", HUGE, "", "-1")
NAMES_A_FILE = re.compile("FILE|FOLDER|DIR|CONFIG|DESCRIPTOR")


class Try(NamedTuple):
    """A value for one parameter; `refused`: it can't be right."""

    value: str
    refused: bool


def tries(parameter: click.Parameter, taken_port: int) -> list[Try]:
    """What may be wrong with it, told from its type and how `--help` names its value."""
    kind, word = parameter.type, parameter.metavar or ""
    if isinstance(kind, click.Choice):
        return wrong("no-such", "")
    if isinstance(kind, OutputFile):
        return wrong(*NOT_OUTPUTS)
    if isinstance(kind, OutputFolder):
        return wrong(*NOT_FOLDERS)
    if isinstance(kind, click.Path):
        return wrong("garbage") if not kind.file_okay else [Try(one, False) for one in NOT_FILES]
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        if str(parameter.name).endswith("port"):
            return wrong(*NOT_NUMBERS, "-1", "99999999", HUGE, str(taken_port))
        return wrong(*NOT_NUMBERS) + [Try(one, False) for one in ODD_NUMBERS]
    odd = [Try(one, False) for one in ODD_TEXTS]
    if NAMES_A_FILE.search(word):
        odd += [Try(one, False) for one in NOT_FILES]
    if word in ("SIZE", "TOKENS", "N"):
        return wrong(*NOT_SIZES) + odd
    if word in ("URL", "ADDRESS"):
        return wrong(*NOT_ADDRESSES) + odd
    return odd


def wrong(*values: str) -> list[Try]:
    return [Try(value, True) for value in values]


def words_for(shop: Shop, command: Command, tried: click.Parameter | None, value: str) -> list[str]:
    """The whole command: what is required is right, except what is tried."""
    port = str(shop.taken_port)
    cheap = [port if word == "TAKEN" else word for word in CHEAP.get(command.name, ())]
    words, arguments = [*command.words, *cheap], []
    for one in command.made.params:
        if one is tried:
            given = value
        elif one.required:
            name = str(one.name)
            known = {**FILLED, "address": shop.directory}
            given = known.get(f"{command.name} {name}") or known[name]
        else:
            continue
        if isinstance(one, click.Option):
            words.append(f"{one.opts[-1]}={given}")
        else:
            arguments.append(given)
    return [*words, "--", *arguments] if arguments else words


PARAMETERS = [
    pytest.param(
        command,
        one,
        id=f"{command.name} {one.opts[-1]}",
    )
    for command in ALL
    for one in command.made.params
    if not (isinstance(one, click.Option) and one.is_flag)
]


ERROR = re.compile(r"^(?:error: |fail  ).*", re.MULTILINE)


def fault(answer: dict[str, Any], command: str, *, named: list[str], refused: bool) -> str:
    """What is wrong with how a command ended; nothing when it is all right."""
    said = answer["out"] + answer["err"]
    told = ERROR.findall(said if command in REPORTS else answer["err"])
    if "Traceback" in said:
        return "a traceback: " + said.strip().splitlines()[-1]
    if answer["code"] is None:
        return "still running"
    if answer["code"] == 0:
        return "taken" if refused else ""
    if answer["code"] not in (1, 2):
        return f"exit code {answer['code']}"
    if command not in REPORTS and told != answer["err"].strip("\n").split("\n"):
        return f"not one line of error: {answer['err'][-300:]}"
    if refused and not any(name in line for name in named for line in told):
        return f"names none of {named}: {told}"
    return ""


def names_of(parameter: click.Parameter, value: str) -> list[str]:
    name = str(parameter.name)
    words = [name, name.replace("_", "-"), name.upper(), parameter.metavar or name]
    return words + [word.lstrip("-") for word in (*parameter.opts, value) if word]


@pytest.mark.parametrize(("command", "parameter"), PARAMETERS)
def test_a_wrong_value_is_refused_in_one_line(
    shop: Shop, command: Command, parameter: click.Parameter
) -> None:
    faults = []
    for value, refused in tries(parameter, shop.taken_port):
        answer = shop.run(words_for(shop, command, parameter, value))
        if found := fault(answer, command.name, named=names_of(parameter, value), refused=refused):
            faults.append(f"{value[:40]!r}: {found}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_an_unknown_option_and_one_word_too_many_are_refused(shop: Shop, command: Command) -> None:
    words = words_for(shop, command, None, "")
    surplus = [*words, *([] if "--" in words else ["--"]), "one-too-many"]
    for asked in (words_with(words, "--no-such-option"), surplus):
        answer = shop.run(asked)
        named = ["--no-such-option", "argument", "one-too-many"]
        assert not fault(answer, "", named=named, refused=True), asked


def words_with(words: list[str], option: str) -> list[str]:
    """The command with one more option, before its arguments."""
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], option, *words[at:]]


OUTPUTS = [
    pytest.param(command, one, id=f"{command.name} {one.opts[-1]}")
    for command in ALL
    for one in command.made.params
    if isinstance(one.type, OutputFile | OutputFolder)
]


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files are needed")
@pytest.mark.parametrize(("command", "parameter"), OUTPUTS)
def test_what_may_not_be_written_is_refused(
    shop: Shop, command: Command, parameter: click.Parameter
) -> None:
    file = isinstance(parameter.type, OutputFile)
    for value in ("sealed", "locked/new") if file else ("locked", "locked/new"):
        answer = shop.run(words_for(shop, command, parameter, value), uid=NOBODY)
        named = names_of(parameter, value)
        assert not fault(answer, command.name, named=named, refused=True), value


def test_every_command_that_writes_a_file_says_so_by_its_type() -> None:
    """An output that is a plain path would be found out only after the work."""
    for command in ALL:
        for one in command.made.params:
            if one.name in ("json_target", "out", "target", "ready_file"):
                assert isinstance(one.type, OutputFile | OutputFolder), (command.name, one.name)


MISSING_EXTRAS = [
    ("worker --port 0", "torch", "engine"),
    pytest.param(
        "worker --port 0 --remote s3://bucket/prefix", "boto3", "s3", marks=pytest.mark.engine
    ),
    ("directory serve --backend valkey://127.0.0.1:1", "redis", "valkey"),
    ("gateway --worker http://127.0.0.1:1 --directory valkey://127.0.0.1:1", "redis", "valkey"),
    ("simulate --sessions 1 --ray auto", "ray", "ray"),
    ("demo", "httpx", "engine"),
    ("worker --port 0 --transfer-roads mooncake,tcp --allow-remote", "mooncake", "mooncake"),
    ("worker --port 0 --transfer-roads nixl,tcp --allow-remote", "nixl", "nixl"),
    ("evaluate --list", "matplotlib", "report"),
]


@pytest.mark.parametrize(("words", "package", "extra"), MISSING_EXTRAS)
def test_a_missing_extra_is_named_with_the_mend(
    shop: Shop, words: str, package: str, extra: str
) -> None:
    answer = shop.run(words.split(), blocked=package)
    assert not fault(answer, "", named=[package], refused=True), answer
    assert f"pip install 'ownerserve[{extra}]'" in answer["err"]


@pytest.mark.parametrize("road", ["mooncake", "nixl"])
def test_a_road_that_asks_nobody_needs_the_operators_word(shop: Shop, road: str) -> None:
    answer = shop.run(["worker", "--port", "0", "--transfer-roads", f"tcp,{road}"])
    assert not fault(answer, "", named=["--transfer-roads", "--allow-remote"], refused=True), answer


@pytest.mark.parametrize("words", ["doctor", "simulate --help", "gateway --help", "store --help"])
def test_only_figures_need_the_plotting_library(shop: Shop, words: str) -> None:
    """vLLM's environment has our core, and no plotting."""
    answer = shop.run(words.split(), blocked="matplotlib")
    assert answer["code"] in (0, 1) and "matplotlib" not in answer["err"], answer


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert set(EXTRAS.values()) == set(project["project"]["optional-dependencies"])


def test_names_are_told_as_they_are(shop: Shop) -> None:
    """A name with what rich takes for markup is no error."""
    folder = shop.folder / "["
    folder.mkdir()
    write_trace(generate("chat", Options(sessions=1)), folder / "t].jsonl")
    shutil.copytree(shop.folder / "store", folder / "store]")
    cheap = ["--policy", "round_robin", "--workers", "1", "--jobs", "1"]
    for words in (
        ["trace", "stats", "[/t].jsonl"],
        ["trace", "convert", "[/t].jsonl", "[/b].jsonl"],
        ["simulate", "[/t].jsonl", *cheap],
        ["store", "ls", "[/store]"],
        ["store", "verify", "[/store]"],
        ["store", "gc", "[/store]"],
        ["doctor", "--store", "[/store]"],
    ):
        answer = shop.run(words)
        assert answer["code"] == 0, (words, answer["err"])


@pytest.mark.parametrize("group", ["", "trace", "store", "plan", "directory", "transfer"])
def test_a_group_without_a_command_teaches(shop: Shop, group: str) -> None:
    answer = shop.run(group.split())
    assert answer["code"] in (0, 2)
    assert "Commands:" in answer["out"] + answer["err"]


def test_every_help_page_teaches(shop: Shop) -> None:
    for command in ALL:
        answer = shop.run([*command.words, "--help"])
        assert answer["code"] == 0 and "Usage: ownerserve" in answer["out"], command.name


def test_a_defect_of_ours_keeps_its_traceback_and_asks_for_a_report(shop: Shop) -> None:
    answer = shop.run(["inspect", "qwen3-30b-a3b"], broken="AssertionError('of ours')")
    assert answer["code"] == 70
    assert "Traceback" in answer["err"] and "of ours" in answer["err"]
    assert answer["err"].rstrip().endswith(REPORT)


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        ("MemoryError()", 2, "error: memory: not enough"),
        ("KeyboardInterrupt()", 130, "interrupted"),
        ("OSError(28, 'No space left on device', 'out.json')", 2, "error: out.json: No space"),
        ("__import__('zmq').ZMQError(98)", 2, "error: socket: Address already in use"),
        ("ImportError('libcudart.so', name='torch')", 2, "pip install 'ownerserve[engine]'"),
        ("__import__('socket').gaierror(-2, 'unknown host')", 2, "error: address: unknown host"),
    ],
)
def test_foreign_errors_are_one_line(shop: Shop, raised: str, code: int, line: str) -> None:
    answer = shop.run(["inspect", "qwen3-30b-a3b"], broken=raised)
    assert answer["code"] == code
    [told] = answer["err"].strip().splitlines()
    assert line in told
