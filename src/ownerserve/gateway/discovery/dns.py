"""A DNS source looks a name up, and again when what it was told has run out.

A name's addresses are its A records, or its AAAA records where it has none: one worker of both
families is one worker. A service's (SRV) targets are workers by their names, at their ports.
A name that no server answers, that is not known or that names nobody has failed: nothing changes.
Some servers answer with a part of what they know: who is missing in one answer is still named, and
who is missing in two in a row is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from ownerserve.gateway.discovery.members import Member
from ownerserve.gateway.discovery.places import DnsPlace, DnsServer
from ownerserve.gateway.http.access import Address
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import WorkerId

ANSWER_S = 3.0
"""How long servers have for an answer."""
AGAIN_S = 5.0
"""How long after a failure it is tried again."""
SOONEST_S = 1.0
"""A name is looked up no sooner again, whatever its records say."""


class DnsSource:
    """A DNS source watches one name."""

    def __init__(
        self, place: DnsPlace, *, latest_s: float, server: DnsServer | None = None
    ) -> None:
        """Read the system's settings, or none where a `server` is given; `latest_s`: how long an
        answer counts at most. Raises InvalidInput."""
        self.name = place.source
        self._place = place
        self._latest_s = latest_s
        self._missing: dict[WorkerId, Member] = {}
        """Workers that were missing in the last answer, and not in the one before."""
        self._named: dict[WorkerId, Member] = {}
        try:
            self._resolver = dns.asyncresolver.Resolver(configure=server is None)
        except dns.exception.DNSException as error:
            mend = "give --dns-server"
            raise InvalidInput("--worker-dns", f"no settings of DNS: {error}", mend) from error
        if server is not None:
            self._resolver.nameservers = [server.host]
            self._resolver.port = server.port
        self._resolver.lifetime = ANSWER_S
        self._resolver.cache = None

    async def watch(
        self, heard: Callable[[Sequence[Member]], None], lost: Callable[[str], None]
    ) -> None:
        """Look up until cancelled; tell whom each answer names, or why there was none."""
        while True:
            try:
                found, counts_s = await self._look_up()
            except (dns.exception.DNSException, OSError) as error:
                lost(_why(error))
                await asyncio.sleep(min(AGAIN_S, self._latest_s))
                continue
            heard(self._settled(found))
            await asyncio.sleep(min(max(counts_s, SOONEST_S), self._latest_s))

    def _settled(self, found: dict[WorkerId, Member]) -> list[Member]:
        """Return whom this answer names, and who was missing in it for the first time."""
        missing = {
            worker: one
            for worker, one in self._named.items()
            if worker not in found and worker not in self._missing
        }
        self._named, self._missing = found | missing, missing
        return list(self._named.values())

    async def _look_up(self) -> tuple[dict[WorkerId, Member], float]:
        """Return whom an answer names, and how long it counts."""
        place = self._place
        if place.port is None:
            answer = await self._ask("SRV")
            addresses = [
                self._address(str(one.target).rstrip("."), one.port, None) for one in answer
            ]
        else:
            try:
                answer = await self._ask("A")
            except dns.resolver.NoAnswer:
                answer = await self._ask("AAAA")
            certified = place.name.rstrip(".")
            addresses = [self._address(one.address, place.port, certified) for one in answer]
        counts_s = float(answer.rrset.ttl if answer.rrset is not None else 0)
        return {one.worker: Member(one) for one in sorted(addresses, key=str)}, counts_s

    async def _ask(self, kind: str) -> dns.resolver.Answer:
        return await self._resolver.resolve(self._place.name, kind, search=True)

    def _address(self, host: str, port: int, certified: str | None) -> Address:
        scheme = self._place.scheme
        certified = certified if scheme == "https" else None
        return self._place.terms.at(host, port, scheme=scheme, certified=certified)


def _why(error: Exception) -> str:
    """Return what went wrong, in a few words."""
    if isinstance(error, dns.resolver.NXDOMAIN):
        return "no such name"
    if isinstance(error, dns.resolver.NoAnswer):
        return "the name has no such records"
    if isinstance(error, dns.exception.Timeout):
        return f"no answer in {ANSWER_S:g} s"
    return f"{type(error).__name__}: {error}"[:200]
