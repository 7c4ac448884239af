"""Certificates made for a test: an authority, and whom it vouches for."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOUR = datetime.timedelta(hours=1)
PEM = serialization.Encoding.PEM


class Pair(NamedTuple):
    """A certificate's file and its key's."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """A server's context with it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self)
        return context


class Authority:
    """A certificate authority; its own certificate lies in `path`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.path = folder / f"{name}.pem"
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = self._signed(
            self._name, self._key, x509.BasicConstraints(ca=True, path_length=0), ends_in=HOUR
        )
        self.path.write_bytes(own.public_bytes(PEM))

    def issue(
        self, name: str, *hosts: str, ends_in: datetime.timedelta = HOUR, to: Pair | None = None
    ) -> Pair:
        """Vouch for `name` at these hosts, addresses or names; written to `to` where that is
        given."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([_general(host) for host in hosts or ("localhost",)])
        signed = self._signed(subject, key, names, ends_in=ends_in)
        pair = to or Pair(self._folder / f"{name}.pem", self._folder / f"{name}-key.pem")
        pair.key.write_bytes(
            key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        pair.certificate.write_bytes(signed.public_bytes(PEM))
        return pair

    def client(self, pair: Pair | None = None) -> ssl.SSLContext:
        """A client's context that believes this authority, with a certificate of its own."""
        context = ssl.create_default_context(cafile=str(self.path))
        if pair is not None:
            context.load_cert_chain(*pair)
        return context

    def _signed(
        self,
        subject: x509.Name,
        key: Any,
        *extensions: x509.ExtensionType,
        ends_in: datetime.timedelta,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * HOUR)
            .not_valid_after(now + ends_in)
        )
        about_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        about_us = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        for extension in (*extensions, about_key, about_us):
            is_critical = isinstance(extension, x509.BasicConstraints)
            builder = builder.add_extension(extension, critical=is_critical)
        return builder.sign(self._key, hashes.SHA256())


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
