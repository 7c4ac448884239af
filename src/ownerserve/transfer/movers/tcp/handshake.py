"""The handshake of the TCP mover: both sides show that they have the key, for this connection only.

    reader -> lender   | OWNSTCP1 | oldest, newest version: 2 each | 0 x 4 | nonce 32 |      48
    lender -> reader   | OWNSTCP1 | version 2 | 0 x 6 | nonce 32 | proof 32 |                80
    reader -> lender   | proof 32 |

A proof is keyed blake3 over the side's name and all that was said: both nonces, both versions. Each
nonce is drawn anew, so a proof of another connection is none here, and the sides' names keep one
from being sent back. Nothing else is read or sent before both have held. The keys of the
connection, one for each direction's frames and one for bytes, come of the same.

These classes say what is to be sent and what came of it; they draw no nonce and touch no socket.
"""

from __future__ import annotations

import hmac
from struct import Struct

import msgspec
from blake3 import blake3

from ownerserve.kv.errors import Corrupt, SpecMismatch
from ownerserve.kv.wire.curve import FleetKey

MAGIC = b"OWNSTCP1"
OLDEST, NEWEST = 1, 1
NO_VERSION = 0
NONCE_BYTES = PROOF_BYTES = 32
_HELLO = Struct("<8sHH4x32s")
_WELCOME = Struct("<8sH6x32s")
HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size + PROOF_BYTES
_CONTEXT = "ownerserve transfer tcp key 1"
_KEYLESS = blake3(b"", derive_key_context="ownerserve transfer tcp no key 1").digest()


class TransferKey:
    """A transfer key is the secret of who may read from whom. Its repr does not show it."""

    __slots__ = ("secret",)

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError for a secret below 32 bytes."""
        if len(secret) < 32:
            raise ValueError("a transfer key has 32 bytes or more")
        self.secret = blake3(secret, derive_key_context=_CONTEXT).digest()


def transfer_key(fleet: FleetKey) -> TransferKey:
    """Return the transfer key that comes of a fleet's: who has the fleet's file has it."""
    return TransferKey(fleet.server_secret + fleet.client_secret)


class ConnectionKeys(msgspec.Struct, frozen=True):
    """The keys of one connection: of the frames that ask, of those that answer, and of bytes."""

    asks: bytes
    answers: bytes
    bytes: bytes


class ReaderHandshake:
    """The reader's side: `hello`, then `welcomed` with what the lender said."""

    def __init__(self, key: TransferKey | None, nonce: bytes) -> None:
        self._key = _KEYLESS if key is None else key.secret
        self.hello = _HELLO.pack(MAGIC, OLDEST, NEWEST, nonce)

    def welcomed(self, welcome: bytes) -> tuple[bytes, ConnectionKeys]:
        """Return the proof to send, and the keys. Raises Corrupt where the lender does not have
        the key, SpecMismatch where it speaks no version of ours."""
        magic, version, _ = _WELCOME.unpack(welcome[: _WELCOME.size])
        if magic != MAGIC:
            raise Corrupt("who answers is no lender")
        said = self.hello + welcome[: _WELCOME.size]
        if not hmac.compare_digest(welcome[_WELCOME.size :], _of(self._key, b"lender", said)):
            raise Corrupt("the lender does not have this key")
        if not OLDEST <= version <= NEWEST:
            raise SpecMismatch("the lender speaks no version of ours")
        return _of(self._key, b"reader", said), _keys(self._key, said)


class LenderHandshake:
    """The lender's side: `welcome` with what the reader said, then `proved` with its proof."""

    def __init__(self, key: TransferKey | None, nonce: bytes) -> None:
        self._key = _KEYLESS if key is None else key.secret
        self._nonce = nonce
        self._said = b""

    def welcome(self, hello: bytes) -> bytes:
        """Return what to answer. Raises Corrupt for what no reader of ours says."""
        magic, oldest, newest, _ = _HELLO.unpack(hello)
        if magic != MAGIC or oldest > newest:
            raise Corrupt("no reader's hello")
        version = min(newest, NEWEST)
        answer = _WELCOME.pack(MAGIC, version if version >= oldest else NO_VERSION, self._nonce)
        self._said = hello + answer
        return answer + _of(self._key, b"lender", self._said)

    def proved(self, proof: bytes) -> ConnectionKeys:
        """Return the keys. Raises Corrupt where the reader does not have the key."""
        if not hmac.compare_digest(proof, _of(self._key, b"reader", self._said)):
            raise Corrupt("the reader does not have this key")
        return _keys(self._key, self._said)


def _of(key: bytes, what: bytes, said: bytes) -> bytes:
    return blake3(what + b"\0" + said, key=key).digest()


def _keys(key: bytes, said: bytes) -> ConnectionKeys:
    return ConnectionKeys(*(_of(key, what, said) for what in (b"asks", b"answers", b"bytes")))
