"""The mutation gate: faults put in on purpose, each of which the fast suites must notice.

    python tools/mutants.py             all of them
    python tools/mutants.py --tenth     one in ten, the next ones with each commit: what CI runs
    python tools/mutants.py --only doors.py --json -
    python tools/mutants.py --check     only whether each mutant's text still stands in its file

The mutants are in tools/mutants/*.toml: file, the text that is replaced and by what, what that
breaks, and where the fast suites of suites.toml are not the right ones, which tests should notice.
A mutant is put into a copy of the package, never into the working tree. One that no test notices
and that gives no reason for it in `survives` fails the run; so does one with a reason that is
noticed after all, one whose text no longer stands exactly once, and a list of which fewer than
90 % are noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tools" / "mutants"
PACKAGE = ROOT / "src" / "ownerserve"
SUITES = "suites.toml"
KILLED_SHARE = 0.9
TENTHS = 10
HANG_S = 60.0
"""A suite that takes so much longer than all do without a mutant hangs: that is noticed."""
MARKS = "not vllm and not slow and not crash and not gpu"


class BadList(Exception):
    """A list of mutants that can't be run as it stands; says which entry, and the mend."""


class Mutant(NamedTuple):
    """One fault: `old` of `file` (below src/ownerserve) replaced by `new`."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    survives: str

    def applied(self, source: str) -> str:
        count = source.count(self.old)
        if count != 1:
            raise BadList(
                f"{self.name}: its text stands {count} times in {self.file}; "
                "give text that stands there once"
            )
        return source.replace(self.old, self.new)


class Verdict(NamedTuple):
    """What came of one mutant; `by` names the first test that noticed."""

    mutant: Mutant
    outcome: str
    by: str
    took_s: float

    @property
    def is_good(self) -> bool:
        return self.outcome == ("survived" if self.mutant.survives else "killed")


# ---- the lists


def suite_of(file: str, suites: dict[str, list[str]]) -> tuple[str, ...]:
    """Return the fast tests of a file: those of the longest path in the table that it is below."""
    below = [prefix for prefix in suites if file.startswith(prefix)]
    if not below:
        raise BadList(f"{file}: no suite; name one in {SUITES}")
    return tuple(suites[max(below, key=len)])


def read_lists(folder: Path) -> list[Mutant]:
    """Return all mutants of a folder of lists; raise `BadList` for an entry that can't be run."""
    suites = tomllib.loads((folder / SUITES).read_text())["suites"]
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        entries = [] if path.name == SUITES else tomllib.loads(path.read_text())["mutant"]
        for entry in entries:
            name = entry.get("name", "(no name)")
            missing = [key for key in ("name", "file", "old", "new", "breaks") if key not in entry]
            unknown = entry.keys() - set(Mutant._fields)
            if missing or unknown or name in found:
                wrong = f"lacks {missing}" if missing else f"has {sorted(unknown)} or comes twice"
                raise BadList(f"{path.name}: {name} {wrong}")
            if "tests" not in entry:
                entry["tests"] = suite_of(entry["file"], suites)
            entry["tests"] = tuple(entry["tests"])
            found[name] = Mutant(**{"survives": "", **entry})
    return list(found.values())


def check(mutants: Iterable[Mutant], package: Path) -> list[str]:
    """Return what is wrong with the lists, without a test: text that moved, or is no Python."""
    wrong = []
    every = list(mutants)
    for mutant in every:
        try:
            compile(mutant.applied((package / mutant.file).read_text()), mutant.file, "exec")
        except (BadList, OSError) as error:
            wrong.append(str(error))
        except SyntaxError as error:
            wrong.append(f"{mutant.name}: {mutant.file} is no Python with it: {error}")
    for test in sorted({test for mutant in every for test in mutant.tests}):
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text() if (ROOT / path).is_file() else None
        if source is None or (name and f"def {name}(" not in source):
            wrong.append(f"{test}: there is no such test; name the one that should notice")
    excused = sum(bool(mutant.survives) for mutant in every)
    if every and (len(every) - excused) / len(every) < KILLED_SHARE:
        wrong.append(f"{excused} of {len(every)} survive: {KILLED_SHARE:.0%} must be noticed")
    return wrong


def tenth_of(mutants: Sequence[Mutant], number: int) -> list[Mutant]:
    """Return one in ten, spread over the lists; ten numbers in a row have them all."""
    return [one for at, one in enumerate(mutants) if at % TENTHS == number % TENTHS]


def commits() -> int:
    """Count the commits up to here; a shallow clone has no history, there the day counts."""
    git = ["git", "-C", str(ROOT), "rev-list", "--count", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    known = int(done.stdout) if done.returncode == 0 else 0
    return known if known > 1 else int(time.time() // 86_400)


# ---- running


class Shadow:
    """A shadow is a copy of the package, in front of the real one for the tests that run in it."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "shadow" / "ownerserve"
        self._folder = folder
        shutil.copytree(PACKAGE, self.package)  # compiled files too: they go by the time of theirs

    def put(self, mutant: Mutant) -> None:
        self._write(mutant.file, mutant.applied((PACKAGE / mutant.file).read_text()))

    def restore(self, mutant: Mutant) -> None:
        self._write(mutant.file, (PACKAGE / mutant.file).read_text())

    def _write(self, file: str, source: str) -> None:
        path = self.package / file
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        path.write_text(source)

    def run(self, tests: Iterable[str], *, within_s: float | None) -> tuple[int | None, str]:
        """Run `tests` up to the first failure; returns pytest's exit code and what it printed.

        The code is None when they took longer than `within_s`.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(self.package.parent), str(LISTS))),
            "PYTHONDONTWRITEBYTECODE": "1",  # two mutants of a second would share a compiled file
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take 2 s of CPU to import, a suite 0.5 s
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._folder / "hypothesis"),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-m", MARKS]
        command += [
            "-p",
            "no:cacheprovider",
            "-p",
            "_hypothesis_pytestplugin",
            "--hypothesis-seed=0",
        ]
        command += [f"--basetemp={self._folder / 'tests'}", *tests]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as running:
            try:
                printed, _ = running.communicate(timeout=within_s)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                printed, _ = running.communicate()
                return None, printed
        return running.returncode, printed


def first_failure(printed: str) -> str:
    """Return the test that failed first, or the last line when none is named."""
    lines = printed.strip().splitlines() or [""]
    named = (line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR ")))
    return next(named, lines[-1])


def judge(mutant: Mutant, shadow: Shadow, hang_s: float) -> Verdict:
    """Run one mutant; an outcome that is neither killed nor survived says what went wrong."""
    begun_s = time.monotonic()
    shadow.put(mutant)
    try:
        code, printed = shadow.run(mutant.tests, within_s=hang_s)
    finally:
        shadow.restore(mutant)
    outcome = {0: "survived", 1: "killed", None: "killed"}.get(code, "not run")
    by = "" if code == 0 else "it hangs" if code is None else first_failure(printed)
    return Verdict(mutant, outcome, by, time.monotonic() - begun_s)


def run_all(mutants: Sequence[Mutant], tell: Callable[[str], None]) -> list[Verdict]:
    """Run the suites without a mutant, then with each; raise `BadList` when they fail without."""
    with tempfile.TemporaryDirectory(prefix="ownerserve-mutants-") as folder:
        shadow = Shadow(Path(folder))
        begun_s = time.monotonic()
        # A test named by file and one of its functions would run once only: as a whole, then.
        suites = dict.fromkeys(test.partition("::")[0] for one in mutants for test in one.tests)
        code, printed = shadow.run(suites, within_s=None)
        if code:
            raise BadList(f"the suites fail without a mutant: {first_failure(printed)}\n{printed}")
        clean_s = time.monotonic() - begun_s
        tell(f"without a mutant: {len(suites)} suites pass in {clean_s:.0f} s")
        verdicts = []
        for at, mutant in enumerate(mutants, 1):
            one = judge(mutant, shadow, clean_s + HANG_S)
            verdicts.append(one)
            mark = " " if one.is_good else "!"
            place = f"{at}/{len(mutants)}"
            tell(f"{mark} {place} {one.outcome} {one.took_s:.1f} s {mutant.name} {one.by}")
        return verdicts


def report(verdicts: Sequence[Verdict]) -> tuple[list[str], dict[str, object]]:
    """Return the closing lines for a person, and the same as one object."""
    killed = sum(one.outcome == "killed" for one in verdicts)
    lines = [f"killed {killed} of {len(verdicts)} mutants"]
    for one in verdicts:
        mutant = one.mutant
        if one.outcome == "killed" and mutant.survives:
            lines.append(f"! {mutant.name} is noticed by {one.by}: take out its reason to survive")
        elif one.outcome == "survived" and mutant.survives:
            lines.append(f"  {mutant.name} survives: {mutant.survives}")
        elif one.outcome == "survived":
            lines.append(f"! {mutant.name} ({mutant.file}) survives: {mutant.breaks}")
        elif one.outcome != "killed":
            lines.append(f"! {mutant.name} ({mutant.file}): the tests did not run: {one.by}")
    rows = [
        {
            "name": one.mutant.name,
            "file": one.mutant.file,
            "breaks": one.mutant.breaks,
            "outcome": one.outcome,
            "by": one.by,
            "survives": one.mutant.survives,
            "took_s": round(one.took_s, 2),
        }
        for one in verdicts
    ]
    found = {"schema": "ownerserve.mutants/1", "mutants": len(rows), "killed": killed, "rows": rows}
    return lines, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Put faults into a copy of the package: the fast suites must notice each.",
        epilog="The lists are in tools/mutants/.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tenth", action="store_true", help="one in ten, others with each commit")
    which.add_argument(
        "--only", metavar="TEXT", action="append", help="those with TEXT in their name or file"
    )
    which.add_argument("--check", action="store_true", help="only look at the lists, run nothing")
    parser.add_argument("--json", metavar="PATH", help="write the results there; - : print them")
    options = parser.parse_args(arguments)
    try:
        every = read_lists(LISTS)
        if wrong := check(every, PACKAGE):
            raise BadList("\n".join(wrong))
        print(f"{len(every)} mutants in {LISTS.relative_to(ROOT)}, their text is in place")
        if options.check:
            return 0
        mutants = tenth_of(every, commits()) if options.tenth else every
        if options.only:
            mutants = [
                one
                for one in mutants
                if any(text in f"{one.name} {one.file}" for text in options.only)
            ]
        if not mutants:
            raise BadList(f"no mutant has one of {options.only} in its name or file")
        verdicts = run_all(mutants, lambda line: print(line, flush=True))
    except BadList as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    lines, found = report(verdicts)
    print("\n".join(lines))
    if options.json == "-":
        print(json.dumps(found, indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(one.is_good for one in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
