"""A trace is what a process asked of the disk: strace's lines, read as events.

Only calls that change files under one folder are kept, and the notes that the process writes beside
it. That no call was overlooked shows in `campaign`: the events, played, give the very bytes that
the file system has in the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.children import importing

CALLS = (
    *("open", "openat", "creat", "close", "dup", "dup2", "dup3", "lseek"),
    *("write", "writev", "pwrite64", "pwritev", "pwritev2", "sendfile", "copy_file_range"),
    *("ftruncate", "truncate", "fallocate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat"),
    *("mkdir", "mkdirat", "rmdir"),
)
LONGEST_BYTES = 1 << 24


class Write(NamedTuple):
    """Bytes were written to a file."""

    path: str
    offset: int
    data: bytes


class Resize(NamedTuple):
    """A file was cut or grown to `size` by a call of its own."""

    path: str
    size: int


class Grow(NamedTuple):
    """Space was allocated up to `size`."""

    path: str
    size: int


class Punch(NamedTuple):
    """A hole was punched."""

    path: str
    offset: int
    length: int


class Make(NamedTuple):
    """A file or a folder was made."""

    path: str
    is_folder: bool


class Name(NamedTuple):
    """A file got another name: by rename, or by link beside the one it has."""

    path: str
    to: str
    is_link: bool


class Unlink(NamedTuple):
    """A name was taken away."""

    path: str


class Sync(NamedTuple):
    """A file or a folder was synced; `since` counts the events that had begun before it did.
    `site` is the code that asked, as the process noted it.
    """

    path: str
    since: int
    site: str


class Note(NamedTuple):
    """The process noted something of its own, as one line."""

    text: str


Event = Write | Resize | Grow | Punch | Make | Name | Unlink | Sync | Note


def run(command: Sequence[str], log: Path, inject: str | None = None) -> int:
    """Run `command` under strace; returns its exit status, negative for a signal."""
    strace = ["strace", "-f", "-qq", "-xx", "-s", str(LONGEST_BYTES)]
    strace += ["-e", "signal=none", "-e", "trace=" + ",".join(CALLS), "-o", str(log)]
    # With the filter, strace 6.1 injects nothing.
    strace += ["-e", f"inject={inject}"] if inject else ["--seccomp-bpf"]
    done = subprocess.run(
        [*strace, sys.executable, *command],
        env=importing(),
        check=False,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode in (0, -9, 137), done.stderr.decode()[-3000:]
    return done.returncode


_LINE = re.compile(r"^(\d+)\s+(.*)$")
_RESUMED = re.compile(r"^<\.\.\. (\w+) resumed>(.*)$")
_CALL = re.compile(r"^(\w+)\((.*)\)\s+= (-?\d+|\?)")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


class _Call(NamedTuple):
    name: str
    text: str
    result: int
    begun: int
    """Events that there were when it began."""
    thread: str


class _Reader:
    """A reader follows one process: its descriptors and where they stand."""

    def __init__(self, root: str, notes: str, events: list[Event]) -> None:
        self._root, self._notes = root, notes
        self._events = events
        self._files: dict[int, str] = {}
        self._at: dict[int, int] = {}
        self._sizes: dict[str, int] = {}
        self._site: dict[str, str] = {}

    def take(self, call: _Call) -> None:
        """Add what a finished call did."""
        if call.result < 0:
            return
        handler = getattr(self, f"_on_{call.name}", None)
        if handler is not None:
            handler(call, _arguments(call.text))

    def _add(self, event: Event) -> None:
        self._events.append(event)

    def _on_open(self, call: _Call, words: list[str]) -> None:
        path, flags = _path(words[0]), words[1]
        if path == self._notes:
            self._files[call.result] = path
            return
        if not self._is_ours(path):
            self._files.pop(call.result, None)
            return
        self._files[call.result], self._at[call.result] = path, 0
        if "O_CREAT" in flags and path not in self._sizes:
            self._sizes[path] = 0
            self._add(Make(path, is_folder=False))
        if "O_TRUNC" in flags and self._sizes[path]:
            self._sizes[path] = 0
            self._add(Resize(path, 0))

    def _on_openat(self, call: _Call, words: list[str]) -> None:
        self._on_open(call, words[1:])

    def _is_ours(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + "/")

    def known(self, path: str, size: int) -> None:
        """Tell the reader of a file that stands before the process lives."""
        self._sizes[path] = size

    def _on_close(self, call: _Call, words: list[str]) -> None:
        self._files.pop(int(words[0]), None)

    def _on_dup(self, call: _Call, words: list[str]) -> None:
        assert int(words[0]) not in self._files, "a duplicated descriptor is not followed"

    _on_dup2 = _on_dup3 = _on_sendfile = _on_dup

    def _on_lseek(self, call: _Call, words: list[str]) -> None:
        if int(words[0]) in self._files:
            self._at[int(words[0])] = call.result

    def _on_write(self, call: _Call, words: list[str]) -> None:
        number = int(words[0])
        path = self._files.get(number)
        if path is None:
            return
        data = _bytes(call.text)[: call.result]
        if path == self._notes:
            text = data.decode().strip()
            if text.startswith("sync "):
                self._site[call.thread] = text[5:]
            else:
                self._add(Note(text))
            return
        self._written(path, self._at[number], data)
        self._at[number] += call.result

    def _on_pwrite64(self, call: _Call, words: list[str]) -> None:
        path = self._files.get(int(words[0]))
        if path is not None:
            # The last argument but flags is the offset; pwritev2 has flags after it.
            place = -2 if call.name == "pwritev2" else -1
            self._written(path, int(words[place]), _bytes(call.text)[: call.result])

    _on_pwritev = _on_pwritev2 = _on_pwrite64

    def _on_writev(self, call: _Call, words: list[str]) -> None:
        self._on_write(call, words)

    def _written(self, path: str, offset: int, data: bytes) -> None:
        self._sizes[path] = max(self._sizes[path], offset + len(data))
        self._add(Write(path, offset, data))

    def _on_ftruncate(self, call: _Call, words: list[str]) -> None:
        path = self._files.get(int(words[0]))
        if path is not None and self._sizes[path] != int(words[1]):
            self._sizes[path] = int(words[1])
            self._add(Resize(path, int(words[1])))

    def _on_fallocate(self, call: _Call, words: list[str]) -> None:
        path = self._files.get(int(words[0]))
        if path is None:
            return
        offset, length = int(words[2]), int(words[3])
        if "PUNCH" in words[1]:
            self._add(Punch(path, offset, length))
        elif offset + length > self._sizes[path]:
            self._sizes[path] = offset + length
            self._add(Grow(path, offset + length))

    def _on_rename(self, call: _Call, words: list[str]) -> None:
        self._named(_path(words[0]), _path(words[1]), is_link=False)

    def _on_renameat(self, call: _Call, words: list[str]) -> None:
        self._named(_path(words[1]), _path(words[3]), is_link=False)

    _on_renameat2 = _on_renameat

    def _on_link(self, call: _Call, words: list[str]) -> None:
        self._named(_path(words[0]), _path(words[1]), is_link=True)

    def _on_linkat(self, call: _Call, words: list[str]) -> None:
        self._named(_path(words[1]), _path(words[3]), is_link=True)

    def _named(self, path: str, to: str, *, is_link: bool) -> None:
        if not self._is_ours(path):
            return
        self._sizes[to] = self._sizes[path]
        if not is_link:
            del self._sizes[path]
            # Descriptors follow the file.
            self._files = {n: to if p == path else p for n, p in self._files.items()}
        self._add(Name(path, to, is_link))

    def _on_unlink(self, call: _Call, words: list[str]) -> None:
        self._unlinked(_path(words[0]))

    def _on_unlinkat(self, call: _Call, words: list[str]) -> None:
        self._unlinked(_path(words[1]))

    _on_rmdir = _on_unlink

    def _unlinked(self, path: str) -> None:
        if self._is_ours(path):
            self._sizes.pop(path, None)
            self._files = {n: p for n, p in self._files.items() if p != path}
            self._add(Unlink(path))

    def _on_mkdir(self, call: _Call, words: list[str]) -> None:
        if self._is_ours(_path(words[0])):
            self._sizes[_path(words[0])] = 0
            self._add(Make(_path(words[0]), is_folder=True))

    def _on_mkdirat(self, call: _Call, words: list[str]) -> None:
        self._on_mkdir(call, words[1:])

    def _on_fsync(self, call: _Call, words: list[str]) -> None:
        path = self._files.get(int(words[0]))
        if path is not None:
            site = self._site.pop(call.thread, None) or f"sqlite {Path(path).name}"
            self._add(Sync(path, call.begun, site))

    _on_fdatasync = _on_fsync


def read(log: Path, root: Path, notes: Path, events: list[Event]) -> None:
    """Add to `events` what the process of `log` did under `root` and wrote to `notes`. The files
    that stood before it lived must be what `events` left.
    """
    reader = _Reader(str(root), str(notes), events)
    for path, size in _standing(events):
        reader.known(path, size)
    begun: dict[str, tuple[str, int]] = {}
    with log.open(errors="strict") as lines:
        for line in lines:
            matched = _LINE.match(line)
            assert matched, line[:200]
            thread, text = matched.groups()
            if text.endswith("<unfinished ...>"):
                begun[thread] = text.removesuffix("<unfinished ...>").rstrip(), len(events)
                continue
            since = len(events)
            resumed = _RESUMED.match(text)
            if resumed:
                head, since = begun.pop(thread)
                text = head + resumed[2]
            call = _CALL.match(text)
            if call and call[3] != "?":
                reader.take(_Call(call[1], call[2], int(call[3]), since, thread))


def _standing(events: Sequence[Event]) -> Iterator[tuple[str, int]]:
    sizes: dict[str, int] = {}
    for event in events:
        match event:
            case Make(path, _):
                sizes[path] = 0
            case Write(path, offset, data):
                sizes[path] = max(sizes[path], offset + len(data))
            case Resize(path, size) | Grow(path, size):
                sizes[path] = size
            case Name(path, to, is_link):
                sizes[to] = sizes[path]
                if not is_link:
                    del sizes[path]
            case Unlink(path):
                sizes.pop(path, None)
    yield from sizes.items()


def _arguments(text: str) -> list[str]:
    """Split a call's arguments; what stands in quotes or brackets is one."""
    bare = _STRING.sub(lambda found: found[0] if len(found[1]) < 2048 else '""', text)
    bare = re.sub(r"\[.*\]", "[]", bare)
    return [word.strip() for word in bare.split(",")]


def _bytes(text: str) -> bytes:
    return b"".join(bytes.fromhex(s.replace("\\x", "")) for s in _STRING.findall(text))


def _path(word: str) -> str:
    return os.path.normpath(_bytes(word).decode())
