"""A process to be read from, as quick to begin as Python is: run as a file, without our package.

It shares one sealed object of known bytes, says `descriptor address`, and ends with its stdin.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys

PROBE_BYTES = 1 << 16


def pattern() -> bytes:
    """Return the bytes that are shared."""
    return bytes(range(256)) * (PROBE_BYTES // 256)


def main() -> None:
    """Share, say where, and wait."""
    descriptor = os.memfd_create("ownerserve-probe", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, PROBE_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    shared = mmap.mmap(descriptor, PROBE_BYTES)
    shared[:] = pattern()
    print(descriptor, ctypes.addressof(ctypes.c_char.from_buffer(shared)), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
