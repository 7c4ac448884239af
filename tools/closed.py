"""Closed parts: what a package keeps to itself, and who reaches in all the same.

Looks at src. Two rules:

| rule | means |
|---|---|
| a package of OPEN is closed but for the modules named there | nobody outside imports another one |
| `thing._name` | `thing` is `self`, `cls` or of this module, which then defines `_name` |

A name of KEPT is for the package itself and for tests. What reaches in for a reason is named in
EXCEPTIONS, with that reason; an entry that nothing needs any more must go.

    python tools/closed.py        exit 1 and one line for each reach-in
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

OPEN: dict[str, frozenset[str]] = {
    "ownerserve.cache": frozenset(
        {
            "counters",
            "effects",
            "hetero",
            "layout",
            "metrics",
            "occupancy",
            "outcomes",
            "policies",
            "pools.budget",
            "pressure",
            "residents",
            "sessions",
            "turnover",
        }
    ),
}
"""A closed package: its modules, or folders of modules, that others may import."""

NAMED_TUPLE = frozenset({"_asdict", "_fields", "_replace"})

KEPT = frozenset({"ownerserve.cache.hetero.parts_of"})

EXCEPTIONS: dict[str, str] = {
    "ownerserve.sim.pool: _processes": "nothing else tells of a pool's processes",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, modules: frozenset[str]) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each import of ours; the name is empty for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole in modules
                yield (
                    node.lineno,
                    whole if is_module else node.module,
                    "" if is_module else alias.name,
                )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""


def reached(module: str, tree: ast.Module, modules: frozenset[str]) -> Iterator[tuple[str, str]]:
    """What `module` imports of closed packages, and what is said of it."""
    for line, target, name in imported(tree, modules):
        for package, opened in OPEN.items():
            if module.startswith(f"{package}.") or not target.startswith(f"{package}."):
                continue
            part = target.removeprefix(f"{package}.")
            if not any(part == one or part.startswith(f"{one}.") for one in opened):
                yield f"{module}: {target}", f"line {line} imports a closed part of {package}"
            elif f"{target}.{name}" in KEPT:
                yield f"{module}: {target}.{name}", f"line {line} imports what is kept for tests"


def private(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Private members of other modules' things that `module` names."""
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Assign):
            own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if node.attr.endswith("__") or node.attr in own or node.attr in NAMED_TUPLE:
            continue
        yield f"{module}: {node.attr}", f"line {node.lineno} reaches into another module's thing"


def main() -> int:
    paths = sorted(SOURCE.rglob("*.py"))
    trees = {module_of(path): ast.parse(path.read_text()) for path in paths}
    modules = frozenset(trees)
    found: dict[str, str] = {}
    for module, tree in trees.items():
        found |= dict(reached(module, tree, modules))
        found |= dict(private(module, tree))
    violations = [f"{what}: {why}" for what, why in found.items() if what not in EXCEPTIONS]
    violations += [
        f"{what}: nobody does; strike it here" for what in EXCEPTIONS if what not in found
    ]
    print("\n".join(violations) or "closed: ok")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
