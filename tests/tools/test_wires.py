"""tools/wires.py notices what nobody sends, acts on or uses."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

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


CONTROL = """
import msgspec
class Came(msgspec.Struct): ...
class Lost(msgspec.Struct): ...
class Ask(msgspec.Struct): ...
class Hold(msgspec.Struct): ...
Event = Came | Lost
Effect = Ask | Hold
"""
MACHINE = """
from ownerserve.transfer.control.events import Ask, Came, Hold, Lost
def handle(event):
    match event:
        case Came(): return [Ask()]
        case Lost(): return [Hold()]
"""
PROCESS = """
from ownerserve.transfer.control import events
from ownerserve.transfer.control.machine import handle
def perform():
    for effect in handle(events.Came()):
        match effect:
            case events.Ask(): perform()
perform()
"""


def test_an_event_that_no_process_makes_and_an_effect_that_none_acts_on_are_dead() -> None:
    sources = {"events": CONTROL, "machine": MACHINE}
    trees = {f"ownerserve.transfer.control.{n}": ast.parse(text) for n, text in sources.items()}
    trees["ownerserve.node.process"] = ast.parse(PROCESS)
    at = "ownerserve.transfer.control.events"
    assert dict(WIRES["dead"](trees)) == {
        f"{at}.Lost": "nobody makes it",
        f"{at}.Hold": "nobody acts on it",
    }


RECORDS = """
import msgspec
class Held(msgspec.Struct):
    owner: str
    epoch: int
    left_s: float
class Page(msgspec.Struct):
    last: int
    def encode(self): return self.last, self.left_s
"""
READER = """
from ownerserve.kv.wire import records
def read(one, page):
    match one:
        case records.Held(owner, _, _): return owner, page.last
"""
STRANGER = """
def read(one): return one.epoch, one.left_s
"""


def test_a_field_that_nobody_reads_is_noticed() -> None:
    def unread(reader: str) -> list[str]:
        sources = {"kv.wire.records": RECORDS, "pkg.reader": reader, "pkg.stranger": STRANGER}
        trees = {f"ownerserve.{name}": ast.parse(text) for name, text in sources.items()}
        return [path.removeprefix("ownerserve.kv.wire.records.") for path in WIRES["unread"](trees)]

    assert unread(READER) == ["Held.epoch", "Held.left_s"]
    assert unread(READER.replace("_, _", "_, left_s")) == ["Held.epoch"]
    assert unread(READER.replace("page.last", "one.epoch")) == ["Held.left_s", "Page.last"]


@pytest.mark.slow
def test_our_own_house_is_in_order() -> None:
    assert WIRES["main"]() == 0
