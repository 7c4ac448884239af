"""Copy streams order our copies behind the engine's stream. On a CPU there is nothing to order.

However a copy ends, also by an exception, its context is left when nothing of it is queued any
more: who reports a failed load gives its blocks back, and nobody may write there then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class CopyStream(Protocol):
    """A `CopyStream` is where copies run beside the engine's work: those out of blocks and those
    into blocks beside one another."""

    def mark(self) -> Any:
        """Return a mark of what the engine has queued so far; called on the engine's thread."""
        ...

    def copying_out(self, mark: Any) -> AbstractContextManager[None]:
        """Return a context whose copies out of blocks run after `mark`, and are over when it is
        left."""
        ...

    def copying_in(self, mark: Any) -> AbstractContextManager[None]:
        """Return a context whose copies into blocks run after `mark`, and are over when it is
        left."""
        ...


class HostStream:
    """A `HostStream` serves a CPU engine, where a step's work is done when its thread says so."""

    def mark(self) -> None:
        """Return nothing to wait for: on the host a forward has ended when it returns."""

    @contextmanager
    def copying_out(self, mark: None) -> Iterator[None]:
        """Enter a copy out of blocks."""
        yield

    @contextmanager
    def copying_in(self, mark: None) -> Iterator[None]:
        """Enter a copy into blocks."""
        yield


class CudaStream:
    """A `CudaStream` is two streams of our own, one a direction, so that a save does not wait for a
    load and the engine's stream is never waited for by its thread. Who waits for a copy sleeps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Return an event behind all that is queued on the engine's stream now."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copying_out(self, mark: Any) -> AbstractContextManager[None]:
        """Enter a copy out of blocks, behind `mark`; when the context is left it is over."""
        return _over_when_left(self._out, mark)

    def copying_in(self, mark: Any) -> AbstractContextManager[None]:
        """Enter a copy into blocks, behind `mark`; when the context is left it is over."""
        return _over_when_left(self._in, mark)


@contextmanager
def _over_when_left(stream: Any, mark: Any) -> Iterator[None]:
    """Run what is inside on `stream` behind `mark`, and wait, asleep, until all of it is done."""
    with torch.cuda.stream(stream):
        stream.wait_event(mark)
        try:
            yield
        finally:
            done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
            done.synchronize()


def host_runtime(device: torch.device) -> Any:
    """Return what page-locks the host memory that is copied to `device`; None where nothing needs
    it."""
    return torch.cuda.cudart() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def stream_of(device: torch.device) -> CopyStream:
    """Return the streams for caches on `device`."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
