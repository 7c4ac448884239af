"""An ownership directory of its own, as an operator starts it, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ownerserve.cli.demo.processes import Child
from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rules import TierCode
from ownerserve.kv.ids import PrefixHash, SessionId

LEASE_S = 4.0


class Directory:
    """The process, and what it says."""

    def __init__(self, address: str) -> None:
        self.address = address

    def record(self, session) -> ask.SessionIs | None:
        client = DirectoryClient(self.address)
        try:
            (found,) = client.execute([ask.FindSession(session)])
        finally:
            client.close()
        return found if isinstance(found, ask.SessionIs) else None

    def known(self, session) -> ask.SessionIs:
        record = self.record(session)
        assert record is not None
        return record

    def tiers(self, prefix: PrefixHash | None) -> set[TierCode]:
        """Where the directory believes copies of the prefix to be."""
        assert prefix is not None
        client = DirectoryClient(self.address)
        try:
            (found,) = client.execute([ask.Lookup((prefix,))])
        finally:
            client.close()
        return {tier for _, tier, _ in found.locations} if isinstance(found, ask.Found) else set()

    def version(self, session: SessionId) -> int:
        """Turns that owners finished; -1: the session is not known."""
        record = self.record(session)
        return -1 if record is None else record.version


@contextmanager
def directory_process(folder: Path) -> Iterator[Directory]:
    """`ownerserve directory serve`."""
    words = ["directory", "serve", "--port", "0", "--new-fleet", "--lease", str(LEASE_S)]
    child = Child("directory", [*words, "--home", str(folder / "directory")], folder)
    try:
        yield Directory(child.wait_ready(60)[0])
    finally:
        child.stop()
