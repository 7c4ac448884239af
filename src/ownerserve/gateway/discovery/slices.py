"""Endpoint slices say which pods stand behind a Kubernetes service: pure, read as the API server
writes them.

| an endpoint | is |
|---|---|
| ready, or its readiness not told | a worker |
| not ready, and not terminating | a worker that gets no new turn |
| terminating | no worker any more: it leaves, what runs there ends |

A service of both families has slices of both, of the same pods: the IPv4 ones count, else IPv6. Of
an endpoint's addresses the first counts, as the API says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ownerserve.gateway.discovery.members import Member
from ownerserve.gateway.discovery.places import KubernetesPlace
from ownerserve.kv.ids import WorkerId

FAMILIES = ("IPv4", "IPv6")


def members_of(slices: Iterable[Mapping[str, Any]], place: KubernetesPlace) -> list[Member]:
    """Return the members that the slices of a service name, in the order of their names; ready
    where one slice says so. What has no such port or address names nobody."""
    kept = [one for one in slices if isinstance(one, Mapping)]
    for family in FAMILIES:
        of_family = [one for one in kept if one.get("addressType") == family]
        if of_family:
            return _members(of_family, place)
    return []


def _members(slices: list[Mapping[str, Any]], place: KubernetesPlace) -> list[Member]:
    found: dict[WorkerId, Member] = {}
    for one in slices:
        port = _port(one, place)
        for endpoint in one.get("endpoints") or () if port is not None else ():
            addresses = endpoint.get("addresses") or ()
            conditions = endpoint.get("conditions") or {}
            if not addresses or conditions.get("terminating"):
                continue
            assert port is not None
            is_ready = conditions.get("ready") is not False
            certified = place.certified if place.scheme == "https" else None
            address = place.terms.at(addresses[0], port, scheme=place.scheme, certified=certified)
            known = found.get(address.worker)
            if known is None or (is_ready and not known.is_ready):
                found[address.worker] = Member(address, is_ready)
    return [found[worker] for worker in sorted(found)]


def _port(one: Mapping[str, Any], place: KubernetesPlace) -> int | None:
    """Return the port of a slice that the place means: by its number or name, else the only one."""
    ports = [port for port in one.get("ports") or () if port.get("port")]
    if place.port is None:
        return int(ports[0]["port"]) if len(ports) == 1 else None
    if isinstance(place.port, int):
        return place.port
    return next((int(port["port"]) for port in ports if port.get("name") == place.port), None)
