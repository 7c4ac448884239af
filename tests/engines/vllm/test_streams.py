"""Copy streams over a CUDA that only keeps its books: what is queued, what was waited for, how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ownerserve.engines.vllm.worker_side.streams import CudaStream

pytestmark = pytest.mark.engine


class Stream:
    """A stream: what was queued on it, and how much of that somebody has waited for."""

    def __init__(self, device: Any = None) -> None:
        self.queued: list[str] = []
        self.done = 0

    def wait_event(self, event: Event) -> None:
        self.queued.append(f"after {event.name}")

    @property
    def in_flight(self) -> list[str]:
        return self.queued[self.done :]


class Event:
    def __init__(self, *, blocking: bool = False, name: str = "") -> None:
        self.blocking, self.name = blocking, name
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream, self._at = stream, len(stream.queued)

    def synchronize(self) -> None:
        assert self._stream is not None
        assert self.blocking, "the host's thread spins"
        self._stream.done = max(self._stream.done, self._at)


class Cuda:
    """What `torch.cuda` has of streams."""

    def __init__(self) -> None:
        self.engine = Stream()
        self.own: list[Stream] = []
        self.current = self.engine

    def stream_of(self, device: Any) -> Stream:
        self.own.append(Stream())
        return self.own[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", found.stream_of)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    return found


DIRECTIONS = ["copying_in", "copying_out"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_copy_that_fails_half_way_is_over_when_it_is_reported(cuda: Cuda, direction: str) -> None:
    """A reader that raises reports its load as failed, and vLLM gives the blocks to others: a
    transfer that was queued before would write into theirs."""
    streams = CudaStream(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="second"), getattr(streams, direction)(streams.mark()):
        cuda.current.queued.append("first block")
        raise RuntimeError("second block")
    assert any("first block" in stream.queued for stream in cuda.own)
    assert [stream.in_flight for stream in cuda.own] == [[], []]
    assert cuda.current is cuda.engine


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_copies_run_behind_the_engines_work_and_are_waited_for(cuda: Cuda, direction: str) -> None:
    streams = CudaStream(torch.device("cuda"))
    mark = streams.mark()
    mark.name = "the forward"
    with getattr(streams, direction)(mark):
        cuda.current.queued.append("a copy")
        assert cuda.current.in_flight == ["after the forward", "a copy"]
    assert [stream.in_flight for stream in cuda.own] == [[], []]


def test_each_direction_has_a_stream(cuda: Cuda) -> None:
    """A long load does not hold up the saves, whose blocks the engine waits for."""
    streams = CudaStream(torch.device("cuda"))
    with streams.copying_in(streams.mark()):
        into = cuda.current
        with streams.copying_out(streams.mark()):
            assert cuda.current is not into
            assert cuda.current is not cuda.engine
            assert into is not cuda.engine
