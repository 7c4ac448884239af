"""One name for one thing, one thing for one name: what style.md §12 and §11 ask of names.

| rule | exceptions |
|---|---|
| a public class name is defined once in src | TWICE: the name, with the reason; in two layers |
| no import of ours is renamed by `as` | RENAMED: `path name`, with the reason |
| a word of RETIRED is no part of a name any more: what it meant has another | STILL: how many |
| a class in the glossary's third column exists, and no term stands in two rows | |
| no docstring begins with a word of OPENERS | OPENERS_LEFT: how many |

What is excepted may only become less: an exception that is no longer needed is printed; with
`--strict` it has to go.

    python tools/names.py [--strict]      exit 1 and one line for each violation
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "ownerserve"
GLOSSARY = ROOT / "docs" / "glossary.md"
OPENERS = ("Of", "It", "As", "Those", "Who", "Whose")
_OPENER = re.compile(rf"(?:{'|'.join(OPENERS)})\b")

TWICE: dict[str, str] = {}
RENAMED: dict[str, str] = {
    "cache/hetero.py check": "its own method is `check` too",
}
RETIRED: dict[str, str] = {
    "desk": "handler",
    "errand": "operation_id",
    "freight": "load_cost",
    "lobby": "admission_queue",
    "outbox": "pending_commands",
    "wish": "pending_restore",
}
STILL: dict[str, int] = {"wish": 6}
OPENERS_LEFT = 0


class Docstring(NamedTuple):
    where: str
    text: str

    @property
    def opens_badly(self) -> bool:
        """Whether its first word says nothing of what it is about."""
        return _OPENER.match(self.text.lstrip()) is not None


def modules(source: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every module below `source`, as (path from there, syntax tree), in order of paths."""
    for path in sorted(source.rglob("*.py")):
        yield path.relative_to(source).as_posix(), ast.parse(path.read_text())


def class_definitions(trees: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Public class name -> every `path:line` that defines it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{name}:{node.lineno}")
    return dict(found)


def docstrings(trees: Iterable[tuple[str, ast.Module]]) -> Iterator[Docstring]:
    """Every docstring of a module, class, function or attribute, in order of paths."""
    for name, tree in trees:
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if not isinstance(body, list) or _is_help(node):
                continue
            for index, item in enumerate(body):
                if index and not isinstance(body[index - 1], ast.Assign | ast.AnnAssign):
                    continue
                if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                    text = item.value.value
                    if isinstance(text, str):
                        yield Docstring(f"{name}:{item.lineno}", text)


def _is_help(node: ast.AST) -> bool:
    """Whether the docstring of a function is a command's help, which the command line shows."""
    decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", ())]
    return any(re.match(r"\w+\.(command|group)\b", one) for one in decorators)


def renamed_imports(trees: Iterable[tuple[str, ast.Module]]) -> Iterator[tuple[str, str]]:
    """Every import of ours under another name: (`path name`, the name here)."""
    for path, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                own = (node.module or "").startswith("ownerserve")
            elif isinstance(node, ast.Import):
                own = any(alias.name.startswith("ownerserve") for alias in node.names)
            else:
                continue
            for alias in node.names:
                if own and alias.asname:
                    yield f"{path} {alias.name}", alias.asname


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives to what it makes: classes, functions, parameters, variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words_of(name: str) -> set[str]:
    """The words in snake_case or CamelCase, each in singular and as it stands, in lower case."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
    return words | {name.lower().strip("_")}


def retired_words(trees: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Word of RETIRED -> `path name` of each name of ours that it is a part of."""
    found: dict[str, list[str]] = {word: [] for word in RETIRED}
    for path, tree in trees:
        names = {(name, word) for name in defined_names(tree) for word in words_of(name)}
        for name, word in sorted(names):
            if word in found:
                found[word].append(f"{path} {name}")
    return found


def layer_of(where: str) -> str:
    """The layer of a path below the package; each engine is one."""
    parts = where.split("/")
    return "/".join(parts[:2]) if parts[0] == "engines" else parts[0]


def twice(classes: dict[str, list[str]]) -> Iterator[str]:
    """A line for each name that is defined twice and not excepted."""
    for name, places in sorted(classes.items()):
        if len(places) > 1 and name not in TWICE:
            yield f"class {name} is defined {len(places)} times: {', '.join(places)}"
        layers = Counter(map(layer_of, places))
        if name in TWICE and max(layers.values()) > 1:
            yield f"class {name} is defined twice in one layer: {', '.join(places)}"


class Row(NamedTuple):
    """A row of the glossary: a term and the classes that its last cell names."""

    term: str
    classes: list[str]


def glossary_rows(text: str) -> Iterator[Row]:
    """The rows of all tables of `text` but the one that says what others call it."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[0] not in {"term", "---"}:
            yield Row(cells[0].strip("*"), re.findall(r"`(?:\w+[./])*([A-Z]\w+)`", cells[2]))


def glossary_problems(text: str, classes: dict[str, list[str]]) -> Iterator[str]:
    """A line for each term that stands twice, and each class that is none."""
    rows = list(glossary_rows(text))
    for term, count in Counter(row.term for row in rows).items():
        if count > 1:
            yield f"glossary: {term} has {count} rows"
    for row in rows:
        for name in row.classes:
            if name not in classes:
                yield f"glossary: {row.term}: there is no class {name}"


def main(arguments: Sequence[str]) -> int:
    trees = list(modules(SOURCE))
    classes = class_definitions(trees)
    problems = [*twice(classes), *glossary_problems(GLOSSARY.read_text(), classes)]
    stale = [f"TWICE: {name} is not" for name in TWICE if len(classes.get(name, ())) < 2]
    renamed = dict(renamed_imports(trees))
    problems += [f"{key} as {renamed[key]}" for key in renamed if key not in RENAMED]
    stale += [f"RENAMED: {key} is not" for key in RENAMED if key not in renamed]
    for word, names in retired_words(trees).items():
        allowed = STILL.get(word, 0)
        if len(names) > allowed:
            problems.append(
                f"'{word}' is '{RETIRED[word]}' now: {len(names)} names have it, not {allowed}: "
                + ", ".join(names)
            )
        elif len(names) < allowed:
            stale.append(f"STILL: {word}: {len(names)}; lower it from {allowed}")
    opening = [text for text in docstrings(trees) if text.opens_badly]
    if len(opening) > OPENERS_LEFT:
        problems.append(f"{len(opening)} docstrings open badly, not {OPENERS_LEFT}:")
        problems += [f"  {text.where} {text.text.splitlines()[0]}" for text in opening]
    elif len(opening) < OPENERS_LEFT:
        stale.append(f"OPENERS_LEFT: {len(opening)}; lower it from {OPENERS_LEFT}")
    strict = "--strict" in arguments
    print("\n".join([*problems, *stale]) or "names: ok")
    return 1 if problems or (strict and stale) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
