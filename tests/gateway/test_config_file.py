"""`ownerserve gateway --config FILE`: the options in a file, and what is said of a wrong one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import pytest

from ownerserve.cli.gateway import command
from ownerserve.cli.gateway_file import read_gateway_file, settings_of
from ownerserve.kv.errors import InvalidInput
from tests.support.children import importing
from tests.support.gateway.process import worker_process

EXAMPLE = Path(__file__).parents[2] / "examples/gateway.toml"


def parsed(*words: str) -> dict[str, Any]:
    """What the command would be called with, and what its context has of its log."""
    context = command.make_context("gateway", list(words))
    return {**context.params, **context.meta["ownerserve.gateway.log"]}


def refused(text: str, folder: Path) -> InvalidInput:
    path = folder / "g.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        parsed("--config", str(path))
    assert caught.value.mend
    return caught.value


def test_the_example_has_every_option_by_its_name_with_its_default() -> None:
    text = EXAMPLE.read_text()
    commented = set(re.findall(r"^# ([a-z-]+) = ", text, re.MULTILINE))
    assert commented | set(tomllib.loads(text)) == set(settings_of(command))
    told, plain = parsed("--config", str(EXAMPLE)), parsed("--worker", "http://127.0.0.1:1")
    assert told.pop("workers") == (
        "http://127.0.0.1:8001",
        "http://127.0.0.1:8002=model-a,model-b",
    )
    plain.pop("workers")
    assert told == plain


def test_what_the_example_has_commented_out_is_of_the_right_type(tmp_path: Path) -> None:
    text = re.sub(r"^# ([a-z-]+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    for name in re.findall(r"(?:-file|^kubeconfig) = \"(.*?)\"", text, re.MULTILINE):
        (tmp_path / name).touch()
    (tmp_path / "all.toml").write_text(text)
    told = parsed("--config", str(tmp_path / "all.toml"))
    assert told["tenants_file"] == tmp_path / "tenants.toml"
    assert (told["seats"], told["opening_s"], told["directory"]) == (1.0, 5.0, "embedded:7700")
    assert all(value is not None for value in told.values())


def test_the_command_line_wins_and_snake_case_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "g.toml"
    path.write_text('hot_ms = 5\ncool-s = 7\naccess_log = true\n[[worker]]\nurl = "http://a:1"\n')
    told = parsed("--config", str(path), "--cool-s", "8", "--worker", "http://b:2")
    assert (told["hot_ms"], told["cool_s"], told["workers"]) == (5.0, 8.0, ("http://b:2",))


WRONG = {
    'prot = 1\n': ("prot", "is no option", "did you mean port?"),
    'check = true\n': ("check", "is no option", "give --check on the command line"),
    'port = "8000"\n': ("port", "is '8000'", "a whole number"),
    "port = true\n": ("port", "is true", "a whole number"),
    "port = 80.5\n": ("port", "is 80.5", "a whole number"),
    "port = 70000\n": ("port", "70000 is not in the range", "mend it"),
    "hot-ms = nan\n": ("hot-ms", "no finite number", "mend it"),
    "allow-remote = 1\n": ("allow-remote", "is 1", "true or false"),
    "hot-ms = 1\nhot_ms = 2\n": ("hot_ms", "as hot-ms", "once"),
    'policy = "best"\n': ("policy", "'best' is not one of", "mend it"),
    'tenants-file = "none.toml"\n': ("tenants-file", "does not exist", "mend it"),
    'worker = ["http://a:1"]\n': ("worker", "no list of tables", "[[worker]]"),
    '[[workers]]\nurl = "http://a:1"\n': ("workers", "is no option", "[[worker]]"),
    "[[worker]]\nmodels = []\n": ("worker[0].url", "is missing", "write url"),
    '[[worker]]\nurl = "a:1"\n': ("worker[0].url", "no http or https URL", "write it like"),
    '[[worker]]\nurl = "http://a:1"\nport = 1\n': ("worker[0].port", "nothing", "above all"),
    '[[worker]]\nurl = "http://a:1"\nmodels = "m"\n': ("worker[0].models", "no list", "models ="),
    '[[worker]]\nurl = "http://a:1"\n[[worker]]\nurl = "https://a:1"\n': (
        "worker[1].url",
        "a:1 is given twice",
        "once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_told_by_its_name_the_key_and_the_mend(text: str, tmp_path: Path) -> None:
    key, problem, mend = WRONG[text]
    error = refused(text, tmp_path)
    assert error.field == f"{tmp_path / 'g.toml'}: {key}"
    assert problem in error.problem
    assert mend in error.mend


def test_no_file_and_no_toml_are_told(tmp_path: Path) -> None:
    context = click.Context(command)
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidInput, match=f"--config: {re.escape(str(path))}: {why}"):
            read_gateway_file(path, context)
    assert "line 2" in refused("port = 1\n= 3\n", tmp_path).problem
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"b\.toml: no TOML"):
        read_gateway_file(tmp_path / "b.toml", context)


@pytest.mark.slow
def test_check_asks_the_workers_of_the_file_and_a_wrong_file_is_2(tmp_path: Path) -> None:
    def checked() -> subprocess.CompletedProcess[str]:
        words = ["gateway", "--config", str(path), "--check"]
        command = [sys.executable, "-m", "ownerserve.cli.main", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=importing(), check=False
        )

    path = tmp_path / "g.toml"
    with ExitStack() as stack:
        port = stack.enter_context(worker_process()).port
        text = f'port = 0\n[[worker]]\nurl = "http://127.0.0.1:{port}"\nmodels = ["tiny"]\n'
        path.write_text(text)
        done = checked()
        assert (done.returncode, done.stderr) == (0, "")
        up = f"ok   worker 127.0.0.1:{port}: up, a plain engine, models: tiny"
        assert done.stdout.splitlines()[0] == up
        path.write_text(f"prot = 1\n{text}")
        done = checked()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {path}: prot: is no option of the gateway; did you mean port?\n"
