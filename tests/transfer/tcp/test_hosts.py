"""Two hosts, as network namespaces: partition, loss, a link that is dead at one end, and traffic
that keeps to its own interface. Skips without root and `ip`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ownerserve.kv.units import MIB
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.tcp.client import TcpMover
from ownerserve.transfer.movers.tcp.server import TcpServer
from ownerserve.transfer.movers.tcp.settings import LenderSettings, Peer, ReaderSettings
from ownerserve.transfer.vocabulary import ReadFailed, ReadFailure, ReadLanded
from tests.support.netns import Host, inside, link_bytes, on, second_cable, two_hosts
from tests.support.transfer.tcp_rig import KEY, Rig, bring, end_of, failed, landed
from tests.support.waits import until

pytestmark = pytest.mark.slow

SIZE = 24 * MIB


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as (here, there):
        for host in (here, there):  # its own words would be counted
            with inside(host):
                Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        yield here, there


class Hosts(Rig):
    """A lender on one host; readers of it on the other."""

    def __init__(self, here: Host, there: Host, *, lending: LenderSettings | None = None) -> None:
        super().__init__(SIZE)
        self.here, self.there = here, there
        with inside(there):
            self.far = TcpServer(self.lender, there.address, key=KEY, settings=lending)
        self.callback(self.far.close)

    def to(self, address: str, settings: ReaderSettings | None = None) -> TcpMover:
        far = TcpMover(Peer(address, self.far.port, KEY), Xxh3(), settings=settings)
        self.callback(far.close)
        return far


def test_bytes_come_from_another_host(hosts: tuple[Host, Host]) -> None:
    with Hosts(*hosts) as rig:
        read = rig.read()
        with inside(rig.here):
            mover = rig.to(rig.there.address)
            assert bring(mover, read) == landed(read)
        assert rig.is_right(read)
        assert link_bytes(rig.here) > SIZE


@pytest.mark.parametrize("end", ["here", "there"])
@pytest.mark.parametrize("amid", [True, False], ids=["amid a read", "between two"])
def test_a_link_that_dies_is_found_and_one_that_lives_again_too(
    hosts: tuple[Host, Host], end: str, amid: bool
) -> None:
    """No end of a connection is told that the link is dead."""
    with Hosts(*hosts) as rig:
        cut = rig.here if end == "here" else rig.there
        mover = rig.to(rig.there.address)
        first, lost = rig.read(), rig.read()
        with inside(rig.here):
            mover.start(first)
            if not amid:
                assert end_of(mover, first) == landed(first)
                on(cut, "link", "set", cut.link, "down")
                mover.start(lost)
            else:
                until(lambda: rig.lender.asked >= 2)
                on(cut, "link", "set", cut.link, "down")
                lost = first
        came = end_of(mover, lost)
        assert came == failed(lost, ReadFailure.PEER_LOST) or (amid and came == landed(lost))
        rig.paint(lost)
        on(cut, "link", "set", cut.link, "up")

        def lands() -> bool:
            read = rig.read()
            return bring(mover, read) == landed(read) and rig.is_right(read)

        until(lands, what="a read over the mended link")
        assert rig.is_untouched(lost)
        until(lambda: rig.far.connections == 1, what="the end of the dead connection")


def test_a_peer_that_was_never_there_is_lost(hosts: tuple[Host, Host]) -> None:
    with Hosts(*hosts) as rig, inside(rig.here):
        read = rig.read()
        nobody = rig.there.address.rsplit(".", 1)[0] + ".77"
        assert bring(rig.to(nobody), read) == failed(read, ReadFailure.PEER_LOST)
        late = rig.read(for_s=0.2)
        mover = rig.to(nobody.replace(".77", ".78"))
        assert bring(mover, late) == failed(late, ReadFailure.LATE)


def test_lost_packets_cost_time_alone(hosts: tuple[Host, Host]) -> None:
    """A narrow queue drops what it can't hold."""
    if shutil.which("tc") is None:
        pytest.skip("needs tc (iproute2)")
    here, there = hosts
    narrow = f"qdisc add dev {there.link} root tbf rate 800mbit burst 64k limit 96k"
    made = subprocess.run(there.words("tc", *narrow.split()), check=False, capture_output=True)
    if made.returncode:
        pytest.skip("this kernel has no tbf")
    with Hosts(here, there) as rig:
        mover = rig.to(there.address, ReaderSettings(connections=2))
        reads = [rig.read() for _ in range(4)]
        with inside(here):
            for read in reads:
                mover.start(read)
        ends: dict[int, ReadLanded | ReadFailed] = {}

        def all_ended() -> bool:
            ends.update({end.number: end for end in mover.ended()})  # type: ignore[misc]
            return len(ends) == len(reads)

        until(all_ended)
        for read in reads:
            assert ends[read.number] == landed(read)
            assert rig.is_right(read)
        shown = subprocess.run(
            there.words("tc", "-s", "qdisc", "show", "dev", there.link),
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        dropped = re.search(r"dropped (\d+)", shown)
        assert dropped is not None and int(dropped[1]) > 0, "nothing was lost"


@pytest.mark.parametrize("bound", ["interface", "nothing"])
def test_traffic_keeps_to_its_interface(hosts: tuple[Host, Host], bound: str) -> None:
    """The peer's address is reached by both cables, and the route says the first: what is bound to
    the second one's interface leaves no byte on the first. Bound to nothing, all goes by the first.
    """
    second = second_cable(hosts)
    for place, host in enumerate(second):
        other = second[1 - place].address
        first = hosts[1 - place].address
        on(host, "route", "add", f"{other}/32", "via", first, "dev", hosts[place].link)
    named = bound == "interface"
    lending = LenderSettings(interface=second[1].link if named else "")
    reading = ReaderSettings(
        interface=second[0].link if named else "", source=second[0].address if named else ""
    )
    with Hosts(hosts[0], second[1], lending=lending) as rig:
        before = [link_bytes(host) for host in hosts]
        mover, read = rig.to(second[1].address, reading), rig.read()
        with inside(hosts[0]):
            assert bring(mover, read) == landed(read)
        assert rig.is_right(read)
        strayed = [link_bytes(host) - was for host, was in zip(hosts, before, strict=True)]
        if named:
            assert strayed == [0, 0]
            assert all(link_bytes(host) > SIZE for host in second)
        else:
            assert all(count > SIZE for count in strayed)
