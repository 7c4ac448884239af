"""Between reader and lender somebody flips, cuts, holds, swaps and sends again: no wrong byte
counts, none comes late, and each read ends as something."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from ownerserve.kv.units import KIB, MIB
from ownerserve.transfer.movers.tcp.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    WELCOME_BYTES,
    LenderHandshake,
    TransferKey,
)
from ownerserve.transfer.movers.tcp.serving import PART_BYTES
from ownerserve.transfer.movers.tcp.settings import ReaderSettings
from ownerserve.transfer.movers.tcp.wire import (
    ANSWER_BYTES,
    ASK_BYTES,
    AnswerOutcome,
    Checking,
    DigestKind,
    Over,
    PartHead,
    Signing,
    decode_ask,
)
from ownerserve.transfer.vocabulary import ReadFailed, ReadFailure, ReadLanded
from tests.support.transfer.tcp_rig import (
    KEY,
    Cut,
    Hold,
    Proxy,
    Rig,
    Side,
    bring,
    end_of,
    everything,
    exactly,
    failed,
    flipping,
    landed,
    stopping,
)
from tests.support.waits import WAIT_S, until

SIZE = 700 * KIB + 3
ASKED = HELLO_BYTES + PROOF_BYTES + ASK_BYTES
ANSWERED = WELCOME_BYTES + ANSWER_BYTES + SIZE + ANSWER_BYTES
KINDS = list(DigestKind)
drawn = settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def with_digest(kind: DigestKind, *, quiet_s: float = 2.0) -> ReaderSettings:
    return ReaderSettings(digest=kind, quiet_s=quiet_s)


@drawn
@given(st.integers(0, ANSWERED - 1), st.sampled_from(KINDS))
def test_no_byte_that_the_lender_says_can_be_another(at: int, kind: DigestKind) -> None:
    with Rig(SIZE) as rig, Proxy(rig.server.port, flipping(Side.LENDER, at)) as proxy:
        read = rig.read(told=kind is DigestKind.NONE)
        end = bring(rig.mover(proxy.port, settings=with_digest(kind)), read)
        handshake = at < WELCOME_BYTES
        assert end == failed(read, ReadFailure.UNABLE if handshake else ReadFailure.CORRUPT)


@drawn
@given(st.integers(0, ASKED - 1))
def test_no_byte_that_the_reader_says_can_be_another(at: int) -> None:
    with Rig(SIZE) as rig, Proxy(rig.server.port, flipping(Side.READER, at)) as proxy:
        read = rig.read()
        end = bring(rig.mover(proxy.port), read)
        assert isinstance(end, ReadFailed)
        assert end.reason in (ReadFailure.UNABLE, ReadFailure.PEER_LOST)
        assert rig.is_untouched(read)


@pytest.mark.parametrize("at", [0, HELLO_BYTES, HELLO_BYTES + PROOF_BYTES, ASKED - 1])
def test_a_link_that_breaks_as_the_reader_speaks(at: int) -> None:
    with Rig(SIZE) as rig, Proxy(rig.server.port, stopping(Side.READER, at, by=Cut)) as proxy:
        read = rig.read()
        assert bring(rig.mover(proxy.port), read) == failed(read, ReadFailure.PEER_LOST)
        assert rig.is_untouched(read)


@drawn
@given(st.integers(0, ANSWERED - 1))
def test_a_link_that_breaks_as_the_lender_speaks(at: int) -> None:
    with Rig(SIZE) as rig, Proxy(rig.server.port, stopping(Side.LENDER, at, by=Cut)) as proxy:
        read = rig.read()
        mover = rig.mover(proxy.port)
        assert bring(mover, read) == failed(read, ReadFailure.PEER_LOST)
        rig.paint(read)
        mover.close()
        assert rig.is_untouched(read)


PLACES = [0, WELCOME_BYTES, WELCOME_BYTES + ANSWER_BYTES + 400 * KIB, ANSWERED - 1]


@pytest.mark.parametrize("at", PLACES)
def test_a_lender_that_falls_silent_is_lost(at: int) -> None:
    with Rig(SIZE) as rig, Proxy(rig.server.port, stopping(Side.LENDER, at, by=Hold)) as proxy:
        read = rig.read()
        mover = rig.mover(proxy.port, settings=ReaderSettings(quiet_s=0.1))
        assert bring(mover, read) == failed(read, ReadFailure.PEER_LOST)


@pytest.mark.parametrize("at", PLACES)
def test_or_late_where_its_deadline_is_sooner(at: int) -> None:
    with Rig(SIZE) as rig, Proxy(rig.server.port, stopping(Side.LENDER, at, by=Hold)) as proxy:
        read = rig.read(for_s=0.1)
        mover = rig.mover(proxy.port, settings=ReaderSettings(quiet_s=WAIT_S))
        assert bring(mover, read) == failed(read, ReadFailure.LATE)
        rig.paint(read)
        mover.close()
        assert rig.is_untouched(read)


def test_what_waits_is_late_too_while_another_read_is_silent() -> None:
    at = WELCOME_BYTES + ANSWER_BYTES
    with Rig(SIZE) as rig, Proxy(rig.server.port, stopping(Side.LENDER, at, by=Hold)) as proxy:
        mover = rig.mover(proxy.port, settings=ReaderSettings(quiet_s=WAIT_S))
        silent, waiting = rig.read(), rig.read(for_s=0.1)
        mover.start(silent)
        mover.start(waiting)
        assert end_of(mover, waiting) == failed(waiting, ReadFailure.LATE)
        mover.cancel(silent.number)
        assert end_of(mover, silent) == failed(silent, ReadFailure.CANCELLED)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_in_another_order_are_corrupt(kind: DigestKind) -> None:
    def swapped(side: Side, before: int, data: bytes) -> bytes:
        if side is Side.LENDER and before > WELCOME_BYTES + ANSWER_BYTES and len(data) > 2000:
            return data[1000:2000] + data[:1000] + data[2000:]
        return data

    with Rig(8 * MIB) as rig, Proxy(rig.server.port, swapped) as proxy:
        read = rig.read(told=kind is DigestKind.NONE)
        mover = rig.mover(proxy.port, settings=with_digest(kind))
        assert bring(mover, read) == failed(read, ReadFailure.CORRUPT)


def test_a_frame_sent_twice_is_corrupt() -> None:
    def doubled(side: Side, before: int, data: bytes) -> bytes:
        return data * 2 if side is Side.READER and len(data) == ASK_BYTES else data

    with Rig(SIZE) as rig, Proxy(rig.server.port, doubled) as proxy:
        mover = rig.mover(proxy.port)
        first, second = rig.read(), rig.read()
        assert bring(mover, first) == landed(first)
        assert isinstance(bring(mover, second), ReadLanded | ReadFailed)
        assert rig.lender.asked <= 6, "what was sent twice is answered once"


def test_what_a_reader_said_brings_nothing_when_it_is_said_again() -> None:
    with Rig(SIZE) as rig, Proxy(rig.server.port, lambda *said: said[2]) as proxy:
        read = rig.read()
        assert bring(rig.mover(proxy.port), read) == landed(read)
        (heard,) = proxy.heard
        asked = rig.lender.asked
        with socket.create_connection(("127.0.0.1", rig.server.port)) as again:
            again.settimeout(WAIT_S)
            again.sendall(heard[Side.READER])
            assert len(everything(again)) == WELCOME_BYTES
        assert rig.lender.asked == asked


@contextmanager
def lending(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Somebody who takes connections and answers as he likes: the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        open_: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    open_.append(sock)
                    with suppress(OSError):
                        answer(sock)
                    sock.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        for sock in (listener, *open_):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)


def test_what_a_lender_said_is_not_believed_when_it_is_said_again() -> None:
    with Rig(SIZE) as rig, Proxy(rig.server.port, lambda *said: said[2]) as proxy:
        first = rig.read()
        assert bring(rig.mover(proxy.port), first) == landed(first)
        said = proxy.heard[0][Side.LENDER]
        with lending(lambda sock: sock.sendall(said)) as port:
            read = rig.read()
            assert bring(rig.mover(port), read) == failed(read, ReadFailure.UNABLE)
            assert rig.is_untouched(read)


def test_a_reader_s_own_words_sent_back_are_not_believed() -> None:
    def echo(sock: socket.socket) -> None:
        while data := sock.recv(1 << 16):
            sock.sendall(data)

    with Rig(10) as rig, lending(echo) as port:
        read = rig.read()
        mover = rig.mover(port, settings=ReaderSettings(quiet_s=0.1))
        assert isinstance(bring(mover, read), ReadFailed)
        assert rig.is_untouched(read)


@pytest.mark.parametrize("key", [TransferKey(b"another key of another fleet, 32"), None])
def test_who_has_another_key_reads_nothing(key: TransferKey | None) -> None:
    with Rig(SIZE) as rig:
        read = rig.read()
        mover = rig.mover(key=key)
        assert bring(mover, read) == failed(read, ReadFailure.UNABLE)
        soon = rig.read()
        assert isinstance(bring(mover, soon), ReadFailed)
        assert rig.lender.asked == 0


class Insider:
    """A lender who has the key, and lies: after its handshake it says `answers`, each followed by
    as many bytes as it likes."""

    def __init__(self, answers: list[tuple[PartHead | Over, int]]) -> None:
        self.answers = answers

    def __call__(self, sock: socket.socket) -> None:
        handshake = LenderHandshake(KEY, os.urandom(NONCE_BYTES))
        sock.sendall(handshake.welcome(exactly(sock, HELLO_BYTES)))
        keys = handshake.proved(exactly(sock, PROOF_BYTES))
        decode_ask(Checking(keys.asks).body(exactly(sock, ASK_BYTES)))
        signing = Signing(keys.answers)
        for answer, count in self.answers:
            sock.sendall(signing.frame(answer.body()) + bytes(count))


sizes = st.one_of(st.integers(1, 3 * 256 * KIB), st.just(256 * KIB), st.integers(2**62, 2**64 - 1))
lies = st.one_of(
    st.builds(PartHead, st.integers(1, 2), sizes),
    st.builds(Over, st.integers(1, 2), st.sampled_from(AnswerOutcome), sizes, st.just(b"d" * 32)),
)


@drawn
@given(st.lists(st.tuples(lies, st.integers(0, 300 * KIB)), max_size=4), st.sampled_from(KINDS))
def test_a_lender_who_lies_writes_nothing_beside_the_goal(
    answers: list[tuple[PartHead | Over, int]], kind: DigestKind
) -> None:
    with Rig(300 * KIB) as rig, lending(Insider(answers)) as port:
        read = rig.read()
        guard = rig.goals[read.number]
        mover = rig.mover(port, settings=with_digest(kind, quiet_s=0.2))
        end = bring(mover, read)
        assert isinstance(end, ReadFailed)
        assert end.reason in (
            ReadFailure.CORRUPT, ReadFailure.PEER_LOST, ReadFailure.GONE, ReadFailure.REFUSED
        )  # fmt: skip
        rig.paint(read)
        mover.close()
        assert bool((guard == 0xA5).all())


def test_an_answer_that_ends_early_is_corrupt_whatever_it_signs() -> None:
    sent = bytes(MIB)
    short = Over(1, AnswerOutcome.BROUGHT, MIB, xxh3_128_digest(sent))
    with Rig(3 * MIB) as rig, lending(Insider([(PartHead(1, MIB), MIB), (short, 0)])) as port:
        read = rig.read(told=False)
        assert bring(rig.mover(port), read) == failed(read, ReadFailure.CORRUPT)


def test_nothing_of_a_cancelled_read_is_taken_for_the_next_one_s() -> None:
    go_on = threading.Event()

    def wait_amid() -> None:
        if rig.lender.asked == 2:
            go_on.wait(WAIT_S)

    with Rig(20 * MIB) as rig, Proxy(rig.server.port, lambda *said: said[2]) as proxy:
        rig.lender.on_stands = wait_amid
        mover, read, good = rig.mover(proxy.port), rig.read(), rig.read()
        mover.start(read)
        until(lambda: rig.has_come(read, PART_BYTES))  # and nothing lies in the socket
        mover.cancel(read.number)
        assert end_of(mover, read) == failed(read, ReadFailure.CANCELLED)
        rig.paint(read)
        before = spoken(proxy)
        mover.start(good)
        until(lambda: spoken(proxy) > before)  # and only now the rest of the first one comes
        go_on.set()
        assert end_of(mover, good) == landed(good)
        assert rig.is_right(good)
        assert rig.is_untouched(read)


def spoken(proxy: Proxy) -> int:
    """How many bytes readers have said."""
    return sum(len(said[Side.READER]) for said in proxy.heard)


@drawn
@given(st.lists(st.binary(min_size=ASK_BYTES, max_size=ASK_BYTES), min_size=1, max_size=3))
def test_a_reader_who_has_the_key_and_says_anything_is_dropped(frames: list[bytes]) -> None:
    with Rig(SIZE) as rig:
        known = rig.raw()
        with suppress(OSError):
            for frame in frames:
                known.socket.sendall(known.signing.frame(frame[:-16]))
        assert everything(known.socket) == b""
        read = rig.read()
        assert bring(rig.mover(), read) == landed(read)


def test_a_lender_that_starts_again_is_found_again() -> None:
    gone = threading.Event()

    def until_gone(side: Side, before: int, data: bytes) -> bytes:
        if gone.is_set():
            raise Cut
        return data

    with Rig(SIZE) as rig, Proxy(rig.server.port, until_gone) as proxy:
        mover = rig.mover(proxy.port)
        first = rig.read()
        assert bring(mover, first) == landed(first)
        gone.set()
        lost = rig.read()
        assert bring(mover, lost) == failed(lost, ReadFailure.PEER_LOST)
        gone.clear()
        ends: list[bool] = []

        def lands() -> bool:
            read = rig.read()
            ends.append(bring(mover, read) == landed(read))
            return ends[-1]

        until(lands, what="a read of a peer that is there again")
