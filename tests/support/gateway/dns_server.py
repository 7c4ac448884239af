"""A small DNS server on real UDP and TCP sockets, whose records a test changes."""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer:
    """Records by name and kind; what is not here is NXDOMAIN. `rcode`: what is answered instead."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], Sequence[str]] = {}
        self.ttl = 1
        self.rcode: dns.rcode.Rcode | None = None
        self.is_silent = False
        self.is_short = False
        """Answers over UDP are cut short: the client comes again over TCP."""
        self.asked: list[str] = []
        self.port = 0

    def answer(self, data: bytes, *, by_udp: bool) -> bytes | None:
        if self.is_silent:
            return None
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append(f"{kind} {name}")
        answer = dns.message.make_response(query)
        known = {one for one, _ in self.records}
        if self.rcode is not None:
            answer.set_rcode(self.rcode)
        elif name not in known:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif by_udp and self.is_short:
            answer.flags |= dns.flags.TC
        elif found := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text_list(name, self.ttl, "IN", kind, list(found)))
        return answer.to_wire()


@contextmanager
def dns_server() -> Iterator[DnsServer]:
    """A server that answers on a port of 127.0.0.1, until the end."""
    server = DnsServer()

    class Udp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data, sock = self.request
            answer = server.answer(data, by_udp=True)
            if answer is not None:
                sock.sendto(answer, self.client_address)

    class Tcp(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = self.rfile.read(2)
            if len(head) == 2:
                answer = server.answer(self.rfile.read(*struct.unpack("!H", head)), by_udp=False)
                if answer is not None:
                    self.wfile.write(struct.pack("!H", len(answer)) + answer)

    class UdpServer(socketserver.ThreadingUDPServer):
        daemon_threads = True

    class TcpServer(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    tcp, udp = _both(
        partial(TcpServer, RequestHandlerClass=Tcp), partial(UdpServer, RequestHandlerClass=Udp)
    )
    server.port = tcp.server_address[1]
    threads = [threading.Thread(target=one.serve_forever, args=(0.05,)) for one in (udp, tcp)]
    both: tuple[Any, ...] = (udp, tcp)
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        for one in both:
            one.shutdown()
            one.server_close()
        for thread in threads:
            thread.join()


def _both(
    tcp: Callable[[tuple[str, int]], socketserver.TCPServer],
    udp: Callable[[tuple[str, int]], socketserver.UDPServer],
) -> tuple[socketserver.TCPServer, socketserver.UDPServer]:
    """A server of each kind at one port that is free for both."""
    while True:
        one = tcp(("127.0.0.1", 0))
        try:
            return one, udp(("127.0.0.1", one.server_address[1]))
        except OSError:  # somebody else's socket of the other kind
            one.server_close()
