"""This module tells a foreign error to who typed the command: one line, with the mend.

Errors of ours say it themselves (kv/errors.py). What is left over is a defect of ours and keeps
its traceback.
"""

from __future__ import annotations

import errno
import os
import socket
import sys

from ownerserve.kv.errors import InvariantViolated, OwnerServeError

REPORT = (
    "This is a defect of OwnerServe. Please report it with the lines above, the command and what"
    " `ownerserve doctor` says."
)

EXTRAS = {
    "boto3": "s3",
    "botocore": "s3",
    "cryptography": "encryption",
    "dns": "dns",
    "httpx": "engine",
    "jinja2": "engine",
    "kubernetes": "kubernetes",
    "matplotlib": "report",
    "mooncake": "mooncake",
    "nixl": "nixl",
    "opentelemetry": "otel",
    "ray": "ray",
    "redis": "valkey",
    "safetensors": "engine",
    "tokenizers": "engine",
    "torch": "engine",
    "transformers": "engine",
}
"""The extra of pyproject.toml that brings a package."""

MENDS = {
    errno.EACCES: "change its permissions or name another",
    errno.EADDRINUSE: "use another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "use an address of this machine",
    errno.ECONNREFUSED: "is it running?",
    errno.EEXIST: "remove it or name another",
    errno.EISDIR: "name a file",
    errno.EMFILE: "raise the limit: ulimit -n 65536",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOENT: "check the path",
    errno.ENOSPC: "make room or name another disk",
    errno.ENOTDIR: "name a folder",
    errno.EPERM: "change its permissions or name another",
    errno.EROFS: "name a place that can be written",
}
TRACE_MEND = "OWNERSERVE_LOG=debug shows where it came from"


def told(error: BaseException) -> str | None:
    """Return `error` in one line for the user; None for a defect of ours."""
    if isinstance(error, InvariantViolated):
        return None
    if isinstance(error, OwnerServeError):
        return _line(str(error))
    if isinstance(error, ImportError):
        return _missing(error)
    if isinstance(error, MemoryError):
        return "memory: not enough of it; ask for smaller sizes or use a larger machine"
    if isinstance(error, OSError):
        return _line(_system(error))
    zmq = sys.modules.get("zmq")
    if zmq is not None and isinstance(error, zmq.ZMQError):
        mend = MENDS.get(error.errno or 0, TRACE_MEND)
        return _line(f"socket: {error.strerror}; {mend}")
    return None


def _line(text: str) -> str:
    return " ".join(text.split())


def _missing(error: ImportError) -> str | None:
    """Return the line on the package that an import lacks; None when the package is ours."""
    package = (error.name or "").partition(".")[0]
    if not package or package == "ownerserve":
        return None
    extra = EXTRAS.get(package)
    wanted = "ownerserve" if extra is None else f"ownerserve[{extra}]"
    problem = "is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
    return _line(f"{package}: {problem}; pip install '{wanted}'")


def _system(error: OSError) -> str:
    """Return what the operating system refused, and about which file or address."""
    problem = error.strerror or str(error) or type(error).__name__
    if isinstance(error, socket.gaierror):
        return f"address: {problem}; check the host's name"
    place = error.filename
    if isinstance(place, bytes):
        place = os.fsdecode(place)
    mend = MENDS.get(error.errno or 0, TRACE_MEND)
    return f"{place if place is not None else 'system'}: {problem}; {mend}"
