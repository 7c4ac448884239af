"""One suite for every backend: what a directory answers, told as scenarios."""

from __future__ import annotations

from ownerserve.directory import messages as ask
from ownerserve.directory.messages import DirectoryRefusal
from ownerserve.directory.rules import TierCode
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.messages import NO_UNIT, Epoch, Term
from tests.support.directory.contract import (
    LEASE_S,
    MAIN,
    P1,
    P2,
    S1,
    S2,
    A,
    B,
    World,
    claim,
    extents,
    hold,
    refused,
    unit,
)

# ---- sessions


def test_a_session_has_one_owner_while_its_lease_runs(world: World) -> None:
    world.join(A, B)
    first = world.ask(ask.Bind(S1, A))
    assert isinstance(first, ask.Bound) and first.version == 0
    second = world.ask(ask.Bind(S1, B))
    assert isinstance(second, ask.HeldBy) and second.owner == A
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
    assert refused(world.ask(ask.RenewLease(A)), DirectoryRefusal.LEASE_LAPSED)


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
    assert refused(
        world.ask(ask.Transfer(S2, A, B, first.epoch, 0)), DirectoryRefusal.UNKNOWN_SESSION
    )


def test_a_session_is_not_handed_to_one_who_is_not_there(world: World) -> None:
    world.join(A)
    first = world.ask(ask.Bind(S1, A))
    gone = ask.Transfer(S1, A, B, first.epoch, first.version)
    assert refused(world.ask(gone), DirectoryRefusal.TARGET_NOT_LIVE)
    world.join(unit("b", 2))
    assert refused(world.ask(gone), DirectoryRefusal.TARGET_NOT_LIVE)


def test_what_its_owner_gives_up_to_nobody_is_whose_turn_comes_next(world: World) -> None:
    world.join(A, B)
    first = world.ask(ask.Bind(S1, A))
    world.ask(ask.Advance(S1, A, first.epoch, 1, P1, 64))
    freed = world.ask(ask.Transfer(S1, A, NO_UNIT, first.epoch, 1))
    assert isinstance(freed, ask.Bound) and freed.epoch > first.epoch
    found = world.ask(ask.FindSession(S1))
    assert (found.owner, found.owner_live, found.version) == (NO_UNIT, False, 1)
    late = ask.Advance(S1, A, first.epoch, 2, P2, 128)
    assert isinstance(world.ask(late), ask.Conflict)
    taken = world.ask(ask.Bind(S1, B))
    assert isinstance(taken, ask.Bound) and taken.epoch > freed.epoch and taken.version == 1


def test_ending_a_session_needs_its_epoch(world: World) -> None:
    world.join(A)
    first = world.ask(ask.Bind(S1, A))
    later = world.ask(ask.Bind(S1, A, seen=first.epoch))
    assert refused(world.ask(ask.EndSession(S1, A, first.epoch)), DirectoryRefusal.NOT_OWNER)
    assert isinstance(world.ask(ask.EndSession(S1, A, later.epoch)), ask.Ended)
    assert isinstance(world.ask(ask.FindSession(S1)), ask.Miss)
    assert isinstance(world.ask(ask.EndSession(S1, A, later.epoch)), ask.Ended)
    again = world.ask(ask.Bind(S1, A))
    assert again.epoch > later.epoch and again.version == 0


# ---- incarnations


def test_a_new_life_drops_at_once_what_the_former_held(world: World) -> None:
    world.join(A, B)
    world.ask(ask.Bind(S1, A))
    hold(world, A, P1, TierCode.DEVICE)
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Found)
    world.join(unit("a", 2))
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)
    assert isinstance(world.ask(ask.Bind(S1, B)), ask.Bound)
    for late in (ask.RenewLease(A), ask.Register(A), ask.Publish(A), ask.Bind(S2, A)):
        assert refused(world.ask(late), DirectoryRefusal.STALE_INCARNATION)


def test_a_new_lifes_store_is_readopted_by_its_inventory(world: World) -> None:
    world.join(A)
    first = claim(world, A, S1, P1)
    hold(world, A, P1, TierCode.DISK)
    reborn = unit("a", 2)
    world.join(reborn)
    assert isinstance(world.ask(ask.Lookup((P1,))), ask.Miss)  # not verified yet
    verified = ask.HeldExtent(P1, 512, TierCode.DISK, MAIN)
    assert isinstance(world.ask(ask.Publish(reborn, (verified,))), ask.Published)
    found = world.ask(ask.Lookup((P1,)))
    assert found.locations == ((reborn, TierCode.DISK, MAIN),) and found.owner is None
    assert claim(world, reborn, S1, P1).duty > first.duty


def test_a_former_life_that_came_first_after_amnesia_gives_way(world: World) -> None:
    world.join(unit("a", 2))
    world.directory.forget()
    world.join(unit("a", 1))
    assert refused(world.ask(ask.RenewLease(unit("a", 2))), DirectoryRefusal.UNKNOWN_HOLDER)
    world.join(unit("a", 2))
    assert refused(world.ask(ask.RenewLease(unit("a", 1))), DirectoryRefusal.STALE_INCARNATION)


def test_a_memory_that_knows_a_unit_by_a_late_message_renews_nothing(world: World) -> None:
    """It knows nothing of what the unit owns: that is reported first (schedule 141)."""
    before = world.ask(ask.Register(A))
    world.directory.forget()
    world.join(A)  # sent before, twice
    assert refused(
        world.ask(ask.RenewLease(A, None, before.memory)), DirectoryRefusal.UNKNOWN_HOLDER
    )
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
        ask.RenewLease(A),
        ask.Publish(A),
    ):
        assert refused(world.ask(request), DirectoryRefusal.UNKNOWN_HOLDER)


# ---- memory


def test_a_later_epoch_than_ours_starts_a_term_above_it(world: World) -> None:
    world.join(A, B)
    before = world.ask(ask.Bind(S1, A)).epoch
    above = Epoch(Term(before.term.ordinal + 7, 5), 99)
    assert refused(world.ask(ask.Bind(S2, B, seen=above)), DirectoryRefusal.REBUILDING)
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
    hold(world, A, P1, TierCode.DEVICE)
    mine = world.ask(ask.Bind(S1, A))
    status = world.directory.forget()
    assert status.opens_in_s > 0
    assert isinstance(world.ask(ask.FindSession(S1)), ask.Miss)
    assert refused(world.ask(ask.RenewLease(A)), DirectoryRefusal.UNKNOWN_HOLDER)
    world.join(A, B)
    assert refused(world.ask(ask.Bind(S2, B)), DirectoryRefusal.REBUILDING)
    held = ask.HeldSession(S1, mine.version, P1, 512, mine.epoch)
    extent = ask.HeldExtent(P1, 512, TierCode.DEVICE, MAIN)
    answer = world.ask(ask.Publish(A, (extent,), sessions=(held,)))
    assert answer == ask.Published((S1,))
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
        ask.HeldExtent(one, 512, tier, MAIN)
        for one in (P1, P2)
        for tier in (TierCode.HOST, TierCode.DISK)
    )
    for _ in range(2):
        assert world.ask(ask.Publish(A, extents)) == ask.Published()
    assert len(world.ask(ask.Lookup((P1,))).locations) == 2
    world.ask(ask.Publish(A, gone=((P1, TierCode.HOST), (P1, TierCode.DISK))))
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
    assert outcomes == [ask.Published()] * (len(parts) + 1)
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


def test_a_report_acts_on_the_reporters_own_grant_alone(world: World) -> None:
    world.join(A, B)
    mine = world.ask(ask.Bind(S1, A))
    told = ask.HeldSession(S1, mine.version + 5, P1, 512, mine.epoch)
    assert world.ask(ask.Publish(B, sessions=(told,))).adopted == ()
    found = world.ask(ask.FindSession(S1))
    assert (found.owner, found.version) == (A, mine.version)
    assert world.ask(ask.Publish(A, sessions=(told,))).adopted == (S1,)


def test_no_session_changes_hands_while_the_directory_is_rebuilt(world: World) -> None:
    world.join(A, B)
    mine = world.ask(ask.Bind(S1, A))
    world.directory.forget()
    world.join(A, B)
    held = ask.HeldSession(S1, mine.version, None, 0, mine.epoch)
    assert world.ask(ask.Publish(A, sessions=(held,))).adopted == (S1,)
    move = ask.Transfer(S1, A, B, mine.epoch, mine.version)
    assert refused(world.ask(move), DirectoryRefusal.REBUILDING)
    world.past_lease()
    world.join(A, B)
    moved = world.ask(move)
    assert isinstance(moved, ask.Bound) and moved.epoch > mine.epoch


def test_a_sweep_forgets_former_lives(world: World) -> None:
    world.join(A)
    hold(world, A, P1, TierCode.DEVICE)
    world.join(unit("a", 2))
    swept = sum(world.directory.sweep(100) for _ in range(5))
    assert swept == 1
    records = world.directory.status().records
    assert records is None or records.prefixes == 0


def test_a_sweep_forgets_wishes_for_former_lives(world: World) -> None:
    world.join(A, B)
    hold(world, A, P1, TierCode.DEVICE)
    world.ask(ask.ReplicateReadonly(P1, B.worker))
    assert sum(world.directory.sweep(100) for _ in range(5)) == 0
    world.join(unit("b", 2))
    assert sum(world.directory.sweep(100) for _ in range(5)) == 1
