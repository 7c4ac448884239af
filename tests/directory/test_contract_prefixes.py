"""The same suite: who holds a prefix, who stands on it, and groups of them."""

from __future__ import annotations

import msgspec

from ownerserve.directory import messages as ask
from ownerserve.directory.decisions.records import (
    WISH_LIMIT,
    Location,
    PrefixRecord,
    decode_record,
    encode_record,
)
from ownerserve.directory.messages import DirectoryRefusal
from ownerserve.directory.rules import StateKind, TierCode
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from tests.support.directory.contract import (
    MAIN,
    P1,
    P2,
    P3,
    S1,
    S2,
    S3,
    A,
    B,
    C,
    World,
    claim,
    hold,
    refused,
    unit,
)


def test_lookup_gives_the_longest_that_someone_alive_holds(world: World) -> None:
    world.join(A, B)
    hold(world, A, P1, TierCode.HOST)
    hold(world, B, P2, TierCode.DEVICE, tokens=1024)
    assert world.ask(ask.Lookup((P3, P2, P1))).prefix_hash == P2
    world.ask(ask.Retire(B))
    assert world.ask(ask.Lookup((P3, P2, P1))).tokens == 512
    assert isinstance(world.ask(ask.Lookup((P3,))), ask.Miss)


def test_locations_come_by_tier_and_replicas_have_no_duty(world: World) -> None:
    world.join(A, B)
    mine = world.ask(ask.Bind(S1, A))
    world.ask(ask.Advance(S1, A, mine.epoch, 1, P1, 512, tier=TierCode.HOST))
    hold(world, A, P1, TierCode.REMOTE)
    hold(world, B, P1, TierCode.DEVICE)
    found = world.ask(ask.Lookup((P1,)))
    assert [place[:2] for place in found.locations] == [
        (B, TierCode.DEVICE), (A, TierCode.HOST), (None, TierCode.REMOTE),
    ]  # fmt: skip
    assert found.owner == A
    world.past_lease()
    left = world.ask(ask.Lookup((P1,)))
    assert left.locations == ((None, TierCode.REMOTE, MAIN),) and left.owner is None


def test_last_copy_duty_is_ones_until_its_lease_ends(world: World) -> None:
    world.join(A, B)
    first = claim(world, A, S1, P1)
    assert claim(world, B, S2, P1).duty is None
    world.past_lease()
    world.join(B)
    second = claim(world, B, S2, P1)
    assert second.duty > first.duty
    world.join(A)
    old = ask.HeldExtent(P1, 512, TierCode.DEVICE, MAIN, epoch=first.duty)
    world.ask(ask.Publish(A, (old,)))
    assert world.ask(ask.Lookup((P1,))).owner == B


def test_the_last_copy_that_a_fork_stands_on_is_spilled_first(world: World) -> None:
    world.join(A, B)
    claim(world, A, S1, P1)
    assert refused(world.ask(ask.Drop(P1, A, TierCode.DEVICE)), DirectoryRefusal.LAST_COPY)
    hold(world, B, P1, TierCode.DEVICE)
    world.ask(ask.Retire(B))
    assert refused(world.ask(ask.Drop(P1, A, TierCode.DEVICE)), DirectoryRefusal.LAST_COPY)
    hold(world, A, P1, TierCode.DISK)
    assert isinstance(world.ask(ask.Drop(P1, A, TierCode.DEVICE)), ask.Dropped)
    assert [place[1] for place in world.ask(ask.Lookup((P1,))).locations] == [TierCode.DISK]


def test_nobody_keeps_what_no_session_stands_on(world: World) -> None:
    world.join(A)
    hold(world, A, P1, TierCode.DEVICE)
    assert isinstance(world.ask(ask.Drop(P1, A, TierCode.DEVICE)), ask.Dropped)
    records = world.directory.status().records
    assert records is None or records.prefixes == 0
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)


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
    assert isinstance(first, ask.Advanced) and first.duty is not None
    assert world.ask(ask.FindSession(S1)).version == 3
    assert world.ask(several) == ask.Advanced()
    late = world.ask(ask.Advance(S1, A, mine.epoch, 2, P1, 512))
    assert isinstance(late, ask.Conflict) and late.current.prefix_hash == P2
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)
    assert refused(
        world.ask(ask.Advance(S2, A, mine.epoch, 1, P1, 1)), DirectoryRefusal.UNKNOWN_SESSION
    )


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
    second = world.ask(ask.Advance(S2, B, theirs.epoch, 1, P1, 512, tier=TierCode.HOST))
    assert second.duty is None
    found = world.ask(ask.Lookup((P1,)))
    assert found.owner == A and found.refs == 2
    assert {place[:2] for place in found.locations} == {(A, TierCode.DEVICE), (B, TierCode.HOST)}
    world.ask(ask.Retire(A))
    third = world.ask(ask.Advance(S2, B, theirs.epoch, 2, P1, 512))
    assert third.duty > first.duty and world.ask(ask.Lookup((P1,))).owner == B


def test_a_tail_is_claimed_by_nobody(world: World) -> None:
    world.join(A)
    mine = world.ask(ask.Bind(S1, A))
    tail = ask.Advance(S1, A, mine.epoch, 1, P1, 512, kinds=int(StateKind.TAIL))
    assert refused(world.ask(tail), DirectoryRefusal.SESSION_LOCAL)


def test_a_tail_is_published_by_nobody(world: World) -> None:
    world.join(A)
    published = ask.HeldExtent(P1, 512, TierCode.DISK, StateKind.TAIL | StateKind.DENSE)
    assert refused(world.ask(ask.Publish(A, (published,))), DirectoryRefusal.SESSION_LOCAL)


def wanted(world: World) -> tuple[RoutingUnit, ...]:
    found: tuple[RoutingUnit, ...] = world.ask(ask.Lookup((P1,))).wanted
    return found


def test_a_wish_for_a_copy_stands_until_the_copy_is_told_of(world: World) -> None:
    world.join(A, B, C)
    claim(world, A, S1, P1)
    wish = ask.ReplicateReadonly(P1, B.worker)
    assert world.ask(wish) == world.ask(wish) == ask.Wished((B,))
    assert world.ask(ask.ReplicateReadonly(P1, C.worker)) == ask.Wished((B, C))
    hold(world, A, P1, TierCode.REMOTE)
    world.ask(ask.Bind(S2, A, parent=S1))
    assert wanted(world) == (B, C), "others' copies and forks leave it as it is"
    hold(world, B, P1, TierCode.DISK)
    assert wanted(world) == (C,)
    assert world.ask(wish) == ask.Wished((C,)), "it has one"
    claim(world, C, S3, P1)
    assert wanted(world) == ()


def test_a_wish_ends_with_the_life_that_it_named(world: World) -> None:
    world.join(A, B, C)
    claim(world, A, S1, P1)
    for name in (B, C):
        world.ask(ask.ReplicateReadonly(P1, name.worker))
    world.join(unit("b", life=2))
    assert wanted(world) == (C,)
    world.ask(ask.Retire(C))
    assert wanted(world) == ()


def test_a_wish_wants_a_known_prefix_and_a_live_unit(world: World) -> None:
    world.join(A)
    assert refused(world.ask(ask.ReplicateReadonly(P1, A.worker)), DirectoryRefusal.UNKNOWN_PREFIX)
    claim(world, A, S1, P1)
    for name, rank in ((B.worker, 0), (A.worker, 1)):
        wish = ask.ReplicateReadonly(P1, name, rank)
        assert refused(world.ask(wish), DirectoryRefusal.TARGET_NOT_LIVE)
    world.past_lease()
    assert refused(world.ask(ask.ReplicateReadonly(P1, A.worker)), DirectoryRefusal.TARGET_NOT_LIVE)


def test_a_prefix_remembers_the_last_wishes(world: World) -> None:
    units = [unit(f"u{number}") for number in range(WISH_LIMIT + 1)]
    world.join(A, *units)
    claim(world, A, S1, P1)
    for one in units:
        world.ask(ask.ReplicateReadonly(P1, one.worker))
    assert wanted(world) == tuple(units[1:])


def test_a_prefix_that_the_version_before_wrote_is_read() -> None:
    """It had no wishes; `epoch` was its last field then too."""
    epoch = Epoch(Term(1, 2), 3)
    place = Location(A, TierCode.DISK, MAIN)
    former = msgspec.msgpack.encode(["p", 512, A, [place], 1, 2.0, "repo", epoch])
    read = decode_record(former)
    assert read == PrefixRecord(512, A, (place,), 1, 2.0, "repo", (), epoch)
    assert decode_record(encode_record(read)) == read


def group(world: World, name: str = "repo:ownerserve") -> dict[PrefixHash, int]:
    return dict(world.ask(ask.FindGroup(name)).members)


def test_hot_prefixes_of_a_group(world: World) -> None:
    world.join(A)
    for session, prefix_hash in ((S1, P1), (S2, P2)):
        mine = world.ask(ask.Bind(session, A))
        world.ask(ask.Advance(session, A, mine.epoch, 1, prefix_hash, 512, group="repo:ownerserve"))
    assert group(world) == {P1: 1, P2: 1}
    world.ask(ask.Bind(S3, A, parent=S2))
    assert world.ask(ask.FindGroup("repo:ownerserve")) == ask.GroupIs(((P2, 2), (P1, 1)))
    assert world.ask(ask.FindGroup("repo:none")) == ask.GroupIs(())


def test_a_published_extent_stands_in_its_group_while_anything_is_known_of_it(world: World) -> None:
    world.join(A, B)
    named = ask.HeldExtent(P1, 512, TierCode.DEVICE, MAIN, "repo:ownerserve")
    hold(world, B, P1, TierCode.DEVICE)
    for _ in range(2):
        world.ask(ask.Publish(A, (named,)))
    assert group(world) == {P1: 0}
    world.ask(ask.Publish(A, gone=((P1, TierCode.DEVICE),)))
    assert group(world) == {P1: 0}
    world.ask(ask.Drop(P1, B, TierCode.DEVICE))
    assert group(world) == {}


def test_a_group_forgets_what_a_session_went_on_from(world: World) -> None:
    world.join(A)
    mine = world.ask(ask.Bind(S1, A))
    for version, tip in enumerate((P1, P2), start=1):
        told = ask.Advance(S1, A, mine.epoch, version, tip, 512 * version, group="repo:ownerserve")
        assert isinstance(world.ask(told), ask.Advanced)
    assert set(group(world)) == {P1, P2}
    assert world.ask(ask.Publish(A, left=((P1, TierCode.DEVICE),))) == ask.Published()
    assert set(group(world)) == {P2}
    world.ask(ask.Publish(A, gone=((P2, TierCode.DEVICE),)))
    world.ask(ask.EndSession(S1, A, mine.epoch))
    assert group(world) == {}


# ---- what goes


def test_what_a_session_went_on_from_stays_known_while_a_fork_stands_on_it(world: World) -> None:
    world.join(A, B)
    claim(world, A, S1, P1)
    child = world.ask(ask.Bind(S2, B, parent=S1))
    mine = world.ask(ask.Bind(S1, A))
    world.ask(ask.Advance(S1, A, mine.epoch, 2, P2, 1024))
    left = ask.Publish(A, left=((P1, TierCode.DEVICE), (P3, TierCode.DEVICE)))
    assert world.ask(left).forked == ((P1, TierCode.DEVICE),)
    assert world.ask(ask.Lookup((P1,))).locations == ((A, TierCode.DEVICE, MAIN),)
    world.ask(ask.EndSession(S2, B, child.epoch))
    assert world.ask(left).forked == ()
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)


def test_a_lost_last_copy_is_told_once(world: World) -> None:
    world.join(A, B)
    claim(world, A, S1, P1)
    hold(world, A, P1, TierCode.DISK)
    hold(world, B, P1, TierCode.HOST)
    hold(world, A, P2, TierCode.HOST)
    away = ask.Publish(A, gone=((P1, TierCode.DEVICE), (P2, TierCode.HOST)))
    assert world.ask(away).lost == (), "there are others, and nobody stands on the second"
    world.ask(ask.Retire(B))
    last = ask.Publish(A, gone=((P1, TierCode.DISK),))
    assert world.ask(last).lost == (P1,)
    assert world.ask(last).lost == ()
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)


def test_a_copy_that_comes_back_may_be_lost_again(world: World) -> None:
    world.join(A)
    claim(world, A, S1, P1)
    for _ in range(2):
        assert world.ask(ask.Publish(A, gone=((P1, TierCode.DEVICE),))).lost == (P1,)
        hold(world, A, P1, TierCode.DEVICE)


def test_a_session_stands_on_its_tip_also_when_its_extent_is_told_after_it(world: World) -> None:
    world.join(A)
    mine = world.ask(ask.Bind(S1, A))
    world.directory.forget()
    world.join(A)
    held = ask.HeldSession(S1, 3, P1, 512, mine.epoch)
    assert world.ask(ask.Publish(A, sessions=(held,))).adopted == (S1,)
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)
    hold(world, A, P1, TierCode.DEVICE)
    found = world.ask(ask.Lookup((P1,)))
    assert (found.refs, found.tokens) == (1, 512)
    assert world.ask(ask.FindSession(S1)).prefix_hash == P1
