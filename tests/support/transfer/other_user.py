"""A reader that runs as another user than the process it reads."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import numpy as np

from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.movers.readv import readv_mover
from ownerserve.transfer.movers.rights import read_rights
from ownerserve.transfer.vocabulary import FramePiece, Read
from tests.support.transfer.reading import LONG_S, runs_of, the_end_of
from tests.support.waits import WAIT_S

NOBODY = 65534


def _read(pipe: Connection, name: ProcessName, address: int) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    mover = readv_mover(name, Xxh3())
    goal = np.zeros(10, np.uint8)
    into, source = runs_of([(int(goal.ctypes.data), 10)]), runs_of([(address, 10)])
    mover.start(Read(1, 1, FramePiece(bytes(32), 0, 1, 0, 1), into, source, b"", LONG_S + 1e9))
    end = the_end_of(mover)
    pipe.send_bytes(f"{end} {read_rights(name.pid)} {bytes(goal)!r}".encode())
    mover.close()


def read_as_nobody(name: ProcessName, address: int) -> str:
    """What came of a read of 10 bytes of that process by user nobody, and what `read_rights` says
    there. Needs root."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(theirs, name, address), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(WAIT_S)
    told = ours.recv_bytes().decode()
    process.join(WAIT_S)
    ours.close()
    return told
