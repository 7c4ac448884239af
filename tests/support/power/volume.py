"""A volume is what a disk holds after some events: what is durable of it, and what is pending, in
order, and may be there after a power cut or not.

A file is pages of 4 KiB and a size; a folder is names. Each page, each size and each name has its
own line of pending changes, stamped by the event that made them:

    durable page | change | change | change      a cut leaves the first n of them, any n

What a sync makes durable is the journal's matter (`Journal`): POSIX promises the file alone; an
ordered journal takes with it all changes of names, cuts and holes that came before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

from tests.support.power.trace import (
    Event,
    Grow,
    Make,
    Name,
    Note,
    Punch,
    Resize,
    Sync,
    Unlink,
    Write,
)

PAGE = 4096
_ZEROS = bytes(PAGE)


class Piece(NamedTuple):
    """A piece is a change of one page: bytes at `start`. A journalled one is a hole or a cut."""

    stamp: int
    start: int
    data: bytes
    journalled: bool = False


class Extent(NamedTuple):
    """An extent is a change of a file's size; by a write, or journalled: by a call of its own."""

    stamp: int
    size: int
    journalled: bool


class Node:
    """A node is a file or a folder, whatever its names are."""

    def __init__(self, *, is_folder: bool) -> None:
        self.is_folder = is_folder
        self.names: dict[str, Node] = {}
        self.live: dict[str, Node] = {}
        self.pages: dict[int, bytes] = {}
        self.size = 0
        self.live_size = 0
        self.pieces: dict[int, list[Piece]] = {}
        self.extents: list[Extent] = []

    def settle_page(self, number: int, count: int) -> None:
        """Make the first `count` pending changes of a page durable."""
        line = self.pieces[number]
        self.pages[number] = applied(self.pages.get(number, _ZEROS), line[:count])
        del line[:count]
        if not line:
            del self.pieces[number]

    def settle(self, before: int) -> None:
        """Make durable all that was asked of the file before an event."""
        for number in list(self.pieces):
            self.settle_page(number, sum(piece.stamp < before for piece in self.pieces[number]))
        self.settle_size(sum(extent.stamp < before for extent in self.extents))

    def settle_size(self, count: int) -> None:
        """Make the first `count` pending changes of the size durable."""
        if count:
            self.size = self.extents[count - 1].size
            del self.extents[:count]


class Naming(NamedTuple):
    """A naming is one change of names, whole or not at all: (folder, name, node or None)."""

    stamp: int
    changes: tuple[tuple[Node, str, Node | None], ...]


class Journal(Protocol):
    """A journal is a file system's rule: what a sync makes durable beside the file itself."""

    def synced(self, volume: Volume, node: Node, before: int) -> None:
        """Settle what the sync of `node` took with it."""
        ...


class Volume:
    """A volume owns all nodes under one root folder, which itself is durable."""

    def __init__(self, root: str, journal: Journal) -> None:
        self._root_path = PurePosixPath(root)
        self._journal = journal
        self.root = Node(is_folder=True)
        self.nodes = [self.root]
        self.namings: list[Naming] = []
        self.committed = -1
        """The stamp up to which an ordered journal is durable."""
        self._stamp = -1

    def play(self, event: Event) -> None:
        """Take the next event."""
        self._stamp += 1
        match event:
            case Write(path, offset, data):
                node = self.find(path)
                self._grow(node, offset + len(data), journalled=False)
                for number, start, piece in _pages(offset, data):
                    self._pend(node, number, Piece(self._stamp, start, piece))
            case Resize(path, size):
                node = self.find(path)
                if size < node.live_size:
                    self._clear(node, size, node.live_size - size)
                node.live_size = size
                node.extents.append(Extent(self._stamp, size, journalled=True))
            case Grow(path, size):
                self._grow(self.find(path), size, journalled=True)
            case Punch(path, offset, length):
                self._clear(self.find(path), offset, length)
            case Make(path, is_folder):
                node = Node(is_folder=is_folder)
                self.nodes.append(node)
                self._name((*self._place(path), node))
            case Name(path, to, is_link):
                node = self.find(path)
                gone = () if is_link else ((*self._place(path), None),)
                self._name(*gone, (*self._place(to), node))
            case Unlink(path):
                self._name((*self._place(path), None))
            case Sync(path, since, _):
                self._journal.synced(self, self.find(path), since)
            case Note():
                pass

    def find(self, path: str) -> Node:
        """Return the node that has this name now."""
        node = self.root
        for part in PurePosixPath(path).relative_to(self._root_path).parts:
            node = node.live[part]
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        return self.find(str(PurePosixPath(path).parent)), PurePosixPath(path).name

    def _name(self, *changes: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in changes:
            set_name(folder.live, name, node)
        self.namings.append(Naming(self._stamp, changes))

    def _grow(self, node: Node, size: int, *, journalled: bool) -> None:
        if size > node.live_size:
            node.live_size = size
            node.extents.append(Extent(self._stamp, size, journalled))

    def _clear(self, node: Node, offset: int, length: int) -> None:
        for number, start, piece in _pages(offset, bytes(length)):
            if number in node.pages or number in node.pieces:
                self._pend(node, number, Piece(self._stamp, start, piece, journalled=True))

    def _pend(self, node: Node, number: int, piece: Piece) -> None:
        node.pieces.setdefault(number, []).append(piece)

    def settle_names(self, chosen: list[Naming]) -> None:
        """Make pending namings durable, in order."""
        for naming in chosen:
            for folder, name, node in naming.changes:
                set_name(folder.names, name, node)
            self.namings.remove(naming)

    def contents(self) -> Iterator[tuple[str, bytes | None]]:
        """Yield (path under the root, bytes) as everybody sees them now; None for a folder."""
        yield from _contents(self.root, "")


def _contents(folder: Node, prefix: str) -> Iterator[tuple[str, bytes | None]]:
    for name, node in folder.live.items():
        if node.is_folder:
            yield prefix + name, None
            yield from _contents(node, f"{prefix}{name}/")
        else:
            pages = {n: applied(node.pages.get(n, _ZEROS), line) for n, line in node.pieces.items()}
            yield prefix + name, whole(node.pages | pages, node.live_size)


def set_name(names: dict[str, Node], name: str, node: Node | None) -> None:
    """Give a name to a node, or to none."""
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def applied(page: bytes, pieces: list[Piece]) -> bytes:
    """Return the page after these changes."""
    if pieces and len(pieces[-1].data) == PAGE:
        return pieces[-1].data
    changed = bytearray(page)
    for piece in pieces:
        changed[piece.start : piece.start + len(piece.data)] = piece.data
    return bytes(changed)


def whole(pages: dict[int, bytes], size: int) -> bytes:
    """Return a file's bytes: its pages, cut off at its size."""
    count = -(-size // PAGE)
    return b"".join(pages.get(number, _ZEROS) for number in range(count))[:size]


def _pages(offset: int, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (page, start in it, bytes) of a span."""
    done = 0
    while done < len(data):
        number, start = divmod(offset + done, PAGE)
        count = min(PAGE - start, len(data) - done)
        yield number, start, data[done : done + count]
        done += count
