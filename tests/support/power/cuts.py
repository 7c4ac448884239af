"""Cuts: the states that a power cut may leave of a volume, drawn by a seed.

Posix      a sync keeps the file that was synced (a folder: its names). All else, in any
           combination: each page, each size, each naming for itself.
Ordered    ext4 with data=ordered: namings, cuts, holes and allocations are kept up to one point of
           the journal, none after it. A sync commits the journal up to the last change of that
           file. A file that a write has grown bears the bytes that grew it. Pages that were
           there are written whenever the kernel likes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from tests.support.power.volume import Journal, Naming, Node, Volume, applied, set_name, whole

State = dict[str, bytes | None]
"""Path under the root -> bytes; None for a folder."""
_SHARES = (0.0, 0.0, 0.1, 0.5, 0.9, 1.0, 1.0)


class FileSystem(Journal, Protocol):
    """A file system's model: its journal, and what a cut leaves."""

    def cut(self, volume: Volume, rng: random.Random) -> State:
        """Draw one state that a power cut may leave now."""
        ...


class _Draw:
    """A draw chooses how many of the pending changes a cut leaves. Each file has a leaning of its
    own, so that one may be whole and its neighbour as it was.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._same = rng.choice((*_SHARES, None, None, None))
        self.lean()

    def lean(self) -> None:
        """Take another leaning, for the next file."""
        self._share = self._rng.choice(_SHARES) if self._same is None else self._same

    def of(self, low: int, high: int) -> int:
        """Choose from low .. high."""
        if low == high:
            return low
        if self._rng.random() < self._share:
            return high
        return low if self._rng.random() < 0.5 else self._rng.randint(low, high)


class Posix:
    """The weakest promise that programs may rely on."""

    def synced(self, volume: Volume, node: Node, before: int) -> None:
        node.settle(before)
        if node.is_folder:
            _settle_folder(volume, node, before)

    def cut(self, volume: Volume, rng: random.Random) -> State:
        draw = _Draw(rng)
        kept = [naming for naming in volume.namings if draw.of(0, 1)]

        def file(node: Node) -> bytes:
            draw.lean()
            pages = dict(node.pages)
            for number, line in node.pieces.items():
                pages[number] = applied(
                    pages.get(number, b"\0" * 4096), line[: draw.of(0, len(line))]
                )
            sizes = [node.size, *(extent.size for extent in node.extents)]
            return whole(pages, sizes[draw.of(0, len(node.extents))])

        return _tree(volume, kept, file)


def _settle_folder(volume: Volume, folder: Node, before: int) -> None:
    """A folder's sync keeps its own half of each naming."""
    left = []
    for naming in volume.namings:
        mine = [change for change in naming.changes if change[0] is folder]
        if naming.stamp >= before or not mine:
            left.append(naming)
            continue
        for _, name, node in mine:
            set_name(folder.names, name, node)
        others = tuple(change for change in naming.changes if change[0] is not folder)
        if others:
            left.append(Naming(naming.stamp, others))
    volume.namings = left


class Ordered:
    """ext4, data=ordered."""

    def synced(self, volume: Volume, node: Node, before: int) -> None:
        touched = [
            naming.stamp
            for naming in volume.namings
            if any(node is folder or node is named for folder, _, named in naming.changes)
        ]
        touched += [extent.stamp for extent in node.extents if extent.journalled]
        touched += [p.stamp for line in node.pieces.values() for p in line if p.journalled]
        point = max((stamp for stamp in touched if stamp < before), default=-1)
        node.settle(before)
        if point <= volume.committed:
            return
        volume.committed = point
        volume.settle_names([n for n in volume.namings if n.stamp <= point])
        for other in volume.nodes:
            for number in list(other.pieces):
                stamps = [p.stamp if p.journalled else -1 for p in other.pieces[number]]
                other.settle_page(number, _through(stamps, point))
            stamps = [e.stamp if e.journalled else -1 for e in other.extents]
            other.settle_size(_through(stamps, point))

    def cut(self, volume: Volume, rng: random.Random) -> State:
        draw = _Draw(rng)
        stamps = sorted(
            {naming.stamp for naming in volume.namings}
            | {e.stamp for node in volume.nodes for e in node.extents if e.journalled}
            | {
                p.stamp
                for node in volume.nodes
                for line in node.pieces.values()
                for p in line
                if p.journalled
            }
        )
        point = [volume.committed, *stamps][draw.of(0, len(stamps))]
        kept = [naming for naming in volume.namings if naming.stamp <= point]

        def file(node: Node) -> bytes:
            draw.lean()
            marks = [e.stamp if e.journalled else -1 for e in node.extents]
            count = draw.of(_through(marks, point), _before(marks, point))
            size = node.extents[count - 1].size if count else node.size
            grown = {e.stamp for e in node.extents[:count] if not e.journalled}
            pages = dict(node.pages)
            for number, line in node.pieces.items():
                marks = [p.stamp if p.journalled else -1 for p in line]
                low, high = _through(marks, point), _before(marks, point)
                written = [at + 1 for at, p in enumerate(line) if p.stamp in grown]
                low = min(high, max([low, *written]))
                pages[number] = applied(pages.get(number, b"\0" * 4096), line[: draw.of(low, high)])
            return whole(pages, size)

        return _tree(volume, kept, file)


def _through(stamps: list[int], point: int) -> int:
    """Count the changes up to the last journalled one at or before `point`."""
    return max((at + 1 for at, s in enumerate(stamps) if 0 <= s <= point), default=0)


def _before(stamps: list[int], point: int) -> int:
    """Count the changes before the first journalled one after `point`."""
    return next((at for at, stamp in enumerate(stamps) if stamp > point), len(stamps))


def _tree(volume: Volume, kept: list[Naming], file: Callable[[Node], bytes]) -> State:
    names = {id(node): dict(node.names) for node in volume.nodes if node.is_folder}
    for naming in kept:
        for folder, name, named in naming.changes:
            set_name(names[id(folder)], name, named)
    state: State = {}

    def walk(folder: Node, prefix: str) -> None:
        for name, node in names[id(folder)].items():
            state[prefix + name] = None if node.is_folder else file(node)
            if node.is_folder:
                walk(node, f"{prefix}{name}/")

    walk(volume.root, "")
    return state


FILE_SYSTEMS: dict[str, Callable[[], FileSystem]] = {"posix": Posix, "ext4-ordered": Ordered}
