"""The gateway's two ports: where they are, and who is let in."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import click
import pytest

from ownerserve.cli import gateway, worker
from ownerserve.cli.directory.command import serve
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.service import Gateway
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import (
    ADMIN,
    DIRECTORY,
    GATEWAY,
    LISTENERS,
    RPC,
    TRANSFER,
    WORKER,
    ServicePort,
)
from tests.gateway.test_cli import gateway as running
from tests.support.children import ROOT
from tests.support.net import listening

KEY = "sk-admin-secret"


def told(*words: str) -> str:
    """The one line of a gateway that does not start."""
    command = [sys.executable, "-m", "ownerserve.cli.main", "gateway", *words]
    command += ["--worker", "http://127.0.0.1:1", "--port", "0", "--admin-port", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2, refused
    (line,) = refused.stderr.splitlines()
    return line


@pytest.mark.slow
def test_no_port_is_open_to_others_by_a_host_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    data = told("--host", "0.0.0.0")
    assert data.startswith("error: --host: 0.0.0.0 is reachable from outside")
    admin = told("--admin-host", "0.0.0.0", "--host", "0.0.0.0", "--allow-remote")
    assert admin.startswith("error: --admin-host: 0.0.0.0 is reachable from outside")
    assert "--admin-key-file" in admin
    assert told("--host", "::").startswith("error: --host: ")


@pytest.mark.parametrize("told", [{"host": "0.0.0.0"}, {"admin_host": "0.0.0.0"}])
def test_nor_by_the_class(told: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="reachable from outside"):
        Gateway(Config(workers=(Address("127.0.0.1", 1),), **told))


def status_of(url: str, key: str | None = None) -> int:
    request = urllib.request.Request(url)
    if key is not None:
        request.add_header("authorization", key)
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.slow
def test_an_admin_port_with_a_key_answers_nobody_else(tmp_path: Path) -> None:
    ready, key = tmp_path / "ready", tmp_path / "key"
    key.write_text(f"{KEY}\n")
    words = ["--host", "127.0.0.1", "--admin-host", "0.0.0.0", "--admin-key-file", str(key)]
    with running(ready, *words) as process:
        data, admin = ready.read_text().split()
        admin = admin.replace("0.0.0.0", "127.0.0.1")
        for path in ("/status", "/metrics", "/decisions", "/sessions", "/health", "/nowhere", "//"):
            for wrong in (None, "", KEY, f"Bearer {KEY}x", f"bearer {KEY}", "Bearer "):
                assert status_of(admin + path, wrong) == 401, (path, wrong)
        assert status_of(f"{admin}/status", f"Bearer {KEY}") == 200
        assert status_of(f"{admin}/nowhere", f"Bearer {KEY}") == 404
        assert status_of(f"{admin}/", None) == 200  # the live page, which asks for the key itself
        assert (
            status_of(f"{data}/v1/models", f"Bearer {KEY}") == 503
        )  # no worker: it is not its key
        hosts = {one.host: one.port for one in listening(process.pid)}
        assert set(hosts) == {"127.0.0.1", "0.0.0.0"}
        assert admin.endswith(f":{hosts['0.0.0.0']}")
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert KEY not in output


def test_keys_are_in_no_repr() -> None:
    config = Config(workers=(Address("127.0.0.1", 1),), admin_key=KEY, worker_key="sk-worker")
    assert KEY not in repr(config) and "sk-worker" not in repr(config)


COMMANDS: list[tuple[click.Command, ServicePort]] = [
    (gateway.command, GATEWAY),
    (gateway.command, ADMIN),
    (serve, DIRECTORY),
    (worker.command, WORKER),
    (worker.command, RPC),
    (worker.command, TRANSFER),
]


@pytest.mark.parametrize(("command", "listener"), COMMANDS, ids=lambda one: one.name)
def test_commands_take_the_tables_ports(command: click.Command, listener: ServicePort) -> None:
    defaults = {option: one.default for one in command.params for option in one.opts}
    assert defaults[listener.port_option] == listener.port
    assert defaults[listener.host_option] == "127.0.0.1"


def test_the_page_has_the_table() -> None:
    rows = [line for line in (ROOT / "docs" / "ports.md").read_text().splitlines() if "--" in line]
    for listener in LISTENERS:
        port = str(listener.port) if listener.port else "a free one"
        wanted = f"| `{listener.host_option}`, `{listener.port_option}` | {port} |"
        (row,) = [row for row in rows if row.startswith(f"| {listener.name} |")]
        assert wanted in row
