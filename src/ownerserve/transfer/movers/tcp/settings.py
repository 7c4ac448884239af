"""What each side of the TCP mover is told: the key, the interface and the address it is bound to.

    interface   a device, as `eth1`: nothing of the mover comes or goes by another
    source      an address of this host, from which a reader connects

Which traffic goes where is settled here, in the kernel, and not by routes alone: a host answers on
any of its interfaces, and the shortest route to an address may be another's.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from struct import Struct

import msgspec

from ownerserve.kv.addresses import is_loopback
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import TRANSFER
from ownerserve.transfer.movers.tcp.handshake import TransferKey
from ownerserve.transfer.movers.tcp.wire import DigestKind

IDLE_PROBE_S, PROBE_S, PROBES = 10, 5, 3
"""A connection on which nothing is said is looked at after so long, so often."""
_TIMEVAL = Struct("@ll")
UNHEARD_MS = 10_000
"""A connection is given up when the other side's host takes in nothing for so long."""


class ReaderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's settings. `digest`: NONE takes the digest that each read brings for the proof (and
    asks for xxh3 where it brings none); the others ask for that one as well.

    `quiet_s`: a peer from which no byte comes for so long is lost.
    """

    interface: str = ""
    source: str = ""
    connections: int = 1
    digest: DigestKind = DigestKind.NONE
    quiet_s: float = 2.0


class LenderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A lender's settings. `handshake_s`: what a whole hello, proof or question may take;
    `stall_s`: a reader that takes no byte for so long is dropped (a ticket has ended by then)."""

    interface: str = ""
    connections_max: int = 256
    handshake_s: float = 2.0
    stall_s: float = 5.0


class Peer(msgspec.Struct, frozen=True):
    """A `Peer` is where somebody lends: an address (no name is looked up) and a port, and the key
    that both sides have; None: on loopback only."""

    host: str
    port: int
    key: TransferKey | None


def check_peer(peer: Peer) -> None:
    """Raise InvalidInput for a peer that is not to be connected to."""
    try:
        ipaddress.ip_address(peer.host)
    except ValueError:
        problem = f"{peer.host[:80]!r} is no address"
        raise InvalidInput("peer", problem, "give it like 10.0.0.7, not by name") from None
    if not 0 < peer.port <= 0xFFFF:
        raise InvalidInput("peer", f"there is no port {peer.port}", "give the lender's")
    if peer.key is None and not is_loopback(peer.host):
        problem = f"{peer.host} is another host, and without a key nobody is known there"
        raise InvalidInput("peer", problem, f"give {TRANSFER.opened_by}")


def keep_to(sock: socket.socket, interface: str) -> None:
    """Have all of the socket's traffic go by that interface ("": any). Raises OSError."""
    if interface:
        name = os.fsencode(interface) + b"\0"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)


def check_interface(interface: str, *, field: str) -> None:
    """Raise InvalidInput, naming `field`, for a device that this host has not, or to which this
    process may not keep ("": any is right)."""
    with socket.socket() as sock:
        try:
            keep_to(sock, interface)
        except OSError as error:
            problem = f"{interface[:80]!r}: {error.strerror}"
            raise InvalidInput(field, problem, "name a device of this machine, as eth1") from error


def tune(sock: socket.socket) -> None:
    """Have the socket never wait, send small frames at once and find a silent host."""
    sock.settimeout(0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)


def be_patient(sock: socket.socket, patience_s: float) -> None:
    """Have calls that fill memory wait for it in the kernel, and return with less after so long."""
    sock.settimeout(None)
    wait = _TIMEVAL.pack(int(patience_s), round(patience_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
