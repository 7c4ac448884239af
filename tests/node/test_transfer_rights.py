"""A node that may be read by address tells the kernel so: Yama asks for it."""

from __future__ import annotations

import ctypes

import pytest

from ownerserve.transfer.movers.rights import permit_readers
from tests.support.node.lending_nodes import Node

PR_SET_PTRACER = int.from_bytes(b"Yama", "big")
ANY = ctypes.c_ulong(-1).value


class Kernel:
    """What a process has asked of prctl."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def prctl(self, option: int, what: ctypes.c_ulong, *rest: int) -> int:
        self.asked.append((option, what.value))
        return -1  # as without Yama


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr("ownerserve.transfer.movers.rights.ctypes.CDLL", lambda _: kernel)
    return kernel


def test_readers_are_permitted_by_the_name_that_yama_has_for_all(kernel: Kernel) -> None:
    permit_readers()
    assert kernel.asked == [(PR_SET_PTRACER, ANY)]


@pytest.mark.parametrize(
    ("roads", "asked"),
    [(("shm", "readv", "tcp"), 1), (("readv",), 1), (("shm", "tcp"), 0)],
    ids=["all roads", "readv", "not by address"],
)
def test_a_node_permits_them_where_readv_is_a_road(
    kernel: Kernel, roads: tuple[str, ...], asked: int
) -> None:
    Node("lends", roads=roads).close()
    assert len(kernel.asked) == asked
