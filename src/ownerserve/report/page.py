"""This module makes one self-contained HTML page: verdicts, tables and figures; it opens from a
disk, years from now.

Owns the markup and its style. Takes plain data; every text is escaped, nothing is fetched and no
script runs. Light and dark follow the reader's system: figures are inlined as SVG whose ink takes
the page's colour.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from html import escape
from importlib import resources
from pathlib import Path
from typing import TypeAlias

import msgspec

from ownerserve.report.figures.style import GRID, INK, Written


class Verdict(StrEnum):
    """A verdict is what the evaluation found of a claim."""

    HOLDS = "holds"
    IN_RANGE = "holds in a range"
    FAILS = "does not hold"
    NOT_SHOWN = "not shown"
    """The run had nothing by which the claim could have failed, or draws that disagree."""


SIGNS = {
    Verdict.HOLDS: "✓",
    Verdict.IN_RANGE: "◐",
    Verdict.FAILS: "✗",
    Verdict.NOT_SHOWN: "○",
}
CLASSES = {
    Verdict.HOLDS: "holds",
    Verdict.IN_RANGE: "range",
    Verdict.FAILS: "fails",
    Verdict.NOT_SHOWN: "unshown",
}


class Claim(msgspec.Struct, frozen=True):
    """A claim is one of the seeds', with its verdict.

    `number`: the measured one, with its unit. `section`: title of the section that shows it, "" for
    none.
    """

    claim: str
    source: str
    verdict: Verdict
    number: str
    trace: str
    command: str
    section: str = ""


class Text(msgspec.Struct, frozen=True, tag=True):
    """A text is one paragraph; `code` spans are written in backticks."""

    text: str


class Grid(msgspec.Struct, frozen=True, tag=True):
    """A grid is a table. Cells that read as numbers stand to the right."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


class Plot(msgspec.Struct, frozen=True, tag=True):
    """A plot is a figure: `svg` is the file's text. `name` is unique on the page."""

    name: str
    caption: str
    svg: str


class Picture(msgspec.Struct, frozen=True, tag=True):
    """A picture is a figure too dense for SVG, as PNG."""

    name: str
    caption: str
    png: bytes


class Command(msgspec.Struct, frozen=True, tag=True):
    """A command is what to type to get this again."""

    command: str


Block: TypeAlias = Text | Grid | Plot | Picture | Command


class Section(msgspec.Struct, frozen=True):
    title: str
    blocks: list[Block]


class ReportPage(msgspec.Struct, frozen=True):
    """A page is the whole report. `facts`: what the run was made with (trace, seed, commit,
    machine): label -> value."""

    title: str
    summary: str
    sections: list[Section]
    claims: list[Claim] = []
    facts: dict[str, str] = {}


def plot_from(written: Written, caption: str) -> Plot:
    """Read the figure that `figures.style.write` wrote."""
    return Plot(written.svg.stem, caption, written.svg.read_text(encoding="utf-8"))


def write(page: ReportPage, path: Path) -> None:
    """Write the page; equal pages are equal bytes."""
    path.write_text(render(page), encoding="utf-8", newline="\n")


def render(page: ReportPage) -> str:
    """Return the whole HTML document as text."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    anchors = _anchors(page.sections)
    contents = [("verdicts", "Verdicts")] if page.claims else []
    contents += [(anchors[section.title], section.title) for section in page.sections]
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(page.title)}</title>",
        f"<style>\n{style}</style>",
        "</head>",
        "<body>",
        "<nav>",
        "<strong>Contents</strong>",
        "<ol>",
        *(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title in contents),
        "</ol>",
        "</nav>",
        "<main>",
        f"<h1>{escape(page.title)}</h1>",
        f"<p>{_inline(page.summary)}</p>",
        *_facts(page.facts),
        *_verdicts(page.claims, anchors),
    ]
    for section in page.sections:
        parts.append(f'<section id="{anchors[section.title]}">')
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts += [_block(block) for block in section.blocks]
        parts.append("</section>")
    parts += ["</main>", "</body>", "</html>", ""]
    return "\n".join(parts)


def _anchors(sections: Sequence[Section]) -> dict[str, str]:
    """Return a readable and unique id for each title."""
    taken = {"verdicts"}
    found: dict[str, str] = {}
    for section in sections:
        base = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        anchor, count = base, 2
        while anchor in taken:
            anchor, count = f"{base}-{count}", count + 1
        taken.add(anchor)
        found[section.title] = anchor
    return found


def _facts(facts: dict[str, str]) -> list[str]:
    if not facts:
        return []
    pairs = (f"<dt>{escape(k)}</dt><dd>{_inline(v)}</dd>" for k, v in facts.items())
    return ["<dl>", *pairs, "</dl>"]


def _verdicts(claims: Sequence[Claim], anchors: dict[str, str]) -> list[str]:
    """Return the markup of the verdicts: how many of each, then a row a claim."""
    if not claims:
        return []
    counts = Counter(claim.verdict for claim in claims)
    tallies = (f"{_badge(verdict)} {counts[verdict]}" for verdict in Verdict if counts[verdict])
    headings = ("claim", "source", "verdict", "number and command", "trace")
    return [
        '<section id="verdicts">',
        "<h2>Verdicts</h2>",
        f"<p>{' &nbsp; '.join(tallies)}</p>",
        '<div class="wide"><table class="verdicts">',
        f"<thead><tr>{''.join(f'<th>{heading}</th>' for heading in headings)}</tr></thead>",
        "<tbody>",
        *(_claim(claim, anchors) for claim in claims),
        "</tbody>",
        "</table></div>",
        "</section>",
    ]


def _claim(claim: Claim, anchors: dict[str, str]) -> str:
    text = _inline(claim.claim)
    if claim.section in anchors:
        text = f'<a href="#{anchors[claim.section]}">{text}</a>'
    cells = (
        text,
        escape(claim.source),
        _badge(claim.verdict),
        f"{_inline(claim.number)}<br><code>{escape(claim.command)}</code>",
        escape(claim.trace),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _badge(verdict: Verdict) -> str:
    return f'<span class="badge {CLASSES[verdict]}">{SIGNS[verdict]} {verdict.value}</span>'


def _block(block: Block) -> str:
    match block:
        case Text():
            return f"<p>{_inline(block.text)}</p>"
        case Command():
            return f"<pre><code>{escape(block.command)}</code></pre>"
        case Grid():
            return _grid(block)
        case Plot():
            drawing = _inlined(block)
        case Picture():
            data = base64.b64encode(block.png).decode("ascii")
            alt = escape(block.caption)
            drawing = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
    return (
        f'<figure id="figure-{escape(block.name)}">\n<div class="wide">{drawing}</div>\n'
        f"<figcaption>{_inline(block.caption)}</figcaption>\n</figure>"
    )


def _grid(grid: Grid) -> str:
    head = "".join(f"<th>{_inline(column)}</th>" for column in grid.columns)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in grid.rows)
    caption = f"<caption>{_inline(grid.caption)}</caption>\n" if grid.caption else ""
    return (
        f'<div class="wide"><table>\n{caption}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _cell(text: str) -> str:
    numeric = re.match(r"[-+~<>≤≥]?\s?\d", text) or text in ("", "-")
    opening = '<td class="n">' if numeric else "<td>"
    return f"{opening}{_inline(text)}</td>"


def _inline(text: str) -> str:
    """Return the text escaped, with its `code` spans marked up."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


_LINK = re.compile(r'(\bid="|url\(#|href="#)')


def _inlined(plot: Plot) -> str:
    """Return the SVG without prolog and metadata, its ids made the figure's own, its ink the
    page's."""
    svg = plot.svg[plot.svg.index("<svg") :].strip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _LINK.sub(lambda link: f"{link[0]}{plot.name}-", svg)
    svg = re.sub(re.escape(INK), "currentColor", svg, flags=re.IGNORECASE)
    svg = re.sub(re.escape(GRID), "var(--grid)", svg, flags=re.IGNORECASE)
    label = f'<svg role="img" aria-label="{escape(plot.caption)}" '
    return svg.replace("<svg ", label, 1)
