"""Dead wires: messages that nobody sends or nobody acts on, and public names that nothing uses.

Looks at src alone: what only tests construct is dead. Names are followed through imports, so that
two classes of one name are two.

| what | needs, somewhere in src |
|---|---|
| a message: a struct in a module of MESSAGES | a line that makes it, and one that acts on it: |
| | `case X(...)`, `isinstance`, a key of a table, an annotation of who takes it |
| each field of a message of WIRE | a line of another module that imports its module and reads |
| | `.field`, or takes it apart by `case X(...)` |
| any other public class or function | a use outside its own body |

A field is looked for by its name: where something else that is read there has it too, it counts.

Commands and routes are used by their decorator. What is called from outside is in OUTSIDE, with by
whom; what is dead and has its order in DEAD, with that order. An entry that came to life must go.

    python tools/wires.py        exit 1 and one line for each dead wire or unread field
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

MESSAGES = (
    "ownerserve.directory.messages",
    "ownerserve.kv.wire",
    "ownerserve.node.admission",
    "ownerserve.node.vocabulary.events",
    "ownerserve.router.messages",
    "ownerserve.transfer.control.events",
    "ownerserve.transfer.control.messages",
)

WIRE = ("ownerserve.directory.messages", "ownerserve.kv.wire")
"""Of these, what crosses between processes: each field has a reader too."""

VLLM = "vLLM loads it by its name"
ORACLE = "tests and benchmarks compare against it"
FITTING = "tools/fit_*.py make the shipped paces with it"

OUTSIDE: dict[str, str] = {
    "ownerserve.engines.hf.model.checkpoint.save_tiny": "tests make checkpoints with it",
    "ownerserve.engines.vllm.connector.OwnerServeConnector": VLLM,
    "ownerserve.engines.vllm.offload_policy.SessionPolicy": VLLM,
    "ownerserve.engines.vllm.offload_tier.OwnerServeTier": VLLM,
    "ownerserve.engines.vllm.plugin.OwnerServeEndpoints": VLLM,
    "ownerserve.engines.vllm.replay.scheduler.AsyncReplayScheduler": VLLM,
    "ownerserve.engines.vllm.replay.scheduler.ReplayScheduler": VLLM,
    "ownerserve.kv.clock.ManualClock": "the clock of tests",
    "ownerserve.cache.policies.block_lru.BlockLru": ORACLE,
    "ownerserve.sim.oracle.belady.bound": ORACLE,
    "ownerserve.sim.oracle.infinite.infinite": ORACLE,
    "ownerserve.sim.engine.pace_fit.fit_steps": FITTING,
    "ownerserve.sim.engine.pace_fit.read_steps": FITTING,
}

ACKNOWLEDGED = "an answer that asks for nothing: who hears it goes on as before"

DEAD: dict[str, str] = {
    "ownerserve.kv.wire.rpc.Committed": ACKNOWLEDGED,
    "ownerserve.transfer.control.messages.LendReturned": ACKNOWLEDGED,
}

STATED = "a gateway's /status shows the whole of what a worker states, for people"

READ: dict[str, str] = {
    "ownerserve.kv.wire.rpc.Admit.ahead_prefill_tokens": "by who asks POST /ownerserve/admit",
    "ownerserve.kv.wire.status.ProfileStatement.rpc": "gateway/service.py, of health's copy",
}
"""Fields that are read where this can't see it, and by whom."""


class Thing(NamedTuple):
    """A public class or function of src, by its module and name."""

    module: str
    name: str
    is_message: bool

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


class Uses:
    """How often each thing is made, taken and named at all, outside its own body."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self.taken: set[str] = set()
        self.named: set[str] = set()


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def things(module: str, tree: ast.Module) -> Iterator[Thing]:
    """The public classes and functions that `module` defines."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") or (
            node.decorator_list and not isinstance(node, ast.ClassDef)
        ):
            continue
        is_struct = isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith("Struct") for base in node.bases
        )
        yield Thing(module, node.name, is_struct and module.startswith(MESSAGES))


def imported(module: str, tree: ast.Module) -> dict[str, str]:
    """What each name of a module stands for: a dotted path, of a module or of a thing in one."""
    names = {
        node.name: f"{module}.{node.name}"
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
    return names


class Reader(ast.NodeVisitor):
    """Notes the uses in one module."""

    def __init__(self, module: str, names: dict[str, dict[str, str]], uses: Uses) -> None:
        self._module = module
        self._names = names
        self._uses = uses
        self._inside: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._body(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._body(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._body(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._note(node.func, self._uses.made)
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            for named in ast.walk(node.args[1]):
                self._note(named, self._uses.taken)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self._note(node.cls, self._uses.taken)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            if key is not None:
                self._note(key, self._uses.taken)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for side in (node.left, *node.comparators):
            self._note(side, self._uses.taken)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        for named in ast.walk(node.annotation) if node.annotation is not None else ():
            self._note(named, self._uses.taken)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node, self._uses.named)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node, self._uses.named)
        self.generic_visit(node)

    def _body(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside.append(f"{self._module}.{node.name}")
        self.generic_visit(node)
        self._inside.pop()

    def _note(self, node: ast.AST, where: set[str]) -> None:
        path = self.path(node)
        if path is not None and path not in self._inside:
            where.add(path)

    def path(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._from(self._module, node.id)
        if isinstance(node, ast.Attribute):
            base = self.path(node.value)
            return None if base is None else self._from(base, node.attr)
        return None

    def _from(self, base: str, name: str) -> str | None:
        """`name` as `base` has it; what a module has from another is that one's."""
        path = self._names.get(base, {}).get(name)
        if path is None:
            return None if base == self._module else f"{base}.{name}"
        home, _, last = path.rpartition(".")
        return path if home == base or home not in self._names else self._from(home, last)


class FieldReads(ast.NodeVisitor):
    """What one module reads of messages: attributes by name, and places and names of patterns."""

    def __init__(self, module: str, names: dict[str, dict[str, str]]) -> None:
        self.attributes: set[str] = set()
        self.places: set[tuple[str, int]] = set()
        """(class, position) of each part of a pattern that is named or looked at."""
        self._resolve = Reader(module, names, Uses()).path

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.attributes.update(node.kwd_attrs)
        path = self._resolve(node.cls)
        for place, part in enumerate(node.patterns):
            is_ignored = isinstance(part, ast.MatchAs) and part.name is None
            if path is not None and not is_ignored:
                self.places.add((path, place))
        self.generic_visit(node)


def fields(module: str, tree: ast.Module) -> Iterator[tuple[Thing, int, str]]:
    """Each message's fields of `module`, with their places."""
    messages = {thing.name: thing for thing in things(module, tree) if thing.is_message}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in messages:
            stated = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            named = [target.id for target in stated if isinstance(target, ast.Name)]
            for place, name in enumerate(named):
                yield messages[node.name], place, name


def unread(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Fields of messages that nobody reads, as `module.Class.field`."""
    names = {module: imported(module, tree) for module, tree in trees.items()}
    reads: dict[str, FieldReads] = {}
    for module, tree in trees.items():
        reads[module] = FieldReads(module, names)
        reads[module].visit(tree)
    for home, tree in trees.items():
        if not home.startswith(WIRE):
            continue
        readers = [
            reads[module]
            for module, known in names.items()
            if module != home
            and any(path == home or path.startswith(f"{home}.") for path in known.values())
        ]
        for thing, place, name in fields(home, tree):
            if not any(
                name in one.attributes or (thing.path, place) in one.places for one in readers
            ):
                yield f"{thing.path}.{name}"


def dead(trees: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """What is dead, and why."""
    uses = Uses()
    names = {module: imported(module, tree) for module, tree in trees.items()}
    for module, tree in trees.items():
        Reader(module, names, uses).visit(tree)
    for module, tree in trees.items():
        for thing in things(module, tree):
            if thing.is_message and thing.path not in uses.made:
                yield thing.path, "nobody makes it"
            elif thing.is_message and thing.path not in uses.taken:
                yield thing.path, "nobody acts on it"
            elif thing.path not in uses.named:
                yield thing.path, "nothing uses it"


def main() -> int:
    paths = sorted(SOURCE.rglob("*.py"))
    trees = {module_of(path): ast.parse(path.read_text()) for path in paths}
    found = dict(dead(trees)) | dict.fromkeys(unread(trees), "nobody reads it")
    known = OUTSIDE | DEAD | READ
    violations = [f"{path}: {why}" for path, why in found.items() if path not in known]
    violations += [f"{path}: alive or gone; strike it here" for path in known if path not in found]
    print("\n".join(violations) or "wires: ok")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
