"""Look up what the tests run with (constraints.txt) in a database of known vulnerabilities.

    python tools/audit.py [CONSTRAINTS] [--osv-url URL]

pip-audit asks PyPI, or the service at URL, which speaks OSV's protocol. It lives in an environment
of its own, made on the first call. Exit status 1: a vulnerability that IGNORED does not explain.
Without an index to install it from, or a service that answers, nothing is audited: that is said,
and is no failure, for a build offline is none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VERSION = "2.10.1"
ENVIRONMENT = ROOT / ".venv-audit"
TIMEOUT_S = 120.0

# An id that PyPI or OSV gives -> why it does not touch us, until it is mended upstream.
IGNORED: dict[str, str] = {}


class Found(NamedTuple):
    """What an audit said: how many packages it knew, those it did not, and what is vulnerable."""

    known: int
    unknown: list[str]
    vulnerable: list[str]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Look up known vulnerabilities.")
    parser.add_argument("constraints", nargs="?", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--osv-url", help="https://api.osv.dev/v1/query; else PyPI")
    given = parser.parse_args(arguments)
    if not has_pip_audit():
        return unaudited(f"pip-audit {VERSION} can't be installed: no index")
    report = audited(given.constraints, given.osv_url)
    if report is None:
        return unaudited("no service of known vulnerabilities answers")
    found = read(report)
    if not found.known:
        return unaudited(f"the service knows none of {len(found.unknown)} packages")
    for line in found.vulnerable:
        print(f"vulnerable: {line}")
    print(
        f"audit: {found.known} packages, {len(found.vulnerable)} vulnerabilities;"
        f" unknown to the service: {', '.join(found.unknown) or 'none'}"
    )
    return 1 if found.vulnerable else 0


def unaudited(why: str) -> int:
    print(f"!!! nothing is audited: {why}")
    return 0


def has_pip_audit() -> bool:
    """Whether pip-audit is at hand; makes its environment where there is none."""
    if (ENVIRONMENT / f".pip-audit-{VERSION}").exists():
        return True
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    install = [ENVIRONMENT / "bin/python", "-m", "pip", "install", "--quiet"]
    install += ["--disable-pip-version-check", f"pip-audit=={VERSION}"]
    if ran(install).returncode != 0:
        return False
    (ENVIRONMENT / f".pip-audit-{VERSION}").touch()
    return True


def audited(constraints: Path, osv_url: str | None) -> dict[str, Any] | None:
    """pip-audit's report on pinned versions; None when it could make none."""
    command = [ENVIRONMENT / "bin/python", "-m", "pip_audit", "--progress-spinner", "off"]
    command += ["--requirement", constraints, "--no-deps", "--disable-pip", "--format", "json"]
    if osv_url is not None:
        command += ["--vulnerability-service", "osv", "--osv-url", osv_url]
    told = ran(command)
    try:
        report: dict[str, Any] = json.loads(told.stdout)
    except ValueError:
        print(told.stderr[-2000:], file=sys.stderr)
        return None
    return report


def ran(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """The command, ended; one that takes longer than TIMEOUT_S has failed."""
    try:
        return subprocess.run(
            command, text=True, capture_output=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end in {TIMEOUT_S:.0f} s")


def read(report: dict[str, Any]) -> Found:
    """What a report of pip-audit says, less what is ignored."""
    known = [one for one in report["dependencies"] if "skip_reason" not in one]
    return Found(
        len(known),
        [one["name"] for one in report["dependencies"] if "skip_reason" in one],
        [
            f"{one['name']} {one['version']}: {flaw['id']}"
            f" (mended in {', '.join(flaw['fix_versions']) or 'no version'})"
            for one in known
            for flaw in one["vulns"]
            if not {flaw["id"], *flaw.get("aliases", ())} & IGNORED.keys()
        ],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
