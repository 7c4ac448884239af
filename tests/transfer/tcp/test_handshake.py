"""The handshake: who has the key, for this connection only; and the keys that come of it."""

from __future__ import annotations

import pytest

from ownerserve.kv.errors import Corrupt, SpecMismatch
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.transfer.movers.tcp.handshake import (
    MAGIC,
    ConnectionKeys,
    LenderHandshake,
    ReaderHandshake,
    TransferKey,
    transfer_key,
)

OURS, OTHER = TransferKey(b"o" * 32), TransferKey(b"x" * 32)
READER_NONCE, LENDER_NONCE = b"r" * 32, b"l" * 32


def greeted(reader: ReaderHandshake, lender: LenderHandshake) -> tuple[bytes, ConnectionKeys]:
    """What the reader makes of the lender's welcome."""
    return reader.welcomed(lender.welcome(reader.hello))


def test_both_sides_with_the_key_have_the_same_keys_for_the_connection() -> None:
    reader, lender = ReaderHandshake(OURS, READER_NONCE), LenderHandshake(OURS, LENDER_NONCE)
    proof, keys = greeted(reader, lender)
    assert lender.proved(proof) == keys
    assert len({keys.asks, keys.answers, keys.bytes}) == 3


def test_both_nonces_are_in_the_keys() -> None:
    pairs = [(READER_NONCE, LENDER_NONCE), (b"R" * 32, LENDER_NONCE), (READER_NONCE, b"L" * 32)]
    keys = [greeted(ReaderHandshake(OURS, r), LenderHandshake(OURS, s))[1].asks for r, s in pairs]
    assert len(set(keys)) == 3


def test_a_reader_finds_out_a_lender_with_another_key() -> None:
    with pytest.raises(Corrupt):
        greeted(ReaderHandshake(OURS, READER_NONCE), LenderHandshake(OTHER, LENDER_NONCE))


def test_a_lender_finds_out_a_reader_with_another_key() -> None:
    lender = LenderHandshake(OURS, LENDER_NONCE)
    lender.welcome(ReaderHandshake(OTHER, READER_NONCE).hello)
    impostor = LenderHandshake(OTHER, LENDER_NONCE)
    proof, _ = greeted(ReaderHandshake(OTHER, READER_NONCE), impostor)
    with pytest.raises(Corrupt):
        lender.proved(proof)


@pytest.mark.parametrize("ours", [None, OURS])
def test_a_key_and_none_do_not_meet(ours: TransferKey | None) -> None:
    other = OURS if ours is None else None
    with pytest.raises(Corrupt):
        greeted(ReaderHandshake(ours, READER_NONCE), LenderHandshake(other, LENDER_NONCE))


def test_a_proof_of_another_connection_is_none_here() -> None:
    reader = ReaderHandshake(OURS, READER_NONCE)
    proof, _ = greeted(reader, LenderHandshake(OURS, LENDER_NONCE))
    later = LenderHandshake(OURS, b"m" * 32)
    later.welcome(reader.hello)
    with pytest.raises(Corrupt):
        later.proved(proof)


def test_a_welcome_of_another_connection_is_none_here() -> None:
    welcome = LenderHandshake(OURS, LENDER_NONCE).welcome(ReaderHandshake(OURS, READER_NONCE).hello)
    with pytest.raises(Corrupt):
        ReaderHandshake(OURS, b"s" * 32).welcomed(welcome)


def test_a_side_s_own_proof_sent_back_is_none() -> None:
    reader, lender = ReaderHandshake(OURS, READER_NONCE), LenderHandshake(OURS, LENDER_NONCE)
    welcome = lender.welcome(reader.hello)
    with pytest.raises(Corrupt):
        lender.proved(welcome[-32:])


def test_versions_that_do_not_meet_are_told_apart_from_a_wrong_key() -> None:
    reader, lender = ReaderHandshake(OURS, READER_NONCE), LenderHandshake(OURS, LENDER_NONCE)
    newer = MAGIC + (7).to_bytes(2, "little") + (9).to_bytes(2, "little") + reader.hello[12:]
    welcome = lender.welcome(newer)
    assert welcome[8:10] == b"\0\0"
    reader.hello = newer
    with pytest.raises(SpecMismatch):
        reader.welcomed(welcome)


def test_a_version_pressed_down_on_the_way_is_found() -> None:
    reader, lender = ReaderHandshake(OURS, READER_NONCE), LenderHandshake(OURS, LENDER_NONCE)
    pressed = reader.hello[:10] + (5).to_bytes(2, "little") + reader.hello[12:]
    with pytest.raises(Corrupt):
        reader.welcomed(lender.welcome(pressed))


@pytest.mark.parametrize("hello", [b"GET / HT" + bytes(40), MAGIC + b"\2\0\1\0" + bytes(36)])
def test_what_is_no_hello_gets_no_welcome(hello: bytes) -> None:
    with pytest.raises(Corrupt):
        LenderHandshake(OURS, LENDER_NONCE).welcome(hello)


def test_a_fleets_key_makes_a_transfer_key_that_does_not_show_it() -> None:
    fleet = FleetKey(
        b"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6", b"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
    )
    key = transfer_key(fleet)
    assert key.secret == transfer_key(fleet).secret
    assert fleet.server_secret not in key.secret
    assert "secret" not in repr(key)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        TransferKey(b"k" * 31)
