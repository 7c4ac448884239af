"""A node's thread tells a real directory what it holds: with frames that go anyway, all anew when
the directory has forgotten, and asks before it leaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from ownerserve.cli.main import cli
from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.rules import MAIN_KINDS, TierCode
from ownerserve.directory.terms import TermFile
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.prefix import Packed, hash_prefix, pack
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.ownership import Ownership, TurnCame, TurnLeft, boot_time_s
from ownerserve.node.ownership.publishing import extent_name
from tests.support.waits import until

BLOCK = 16
ONE, OTHER = bytes(32), bytes([1]) * 32
S1 = SessionId("s1")
LEASE_S = 9.0


class BootClock:
    def now(self) -> float:
        return boot_time_s()


class Rig:
    """A directory service and nodes beside it."""

    def __init__(self) -> None:
        embedded = EmbeddedDirectory(BootClock(), TermFile(), lease_s=LEASE_S, opens_in_s=0.0)
        self.server = DirectoryServer(embedded)
        self.server.start()
        self.client = DirectoryClient(self.server.address)
        self.nodes: list[Ownership] = []

    def join(self, name: str, *, scope: bytes = ONE) -> tuple[Ownership, Inventory]:
        inventory = Inventory(has_kept=1 << 20)
        node = Ownership(
            RoutingUnit(WorkerId(name), 0, Incarnation(1)),
            lambda: DirectoryClient(self.server.address, timeout_s=2.0),
            block_tokens=BLOCK,
            scope=scope,
            inventory=inventory,
        )
        node.start()
        self.nodes.append(node)
        return node, inventory

    def ask(self, request: ask.Request) -> ask.Outcome:
        (outcome,) = self.client.execute([request])
        return outcome

    def tiers(self, prefix_hash: PrefixHash) -> list[tuple[str, TierCode]]:
        found = self.ask(ask.Lookup((prefix_hash,)))
        places = found.locations if isinstance(found, ask.Found) else ()
        return [(unit.worker if unit else "", tier) for unit, tier, _ in places]

    def close(self) -> None:
        for node in self.nodes:
            node.close(within_s=5.0)
        self.client.close()
        self.server.stop()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def tokens(blocks: int) -> Packed:
    return pack(range(blocks * BLOCK))


def chain(blocks: int) -> PrefixHash:
    return hash_prefix(tokens(blocks), BLOCK)[-1]


def held(inventory: Inventory, tier: Tier, blocks: int) -> None:
    inventory.has(S1, tier, blocks * BLOCK, digest=chain(blocks), kinds=MAIN_KINDS)


def test_what_comes_and_goes_is_told_by_an_idle_worker_with_its_renewal(rig: Rig) -> None:
    _, inventory = rig.join("w1")
    held(inventory, Tier.DISK, 2)
    name = extent_name(ONE, chain(2))
    until(lambda: rig.tiers(name) == [("w1", TierCode.DISK)])
    inventory.gone(S1, Tier.DISK)
    until(lambda: rig.tiers(name) == [])


def test_a_turn_costs_one_frame_with_all_that_is_told_of_it(rig: Rig) -> None:
    node, inventory = rig.join("w1")
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1))
    turns = 12
    before, began_s = node.frames, time.monotonic()
    for number in range(1, turns + 1):
        node.tell(TurnLeft(S1, tokens(number), "repo"))
        held(inventory, Tier.DEVICE, number)
        held(inventory, Tier.DISK, number)
        until(lambda number=number: rig.tiers(extent_name(ONE, chain(number))))  # type: ignore[misc]
        node.tell(TurnCame(S1))
    renewals = (time.monotonic() - began_s) / (LEASE_S / 3) + 1
    assert node.frames - before <= turns + renewals
    last = extent_name(ONE, chain(turns))
    until(lambda: rig.tiers(last) == [("w1", TierCode.DEVICE), ("w1", TierCode.DISK)])
    until(lambda: rig.ask(ask.FindGroup("repo")) == ask.GroupIs(((last, 1),)))


def test_equal_tokens_of_two_models_are_two_prefixes(rig: Rig) -> None:
    for name, scope in (("w1", ONE), ("w2", OTHER)):
        node, inventory = rig.join(name, scope=scope)
        node.tell(TurnCame(SessionId(name)))
        until(lambda node=node, name=name: node.standing(SessionId(name)))  # type: ignore[misc]
        node.tell(TurnLeft(SessionId(name), tokens(3)))
        held(inventory, Tier.DISK, 3)
    for name, scope in (("w1", ONE), ("w2", OTHER)):
        both = [(name, TierCode.DEVICE), (name, TierCode.DISK)]
        until(lambda both=both, scope=scope: rig.tiers(extent_name(scope, chain(3))) == both)  # type: ignore[misc]
    assert rig.tiers(chain(3)) == []


def test_a_rebuilt_directory_hears_sessions_and_extents_again(rig: Rig) -> None:
    node, inventory = rig.join("w1")
    for number in range(2500):
        digest = PrefixHash(number.to_bytes(32))
        inventory.has(SessionId(f"t{number}"), Tier.DISK, 16, digest=digest, kinds=MAIN_KINDS)
    sessions = [SessionId(f"s{number}") for number in range(1200)]
    for session in sessions:
        node.tell(TurnCame(session))
        node.tell(TurnLeft(session, tokens(2)))

    def known() -> tuple[int, int]:
        records = rig.client.status().records
        assert records is not None
        return records.sessions, records.prefixes

    def found() -> ask.Found:
        answer = rig.ask(ask.Lookup((extent_name(ONE, chain(2)),)))
        assert isinstance(answer, ask.Found)
        return answer

    until(lambda: known() == (1200, 2501))
    until(lambda: found().refs == 1200)  # a session is known before its turn's end is
    owner = found().owner
    shown = CliRunner().invoke(cli, ["directory", "rebuild", rig.server.address, "--json", "-"])
    assert shown.exit_code == 0
    rebuilt = json.loads(shown.stdout)["rebuilt"]
    assert rebuilt["before"] == rebuilt["after"] and rebuilt["is_open"]
    assert (rebuilt["after"]["sessions"], rebuilt["after"]["prefixes"]) == (1200, 2501)
    assert known() == (1200, 2501)
    again = found()
    assert (again.refs, again.owner) == (1200, owner)
    until(lambda: all(node.standing(session) for session in sessions))


def test_who_leaves_says_what_goes_with_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    node, inventory = rig.join("w1")
    node.tell(TurnCame(S1))
    until(lambda: node.standing(S1))
    node.tell(TurnLeft(S1, tokens(2)))
    held(inventory, Tier.DISK, 2)
    until(lambda: len(rig.tiers(extent_name(ONE, chain(2)))) == 2)
    node.close(within_s=5.0)
    assert node.answers["dropped"] == 1 and node.answers["last_copy"] == 1
    assert node.answers["retired"] == 1
    assert "1 last copies that sessions stand on leave with this worker" in caplog.text


def test_the_inventory_is_read_while_it_changes(rig: Rig) -> None:
    node, inventory = rig.join("w1")
    stop = threading.Event()

    def churn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            session = SessionId(f"c{number % 500}")
            digest = PrefixHash(number.to_bytes(32))
            inventory.has(session, Tier.HOST, 16 + number % 7, digest=digest, kinds=MAIN_KINDS)
            inventory.gone(SessionId(f"c{(number * 7) % 500}"), Tier.HOST)
            if not number % 100:
                time.sleep(0.005)

    thread = threading.Thread(target=churn)
    thread.start()
    time.sleep(1.0)
    stop.set()
    thread.join()
    until(lambda: len(node.publishing) == len(inventory))
    records = rig.client.status().records
    assert records is not None and records.prefixes == len(inventory)
    assert not node.answers["failed"]
