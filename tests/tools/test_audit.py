"""tools/audit.py fails for a vulnerability, and for nothing that is only out of reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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
