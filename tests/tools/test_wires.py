"""tools/wires.py notices what nobody sends, acts on or uses."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIRES = runpy.run_path(str(ROOT / "tools" / "wires.py"))

MESSAGES = """
import msgspec
class Asked(msgspec.Struct): ...
class Told(msgspec.Struct): ...
class Silent(msgspec.Struct): ...
Request = Asked | Silent
"""
SENDER = """
from ownerserve.pkg import Asked
import ownerserve.node.vocabulary.events as said
class Sender:
    def ask(self): return Asked()
    def again(self): return Sender(), said.Told()
"""
TAKER = """
from ownerserve.node.vocabulary import events
from ownerserve.pkg import sender
def take(one):
    match one:
        case events.Asked(): return sender.Sender()
def lonely(n): return lonely(n - 1)
@route("/take")
def served(): take(1)
"""


def dead(**changed: str) -> dict[str, str]:
    sources = {
        "ownerserve.node.vocabulary.events": MESSAGES,
        "ownerserve.pkg": "from ownerserve.node.vocabulary.events import Asked",
        "ownerserve.pkg.sender": SENDER,
        "ownerserve.pkg.taker": TAKER,
    }
    trees = {name: ast.parse(changed.get(name, text)) for name, text in sources.items()}
    return dict(WIRES["dead"](trees))


def test_what_is_made_or_taken_by_nobody_is_dead() -> None:
    assert dead() == {
        "ownerserve.node.vocabulary.events.Told": "nobody acts on it",
        "ownerserve.node.vocabulary.events.Silent": "nobody makes it",
        "ownerserve.pkg.taker.lonely": "nothing uses it",
    }


def test_cutting_a_wire_is_noticed() -> None:
    cut = dead(**{"ownerserve.pkg.sender": SENDER.replace("return Asked()", "return None")})
    assert cut["ownerserve.node.vocabulary.events.Asked"] == "nobody makes it"


def test_our_own_house_is_in_order() -> None:
    assert WIRES["main"]() == 0
