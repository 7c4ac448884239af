"""A copy stream orders our copies behind the engine's stream. On a CPU there is nothing to
order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class CopyStream(Protocol):
    """A `CopyStream` is where copies run beside the engine's work."""

    def mark(self) -> Any:
        """Return a mark of what the engine has queued so far; called on the engine's thread."""
        ...

    def after(self, mark: Any) -> Any:
        """Return a context whose copies run after `mark`, and are done when it is left."""
        ...


class HostStream:
    """A `HostStream` serves a CPU engine, where a step's work is done when its thread says so."""

    def mark(self) -> None:
        return None

    @contextmanager
    def after(self, mark: None) -> Iterator[None]:
        yield


class CudaStream:
    """A `CudaStream` is a stream of our own, so that the engine's is never waited for by its
    thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()


def host_runtime(device: torch.device) -> Any:
    """Return what page-locks the host memory that is copied to `device`; None where nothing needs
    it."""
    return torch.cuda.cudart() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def stream_of(device: torch.device) -> CopyStream:
    """Return the stream for caches on `device`."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
