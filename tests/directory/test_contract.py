"""One suite for every backend: what a directory answers, told as scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from servers import Server

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.messages import Refusal, Request
from ownerserve.directory.port import Directory
from ownerserve.directory.rules import Kind, Tier
from ownerserve.directory.terms import TermFile
from ownerserve.directory.valkey.directory import ValkeyDirectory, ValkeyOptions
from ownerserve.directory.valkey.primary import parse_source
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.epoch import Epoch, Term
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit

LEASE_S = 1.5
"""In real time on Valkey: longer than 15,000 records take on a machine that is busy."""
P1, P2, P3 = (PrefixHash(bytes([number]) * 32) for number in (1, 2, 3))
S1, S2 = SessionId("tenant/s1"), SessionId("tenant/s2")
MAIN = Kind.DENSE | Kind.COMPRESSED


def unit(name: str, life: int = 1, rank: int = 0) -> RoutingUnit:
    return RoutingUnit(WorkerId(name), rank, Incarnation(life))


A, B, C = unit("a"), unit("b"), unit("c")


class World:
    """A directory and time, real or not."""

    def __init__(self, directory: Directory, sleep: Callable[[float], None]) -> None:
        self.directory = directory
        self.sleep = sleep

    def ask(self, request: Request) -> Any:
        return self.directory.execute([request])[0]

    def join(self, *units: RoutingUnit) -> None:
        for one in units:
            assert isinstance(self.ask(ask.Register(one)), ask.Leased)

    def past_lease(self) -> None:
        self.sleep(LEASE_S * 1.1)


@pytest.fixture(params=["embedded", "valkey"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "embedded":
        clock = ManualClock(1000.0)
        embedded = EmbeddedDirectory(clock, TermFile(), lease_s=LEASE_S, opens_in_s=0.0)
        yield World(embedded, clock.advance)
        return
    import time

    server: Server = request.getfixturevalue("server")
    server.client().flushall()
    options = ValkeyOptions(lease_s=LEASE_S)
    shared = ValkeyDirectory(parse_source(server.url), options)
    shared.status()
    server.client().hset("ownerserve:term", "open_us", "0")  # a new fleet: no lease of before
    yield World(shared, time.sleep)
    shared.close()


def extents(held: Sequence[PrefixHash]) -> tuple[ask.HeldExtent, ...]:
    return tuple(ask.HeldExtent(one, 512, Tier.HOST, MAIN) for one in held)


def refused(outcome: object, reason: Refusal) -> bool:
    return isinstance(outcome, ask.Refused) and outcome.reason is reason


# ---- sessions


def test_a_session_has_one_owner_while_its_lease_runs(world: World) -> None:
    world.join(A, B)
    first = world.ask(ask.Bind(S1, A))
    assert isinstance(first, ask.Bound) and first.version == 0
    second = world.ask(ask.Bind(S1, B))
    assert isinstance(second, ask.HeldBy) and second.owner == A
    assert 0 < second.lease_left_s <= LEASE_S
    found = world.ask(ask.FindSession(S1))
    assert isinstance(found, ask.SessionIs) and found.owner == A and found.owner_live


def test_an_orphan_goes_to_who_asks_first_under_a_later_epoch(world: World) -> None:
    world.join(A)
    first = world.ask(ask.Bind(S1, A))
    world.past_lease()
    world.join(B)
    found = world.ask(ask.FindSession(S1))
    assert not found.owner_live
    second = world.ask(ask.Bind(S1, B))
    assert isinstance(second, ask.Bound) and second.epoch > first.epoch and second.version == 0
    assert refused(world.ask(ask.RenewLease(A)), Refusal.LEASE_LAPSED)


def test_renewing_keeps_what_is_owned(world: World) -> None:
    world.join(A, B)
    world.ask(ask.Bind(S1, A))
    for _ in range(4):
        world.sleep(LEASE_S / 2)
        assert isinstance(world.ask(ask.RenewLease(A)), ask.Leased)
        world.join(B)
    assert isinstance(world.ask(ask.Bind(S1, B)), ask.HeldBy)


def test_a_lost_answer_is_told_again_and_a_new_wish_gets_a_new_epoch(world: World) -> None:
    world.join(A)
    first = world.ask(ask.Bind(S1, A))
    assert world.ask(ask.Bind(S1, A)) == first
    again = world.ask(ask.Bind(S1, A, seen=first.epoch))
    assert again.epoch > first.epoch
    late = ask.Transfer(S1, A, A, first.epoch, first.version)
    assert isinstance(world.ask(late), ask.Conflict)


def test_transfer_is_compare_and_set(world: World) -> None:
    world.join(A, B)
    first = world.ask(ask.Bind(S1, A))
    stale = ask.Transfer(S1, A, B, first.epoch, first.version + 1)
    assert isinstance(world.ask(stale), ask.Conflict)
    assert isinstance(world.ask(ask.Transfer(S1, B, B, first.epoch, 0)), ask.Conflict)
    moved = world.ask(ask.Transfer(S1, A, B, first.epoch, first.version))
    assert isinstance(moved, ask.Bound) and moved.epoch > first.epoch
    repeated = world.ask(ask.Transfer(S1, A, B, first.epoch, first.version))
    assert isinstance(repeated, ask.Conflict) and repeated.current.owner == B
    assert refused(world.ask(ask.Transfer(S2, A, B, first.epoch, 0)), Refusal.UNKNOWN_SESSION)


def test_a_session_is_not_handed_to_one_who_is_not_there(world: World) -> None:
    world.join(A)
    first = world.ask(ask.Bind(S1, A))
    gone = ask.Transfer(S1, A, B, first.epoch, first.version)
    assert refused(world.ask(gone), Refusal.TARGET_NOT_LIVE)
    world.join(unit("b", 2))
    assert refused(world.ask(gone), Refusal.TARGET_NOT_LIVE)


def test_ending_a_session_needs_its_epoch(world: World) -> None:
    world.join(A)
    first = world.ask(ask.Bind(S1, A))
    later = world.ask(ask.Bind(S1, A, seen=first.epoch))
    assert refused(world.ask(ask.EndSession(S1, A, first.epoch)), Refusal.NOT_OWNER)
    assert isinstance(world.ask(ask.EndSession(S1, A, later.epoch)), ask.Ended)
    assert isinstance(world.ask(ask.FindSession(S1)), ask.Miss)
    assert isinstance(world.ask(ask.EndSession(S1, A, later.epoch)), ask.Ended)
    again = world.ask(ask.Bind(S1, A))
    assert again.epoch > later.epoch and again.version == 0


# ---- incarnations


def test_a_new_life_drops_at_once_what_the_former_held(world: World) -> None:
    world.join(A, B)
    world.ask(ask.Bind(S1, A))
    world.ask(ask.ClaimOwner(P1, 512, A, Tier.DEVICE, MAIN))
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Found)
    world.join(unit("a", 2))
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)
    assert isinstance(world.ask(ask.Bind(S1, B)), ask.Bound)
    for late in (ask.RenewLease(A), ask.Register(A), ask.Publish(A), ask.Bind(S2, A)):
        assert refused(world.ask(late), Refusal.STALE_INCARNATION)


def test_a_new_lifes_store_is_readopted_by_its_inventory(world: World) -> None:
    world.join(A)
    world.ask(ask.ClaimOwner(P1, 512, A, Tier.DISK, MAIN))
    reborn = unit("a", 2)
    world.join(reborn)
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)  # not verified yet
    verified = ask.HeldExtent(P1, 512, Tier.DISK, MAIN)
    assert isinstance(world.ask(ask.Publish(reborn, (verified,))), ask.Published)
    found = world.ask(ask.Lookup((P1,)))
    assert found.locations == ((reborn, Tier.DISK, MAIN),) and found.owner is None
    assert isinstance(world.ask(ask.ClaimOwner(P1, 512, reborn, Tier.DISK, MAIN)), ask.Granted)


def test_a_former_life_that_came_first_after_amnesia_gives_way(world: World) -> None:
    world.join(unit("a", 2))
    world.directory.forget()
    world.join(unit("a", 1))
    assert refused(world.ask(ask.RenewLease(unit("a", 2))), Refusal.UNKNOWN_HOLDER)
    world.join(unit("a", 2))
    assert refused(world.ask(ask.RenewLease(unit("a", 1))), Refusal.STALE_INCARNATION)


def test_a_memory_that_knows_a_unit_by_a_late_message_renews_nothing(world: World) -> None:
    """It knows nothing of what the unit owns: that is reported first (schedule 141)."""
    before = world.ask(ask.Register(A))
    world.directory.forget()
    world.join(A)  # sent before, twice
    assert refused(world.ask(ask.RenewLease(A, None, before.memory)), Refusal.UNKNOWN_HOLDER)
    again = world.ask(ask.Register(A))
    assert again.memory != before.memory
    renewed = world.ask(ask.RenewLease(A, None, again.memory))
    assert isinstance(renewed, ask.Leased) and renewed.memory == again.memory


def test_ranks_of_a_worker_are_apart(world: World) -> None:
    other = unit("a", 1, rank=1)
    world.join(A, other)
    world.ask(ask.Bind(S1, A))
    assert isinstance(world.ask(ask.Bind(S1, other)), ask.HeldBy)
    world.join(unit("a", 2, rank=1))
    assert isinstance(world.ask(ask.Bind(S1, unit("a", 2, rank=1))), ask.HeldBy)


def test_who_retires_is_free_at_once(world: World) -> None:
    world.join(A, B)
    world.ask(ask.Bind(S1, A))
    assert isinstance(world.ask(ask.Retire(A)), ask.Retired)
    assert isinstance(world.ask(ask.Bind(S1, B)), ask.Bound)


def test_strangers_own_nothing(world: World) -> None:
    for request in (
        ask.Bind(S1, A),
        ask.ClaimOwner(P1, 16, A, Tier.HOST, MAIN),
        ask.RenewLease(A),
        ask.Publish(A),
    ):
        assert refused(world.ask(request), Refusal.UNKNOWN_HOLDER)


# ---- prefixes


def test_lookup_gives_the_longest_that_someone_alive_holds(world: World) -> None:
    world.join(A, B)
    world.ask(ask.ClaimOwner(P1, 512, A, Tier.HOST, MAIN))
    world.ask(ask.ClaimOwner(P2, 1024, B, Tier.DEVICE, Kind.DENSE))
    assert world.ask(ask.Lookup((P3, P2, P1))).prefix_hash == P2
    assert world.ask(ask.Lookup((P3, P2, P1), Kind.COMPRESSED)).prefix_hash == P1
    world.ask(ask.Retire(B))
    assert world.ask(ask.Lookup((P3, P2, P1))).tokens == 512
    assert isinstance(world.ask(ask.Lookup((P3,))), ask.Miss)


def test_locations_come_by_tier_and_replicas_have_no_duty(world: World) -> None:
    world.join(A, B)
    granted = world.ask(ask.ClaimOwner(P1, 512, A, Tier.HOST, MAIN))
    assert isinstance(world.ask(ask.ReplicateReadonly(P1, None, Tier.REMOTE, MAIN)), ask.Replicated)
    assert isinstance(world.ask(ask.ReplicateReadonly(P1, B, Tier.DEVICE, MAIN)), ask.Replicated)
    found = world.ask(ask.Lookup((P1,)))
    assert [place[:2] for place in found.locations] == [
        (B, Tier.DEVICE), (A, Tier.HOST), (None, Tier.REMOTE),
    ]  # fmt: skip
    assert (found.owner, found.epoch) == (A, granted.epoch)
    world.past_lease()
    left = world.ask(ask.Lookup((P1,)))
    assert left.locations == ((None, Tier.REMOTE, MAIN),) and left.owner is None


def test_last_copy_duty_is_ones_until_its_lease_ends(world: World) -> None:
    world.join(A, B)
    first = world.ask(ask.ClaimOwner(P1, 512, A, Tier.DEVICE, MAIN))
    assert world.ask(ask.ClaimOwner(P1, 512, A, Tier.HOST, MAIN)) == first
    assert isinstance(world.ask(ask.ClaimOwner(P1, 512, B, Tier.DEVICE, MAIN)), ask.HeldBy)
    assert refused(world.ask(ask.Release(P1, B, first.epoch)), Refusal.NOT_OWNER)
    assert world.ask(ask.Release(P1, A, first.epoch)) == ask.Released(2)
    second = world.ask(ask.ClaimOwner(P1, 512, B, Tier.DEVICE, MAIN))
    assert second.epoch > first.epoch
    old = ask.HeldExtent(P1, 512, Tier.DEVICE, MAIN, epoch=first.epoch)
    world.ask(ask.Publish(A, (old,)))
    assert world.ask(ask.Lookup((P1,))).owner == B


def test_the_last_copy_that_a_fork_stands_on_is_spilled_first(world: World) -> None:
    world.join(A, B)
    world.ask(ask.ClaimOwner(P1, 512, A, Tier.DEVICE, MAIN))
    bound = world.ask(ask.Bind(S1, A))
    world.ask(ask.Advance(S1, A, bound.epoch, 1, P1, 512))
    assert refused(world.ask(ask.Drop(P1, A, Tier.DEVICE)), Refusal.LAST_COPY)
    world.ask(ask.ReplicateReadonly(P1, B, Tier.DEVICE, MAIN))
    world.ask(ask.Retire(B))
    assert refused(world.ask(ask.Drop(P1, A, Tier.DEVICE)), Refusal.LAST_COPY)
    world.ask(ask.ReplicateReadonly(P1, A, Tier.DISK, MAIN))
    assert isinstance(world.ask(ask.Drop(P1, A, Tier.DEVICE)), ask.Dropped)
    assert [place[1] for place in world.ask(ask.Lookup((P1,))).locations] == [Tier.DISK]


def test_nobody_keeps_what_no_session_stands_on(world: World) -> None:
    world.join(A)
    world.ask(ask.ClaimOwner(P1, 512, A, Tier.DEVICE, MAIN))
    assert isinstance(world.ask(ask.Drop(P1, A, Tier.DEVICE)), ask.Dropped)
    assert refused(world.ask(ask.ReplicateReadonly(P1, A, Tier.HOST, MAIN)), Refusal.UNKNOWN_PREFIX)


def test_forks_are_counted_on_what_they_stand_on(world: World) -> None:
    world.join(A, B)
    parent = world.ask(ask.Bind(S1, A))
    world.ask(ask.Advance(S1, A, parent.epoch, 1, P1, 512))
    child = world.ask(ask.Bind(S2, B, parent=S1))
    assert (child.prefix_hash, child.tokens, child.version) == (P1, 512, 0)
    assert world.ask(ask.Lookup((P1,))).refs == 2
    moved = world.ask(ask.Advance(S1, A, parent.epoch, 2, P2, 1024))
    assert isinstance(moved, ask.Advanced)
    assert [world.ask(ask.Lookup((one,))).refs for one in (P1, P2)] == [1, 1]
    world.ask(ask.EndSession(S2, B, child.epoch))
    assert world.ask(ask.Lookup((P1,))).refs == 0


def test_a_report_of_several_turns_counts_them_all_and_a_late_one_changes_nothing(
    world: World,
) -> None:
    world.join(A, B)
    mine = world.ask(ask.Bind(S1, A))
    several = ask.Advance(S1, A, mine.epoch, 3, P2, 1024)
    first = world.ask(several)
    assert isinstance(first, ask.Advanced) and first.version == 3
    assert world.ask(several) == ask.Advanced(3)
    late = world.ask(ask.Advance(S1, A, mine.epoch, 2, P1, 512))
    assert isinstance(late, ask.Conflict) and late.current.prefix_hash == P2
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)
    assert refused(world.ask(ask.Advance(S2, A, mine.epoch, 1, P1, 1)), Refusal.UNKNOWN_SESSION)


def test_a_change_of_owner_finishes_no_turn(world: World) -> None:
    world.join(A, B)
    mine = world.ask(ask.Bind(S1, A))
    world.ask(ask.Advance(S1, A, mine.epoch, 5, P1, 512))
    moved = world.ask(ask.Transfer(S1, A, B, mine.epoch, 5))
    assert (moved.version, moved.prefix_hash) == (5, P1)
    by_the_former = ask.Advance(S1, A, mine.epoch, 6, P2, 1024)
    assert isinstance(world.ask(by_the_former), ask.Conflict)
    world.ask(ask.Retire(B))
    again = world.ask(ask.Bind(S1, A, seen=moved.epoch))
    assert again.version == 5 and again.epoch > moved.epoch


def test_a_finished_turn_claims_its_tip_where_nobody_alive_has_it(world: World) -> None:
    world.join(A, B)
    mine, theirs = world.ask(ask.Bind(S1, A)), world.ask(ask.Bind(S2, B))
    first = world.ask(ask.Advance(S1, A, mine.epoch, 1, P1, 512, group="repo:x"))
    assert first.duty > mine.epoch
    assert world.ask(ask.FindGroup("repo:x")).members == ((P1, 1),)
    second = world.ask(ask.Advance(S2, B, theirs.epoch, 1, P1, 512, tier=Tier.HOST))
    assert second.duty is None
    found = world.ask(ask.Lookup((P1,)))
    assert found.owner == A and found.epoch == first.duty and found.refs == 2
    assert {place[:2] for place in found.locations} == {(A, Tier.DEVICE), (B, Tier.HOST)}
    world.ask(ask.Retire(A))
    third = world.ask(ask.Advance(S2, B, theirs.epoch, 2, P1, 512))
    assert third.duty > first.duty and world.ask(ask.Lookup((P1,))).owner == B


def test_a_tail_is_claimed_by_nobody(world: World) -> None:
    world.join(A)
    mine = world.ask(ask.Bind(S1, A))
    tail = ask.Advance(S1, A, mine.epoch, 1, P1, 512, kinds=int(Kind.TAIL))
    assert refused(world.ask(tail), Refusal.SESSION_LOCAL)


def test_owner_rules_by_kind_of_state(world: World) -> None:
    world.join(A, B)
    tail = ask.ClaimOwner(P1, 512, A, Tier.DEVICE, Kind.TAIL)
    assert refused(world.ask(tail), Refusal.SESSION_LOCAL)
    published = ask.HeldExtent(P1, 512, Tier.DISK, Kind.TAIL | Kind.DENSE)
    assert refused(world.ask(ask.Publish(A, (published,))), Refusal.SESSION_LOCAL)
    world.ask(ask.ClaimOwner(P1, 512, A, Tier.DEVICE, MAIN | Kind.CHECKPOINT))
    elsewhere = ask.ReplicateReadonly(P1, B, Tier.DEVICE, Kind.CHECKPOINT)
    assert refused(world.ask(elsewhere), Refusal.SESSION_LOCAL)
    on_disk = ask.ReplicateReadonly(P1, B, Tier.DISK, Kind.CHECKPOINT)
    assert isinstance(world.ask(on_disk), ask.Replicated)


def test_hot_prefixes_of_a_group(world: World) -> None:
    world.join(A)
    for prefix_hash in (P1, P2):
        world.ask(ask.ClaimOwner(prefix_hash, 512, A, Tier.HOST, MAIN, "repo:ownerserve"))
    members = world.ask(ask.FindGroup("repo:ownerserve")).members
    assert {name for name, _ in members} == {P1, P2}
    assert world.ask(ask.FindGroup("repo:none")) == ask.GroupIs(())


# ---- memory


def test_a_later_epoch_than_ours_starts_a_term_above_it(world: World) -> None:
    world.join(A, B)
    before = world.ask(ask.Bind(S1, A)).epoch
    above = Epoch(Term(before.term.ordinal + 7, 5), 99)
    assert refused(world.ask(ask.Bind(S2, B, seen=above)), Refusal.REBUILDING)
    assert world.directory.status().term.ordinal == above.term.ordinal + 1  # type: ignore[union-attr]
    world.past_lease()
    world.join(B)
    bound = world.ask(ask.Bind(S2, B, seen=above))
    assert bound.epoch > above > before


def test_a_routers_question_tells_of_a_later_epoch_too(world: World) -> None:
    world.join(A)
    term = world.ask(ask.Bind(S1, A)).epoch.term
    world.ask(ask.FindSession(S1, seen=Epoch(Term(term.ordinal + 7, 5), 99)))
    assert world.directory.status().term.ordinal == term.ordinal + 8  # type: ignore[union-attr]


def test_without_memory_workers_words_count_until_old_leases_are_over(world: World) -> None:
    world.join(A, B)
    world.ask(ask.ClaimOwner(P1, 512, A, Tier.DEVICE, MAIN))
    mine = world.ask(ask.Bind(S1, A))
    status = world.directory.forget()
    assert status.opens_in_s > 0
    assert isinstance(world.ask(ask.FindSession(S1)), ask.Miss)
    assert refused(world.ask(ask.RenewLease(A)), Refusal.UNKNOWN_HOLDER)
    world.join(A, B)
    assert refused(world.ask(ask.Bind(S2, B)), Refusal.REBUILDING)
    held = ask.HeldSession(S1, mine.version, P1, 512, mine.epoch)
    extent = ask.HeldExtent(P1, 512, Tier.DEVICE, MAIN)
    answer = world.ask(ask.Publish(A, (extent,), sessions=(held,)))
    assert answer == ask.Published(1, (S1,))
    earlier = Epoch(Term(0, 0), 1)
    claim = ask.HeldSession(S1, 9, None, 0, earlier)
    assert world.ask(ask.Publish(B, sessions=(claim,))).adopted == ()
    found = world.ask(ask.FindSession(S1))
    assert (found.owner, found.epoch, found.prefix_hash) == (A, mine.epoch, P1)
    world.past_lease()
    world.join(B)
    late = ask.HeldSession(S2, 1, None, 0, mine.epoch)
    assert world.ask(ask.Publish(B, sessions=(late,))).adopted == ()
    assert world.ask(ask.Bind(S2, B)).epoch > mine.epoch


def test_an_inventory_may_be_sent_twice_and_taken_back(world: World) -> None:
    world.join(A)
    extents = tuple(
        ask.HeldExtent(one, 512, tier, MAIN) for one in (P1, P2) for tier in (Tier.HOST, Tier.DISK)
    )
    for _ in range(2):
        assert world.ask(ask.Publish(A, extents)) == ask.Published(4, ())
    assert len(world.ask(ask.Lookup((P1,))).locations) == 2
    world.ask(ask.Publish(A, gone=((P1, Tier.HOST), (P1, Tier.DISK))))
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)


def test_inventories_of_what_nobody_knew_and_then_of_what_another_holds(world: World) -> None:
    world.join(A, B)
    many = [PrefixHash(bytes([n]) * 32) for n in range(6)]
    for holder, held in ((A, many[:2]), (A, many[2:4]), (B, many[3:])):  # the last meets one of A's
        assert isinstance(world.ask(ask.Publish(holder, extents(held))), ask.Published)
    holders = [{holder for holder, _, _ in world.ask(ask.Lookup((one,))).locations} for one in many]
    assert holders == [{A}, {A}, {A}, {A, B}, {B}, {B}]


def test_many_inventories_at_once(world: World) -> None:
    world.join(A, B)
    many = [PrefixHash(n.to_bytes(32)) for n in range(12_000)]
    parts = [ask.Publish(A, extents(many[at : at + 3000])) for at in range(0, 12_000, 3000)]
    outcomes = world.directory.execute([*parts, ask.Publish(B, extents(many[-1:]))])
    assert outcomes == [*(ask.Published(3000, ()) for _ in parts), ask.Published(1, ())]
    assert len(world.ask(ask.Lookup((many[-1],))).locations) == 2
    assert len(world.ask(ask.Lookup((many[0],))).locations) == 1


def test_a_question_beside_an_inventory_is_answered_from_what_is_known(world: World) -> None:
    world.join(A, B)
    for one in (P1, P2):
        assert isinstance(world.ask(ask.Publish(A, extents([one]))), ask.Published)
    again = ask.Publish(B, extents([P1]))
    found, published = world.directory.execute([ask.Lookup((P1,)), again])
    assert isinstance(found, ask.Found)
    assert isinstance(published, ask.Published)


def test_a_batch_is_answered_in_order(world: World) -> None:
    outcomes = world.directory.execute(
        [ask.Register(A), ask.Register(B), ask.Bind(S1, A), ask.Bind(S1, B), ask.Bind(S2, B)]
    )
    assert [type(one).__name__ for one in outcomes] == [
        "Leased", "Leased", "Bound", "HeldBy", "Bound",
    ]  # fmt: skip


def test_a_sweep_forgets_former_lives(world: World) -> None:
    world.join(A)
    world.ask(ask.ClaimOwner(P1, 512, A, Tier.DEVICE, MAIN))
    world.join(unit("a", 2))
    swept = sum(world.directory.sweep(100) for _ in range(5))
    assert swept == 1
    assert refused(
        world.ask(ask.ReplicateReadonly(P1, None, Tier.REMOTE, MAIN)), Refusal.UNKNOWN_PREFIX
    )
