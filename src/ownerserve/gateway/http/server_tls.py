"""A listener's TLS is a certificate and its key in two files, which are looked at again and again:
who renews a certificate writes the files anew, and who connects from then on sees the new one.

Owns the context that is in use. A renewal that can't be read (half written, a key of another
certificate) changes nothing: the certificate of before stays in use, and the log says why, once.
"""

from __future__ import annotations

import logging
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ownerserve.kv.errors import InvalidInput

log = logging.getLogger("ownerserve.gateway")

HANDSHAKE_S = 10.0
"""How long a client may take to agree on keys."""

WARN_S = 7 * 24 * 3600.0
"""So long before its end a certificate is warned of."""

Version = tuple[tuple[int, int, int], ...]


class TlsFiles(msgspec.Struct, frozen=True):
    """These files make a listener speak TLS: a certificate with its chain, its key (None: in the
    same file), and the authorities whose certificate each client must bring (None: none is asked).
    `option` is what errors name."""

    certificate: Path
    key: Path | None = None
    client_authorities: Path | None = None
    option: str = "--tls-cert-file"


class ServerTls:
    """A server's TLS has the context that newcomers are met with."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises InvalidInput for what is no certificate with its key."""
        self._files = files
        self._version = _version(files)
        self._refused: Version | None = None
        """The files that could not be read last."""
        self.context = _open(files)
        self.ends_at = _ends_at(files)
        """When the certificate in use runs out, in seconds since 1970."""
        self.was_warned = False
        self._warn_of_end()

    def look(self) -> None:
        """Read the files again if they have changed; what can't be read is told and left."""
        try:
            self._warn_of_end()
            version = _version(self._files)
            if version in (self._version, self._refused):
                return
            context, ends_at = _open(self._files), _ends_at(self._files)
        except InvalidInput as error:
            self._refuse(error)
            return
        self._version, self._refused = version, None
        self.context, self.ends_at, self.was_warned = context, ends_at, False
        log.info("%s: the certificate in it is in use from now on", self._files.certificate)

    def fronting(self) -> ssl.SSLContext:
        """Make a context for a server that takes one for good: it hands each newcomer on to the
        context that is in use."""
        context = _open(self._files)

        def hand_on(
            arriving: ssl.SSLObject | ssl.SSLSocket, name: str, before: ssl.SSLContext
        ) -> None:
            arriving.context = self.context

        context.sni_callback = hand_on  # it is called for who names no server, too
        return context

    def _warn_of_end(self) -> None:
        """Tell once that the certificate in use runs out soon, or has."""
        left_s = self.ends_at - time.time()
        if left_s < WARN_S and not self.was_warned:
            self.was_warned = True
            when = datetime.fromtimestamp(self.ends_at, UTC).isoformat(timespec="minutes")
            said = "has run out" if left_s <= 0 else "runs out"
            log.warning("%s: the certificate %s at %s", self._files.certificate, said, when)

    def _refuse(self, error: InvalidInput) -> None:
        try:
            refused = _version(self._files)
        except InvalidInput:
            refused = ()
        if refused != self._refused:
            self._refused = refused
            log.warning("the certificate of before stays in use: %s", error)


def _version(files: TlsFiles) -> Version:
    """Return what changes when a file does. Raises InvalidInput for one that is not there."""
    found = []
    for path in (files.certificate, files.key, files.client_authorities):
        if path is not None:
            try:
                one = path.stat()
            except OSError as error:
                mend = "name a readable PEM file"
                raise InvalidInput(files.option, f"{path}: {error.strerror}", mend) from error
            found.append((one.st_ino, one.st_mtime_ns, one.st_size))
    return tuple(found)


def _open(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later. Raises InvalidInput, and never asks on a terminal."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ValueError) as error:
        mend = "name PEM files: the certificate with its chain, and its own key, not encrypted"
        problem = f"{files.certificate}: {_why(error)}"
        raise InvalidInput(files.option, problem, mend) from error
    if files.client_authorities is not None:
        try:
            context.load_verify_locations(cafile=files.client_authorities)
        except OSError as error:
            problem = f"{files.client_authorities}: {_why(error)}"
            mend = "name a readable PEM file of certificates"
            raise InvalidInput(files.option, problem, mend) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _ends_at(files: TlsFiles) -> float:
    """Return when the first certificate of a file ends, in seconds since 1970. Raises
    InvalidInput."""
    try:
        text = files.certificate.read_text(errors="replace")
        begin, end = text.index(_BEGIN), text.index(_END)
        return validity_end(ssl.PEM_cert_to_DER_cert(text[begin : end + len(_END)]))
    except (OSError, ValueError, IndexError) as error:
        mend = "name a PEM file with the certificate first, its chain behind it"
        raise InvalidInput(files.option, f"{files.certificate}: {error}", mend) from error


_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_UTC_TIME, _EXPLICIT_VERSION = 0x17, 0xA0


def validity_end(der: bytes) -> float:
    """Return the notAfter of a certificate (RFC 5280), in seconds since 1970. Raises ValueError or
    IndexError for what is none.

        certificate: tbs ..        tbs: [0] version?, serial, algorithm, issuer, validity ..
        validity: notBefore, notAfter
    """
    _, at, _ = _element(der, 0)
    _, at, _ = _element(der, at)
    tag, _, end = _element(der, at)
    at = end if tag == _EXPLICIT_VERSION else at
    for _ in range(3):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)
    _, _, at = _element(der, at)
    tag, begin, end = _element(der, at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    when = datetime.strptime(der[begin:end].decode("ascii"), form)
    if tag == _UTC_TIME and when.year >= 2050:  # two digits stand for 1950 to 2049
        when = when.replace(year=when.year - 100)
    return when.replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at an offset, and where its content begins and ends."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length >= 0x80:
        count = length - 0x80
        length = int.from_bytes(der[begin : begin + count], "big")
        begin += count
    return tag, begin, begin + length


def _no_password() -> str:
    """Refuse to ask for the password of a key. Raises ValueError."""
    raise ValueError("its key is encrypted")


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "it holds no certificate with its key"
    return getattr(error, "strerror", None) or str(error)
