"""How often a shared directory asks its server for one inventory: a few times, however long."""

from __future__ import annotations

from ownerserve.directory import messages as ask
from ownerserve.directory.rules import MAIN_KINDS, TierCode
from ownerserve.directory.valkey.directory import ValkeyDirectory, ValkeyOptions
from ownerserve.directory.valkey.source import parse_source
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from tests.support.directory.servers import Server

A = RoutingUnit(WorkerId("a"), 0, Incarnation(1))
COUNT = 300
TRIPS = 40


def prefix(number: int) -> PrefixHash:
    return PrefixHash(number.to_bytes(32))


def test_sessions_and_groups_of_an_inventory_are_read_at_once(server: Server) -> None:
    client = server.client()
    client.flushall()
    directory = ValkeyDirectory(parse_source(server.url), ValkeyOptions(lease_s=30.0))
    directory.execute([ask.Register(A)])
    epoch = Epoch(Term(0, 0), 1)
    sessions = tuple(
        ask.HeldSession(SessionId(f"s{number}"), 1, prefix(number), 64, epoch)
        for number in range(COUNT)
    )
    extents = tuple(
        ask.HeldExtent(prefix(number), 64, TierCode.DISK, MAIN_KINDS, f"group {number}")
        for number in range(COUNT)
    )
    before = client.info("stats")["total_commands_processed"]
    (adopted,) = directory.execute([ask.Publish(A, sessions=sessions)])
    assert isinstance(adopted, ask.Published) and len(adopted.adopted) == COUNT
    (held,) = directory.execute([ask.Publish(A, extents)])
    assert isinstance(held, ask.Published)
    found = directory.execute([ask.FindGroup(f"group {COUNT - 1}"), ask.Lookup((prefix(7),))])
    assert found[0] == ask.GroupIs(((prefix(COUNT - 1), 1),))
    assert isinstance(found[1], ask.Found) and found[1].refs == 1
    trips = client.info("stats")["total_commands_processed"] - before
    directory.close()
    assert trips < TRIPS
