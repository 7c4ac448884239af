"""TermFile gives new terms, each the highest that this machine knows of plus one, with a random
nonce.

The file is the high-water mark. It is replaced whole and synced before the term is used: a
directory may lose all else, for workers know it, but a term that was used is not used again. Where
even the file is lost, the nonce keeps epochs apart and the first worker that has seen a later one
raises the term (`checks.is_behind`).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from ownerserve.kv.durable import make_directory, sync_directory
from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.messages import NONCE_LIMIT, Term

FILE_NAME = "directory.term"


class TermFile:
    """A term file gives terms that grow over restarts; with no directory to write in, over this
    life only.
    """

    def __init__(self, home: Path | None = None) -> None:
        self._path = home / FILE_NAME if home is not None else None
        self._last = self._read()

    @property
    def is_new(self) -> bool:
        """Tell whether no term was ever started here."""
        return self._last is None

    def start(self, above: Term | None = None) -> Term:
        """Start a term above `above` and above all that were started here, and write it down."""
        floor = max(self._last.ordinal if self._last else 0, above.ordinal if above else 0)
        term = Term(floor + 1, secrets.randbelow(NONCE_LIMIT))
        self._write(term)
        self._last = term
        return term

    def _read(self) -> Term | None:
        if self._path is None or not self._path.exists():
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Term)
        except (*UNREADABLE, InvalidInput) as error:
            mend = "remove it if no worker of this fleet is running, else restore it"
            raise InvalidInput(str(self._path), f"is no term ({error})", mend) from error

    def _write(self, term: Term) -> None:
        if self._path is None:
            return
        make_directory(self._path.parent)
        part = self._path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(msgspec.json.encode(term))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)
        sync_directory(self._path.parent)
