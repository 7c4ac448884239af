"""MooncakeBlobs keep blobs in a Mooncake Store. Extra: `pip install 'ownerserve[mooncake]'`.

Return codes, measured on 0.3.13 (`tests/store/test_mooncake.py` runs them against a real master):

    -200  pool full: no backpressure of its own, the caller must retry     -> Backpressure
    -600  an empty object                                                  -> we store one byte
    -704  no such object                                                   -> FileNotFoundError
    -706  remove of an object that a reader leases, and a get is a lease   -> removed by force
    -900  the master does not answer                                       -> OSError
    put of an existing key: 0, the old value stays                         -> asked first
    master restarted: every key gone                                       -> misses
A get says nothing of why it has nothing: the object is asked for again, and only a clear "absent"
counts as absent.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.tiers.blobs import Backpressure, BlobInfo

_FULL, _ABSENT = -200, -704


class MooncakeBlobs:
    """MooncakeBlobs are objects of a set-up `mooncake.store.MooncakeDistributedStore`, under a
    namespace.

    It has no listing, and its ranged read wants registered memory: a part is cut from the whole
    object, and expiry and purge find nothing to do here; give a tenant's artifacts another tier.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def _name(self, key: str) -> str:
        return f"{self._namespace}/{key}"

    @staticmethod
    def _check(status: int, key: str) -> None:
        if status == _FULL:
            raise Backpressure(f"mooncake {status}")
        if status == _ABSENT:
            raise FileNotFoundError(errno.ENOENT, "mooncake has no such object", key)
        if status < 0:
            raise OSError(errno.EIO, f"mooncake {status}", key)

    def put(self, key: str, data: memoryview) -> None:
        """Write a blob under `key`."""
        self._check(int(self._client.put(self._name(key), bytes(data) or b"\0")), key)

    def put_new(self, key: str, data: memoryview) -> None:
        """Write a blob only if there is none. Raises FileExistsError where there is one."""
        # Two writers may both see none; the first value stays, as in every medium.
        there = int(self._client.is_exist(self._name(key)))
        self._check(there, key)
        if there:
            raise FileExistsError(errno.EEXIST, "mooncake keeps the old value", key)
        self.put(key, data)

    def settle(self, key: str) -> None:
        """Do nothing: what is in other machines' memory is durable nowhere."""

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        """Read from `offset`; return the bytes read, fewer than asked at the blob's end."""
        data: bytes = self._client.get(self._name(key))
        if not data:
            there = int(self._client.is_exist(self._name(key)))
            self._check(there if there else _ABSENT, key)
            raise OSError(errno.EIO, "mooncake has the object and does not give it", key)
        part = data[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def delete(self, key: str) -> None:
        """Delete a blob; one that is not there is no error."""
        # A reader that loses the object in mid-read is told so by its digests: a miss.
        status = int(self._client.remove(self._name(key), force=True))
        if status != _ABSENT:
            self._check(status, key)

    def move(self, key: str, to: str) -> None:
        self.delete(key)  # there is no rename; what is bad is not worth a copy

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        return iter(())

    def tidy(self, before_s: float) -> int:
        return 0  # the master gives up unfinished puts itself


def set_up(namespace: str) -> MooncakeBlobs:
    """Join the Mooncake Store that Mooncake's own settings name (MOONCAKE_MASTER and others, or
    MOONCAKE_CONFIG_PATH), and return its blobs under `namespace`.

    Raises InvalidInput where the package or the settings are missing, OSError where the store can't
    be joined.
    """
    try:
        settings, store = import_module("mooncake.mooncake_config"), import_module("mooncake.store")
    except ImportError as error:
        mend = "pip install 'ownerserve[mooncake]'"
        raise InvalidInput("remote", f"Mooncake needs its package ({error})", mend) from error
    try:
        found = settings.MooncakeConfig.load_from_env()
    except (OSError, ValueError) as error:
        mend = "set MOONCAKE_MASTER=HOST:PORT, or MOONCAKE_CONFIG_PATH"
        raise InvalidInput("remote", f"Mooncake's settings: {error}", mend) from error
    client = store.MooncakeDistributedStore()
    status = client.setup(
        found.local_hostname,
        found.metadata_server,
        found.global_segment_size,
        found.local_buffer_size,
        found.protocol,
        found.device_name,
        found.master_server_address,
    )
    if status != 0:
        raise OSError(errno.EIO, f"mooncake {status}", found.master_server_address)
    return MooncakeBlobs(client, namespace)
