"""nginx and HAProxy as processes, with a configuration of ours or of a test. Tests that need one
skip where it is not installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waits import until

_NGINX = """daemon off; pid {folder}/pid; error_log {folder}/said info; {user}
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {http}
}}
"""


@contextmanager
def nginx(folder: Path, http: str, port: int) -> Iterator[None]:
    """nginx with `http` in its http block, from when it listens at `port`."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    folder.mkdir()
    user = "user root;" if os.geteuid() == 0 else ""  # another could not read the test's folder
    (folder / "conf").write_text(_NGINX.format(folder=folder, http=http, user=user))
    command = [program, "-p", str(folder), "-c", str(folder / "conf")]
    with _running([*command, "-e", str(folder / "said")], folder, port):
        yield


@contextmanager
def haproxy(folder: Path, config: str, port: int) -> Iterator[None]:
    """HAProxy with this configuration, from when it listens at `port`."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/sbin")
    if program is None:
        pytest.skip("haproxy is not installed")
    folder.mkdir()
    (folder / "conf").write_text(config)
    with _running([program, "-db", "-f", str(folder / "conf")], folder, port):
        yield


@contextmanager
def _running(command: list[str], folder: Path, port: int) -> Iterator[None]:
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: _listens(port) or process.poll() is not None, what=command[0])
        assert process.poll() is None, (folder / "output").read_text()
        yield
    finally:
        process.terminate()
        process.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
