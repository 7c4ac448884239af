"""Copies between a device's blocks and frames in host memory, by way of staging memory.

    gather     blocks -- kernel --> staging -- DMA --> frame
    scatter    frame -- DMA --> staging -- kernel --> blocks

Owns the staging memory, a fixed piece of the device for each direction: nothing else is allocated
there. All calls queue on the current stream and return; that stream orders the uses of the staging
memory, so one direction has one stream. Nothing has run on a device yet: docs/vllm.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownerserve.engines.vllm.layout.copies import Form, Pieces
from ownerserve.kv.errors import InvalidInput

log = logging.getLogger("vllm.ownerserve")

MOST_AXES = 4
MOST_PIECES = 4096
"""Pieces of one launch."""
LIST_BYTES = 2 * MOST_PIECES * 8
"""Their begins, in the engine's memory and in staging memory: at the head of the staging memory."""
LONGEST_WORD = 8


class _Staging:
    """A `_Staging` is one direction's staging memory. Whoever queues a transfer and the kernel
    that goes with it holds `lock`, so that no other thread's come between them."""

    def __init__(self, device: torch.device, count: int) -> None:
        memory = torch.empty(count, dtype=torch.uint8, device=device)
        self.lists = memory[:LIST_BYTES].view(torch.int64)
        self.data = memory[LIST_BYTES:]
        self.lock = Lock()


class DeviceCopies:
    """`DeviceCopies` move pieces on one device. Thread-safe."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        """Allocate `staging_bytes` on the device, half for each direction."""
        from ownerserve.engines.vllm.layout.kernel import gather, launch, scatter

        half = staging_bytes // 2
        if half < 2 * LIST_BYTES:
            raise InvalidInput("staging_bytes", f"{staging_bytes}", f"use {4 * LIST_BYTES} or more")
        log.info("%d bytes of %s are taken for copies of KV", 2 * half, device)
        self._gather, self._scatter, self._start = gather, scatter, launch
        self._out, self._in = _Staging(device, half), _Staging(device, half)
        self._settled: Callable[[], None] = (
            _settle_device if device.type == "cuda" else lambda: None
        )

    def gather(self, pieces: Pieces, frame: memoryview) -> None:
        """Queue the copies into `frame`; they are done when the stream is."""
        host = torch.frombuffer(frame, dtype=torch.uint8)
        for run in _runs(pieces, self._out):
            with self._out.lock:
                self._launch(self._gather, run, self._out)
                part = host[run.frame_bytes]
                part.copy_(self._out.data[: len(part)], non_blocking=True)

    def scatter(self, pieces: Pieces, frame: memoryview) -> None:
        """Queue the copies from `frame`, which has to stay as it is until the stream is done."""
        host = readable(frame)
        for run in _runs(pieces, self._in):
            with self._in.lock:
                part = host[run.frame_bytes]
                self._in.data[: len(part)].copy_(part, non_blocking=True)
                self._launch(self._scatter, run, self._in)

    def settle(self) -> None:
        """Return when all that this thread's stream has queued is done, without spinning."""
        self._settled()

    def _launch(self, kernel: Any, run: Pieces, staging: _Staging) -> None:
        count = len(run.own)
        begins = np.stack((run.own, run.frame - run.frame[0] + staging.data.data_ptr()))
        lists = staging.lists[: 2 * count].view(2, count)
        lists.copy_(torch.from_numpy(begins), non_blocking=True)
        axes, word_bytes = _words(run.form)
        self._start(kernel, lists[0], lists[1], axes=axes, word_bytes=word_bytes)


def _runs(pieces: Pieces, staging: _Staging) -> Iterator[Pieces]:
    size = pieces.form.piece_bytes
    if size > len(staging.data):
        raise InvalidInput("staging_bytes", f"{len(staging.data)}", f"a block has {size} bytes")
    return pieces.runs(min(len(staging.data), MOST_PIECES * size))


def _words(form: Form) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the axes of a piece for the kernel, and the bytes of its words: the longest that all
    rows begin at multiples of."""
    axes, row_bytes = form.rows
    word = math.gcd(row_bytes, LONGEST_WORD)
    *outer, (count, stride) = axes
    assert stride == row_bytes
    found = [axis for axis in (*outer, (count * row_bytes // word, word)) if axis[0] > 1]
    assert len(found) <= MOST_AXES, f"{len(found)} axes of {form.lane}"
    return tuple(found), word


def _settle_device() -> None:
    done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record()
    done.synchronize()


class _Unlocked:
    """An `_Unlocked` is an array that torch takes although its memory is read-only: torch has no
    such tensors."""

    def __init__(self, data: memoryview) -> None:
        self._array = np.frombuffer(data, np.uint8)
        address, _ = self._array.__array_interface__["data"]
        self.__array_interface__ = {**self._array.__array_interface__, "data": (address, False)}


def readable(data: memoryview) -> Tensor:
    """Return `data` as a tensor of bytes, not copied. They belong to the store: nobody may write
    into them."""
    return torch.from_numpy(np.asarray(_Unlocked(data)))
