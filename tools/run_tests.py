"""Run pytest so that one flaky test does not lose a whole run, and no flaky test goes unseen.

    python tools/run_tests.py PYTEST-ARGUMENTS...

The 20 slowest tests are printed. Where at most `MOST_AGAIN` tests failed, they alone are run once
more: if all pass then, the run passes, and its last line names them. Whatever else went wrong
(more failures, an error of collection, a limit of a plug-in) stands as pytest's exit code says.
What failed is listed in a folder of this run's own: others may run beside it in one checkout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from pytest import ExitCode

SLOWEST = 20
MOST_AGAIN = 3
PYTEST = (sys.executable, "-m", "pytest")


def main(arguments: Sequence[str]) -> int:
    """The exit code of the run, or of the second one of what failed in it."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), arguments)


def run(cache: Path, arguments: Sequence[str]) -> int:
    """The same, with a folder for pytest's cache."""
    pytest = [*PYTEST, "-o", f"cache_dir={cache / 'cache'}"]
    first = [*pytest, f"--durations={SLOWEST}", *arguments]
    code = subprocess.run(first, check=False).returncode
    if code != ExitCode.TESTS_FAILED:
        return code
    failed = last_failed(cache / "cache")
    if not 1 <= len(failed) <= MOST_AGAIN:
        return code
    print(f"\n{len(failed)} failed: once more, alone", flush=True)
    report = cache / "report.xml"
    again = ["--last-failed", "--last-failed-no-failures=none", f"--junitxml={report}"]
    again += ["-n0"] if "-n" in arguments else []
    subprocess.run([*pytest, *arguments, *again], check=False)
    if passed(report) < len(failed):
        print(f"!!! failed twice, or failed and did not run again: {', '.join(failed)}", flush=True)
        return code
    print(f"!!! failed once, passed alone: {', '.join(failed)}", flush=True)
    return ExitCode.OK


def last_failed(cache: Path) -> list[str]:
    """The tests that failed in the last run with that cache."""
    told = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(told.read_text())) if told.exists() else []


def passed(report: Path) -> int:
    """How many tests of a run passed; a skipped one did not."""
    if not report.exists():
        return 0
    cases = ElementTree.parse(report).iter("testcase")
    return sum(len(case.findall("*[@message]")) == 0 for case in cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
