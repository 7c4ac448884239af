"""Says who is at a transfer port, and whether the key fits, by the TCP mover's own handshake.

    connect ── hello ──> welcome: is it a lender, has it our key ── proof ── asks ──> refusals

A mover says of a peer that does not answer only that it is lost, or unable. Here is told which.
What is asked for is lent to nobody, so nothing of the peer's memory is read.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import statistics
import time

from ownerserve.kv.addresses import is_loopback
from ownerserve.kv.errors import Corrupt, SpecMismatch
from ownerserve.kv.wire.curve import OPTION
from ownerserve.report.transfer_table import RoadFound, RoadState
from ownerserve.transfer.movers.tcp.handshake import (
    MAGIC,
    NONCE_BYTES,
    WELCOME_BYTES,
    ConnectionKeys,
    ReaderHandshake,
    TransferKey,
)
from ownerserve.transfer.movers.tcp.wire import (
    ANSWER_BYTES,
    ARTIFACT_BYTES,
    Bring,
    Checking,
    DigestKind,
    Signing,
    decode_answer,
)
from ownerserve.transfer.vocabulary import FramePiece

WAIT_S = 3.0
"""What each step may take: hosts of a fleet are milliseconds apart."""
UNASKED_S = 0.5
QUESTIONS = 11
NOBODYS_TICKET = (1 << 64) - 1
_PIECE = FramePiece(bytes(ARTIFACT_BYTES), 0, 1, 0, 1)
_SILENT = "it takes the connection and says nothing: another protocol, or a frozen process"
_AT_ONCE = "it closes at once: another protocol, or it has all the connections that it takes"
_NAME_IT = "name a worker's --transfer-port, or the port of a `transfer serve`"
_LOOK = "look into its log"
_SAME_KEY = f"give the {OPTION} that it was started with"
_SPOKEN = (
    (b"\xff\0\0\0", "ZeroMQ, as a worker's rpc port and a directory do"),
    (b"HTTP/", "HTTP"),
    (b"SSH-", "SSH"),
    (b"\x15\x03", "TLS"),
)
"""What others say first, or answer to what they can't read."""


class NotOpen(Exception):
    """The port is not open to us: what was found, and the mend."""

    def __init__(self, found: str, mend: str) -> None:
        super().__init__(found)
        self.found, self.mend = found, mend


class _ClosedAtOnce(Exception):
    """The other side closes the connection at our first words, and says nothing."""


def ask_lender(host: str, port: int, key: TransferKey | None) -> RoadFound:
    """Find out whether somebody lends there to who has this key, and how soon an answer comes."""
    where = f"{host}:{port}"
    try:
        address = address_of(host)
        if key is None and not is_loopback(address):
            raise NotOpen("another host, and no key is given: nobody is known there", _SAME_KEY)
        with _connected(address, port) as peer:
            round_trip_ms = _round_trip_ms(peer, _greet(peer, key))
    except _ClosedAtOnce:
        found = f"{where}: {_told_of(_unasked(address, port)) or _AT_ONCE}"
        return RoadFound("tcp", RoadState.CLOSED, found, _NAME_IT)
    except NotOpen as reason:
        return RoadFound("tcp", RoadState.CLOSED, f"{where}: {reason.found}", reason.mend)
    except OSError as error:
        found = f"{where}: it hung up amid the handshake: {error.strerror or error}"
        return RoadFound("tcp", RoadState.CLOSED, found, _LOOK)
    fits = "no key is asked for" if key is None else "the key fits"
    found = f"{where}: {fits}, {round_trip_ms:.3g} ms a round trip"
    return RoadFound("tcp", RoadState.OPEN, found, round_trip_ms=round_trip_ms)


def address_of(host: str) -> str:
    """Return the host's address, looked up where it is a name: the mover takes none. Raises
    NotOpen."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise NotOpen(f"no such host: {problem}", "give an address, like 10.0.0.7") from error
    return str(found[0][4][0])


def _connected(address: str, port: int) -> socket.socket:
    try:
        return socket.create_connection((address, port), WAIT_S)
    except ConnectionRefusedError as error:
        mend = "start it: `ownerserve worker --transfer-port`, or `ownerserve transfer serve`"
        raise NotOpen("nobody is there", mend) from error
    except TimeoutError as error:
        mend = "is the host up, and does its firewall let this port through?"
        raise NotOpen(f"no answer within {WAIT_S:g} s", mend) from error
    except OSError as error:
        raise NotOpen(error.strerror or str(error), "check address, route and firewall") from error


def _greet(peer: socket.socket, key: TransferKey | None) -> ConnectionKeys:
    """Show each other the key. Raises NotOpen."""
    nonce = os.urandom(NONCE_BYTES)
    handshake = ReaderHandshake(key, nonce)
    welcome = _said(peer, handshake.hello, WELCOME_BYTES, begin=MAGIC)
    if not welcome.startswith(MAGIC):
        raise NotOpen(_told_of(welcome) or _SILENT, _NAME_IT)
    try:
        proof, keys = handshake.welcomed(welcome)
    except Corrupt as error:
        raise _other_key(key, nonce, welcome) from error
    except SpecMismatch as error:
        raise NotOpen(str(error), "run one version of OwnerServe on both") from error
    peer.sendall(proof)
    return keys


def _other_key(key: TransferKey | None, nonce: bytes, welcome: bytes) -> NotOpen:
    """Tell why the lender's proof is not one by our key."""
    if key is None:
        return NotOpen("it asks for a key, and none is given", _SAME_KEY)
    try:
        ReaderHandshake(None, nonce).welcomed(welcome)
    except (Corrupt, SpecMismatch):
        return NotOpen("it has another key", _SAME_KEY)
    return NotOpen("it was started without a key", f"start it with this {OPTION}, or give none")


def _told_of(said: bytes) -> str:
    """Tell what speaks there, by what it said first; nothing, where it said nothing."""
    names = [name for begin, name in _SPOKEN if said.startswith(begin)]
    return f"another protocol: {names[0] if names else repr(said[:16])}" if said else ""


def _unasked(address: str, port: int) -> bytes:
    """Return what is said there to who says nothing, as some protocols do."""
    try:
        with _connected(address, port) as peer:
            peer.settimeout(UNASKED_S)
            return peer.recv(WELCOME_BYTES)
    except (NotOpen, OSError):
        return b""


def _said(peer: socket.socket, question: bytes, count: int, *, begin: bytes = b"") -> bytes:
    """Return what is said after a question: less than `count` bytes, where no more comes in time,
    or where it does not begin as it should. Raises _ClosedAtOnce where the other side closes and
    has said nothing."""
    said, until_s = b"", time.monotonic() + WAIT_S
    try:
        peer.sendall(question)
        while len(said) < count and said.startswith(begin[: len(said)]):
            peer.settimeout(max(1e-3, until_s - time.monotonic()))
            more = peer.recv(count - len(said))
            if not more:
                raise ConnectionResetError
            said += more
    except TimeoutError:
        pass
    except OSError as error:
        if not said:
            raise _ClosedAtOnce from error
    return said


def _round_trip_ms(peer: socket.socket, keys: ConnectionKeys) -> float:
    """Return the median of some questions' times. Raises NotOpen where one is not answered."""
    signing, checking = Signing(keys.asks), Checking(keys.answers)
    took_ms = []
    for number in range(QUESTIONS):
        body = Bring(number, NOBODYS_TICKET, _PIECE, 0, DigestKind.NONE).body()
        begun_s = time.perf_counter()
        answer = _said(peer, signing.frame(body), ANSWER_BYTES)
        took_ms.append(1e3 * (time.perf_counter() - begun_s))
        if len(answer) < ANSWER_BYTES:
            raise NotOpen("it stopped answering", _LOOK)
        try:
            decode_answer(checking.body(answer))
        except Corrupt as error:
            raise NotOpen(str(error), _LOOK) from error
    return statistics.median(took_ms)
