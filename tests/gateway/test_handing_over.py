"""A connection goes from one process of a gateway to another with all that was read of it."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ownerserve.gateway.http.handing import KeptInput, first_end
from ownerserve.gateway.processes.mail import (
    INLINE_BYTES,
    Mailbox,
    Parcel,
    ParcelKind,
    Post,
    Receiving,
)
from tests.support.certificates import Authority
from tests.support.gateway.echoing import digest, echoing_worker, let_go
from tests.support.gateway.several import Several, descriptors, several
from tests.support.gateway.world import header
from tests.support.waits import until

pytestmark = pytest.mark.slow

ROUNDS = 12
BIG = json.dumps({"model": "m", "said": "x" * 400_000}).encode()
SMALL = b'{"model": "m"}'


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Several]:
    with echoing_worker() as worker, several(tmp_path, 2, [worker]) as running:
        yield running


def head(session: str, *lines: str) -> bytes:
    said = ("POST /v1/chat/completions HTTP/1.1", "host: g", "content-type: application/json")
    return "\r\n".join([*said, *lines, f"x-session-id: {session}", "", ""]).encode()


def plain(session: str, body: bytes) -> bytes:
    return head(session, f"content-length: {len(body)}") + body


def chunked(session: str, body: bytes) -> bytes:
    pieces = [body[at : at + 7000] for at in range(0, len(body), 7000)]
    frames = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces)
    return head(session, "transfer-encoding: chunked") + frames + b"0\r\n\r\n"


def whole(client: socket.socket, raw: bytes) -> None:
    client.sendall(raw)


def in_pieces(client: socket.socket, raw: bytes) -> None:
    """Its head in two parts, then the beginning of its body, then the rest."""
    end = raw.index(b"\r\n\r\n") + 4
    for part in (raw[:20], raw[20 : end + 5], raw[end + 5 : end + 9], raw[end + 9 :]):
        client.sendall(part)
        until(lambda: is_sent(client))


def is_sent(client: socket.socket) -> bool:
    """Whether the other side has all bytes in its kernel (SIOCOUTQ)."""
    left = array.array("i", [1])
    fcntl.ioctl(client.fileno(), 0x5411, left)
    return left[0] == 0


def answered(answers: Iterator[bytes], body: bytes) -> None:
    said = json.loads(next(answers))
    assert (said["bytes"], said["digest"]) == (len(body), digest(body))


def read_answers(client: socket.socket) -> Iterator[bytes]:
    """The bodies of the answers, in order."""
    read = b""
    while True:
        while b"\r\n\r\n" not in read:
            read += client.recv(1 << 16) or pytest.fail("the connection ended")
        told, _, read = read.partition(b"\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200"), told
        length = int(header(told + b"\r\n\r\n", b"content-length") or 0)
        while len(read) < length:
            read += client.recv(1 << 16) or pytest.fail("the connection ended")
        yield read[:length]
        read = read[length:]


@pytest.mark.parametrize("send", [whole, in_pieces])
@pytest.mark.parametrize("form", [plain, chunked])
def test_each_shape_of_a_request_arrives_whole(
    send: Callable[[socket.socket, bytes], None],
    form: Callable[[str, bytes], bytes],
    gateway: Several,
) -> None:
    """Sessions take turns on one connection: about each second request is elsewhere's."""
    with gateway.connect() as client:
        answers = read_answers(client)
        for number in range(ROUNDS):
            body = BIG if number % 3 == 2 else SMALL
            send(client, form(f"s{number}", body))
            answered(answers, body)
    assert gateway.metric("ownerserve_gateway_requests_placed_total", at="elsewhere") > 0


def test_pipelined_requests_are_answered_in_order_wherever_they_are(gateway: Several) -> None:
    bodies = [json.dumps({"model": "m", "n": "y" * (37 * n)}).encode() for n in range(3 * ROUNDS)]
    forms = (plain, chunked)
    raw = b"".join(forms[n % 2](f"p{n}", body) for n, body in enumerate(bodies))
    for step in (len(raw), 1500):
        with gateway.connect() as client:
            answers = read_answers(client)
            for at in range(0, len(raw), step):
                client.sendall(raw[at : at + step])
            for body in bodies:
                answered(answers, body)


def test_who_waits_to_be_told_to_go_on_is_told_once(gateway: Several) -> None:
    for number in range(ROUNDS):
        with gateway.connect() as client:
            length = f"content-length: {len(BIG)}"
            client.sendall(head(f"e{number}", length, "expect: 100-continue"))
            said = client.recv(4096)
            assert said == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(BIG)
            answered(read_answers(client), BIG)


def test_under_tls_bytes_are_passed_on(tmp_path: Path) -> None:
    """Head and body in one record or in two, quick and held answers, and a drain in the midst."""
    ca = Authority(tmp_path)
    pair, believes = ca.issue("own", "127.0.0.1"), ca.client()
    words = ("--tls-cert-file", str(pair.certificate), "--tls-key-file", str(pair.key))
    held = b'{"model": "m", "said": "held"}'

    def ask(number: int, body: bytes) -> None:
        with (
            running.connect() as plain_one,
            believes.wrap_socket(plain_one, server_hostname="127.0.0.1") as client,
        ):
            answers = read_answers(client)
            for turn in range(2):
                raw = plain(f"t{number + turn}", body)
                for part in (raw,) if number % 2 else (raw[:-9], raw[-9:]):
                    client.sendall(part)
                answered(answers, body)

    with (
        echoing_worker() as worker,
        ThreadPoolExecutor(12) as pool,
        several(tmp_path, 2, [worker], *words) as running,
    ):
        for body in (SMALL, BIG):
            for number in range(ROUNDS):
                ask(number, body)
        assert sum(one["given_away"] for one in running.processes_now()) > 0
        until(lambda: running.admin("/status")["clients"] == 0)
        turns = [pool.submit(one_turn, running, believes, held, number) for number in range(12)]
        until(lambda: running.admin("/status")["live"] == 12)
        running.gateway.process.send_signal(signal.SIGTERM)
        let_go(worker)
        for turn in turns:
            turn.result()
        assert running.gateway.process.wait(60) == 0


def one_turn(running: Several, believes: ssl.SSLContext, body: bytes, number: int) -> None:
    with (
        running.connect() as plain_one,
        believes.wrap_socket(plain_one, server_hostname="127.0.0.1") as client,
    ):
        client.sendall(plain(f"d{number}", body))
        answered(read_answers(client), body)


def test_nothing_is_left_of_clients_that_hang_up_on_the_way(gateway: Several) -> None:
    pids = [gateway.pid(process) for process in range(2)]
    with gateway.connect() as client:  # the pools have their connections
        answers = read_answers(client)
        for number in range(8):
            client.sendall(plain(f"w{number}", SMALL))
            answered(answers, SMALL)
    until(lambda: gateway.admin("/status")["clients"] == 0)
    before = [descriptors(pid) for pid in pids]
    for number in range(60):
        raw = plain(f"h{number}", BIG)
        with gateway.connect() as client:
            client.sendall(raw[: (100, 300, len(raw))[number % 3]])
    until(lambda: gateway.admin("/status")["clients"] == 0)
    until(lambda: gateway.admin("/status")["live"] == 0)
    # A worker's connection that was closed with its client may be gone, a new one kept.
    until(lambda: all(descriptors(pid) <= had + 4 for pid, had in zip(pids, before, strict=True)))


@pytest.mark.parametrize("form", [plain, chunked])
def test_the_end_of_the_first_request_is_found_to_the_byte(
    form: Callable[[str, bytes], bytes],
) -> None:
    for length in (1, 2, 31, 32, 33, 1023, 1024, 1025, 5000, 40_000):
        first = form("a", b"z" * length)
        for behind in (b"", b"G", first, plain("b", SMALL)[:-1]):
            assert first_end(first + behind) == len(first)


def test_who_finds_no_descriptor_for_the_input_closes_the_client() -> None:
    """With one descriptor left the client's socket arrives and its request does not: it would
    wait for an answer to what nobody has."""

    async def main() -> None:
        mailbox, client, taken = Mailbox(), socket.socketpair(), list[Parcel]()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        Post([mailbox]).send(
            0, Parcel(ParcelKind.CLIENT, client[0].fileno(), bytes(INLINE_BYTES + 1))
        )
        client[0].close()
        Receiving(mailbox, taken.append).open()
        free = os.dup(0)
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
            client[1].setblocking(False)
            async with asyncio.timeout(30):
                ended = await asyncio.get_running_loop().sock_recv(client[1], 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for one in (client[1], mailbox.inlet, mailbox.outlet):
                one.close()
        assert (ended, taken) == (b"", [])

    asyncio.run(main())


def test_what_is_answered_here_is_not_kept() -> None:
    kept = KeptInput()
    first, second = plain("a", SMALL), chunked("b", SMALL)
    kept.add(first + second[:10])
    kept.drop_first()
    assert kept.whole() == second[:10]
    kept.add(second[10:])
    assert kept.whole() == second
    kept.drop_only()
    kept.add(first[:-5])
    kept.skip(5)
    kept.add(first[-5:] + second)
    kept.drop_first()
    assert kept.whole() == second
