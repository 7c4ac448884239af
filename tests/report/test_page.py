"""The report page: one file that fetches nothing, escapes all, and whose links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ownerserve.report.figures.style import Written
from ownerserve.report.page import (
    Claim,
    Command,
    Grid,
    Picture,
    Plot,
    ReportPage,
    Section,
    Text,
    Verdict,
    plot_from,
    render,
    write,
)

GOLDEN = Path(__file__).parent / "golden" / "page.html"
VOID = {"meta", "img", "link", "br", "hr", "input"}

SMALL = ReportPage(
    "OwnerServe: <evaluation>",
    "What the seeds claim & what `simulate` shows.",
    [
        Section(
            "End to end",
            [
                Text("Above the knee, `ownerserve` is ahead."),
                Grid("Policies", ["policy", "TTFT\np50"], [["sticky", "18.0 s"], ["a<b", "-"]]),
                Command("ownerserve simulate --policy 'x' && echo done"),
            ],
        ),
        Section("End to end!", [Picture("dot", "A dot", b"\x89PNG")]),
    ],
    [
        Claim("Affinity wins", "002 §5.2", Verdict.IN_RANGE, "1.4x at 64 sessions", "cc",
              "ownerserve evaluate", "End to end"),
        Claim("T_human is 0", "002 §2.3", Verdict.FAILS, "p50 9 s", "cc", "ownerserve trace stats"),
        Claim("No wrong bytes", "000", Verdict.HOLDS, "0", "all", "make test"),
    ],
    {"seed": "7", "trace": "cc & co"},
)  # fmt: skip


class Reader(HTMLParser):
    """Ids, links and text; raises on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "xlink:href"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def body(text: str) -> str:
    return text[text.index("<body>") : text.index("</html>")]


def test_golden() -> None:
    """The markup; the style sheet is left out."""
    assert body(render(SMALL)) == GOLDEN.read_text()


@pytest.fixture(scope="module")
def full(written: Callable[[str], Written]) -> str:
    names = ("f01_amplification", "f02_reuse", "f10_heat")
    plots = [plot_from(written(name), f"Caption of {name}") for name in names]
    return render(ReportPage("All", "s", [Section("Figures", [*plots])]))


def test_ids_are_unique_and_links_lead_somewhere(full: str) -> None:
    for text in (render(SMALL), full):
        read = Reader(text)
        assert len(read.ids) == len(set(read.ids))
        inner = [link[1:] for link in read.links if link.startswith("#")]
        assert inner
        assert set(inner) <= set(read.ids)
        assert all(link.startswith(("#", "data:")) for link in read.links)
        used = set(re.findall(r"url\(#([^)]+)\)", text))
        assert used <= set(read.ids)


def test_nothing_is_fetched_and_no_script_runs(full: str) -> None:
    read = Reader(full)
    assert not read.tags & {"script", "link", "iframe", "object"}
    without_names = re.sub(r'xmlns(:\w+)?="[^"]+"', "", full)
    assert "http" not in without_names
    assert "@import" not in full


def test_figures_take_the_pages_ink(full: str) -> None:
    assert "prefers-color-scheme: dark" in full
    drawing = full[full.index("<svg") :]
    assert "#26303a" not in drawing.lower()
    assert "currentColor" in drawing
    assert "var(--grid)" in drawing
    assert drawing.count('role="img"') == 3


def test_equal_pages_are_equal_files(tmp_path: Path) -> None:
    write(SMALL, tmp_path / "a.html")
    write(SMALL, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_titles_and_captions_cannot_break_out() -> None:
    evil = '"><script>x</script>'
    plot = Plot("p", evil, '<?xml version="1.0"?>\n<svg width="1"><g id="a"/></svg>')
    text = render(
        ReportPage(evil, evil, [Section(evil, [plot, Picture("q", evil, b""), Text(evil)])])
    )
    assert "script" not in Reader(text).tags
