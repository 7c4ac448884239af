"""Seals say how a record's chunks are protected, and by which key.

    XXH3     xxh3-128 of each chunk: finds accidents. Shared artifacts.
    BLAKE3   keyed blake3 of each chunk and of the header: finds forgery too. Tenants' artifacts.
    AES_GCM  AES-256-GCM of each chunk (the tag takes the digest's place), keyed blake3 of the
             header. Tenants' artifacts at rest in a store opened with encryption.

Keys are never written; a tenant's are derived from the store's master key and the tenant's tag.
"""

from __future__ import annotations

import hmac
import os
from enum import IntEnum
from importlib import import_module
from typing import Protocol

from blake3 import blake3
from xxhash import xxh3_128_digest

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.format.header import CHUNK, chunks_of

KEY_BYTES = 32
SALT_BYTES = 16
NO_MAC = bytes(32)
_NO_TENANT = bytes(32)


class SealKind(IntEnum):
    """SealKind is the header's seal field."""

    XXH3 = 1
    BLAKE3 = 2
    AES_GCM = 3


class Seal(Protocol):
    """A seal is one way to protect a payload, bound to its key."""

    kind: SealKind
    tag_bytes: int

    def close(self, payload: memoryview, salt: bytes) -> bytes:
        """Return the payload's tags; a cipher encrypts `payload` in place."""
        ...

    def open(self, chunk: memoryview, tag: bytes, nonce: tuple[bytes, int]) -> bool:
        """Tell whether `chunk` is what was written. A cipher decrypts it in place. `nonce`: (salt,
        index).
        """
        ...

    def header_mac(self, covered: bytes) -> bytes:
        """Return the MAC of a header's covered bytes; 32 zeros where there is no key."""
        ...


class Xxh3Seal:
    """An Xxh3Seal protects against accidents; it needs no key."""

    kind = SealKind.XXH3
    tag_bytes = 16

    def close(self, payload: memoryview, salt: bytes) -> bytes:
        """Return the payload's tags."""
        return b"".join(
            xxh3_128_digest(payload[at : at + CHUNK]) for at in range(0, len(payload), CHUNK)
        )

    def open(self, chunk: memoryview, tag: bytes, nonce: tuple[bytes, int]) -> bool:
        """Tell whether `chunk` is what was written."""
        return bool(xxh3_128_digest(chunk) == tag)

    def header_mac(self, covered: bytes) -> bytes:
        """Return the MAC of a header's covered bytes; 32 zeros where there is no key."""
        return NO_MAC


class Blake3Seal:
    """A Blake3Seal protects against forgery by whoever can write the medium but has no key."""

    kind = SealKind.BLAKE3
    tag_bytes = 32

    def __init__(self, tenant_key: bytes) -> None:
        self._chunk_key = _derive(tenant_key, "ownerserve store chunk mac 1")
        self._header_key = _derive(tenant_key, "ownerserve store header mac 1")

    def close(self, payload: memoryview, salt: bytes) -> bytes:
        """Return the payload's tags."""
        return b"".join(
            blake3(payload[at : at + CHUNK], key=self._chunk_key).digest()
            for at in range(0, len(payload), CHUNK)
        )

    def open(self, chunk: memoryview, tag: bytes, nonce: tuple[bytes, int]) -> bool:
        """Tell whether `chunk` is what was written."""
        return hmac.compare_digest(blake3(chunk, key=self._chunk_key).digest(), tag)

    def header_mac(self, covered: bytes) -> bytes:
        """Return the MAC of a header's covered bytes; 32 zeros where there is no key."""
        return blake3(covered, key=self._header_key).digest()


class AesGcmSeal(Blake3Seal):
    """An AesGcmSeal encrypts at rest. A record's key comes from its random salt, so nonces can
    count chunks.
    """

    kind = SealKind.AES_GCM
    tag_bytes = 16

    def __init__(self, tenant_key: bytes) -> None:
        super().__init__(tenant_key)
        self._root = _derive(tenant_key, "ownerserve store aes-256-gcm 1")

    def close(self, payload: memoryview, salt: bytes) -> bytes:
        """Encrypt the payload in place and return its tags."""
        aead, tags = _aesgcm(_record_key(self._root, salt)), []
        for index in range(chunks_of(len(payload))):
            chunk = payload[index * CHUNK : (index + 1) * CHUNK]
            sealed = aead.encrypt(index.to_bytes(12, "little"), chunk, salt)
            chunk[:] = sealed[: len(chunk)]
            tags.append(sealed[len(chunk) :])
        return b"".join(tags)

    def open(self, chunk: memoryview, tag: bytes, nonce: tuple[bytes, int]) -> bool:
        """Decrypt `chunk` in place and tell whether it is what was written."""
        salt, index = nonce
        aead = _aesgcm(_record_key(self._root, salt))
        try:
            chunk[:] = aead.decrypt(index.to_bytes(12, "little"), bytes(chunk) + tag, salt)
        except import_module("cryptography.exceptions").InvalidTag:
            return False
        return True


class Aead(Protocol):
    """Aead is what we use of cryptography's AESGCM."""

    def encrypt(self, nonce: bytes, data: memoryview, aad: bytes) -> bytes:
        """Return `data` encrypted, with its tag."""
        ...

    def decrypt(self, nonce: bytes, data: bytes, aad: bytes) -> bytes:
        """Return `data` decrypted. Raises when the tag is not that of `data` and `aad`."""
        ...


def _aesgcm(key: bytes) -> Aead:
    try:
        module = import_module("cryptography.hazmat.primitives.ciphers.aead")
    except ImportError as error:
        raise InvalidInput(
            "encryption", "needs the cryptography library", "pip install 'ownerserve[encryption]'"
        ) from error
    aead: Aead = module.AESGCM(key)
    return aead


def _derive(key: bytes, context: str) -> bytes:
    return blake3(key, derive_key_context=context).digest()


def _record_key(root: bytes, salt: bytes) -> bytes:
    return blake3(salt, key=root).digest()


def fingerprint(master: bytes) -> bytes:
    """Return 32 bytes that tell a master key from another and nothing else about it."""
    return _derive(master, "ownerserve store key fingerprint 1")


class Keys:
    """Keys makes seals by tenant, from one master key. Without one, tenants' artifacts can't be
    kept. `former` is the key that a rotation leaves behind: what it sealed is still read.
    """

    def __init__(
        self,
        master: bytes | None = None,
        at_rest: SealKind = SealKind.BLAKE3,
        *,
        former: bytes | None = None,
    ) -> None:
        for key in (master, former):
            if key is not None and len(key) != KEY_BYTES:
                raise InvalidInput("key", f"{len(key)} bytes", f"give {KEY_BYTES} random bytes")
        if at_rest is SealKind.AES_GCM:
            _aesgcm(bytes(KEY_BYTES))
        self._masters = [key for key in (master, former) if key is not None]
        self._at_rest = at_rest
        self._seals: dict[tuple[bytes, int], tuple[Seal, ...]] = {}

    def for_write(self, tenant: bytes) -> Seal | None:
        """Return the seal for a new record; None when the tenant's key is not at hand."""
        return self.resealing(tenant, self._at_rest if tenant else SealKind.XXH3)

    def may_bear(self, tenant: bytes, kind: int) -> bool:
        """Tell whether a sound record of `tenant` may bear such a seal, whoever has its key."""
        return bool(tenant) == (kind != SealKind.XXH3)

    def fingerprint(self) -> bytes:
        """Return the fingerprint of the master key; empty without one."""
        return fingerprint(self._masters[0]) if self._masters else b""

    def for_medium(self) -> MediumKeys:
        """Return the same keys for a medium that others can write."""
        master, former = (*self._masters, None, None)[:2]
        return MediumKeys(master, self._at_rest, former=former)

    def resealing(self, tenant: bytes, kind: int) -> Seal | None:
        """Return the seal of this kind for a record of `tenant`; None as for `for_read`."""
        return next(iter(self.for_read(tenant, kind)), None)

    def for_read(self, tenant: bytes, kind: int) -> tuple[Seal, ...]:
        """Return the seals of which a record of `tenant` must bear one, that of new records first.

        Empty when the key is missing, or a tenant's record bears no MAC: that is what a forger
        without a key would write.
        """
        cached = self._seals.get((tenant, kind))
        if cached is None:
            cached = self._seals[tenant, kind] = self._make(tenant, kind)
        return cached

    def _make(self, tenant: bytes, kind: int) -> tuple[Seal, ...]:
        if not tenant:
            return (Xxh3Seal(),) if kind == SealKind.XXH3 else ()
        return self._keyed(tenant, kind)

    def _keyed(self, tag: bytes, kind: int) -> tuple[Seal, ...]:
        makers = {SealKind.BLAKE3: Blake3Seal, SealKind.AES_GCM: AesGcmSeal}
        maker = makers.get(SealKind(kind))
        if maker is None:
            return ()
        return tuple(maker(blake3(tag, key=master).digest()) for master in self._masters)


class MediumKeys(Keys):
    """MediumKeys are the keys of a medium that others can write: with a master key every record
    bears a MAC, one of no tenant too. Without one what belongs to no tenant bears a digest, which
    whoever writes the medium can forge.
    """

    def for_write(self, tenant: bytes) -> Seal | None:
        """Return the seal for a new record; None when the tenant's key is not at hand."""
        if tenant:
            return super().for_write(tenant)
        return self.resealing(tenant, SealKind.BLAKE3 if self._masters else SealKind.XXH3)

    def may_bear(self, tenant: bytes, kind: int) -> bool:
        """Tell whether a sound record of `tenant` may bear such a seal, whoever has its key."""
        return kind != SealKind.XXH3 or not (tenant or self._masters)

    def _make(self, tenant: bytes, kind: int) -> tuple[Seal, ...]:
        if not self.may_bear(tenant, kind):
            return ()
        return (Xxh3Seal(),) if kind == SealKind.XXH3 else self._keyed(tenant or _NO_TENANT, kind)


def new_salt(seal: Seal) -> bytes:
    """Draw a fresh salt for an encrypted record; zeros where none is needed."""
    return os.urandom(SALT_BYTES) if seal.kind is SealKind.AES_GCM else bytes(SALT_BYTES)
