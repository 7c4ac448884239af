"""Every command of ours in docs/operations.md is one that the real command line takes, those too
that need other hosts to be run."""

from __future__ import annotations

import re

import click
import pytest

from ownerserve.cli.main import cli
from tests.docs.test_commands import PAGES, blocks, words_of
from tests.support.children import ROOT

(PAGE,) = [page for page in PAGES if page.name == "operations.md"]
LINES = sorted(
    {
        line
        for block in blocks(PAGE)
        for line in block.commands()
        if words_of(line)[:1] == ["ownerserve"]
    }
)


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_takes_it(line: str) -> None:
    found: click.Command = cli
    words = words_of(line)[1:]
    while isinstance(found, click.Group):
        below = found.get_command(click.Context(found), words[0])
        assert below is not None, line
        found, words = below, words[1:]
    context = click.Context(found)
    values, rest, _ = found.make_parser(context).parse_args(words)
    assert values and not rest, line
    known = {option.name: option for option in found.params}
    for name, value in values.items():
        option = known[name]
        if not isinstance(option.type, click.Path) and isinstance(value, str):
            option.type_cast_value(context, value)


def test_there_are_commands_of_each_kind() -> None:
    said = " ".join(LINES)
    for word in ("directory serve", "directory keys", "--check", "--mode shadow", "--worker-dns",
                 "--worker-kubernetes", "--tls-cert-file", "--admin-tls-cert-file"):  # fmt: skip
        assert word in said, word


def test_the_page_has_each_alert() -> None:
    rules = (ROOT / "examples" / "monitoring" / "alerts.yaml").read_text()
    text = PAGE.read_text()
    for name in re.findall(r"alert: (\w+)", rules):
        assert f"`{name}`" in text, name
