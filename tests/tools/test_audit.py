"""tools/audit.py fails for a vulnerability, and for nothing that is only out of reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "audit.py"
FLAW = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"], "description": ""}
SOUND = {"name": "sound", "version": "2.0", "vulns": []}
BAD = {"name": "bad", "version": "1.0", "vulns": [FLAW]}
UNKNOWN = {"name": "ours", "skip_reason": "not found on PyPI"}


def run(
    folder: Path, answer: str | None, *, ignored: str = "{}"
) -> subprocess.CompletedProcess[str]:
    """The tool in a checkout of its own, where pip-audit prints `answer`; None: there is none, and
    no index either."""
    tool = folder / "tools" / "audit.py"
    tool.parent.mkdir()
    shutil.copy(TOOL, tool)
    source = tool.read_text()
    assert "str] = {}" in source
    tool.write_text(source.replace("str] = {}", f"str] = {ignored}", 1))
    (folder / "constraints.txt").write_text("bad==1.0\n")
    if answer is not None:
        (folder / "answer").write_text(answer)
        binary = folder / ".venv-audit" / "bin" / "python"
        binary.parent.mkdir(parents=True)
        binary.write_text(f"#!/bin/sh\ncat {folder}/answer\n")
        binary.chmod(0o755)
        (folder / ".venv-audit" / ".pip-audit-2.10.1").touch()
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    return subprocess.run(
        [sys.executable, str(tool)],
        env=os.environ | offline,
        text=True,
        capture_output=True,
        check=False,
    )


def told(*dependencies: dict[str, Any]) -> str:
    return json.dumps({"dependencies": dependencies, "fixes": []})


def test_a_vulnerability_fails_and_is_named_with_its_mend(tmp_path: Path) -> None:
    ran = run(tmp_path, told(SOUND, BAD, UNKNOWN))
    assert ran.returncode == 1
    assert ran.stdout.splitlines() == [
        "vulnerable: bad 1.0: PYSEC-1 (mended in 1.1)",
        "audit: 2 packages, 1 vulnerabilities; unknown to the service: ours",
    ]


def test_one_that_is_explained_does_not(tmp_path: Path) -> None:
    ran = run(tmp_path, told(BAD), ignored='{"CVE-1": "not called"}')
    assert (ran.returncode, ran.stdout.split(";")[0]) == (0, "audit: 1 packages, 0 vulnerabilities")


@pytest.mark.parametrize("answer", ["", "no json", told(UNKNOWN)])
def test_a_service_that_says_nothing_is_said_loudly(tmp_path: Path, answer: str) -> None:
    ran = run(tmp_path, answer)
    assert ran.returncode == 0
    assert ran.stdout.startswith("!!! nothing is audited: ")


@pytest.mark.slow
def test_without_an_index_nothing_is_audited(tmp_path: Path) -> None:
    ran = run(tmp_path, None)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("!!! nothing is audited: pip-audit 2.10.1 can't be installed")


ADVISORY = {
    "schema_version": "1.7.3",
    "id": "PYSEC-2026-1",
    "aliases": ["CVE-2026-1"],
    "summary": "made up",
    "affected": [
        {
            "package": {"name": "httptools", "ecosystem": "PyPI"},
            "ranges": [
                {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]},
            ],
        }
    ],
}
"""In the form of osv.dev's answers, of the service's documentation."""


class Service(BaseHTTPRequestHandler):
    """A service that speaks OSV's protocol and knows one advisory."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_bad = asked["package"] == {"name": "httptools", "ecosystem": "PyPI"}
        body = json.dumps({"vulns": [ADVISORY]} if is_bad and asked["version"] else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_the_real_pip_audit_asks_a_service_and_its_answer_is_read(tmp_path: Path) -> None:
    if not (TOOL.parents[1] / ".venv-audit" / ".pip-audit-2.10.1").exists():
        pytest.skip("needs pip-audit (make audit)")
    pinned = tmp_path / "constraints.txt"
    pinned.write_text("httptools==0.6.4\nclick==8.1.8\n")
    with service() as url:
        ran = subprocess.run(
            [sys.executable, str(TOOL), str(pinned), "--osv-url", url],
            text=True,
            capture_output=True,
            check=False,
        )
    assert (ran.returncode, ran.stdout.splitlines()) == (
        1,
        [
            "vulnerable: httptools 0.6.4: PYSEC-2026-1 (mended in 99.0)",
            "audit: 2 packages, 1 vulnerabilities; unknown to the service: none",
        ],
    ), ran.stderr
