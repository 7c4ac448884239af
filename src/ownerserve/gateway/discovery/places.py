"""Places are where a gateway finds its workers, as an operator writes them.

http://vllm.internal:8000[=MODEL,...]       each address of a name, at this port
http://_vllm._tcp.internal[=MODEL,...]      each target of a service record, at its port
"""

from __future__ import annotations

import re

import msgspec

from ownerserve.gateway.http.access import WorkerTerms, split_terms
from ownerserve.kv.addresses import LAST_PORT, parse_address
from ownerserve.kv.errors import InvalidInput

_NAME = re.compile(r"(?=.{1,253}$)(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?)+")
_SCHEMES = ("http", "https")


class DnsPlace(msgspec.Struct, frozen=True):
    """A DNS place is a name: of addresses, with a port, or of a service (SRV), without."""

    scheme: str
    name: str
    port: int | None
    terms: WorkerTerms

    @property
    def source(self) -> str:
        """`source` is what logs and metrics call it."""
        return f"dns {self.name}"


def parse_dns_place(text: str, *, field: str = "--worker-dns") -> DnsPlace:
    """Return the place that `text` names. Raises InvalidInput naming `field`."""
    mend = "write it like http://vllm.internal:8000, or http://_vllm._tcp.internal for SRV"
    place, terms = split_terms(text, field=field, mend=mend)
    scheme, separator, rest = place.partition("://")
    name, colon, digits = rest.rstrip("/").partition(":")
    if scheme not in _SCHEMES or not separator or not _NAME.fullmatch(name):
        raise InvalidInput(field, f"{text[:80]!r} names nothing to look up", mend)
    is_service = name.startswith("_")
    if is_service == bool(colon):
        problem = "has a port, which SRV says" if is_service else "has no port"
        raise InvalidInput(field, f"{text[:80]!r} {problem}", mend)
    port = None if is_service else parse_port(digits, field=field, mend=mend)
    return DnsPlace(scheme, name, port, terms)


class KubernetesPlace(msgspec.Struct, frozen=True):
    """A Kubernetes place is a service whose pods are workers. `port`: its number or its name; None:
    the only one."""

    scheme: str
    namespace: str
    service: str
    port: int | str | None
    terms: WorkerTerms

    @property
    def source(self) -> str:
        """`source` is what logs and metrics call it."""
        return f"kubernetes {self.namespace}/{self.service}"

    @property
    def certified(self) -> str:
        """`certified` is the name that the pods' certificates must have."""
        return f"{self.service}.{self.namespace}.svc"


_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def parse_kubernetes_place(text: str, *, field: str = "--worker-kubernetes") -> KubernetesPlace:
    """Return the place that `text` names. Raises InvalidInput naming `field`."""
    mend = "write NAMESPACE/SERVICE, or NAMESPACE/SERVICE:PORT with its number or name"
    place, terms = split_terms(text, field=field, mend=mend)
    scheme, separator, rest = place.rpartition("://")
    namespace, slash, service = rest.partition("/")
    service, colon, port = service.partition(":")
    names = [namespace, service, *([port] if colon else [])]
    if not slash or (separator and scheme not in _SCHEMES):
        raise InvalidInput(field, f"{text[:80]!r} names no service", mend)
    if not all(_LABEL.fullmatch(name) for name in names):
        raise InvalidInput(field, f"{text[:80]!r} has no names of Kubernetes", mend)
    at: int | str | None = port or None
    if port.isdigit():
        at = parse_port(port, field=field, mend=mend)
    return KubernetesPlace(scheme or "http", namespace, service, at, terms)


Place = DnsPlace | KubernetesPlace


def parse_port(digits: str, *, field: str, mend: str) -> int:
    """Return a port. Raises InvalidInput."""
    if not (digits.isascii() and digits.isdigit() and 0 < int(digits) <= LAST_PORT):
        raise InvalidInput(field, f"there is no port {digits[:20]!r}", mend)
    return int(digits)


class DnsServer(msgspec.Struct, frozen=True):
    """A DNS server is asked in place of the system's."""

    host: str
    port: int = 53


def parse_dns_server(text: str, *, field: str = "--dns-server") -> DnsServer:
    """Return the server in "10.0.0.2" or "10.0.0.2:8600". Raises InvalidInput."""
    mend = "write an address, like 10.0.0.2 or 127.0.0.1:8600"
    if ":" not in text:
        text = f"{text}:53"
    host, port = parse_address(text, field=field, mend=mend)
    host = host.strip("[]")
    if not re.fullmatch(r"[0-9.]+|[0-9A-Fa-f:]+", host):
        raise InvalidInput(field, f"{host[:80]!r} is no address", mend)
    return DnsServer(host, port)
