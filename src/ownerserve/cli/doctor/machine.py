"""This module checks what this machine lends to a store, to shared memory, to sockets."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from ownerserve.cli.transfer.roads import ENGINES, engine_road, local_roads
from ownerserve.kv.units import GIB, format_bytes
from ownerserve.report.doctor_table import CheckResult, Level
from ownerserve.report.transfer_table import RoadState

OPEN_FILES = 4096
REDIS_TIMEOUT_S = 2.0
REDIS_PORT = 6379
WORDS = {
    RoadState.OPEN: "on this host",
    RoadState.CLOSED: "not open",
    RoadState.ABSENT: "not installed",
}


def python() -> CheckResult:
    """Show this interpreter's version; pip lets no older one than 3.11 have us."""
    version = ".".join(map(str, sys.version_info[:3]))
    return CheckResult("python", Level.OK, version)


def memory() -> CheckResult:
    """Check how much memory can be had without swapping."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    found = f"{format_bytes(free)} available"
    if free >= 4 * GIB:
        return CheckResult("memory", Level.OK, found)
    return CheckResult(
        "memory", Level.WARN, found, "give the worker a smaller KV pool and host cache"
    )


def shared_memory(path: str = "/dev/shm") -> CheckResult:
    """Check the room where engine processes of one machine share tensors."""
    try:
        size = shutil.disk_usage(path).free
    except OSError as error:
        return CheckResult(
            "shared memory", Level.FAIL, f"{path}: {error.strerror}", f"mount {path}"
        )
    found = f"{format_bytes(size)} free in {path}"
    if size >= GIB:
        return CheckResult("shared memory", Level.OK, found)
    mend = "give the container more: --shm-size=8g, or ipc: host"
    return CheckResult("shared memory", Level.WARN, found, mend)


def roads() -> CheckResult:
    """Check by which roads KV can move from here; `ownerserve transfer check` tells more."""
    here = local_roads()
    found = [*here, *map(engine_road, ENGINES)]
    told = {state: [road.road for road in found if road.state is state] for state in RoadState}
    said = [f"{', '.join(names)} {WORDS[state]}" for state, names in told.items() if names]
    closed = [road for road in here if road.state is RoadState.CLOSED]
    level = Level.WARN if closed else Level.OK
    mend = "; ".join(f"{road.road}: {road.mend}" for road in closed)
    return CheckResult("transfer roads", level, f"tcp; {'; '.join(said)}", mend)


def open_files() -> CheckResult:
    """Check the limit of open files: a gateway holds two sockets a running request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return CheckResult("open files", Level.OK, f"ulimit -n {soft}")
    mend = f"ulimit -n {max(OPEN_FILES, soft) if hard < 0 else min(hard, 65536)}"
    return CheckResult("open files", Level.WARN, f"ulimit -n {soft}", mend)


def store(directory: Path) -> Iterator[CheckResult]:
    """Check whether artifacts can be kept there, and past the page cache."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield CheckResult(
            "store", Level.FAIL, f"{existing} can't be written", "name another directory"
        )
        return
    free = shutil.disk_usage(existing).free
    found = f"{directory}: writable, {format_bytes(free)} free"
    level = Level.OK if free >= 10 * GIB else Level.WARN
    mend = "" if level is Level.OK else "name a directory on a larger disk"
    yield CheckResult("store", level, found, mend)
    yield _direct(existing)


def _direct(directory: Path) -> CheckResult:
    """Check that one block can be written past the page cache."""
    probe = directory / f".ownerserve-doctor-{os.getpid()}"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, 4096) as aligned:
                os.write(fd, aligned)
        finally:
            os.close(fd)
    except OSError as error:
        mend = "a local file system (ext4, xfs) keeps large reads out of the page cache"
        return CheckResult("direct I/O", Level.WARN, f"refused: {error.strerror}", mend)
    finally:
        probe.unlink(missing_ok=True)
    return CheckResult("direct I/O", Level.OK, "O_DIRECT works there")


def redis(url: str) -> CheckResult:
    """Check whether a Redis or Valkey answers a PING; a password wish is an answer too."""
    try:
        parts = urlsplit(url if "//" in url else f"redis://{url}")
        server, port = parts.hostname or "localhost", parts.port or REDIS_PORT
    except ValueError as error:
        return CheckResult("redis", Level.FAIL, f"{url[:80]!r}: {error}", "write redis://HOST:PORT")
    where = f"{server[:80]}:{port}"
    try:
        with socket.create_connection((server, port), REDIS_TIMEOUT_S) as connection:
            connection.settimeout(REDIS_TIMEOUT_S)
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except (OSError, UnicodeError) as error:
        mend = "start it, or use the embedded directory"
        return CheckResult("redis", Level.FAIL, f"{where}: {error}", mend)
    if answer.startswith(b"+PONG"):
        return CheckResult("redis", Level.OK, f"{where} answers")
    if answer.startswith(b"-NOAUTH"):
        return CheckResult("redis", Level.WARN, f"{where} wants a password", "put it in the URL")
    return CheckResult(
        "redis", Level.FAIL, f"{where} speaks something else", "name a Redis or Valkey"
    )
