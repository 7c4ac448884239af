"""The side that lends: who is served, what is said of a ticket, and that none waits for another."""

from __future__ import annotations

import socket

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import KIB, MIB
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.tcp.client import TcpMover
from ownerserve.transfer.movers.tcp.handshake import (
    HELLO_BYTES,
    WELCOME_BYTES,
    ReaderHandshake,
    TransferKey,
)
from ownerserve.transfer.movers.tcp.server import TcpServer
from ownerserve.transfer.movers.tcp.settings import LenderSettings, Peer, ReaderSettings
from ownerserve.transfer.movers.tcp.wire import ANSWER_BYTES, Bring, DigestKind
from ownerserve.transfer.vocabulary import ReadFailed, ReadFailure
from tests.support.net import own_address
from tests.support.transfer.contract import wakes
from tests.support.transfer.reading import own_threads
from tests.support.transfer.tcp_rig import (
    KEY,
    PIECE,
    Known,
    Rig,
    TestLender,
    bring,
    closed_all,
    end_of,
    everything,
    exactly,
    failed,
    landed,
)
from tests.support.waits import WAIT_S, until

SIZE = 20 * MIB
SOON_S = 30.0
"""Longer than a server that has to drop somebody takes on a loaded machine."""


def ask(known: Known, size: int) -> None:
    """Ask for PIECE, and take nothing of the answer."""
    bring_it = Bring(1, 1, PIECE, size, DigestKind.NONE)
    known.socket.sendall(known.signing.frame(bring_it.body()))


@pytest.mark.parametrize("kind", list(DigestKind))
@pytest.mark.parametrize("told", [True, False])
def test_bytes_come_with_each_kind_of_digest(kind: DigestKind, told: bool) -> None:
    with Rig(SIZE) as rig:
        read = rig.read(told=told)
        assert bring(rig.mover(settings=ReaderSettings(digest=kind)), read) == landed(read)
        assert rig.is_right(read)


def test_several_connections_share_the_reads() -> None:
    with Rig(SIZE) as rig:
        mover = rig.mover(settings=ReaderSettings(connections=3))
        reads = [rig.read() for _ in range(9)]
        for read in reads:
            mover.start(read)
        ends = []
        until(lambda: ends.extend(mover.ended()) or len(ends) == 9)
        assert sorted(end.number for end in ends) == [read.number for read in reads]
        assert all(rig.is_right(read) for read in reads)
        assert rig.server.connections == 3


def test_without_a_key_this_machine_is_served_and_no_other() -> None:
    with Rig(SIZE, key=None) as rig:
        read = rig.read()
        assert bring(rig.mover(key=None), read) == landed(read)
    with pytest.raises(InvalidInput, match="nothing is asked there"):
        TcpServer(TestLender(1), "0.0.0.0")
    with pytest.raises(InvalidInput, match="without a key"):
        TcpMover(Peer("10.1.2.3", 9, None), Xxh3())


@pytest.mark.parametrize("peer", [Peer("some.host", 9, KEY), Peer("10.0.0.1", 0, KEY)])
def test_a_peer_is_an_address_and_a_port(peer: Peer) -> None:
    with pytest.raises(InvalidInput):
        TcpMover(peer, Xxh3())


def test_with_a_key_it_is_served_off_loopback() -> None:
    with TcpServerAt(own_address()) as (lender, server), Rig(1) as rig:
        mover = TcpMover(Peer(server.host, server.port, KEY), Xxh3())
        read = rig.read(size=lender.memory.nbytes, told=False)
        assert bring(mover, read) == landed(read)
        mover.close()


class TcpServerAt:
    def __init__(self, host: str) -> None:
        self.lender = TestLender(SIZE)
        self.server = TcpServer(self.lender, host, key=KEY)

    def __enter__(self) -> tuple[TestLender, TcpServer]:
        return self.lender, self.server

    def __exit__(self, *_: object) -> None:
        self.server.close()


def test_an_interface_that_is_not_there_is_not_another() -> None:
    with Rig(SIZE) as rig:
        mover = rig.mover(settings=ReaderSettings(interface="nosuch0"))
        read = rig.read()
        assert bring(mover, read) == failed(read, ReadFailure.UNABLE)
        mover = rig.mover(settings=ReaderSettings(source="192.0.2.77"))
        read = rig.read()
        assert bring(mover, read) == failed(read, ReadFailure.UNABLE)
    with pytest.raises(OSError, match="No such device"):
        TcpServer(TestLender(1), settings=LenderSettings(interface="nosuch0"))


def test_what_is_not_lent_under_that_ticket_is_refused() -> None:
    with Rig(SIZE) as rig:
        mover = rig.mover()
        read = rig.read(ticket=100)
        assert bring(mover, read) == failed(read, ReadFailure.REFUSED)
        longer = rig.read(size=SIZE + 1)
        assert bring(mover, longer) == failed(longer, ReadFailure.REFUSED)
        assert rig.is_untouched(read) and rig.is_untouched(longer)
        good = rig.read()
        assert bring(mover, good) == landed(good)
        assert rig.server.connections == 1


@pytest.mark.parametrize("stands", [0, 1, 2, 3])
def test_a_ticket_is_asked_for_before_each_part_and_after_the_last_byte(stands: int) -> None:
    """20 MiB are three parts: it stands before `stands` of them, and no more."""
    with Rig(SIZE) as rig:
        rig.lender.verdicts = [True] * stands + [False]
        read = rig.read()
        assert bring(rig.mover(), read) == failed(read, ReadFailure.GONE)
        assert rig.lender.asked == stands + 1
        rig.lender.verdicts = [True]
        good = rig.read()
        assert bring(rig.mover(), good) == landed(good)


def test_who_takes_nothing_keeps_nobody_waiting_and_is_dropped() -> None:
    size = 64 * MIB
    with Rig(size, settings=LenderSettings(stall_s=1.0)) as rig:
        frozen = [rig.raw() for _ in range(3)]
        for known in frozen:
            ask(known, size)
            exactly(known.socket, ANSWER_BYTES)
        read = rig.read()
        mover = rig.mover()
        assert bring(mover, read) == landed(read)
        mover.close()
        closed_all(rig.server)


def test_who_says_nothing_or_half_a_word_is_dropped() -> None:
    with Rig(SIZE, settings=LenderSettings(handshake_s=0.2)) as rig:
        at = ("127.0.0.1", rig.server.port)
        half = ReaderHandshake(KEY, b"n" * 32).hello[: HELLO_BYTES - 1]
        for said in (b"", half):
            with socket.create_connection(at) as sock:
                sock.settimeout(SOON_S)
                sock.sendall(said)
                assert everything(sock) == b""
        known = rig.raw()
        known.socket.settimeout(SOON_S)
        known.socket.sendall(known.signing.frame(b"x" * 120)[:-1])
        assert everything(known.socket) == b""
        closed_all(rig.server)


def test_nothing_is_read_before_the_reader_has_shown_its_key() -> None:
    with Rig(SIZE) as rig, socket.create_connection(("127.0.0.1", rig.server.port)) as sock:
        sock.settimeout(WAIT_S)
        bring_it = Bring(1, 1, PIECE, SIZE, DigestKind.NONE)
        sock.sendall(ReaderHandshake(KEY, b"n" * 32).hello + bytes(32) + bring_it.body())
        assert len(everything(sock)) == WELCOME_BYTES
        assert rig.lender.asked == 0


def test_strangers_do_not_keep_readers_out() -> None:
    with Rig(SIZE, settings=LenderSettings(connections_max=4, handshake_s=WAIT_S)) as rig:
        at = ("127.0.0.1", rig.server.port)
        strangers = [rig.enter_context(socket.create_connection(at)) for _ in range(9)]
        until(lambda: rig.server.connections == 4)
        read = rig.read()
        assert bring(rig.mover(), read) == landed(read)
        assert len(strangers) == 9 and rig.server.connections == 4


def test_readers_are_not_dropped_for_others() -> None:
    with Rig(SIZE, settings=LenderSettings(connections_max=2)) as rig:
        movers = [rig.mover() for _ in range(2)]
        for mover in movers:
            read = rig.read()
            assert bring(mover, read) == landed(read)
        refused = rig.read()
        assert bring(rig.mover(), refused) == failed(refused, ReadFailure.PEER_LOST)
        for mover in movers:
            read = rig.read()
            assert bring(mover, read) == landed(read)


def test_a_lender_that_fails_costs_that_read_alone(caplog: pytest.LogCaptureFixture) -> None:
    with Rig(SIZE) as rig:
        rig.lender.on_runs = lambda: 1 // 0
        mover, read = rig.mover(), rig.read()
        assert bring(mover, read) == failed(read, ReadFailure.PEER_LOST)
        assert "could not be served" in caplog.text
        rig.lender.on_runs = lambda: None
        good = rig.read()
        assert bring(rig.mover(), good) == landed(good)


def test_both_sides_sleep_while_nothing_is_asked() -> None:
    before = own_threads()
    with Rig(64 * KIB) as rig:
        mover, read = rig.mover(), rig.read()
        assert bring(mover, read) == landed(read)
        own = own_threads() - before
        assert len(own) == 2
        was = wakes(own)
        for _ in range(50):
            socket.create_server(("127.0.0.1", 0)).close()
        assert wakes(own) - was <= 2 * len(own)


def test_close_amid_answers_ends_them() -> None:
    size = 64 * MIB
    with Rig(size) as rig:
        mover, read = rig.mover(), rig.read()
        mover.start(read)
        until(lambda: rig.lender.asked >= 2)
        rig.server.close()
        end = end_of(mover, read)
        assert end == failed(read, ReadFailure.PEER_LOST) or end == landed(read)
        again = rig.read()
        assert isinstance(bring(mover, again), ReadFailed)


def test_a_port_that_is_taken_is_said() -> None:
    with Rig(1) as rig, pytest.raises(InvalidInput, match="Address already in use"):
        TcpServer(TestLender(1), port=rig.server.port, key=TransferKey(b"k" * 32))
