"""S3Blobs keep blobs in an S3 bucket, by boto3. Extra: `pip install 'ownerserve[s3]'`.

Up to `part_bytes` a blob is one PUT; above that, parts, which are given up when one fails. What a
killed writer leaves of them is invisible and is given up by `tidy`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.tiers.blobs import Backpressure, BlobInfo

_MISSING = frozenset({"404", "NoSuchKey", "NotFound", "NoSuchUpload"})
_EXISTS = frozenset({"412", "PreconditionFailed"})
_BUSY = frozenset(
    {
        *("503", "SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling"),
        *("409", "ConditionalRequestConflict"),  # another writer is at it: not yet there
    }
)
_ONLY_NEW = {"IfNoneMatch": "*"}


class S3Options(msgspec.Struct, frozen=True):
    """S3Options say how patient a client is, and from what size on it sends parts (S3: 5 MiB at
    least).
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    attempts: int = 3
    part_bytes: int = 64 * MIB


class S3Blobs:
    """S3Blobs are objects under `prefix` of a bucket. Credentials and region are boto3's own
    business.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        options: S3Options | None = None,
    ) -> None:
        try:
            boto3, config = import_module("boto3"), import_module("botocore.config")
        except ImportError as error:
            raise InvalidInput(
                "remote", "S3 needs boto3", "pip install 'ownerserve[s3]'"
            ) from error
        self._errors = import_module("botocore.exceptions")
        self._options = options or S3Options()
        settings = config.Config(
            connect_timeout=self._options.connect_timeout_s,
            read_timeout=self._options.read_timeout_s,
            retries={"total_max_attempts": self._options.attempts, "mode": "standard"},
        )
        self._client: Any = boto3.client("s3", endpoint_url=endpoint_url, config=settings)
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix else ""

    def _call(self, name: str, key: str, **more: object) -> Any:
        try:
            return getattr(self._client, name)(Bucket=self._bucket, Key=self._prefix + key, **more)
        except self._errors.ClientError as error:
            raise self._mapped(error, key) from error
        except self._errors.BotoCoreError as error:
            raise OSError(errno.EIO, str(error), key) from error

    @staticmethod
    def _mapped(error: Any, key: str) -> Exception:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _MISSING:
            return FileNotFoundError(errno.ENOENT, code, key)
        if code in _EXISTS:
            return FileExistsError(errno.EEXIST, code, key)
        return Backpressure(code) if code in _BUSY else OSError(errno.EIO, str(error), key)

    def put(self, key: str, data: memoryview) -> None:
        """Write a blob under `key`."""
        self._put(key, data, {})

    def put_new(self, key: str, data: memoryview) -> None:
        """Write a blob only if there is none. Raises FileExistsError where there is one."""
        self._put(key, data, _ONLY_NEW)

    def _put(self, key: str, data: memoryview, only: dict[str, str]) -> None:
        if len(data) > self._options.part_bytes:
            self._put_parts(key, data, only)
        else:
            self._call("put_object", key, Body=bytes(data), **only)

    def _put_parts(self, key: str, data: memoryview, only: dict[str, str]) -> None:
        upload = self._call("create_multipart_upload", key)["UploadId"]
        step = self._options.part_bytes
        try:
            parts = []
            for number, at in enumerate(range(0, len(data), step), 1):
                body = bytes(data[at : at + step])
                sent = self._call("upload_part", key, UploadId=upload, PartNumber=number, Body=body)
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            whole = {"Parts": parts}
            self._call(
                "complete_multipart_upload", key, UploadId=upload, MultipartUpload=whole, **only
            )
        except (OSError, Backpressure):
            self._give_up(key, upload)
            raise

    def _give_up(self, key: str, upload: str) -> int:
        try:
            self._call("abort_multipart_upload", key, UploadId=upload)
        except (OSError, Backpressure):
            return 0  # out of reach now: `tidy` comes again
        return 1

    def settle(self, key: str) -> None:
        """Do nothing: an object is durable once it is there."""

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        """Read from `offset`; return the bytes read, fewer than asked at the blob's end."""
        end = offset + len(into) - 1
        body = self._call("get_object", key, Range=f"bytes={offset}-{end}")["Body"]
        done = 0
        try:
            while done < len(into):
                data = body.read(min(len(into) - done, MIB))
                if not data:
                    break
                into[done : done + len(data)] = data
                done += len(data)
        except self._errors.BotoCoreError as error:
            raise OSError(errno.EIO, str(error), key) from error
        finally:
            body.close()
        return done

    def delete(self, key: str) -> None:
        """Delete a blob; one that is not there is no error."""
        self._call("delete_object", key)

    def move(self, key: str, to: str) -> None:
        source = {"Bucket": self._bucket, "Key": self._prefix + key}
        self._call("copy_object", to, CopySource=source)
        self.delete(key)

    def _pages(self, name: str, prefix: str) -> Iterator[Any]:
        pages = self._client.get_paginator(name)
        try:
            yield from pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
        except self._errors.ClientError as error:
            raise self._mapped(error, prefix) from error
        except self._errors.BotoCoreError as error:
            raise OSError(errno.EIO, str(error), prefix) from error

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """Iterate over the blobs under `prefix`, which ends with a slash."""
        for page in self._pages("list_objects_v2", prefix):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                yield BlobInfo(key, item["LastModified"].timestamp())

    def tidy(self, before_s: float) -> int:
        """Give up what writers that died left half-written before then; return how many."""
        gone = 0
        for page in self._pages("list_multipart_uploads", ""):
            for item in page.get("Uploads", ()):
                if item["Initiated"].timestamp() < before_s:
                    gone += self._give_up(item["Key"].removeprefix(self._prefix), item["UploadId"])
        return gone
