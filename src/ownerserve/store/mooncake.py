"""Blobs in a Mooncake Store. Extra: `pip install 'ownerserve[mooncake]'`.

Not tested here against a running Mooncake: only this translation is, against a stand-in with the
return codes that `research/stores-transfer.md` §3 measured (0.3.13):

    -200  pool full: no backpressure of its own, the caller must retry     -> Backpressure
    -704  no such object                                                   -> FileNotFoundError
    -706  remove of an object that a reader leases                         -> Backpressure
    put of an existing key: 0, the old value stays                         -> right: ids are sealed
    master restarted: every key gone                                       -> misses
A get that fails late because its lease ran out is an OSError, and verification is ours anyway.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

from ownerserve.store.blobs import Backpressure, BlobInfo

_FULL, _ABSENT, _LEASED = -200, -704, -706


class MooncakeBlobs:
    """Blobs through a set-up `mooncake.store.MooncakeDistributedStore`, under a namespace.

    It has no ranged read and no listing: a part is cut from the whole object, and expiry and
    purge find nothing to do here; give a tenant's artifacts another remote tier.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def _name(self, key: str) -> str:
        return f"{self._namespace}/{key}"

    @staticmethod
    def _check(status: int, key: str) -> None:
        if status in (_FULL, _LEASED):
            raise Backpressure(f"mooncake {status}")
        if status == _ABSENT:
            raise FileNotFoundError(errno.ENOENT, "mooncake has no such object", key)
        if status < 0:
            raise OSError(errno.EIO, f"mooncake {status}", key)

    def put(self, key: str, data: memoryview) -> None:
        # An empty object is stored as one byte: Mooncake refuses empty values (its issue 3465).
        self._check(self._client.put(self._name(key), bytes(data) or b"\0"), key)

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        data: bytes = self._client.get(self._name(key))
        if not data:
            raise FileNotFoundError(errno.ENOENT, "mooncake has no such object", key)
        part = data[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def delete(self, key: str) -> None:
        status = int(self._client.remove(self._name(key)))
        if status != _ABSENT:
            self._check(status, key)

    def move(self, key: str, to: str) -> None:
        self.delete(key)  # there is no rename; what is bad is not worth a copy

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        return iter(())
