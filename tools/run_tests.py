"""Run pytest so that one flaky test does not lose a whole run, and no flaky test goes unseen.

    python tools/run_tests.py PYTEST-ARGUMENTS...

The 20 slowest tests are printed. Where at most `MOST_AGAIN` tests failed, they alone are run once
more: if all pass then, the run passes, and its last line names them. Whatever else went wrong
(more failures, an error of collection, a limit of a plug-in) stands as pytest's exit code says.
pytest's cache is cleared first, so that what it lists as failed failed in this run.
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
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
PYTEST = (sys.executable, "-m", "pytest")


def main(arguments: Sequence[str]) -> int:
    """The exit code of the run, or of the second one of what failed in it."""
    first = [*PYTEST, "--cache-clear", f"--durations={SLOWEST}", *arguments]
    code = subprocess.run(first, check=False).returncode
    if code != ExitCode.TESTS_FAILED:
        return code
    failed = last_failed()
    if not 1 <= len(failed) <= MOST_AGAIN:
        return code
    print(f"\n{len(failed)} failed: once more, alone", flush=True)
    if passed_again(arguments) < len(failed):
        print(f"!!! failed twice, or failed and did not run again: {', '.join(failed)}", flush=True)
        return code
    print(f"!!! failed once, passed alone: {', '.join(failed)}", flush=True)
    return ExitCode.OK


def last_failed() -> list[str]:
    """The tests that failed in the last run here."""
    return sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []


def passed_again(arguments: Sequence[str]) -> int:
    """How many of the tests that failed in the last run pass now; a skipped one does not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        again = ["-n0", "--last-failed", "--last-failed-no-failures=none", f"--junitxml={report}"]
        subprocess.run([*PYTEST, *arguments, *again], check=False)
        if not report.exists():
            return 0
        cases = ElementTree.parse(report).iter("testcase")
        return sum(len(case.findall("*[@message]")) == 0 for case in cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
