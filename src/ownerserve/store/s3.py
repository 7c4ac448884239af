"""Blobs in an S3 bucket, by boto3. Extra: `pip install 'ownerserve[s3]'`."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.blobs import Backpressure, BlobInfo

_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_BUSY = frozenset({"503", "SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling"})


class S3Blobs:
    """Blobs under `prefix` of a bucket. Credentials and region are boto3's own business."""

    def __init__(self, bucket: str, prefix: str = "", *, endpoint_url: str | None = None) -> None:
        try:
            boto3, config = import_module("boto3"), import_module("botocore.config")
        except ImportError as error:
            raise InvalidInput(
                "remote", "S3 needs boto3", "pip install 'ownerserve[s3]'"
            ) from error
        self._errors = import_module("botocore.exceptions")
        options = config.Config(
            connect_timeout=5, read_timeout=30, retries={"max_attempts": 3, "mode": "standard"}
        )
        self._client: Any = boto3.client("s3", endpoint_url=endpoint_url, config=options)
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
        return Backpressure(code) if code in _BUSY else OSError(errno.EIO, str(error), key)

    def put(self, key: str, data: memoryview) -> None:
        self._call("put_object", key, Body=bytes(data))

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        end = offset + len(into) - 1
        body = self._call("get_object", key, Range=f"bytes={offset}-{end}")["Body"]
        done = 0
        try:
            while done < len(into):
                data = body.read(min(len(into) - done, 1 << 20))
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
        self._call("delete_object", key)

    def move(self, key: str, to: str) -> None:
        source = {"Bucket": self._bucket, "Key": self._prefix + key}
        self._call("copy_object", to, CopySource=source)
        self.delete(key)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        pages = self._client.get_paginator("list_objects_v2")
        try:
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for item in page.get("Contents", ()):
                    key = item["Key"].removeprefix(self._prefix)
                    yield BlobInfo(key, item["LastModified"].timestamp())
        except self._errors.ClientError as error:
            raise self._mapped(error, prefix) from error
        except self._errors.BotoCoreError as error:
            raise OSError(errno.EIO, str(error), prefix) from error
