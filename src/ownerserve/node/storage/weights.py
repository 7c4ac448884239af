"""A checkpoint's weights are named by a digest of its files, the same for every engine.

Never a path: two folders with equal files are equal weights, and a folder whose files changed is
another model. An engine that loads the files and computes in their numerics may share a store with
any other that does; what it makes of them (fused, tied or transposed tensors) does not matter.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from ownerserve.kv.errors import InvalidInput

log = logging.getLogger("ownerserve.node")

WEIGHTS_DOMAIN = b"ownerserve/weight-files/1"
CHUNK_BYTES = 8 << 20
DIGEST_HEX = 64
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weight_files_digest(folder: Path, *, cache: Path | None = None) -> str:
    """Return a SHA-256, in hex, over names, lengths and digests of a checkpoint's weight files.

    Every file is read once; `cache` remembers the digests of files that did not change since.
    Raises InvalidInput when there are no weight files.
    """
    files = next((found for glob in WEIGHT_FILES if (found := sorted(folder.glob(glob)))), [])
    if not files:
        raise InvalidInput(
            "weights", f"{folder} has no weight files", "give their revision as `weights`"
        )
    known = _read_cache(cache)
    digest = hashlib.sha256(WEIGHTS_DOMAIN)
    seen: dict[str, str] = {}
    for file in files:
        stat = file.stat()
        key = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        seen[key] = known.get(key) or _file_digest(file)
        digest.update(f"{file.name} {stat.st_size} {seen[key]}\n".encode())
    if cache is not None and seen.keys() - known.keys():
        _write_cache(cache, {**known, **seen})
    return digest.hexdigest()


def _file_digest(file: Path) -> str:
    # The hub's cache calls large files by their SHA-256: nothing to read.
    name = file.resolve().name
    if len(name) == DIGEST_HEX and file.is_symlink():
        return name
    digest = xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_cache(path: Path | None) -> Mapping[str, str]:
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _write_cache(path: Path, known: Mapping[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(known))
    except OSError as error:
        log.info("digests of weight files are not remembered: %s", error)
