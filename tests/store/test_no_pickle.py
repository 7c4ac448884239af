"""No deserialiser that can run code stands anywhere in the tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pd", "read_pickle")}


def unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in CALLS or node.attr in ("recv_pyobj", "send_pyobj"):
                yield f"{owner}.{node.attr}"


WORDS = MODULES | {"torch.load", "np.load", "numpy.load", "read_pickle", "pyobj"}


def test_no_unsafe_deserialiser():
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    suspects = {path: text for path, text in texts.items() if any(w in text for w in WORDS)}
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path, text in suspects.items()
        for name in unsafe(ast.parse(text))
    }
    assert found == set()


@pytest.mark.parametrize(
    "code", ["import pickle", "from dill import loads", "torch.load(f)", "socket.recv_pyobj()"]
)
def test_the_check_sees_it(code):
    assert list(unsafe(ast.parse(code)))
