"""The router's copy of who holds what: forks, restarts, lost owners, what is told from outside."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ownerserve.kv.ids import PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, PlacementAction, Term, Tier
from ownerserve.plan.cost.prices import Medium
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import (
    Aborted,
    Arrive,
    Claimed,
    Done,
    Down,
    Gone,
    Refusal,
    Refuse,
    Reported,
    SessionEnd,
    Stamped,
    WorkerDown,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.sessions import CLEAN_MIN, Prefix, PrefixIndex, Use
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile
from tests.support.router.fleets import ABLE, SPEED, dispatched, raise_up, served, unit

HASH = PrefixHash(b"h" * 32)
PARENT = SessionId("parent")


@pytest.fixture(params=["ear", "ownerserve"])
def policy(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def state(policy: str) -> RouterState:
    state = RouterState(make_policy(policy))
    raise_up(state, "w0", "w1", "w2")
    return state


def busy(state: RouterState, name: str, now: float, *, pending: int = 10**6, life: int = 1) -> None:
    from tests.support.router.fleets import status

    state.handle(Stamped(status(name, now, pending=pending, incarnation=life)), now)


def test_a_fork_starts_where_the_shared_prefix_lies(state: RouterState) -> None:
    first = served(state, "parent", 1.0, tokens=50_000)
    fork = dispatched(state, "child", 3.0, prompt_bytes=4 * 50_500, parent=PARENT)
    assert (fork.worker, fork.reason) == (first.worker, DispatchReason.FORK)
    assert fork.decision.cached_tokens == 50_010
    assert fork.prefill_tokens == 490


def test_only_the_shared_part_of_a_parent_counts(state: RouterState) -> None:
    served(state, "parent", 1.0, tokens=50_000)
    fork = dispatched(
        state, "child", 3.0, prompt_bytes=4 * 50_000, parent=PARENT, shared_bytes=4 * 20_000
    )
    assert fork.decision.cached_tokens == 20_000


def test_a_hot_prefix_gets_a_read_only_replica_that_later_forks_use(state: RouterState) -> None:
    home = served(state, "parent", 1.0, tokens=50_000).worker
    busy(state, home, 3.0)
    replica = served(state, "child-1", 3.1, tokens=50_500, parent=PARENT)
    assert replica.worker != home
    assert (replica.reason, replica.decision.action) == (
        DispatchReason.REPLICA, PlacementAction.ARTIFACT_FETCH,
    )  # fmt: skip
    for other in {"w0", "w1", "w2"} - {home, replica.worker}:
        busy(state, other, 5.0)
    again = dispatched(state, "child-2", 5.1, prompt_bytes=4 * 50_500, parent=PARENT)
    assert (again.worker, again.reason) == (replica.worker, DispatchReason.FORK)
    assert again.decision.cached_tokens == 50_010


def test_forks_are_copy_on_write(state: RouterState) -> None:
    served(state, "parent", 1.0, tokens=50_000)
    served(state, "child", 3.0, tokens=60_000, parent=PARENT)
    # Neither sees what the other added.
    parent = dispatched(state, "parent", 5.0, prompt_bytes=4 * 51_000)
    assert parent.decision.cached_tokens == 50_010
    state.handle(Done(parent.receipt, Usage(51_000, 10, 0)), 6.0)
    child = dispatched(state, "child", 7.0, prompt_bytes=4 * 61_000)
    assert child.decision.cached_tokens == 60_010
    state.handle(Done(child.receipt, Usage(61_000, 10, 0)), 8.0)
    state.handle(SessionEnd(PARENT), 9.0)
    state.check()


def test_a_restart_drops_what_was_volatile_at_once(state: RouterState) -> None:
    owner = served(state, "s", 1.0, tokens=50_000).worker
    busy(state, owner, 3.0, pending=0, life=2)  # the stamp of a new life is the first to tell
    turn = dispatched(state, "s", 4.0, prompt_bytes=4 * 50_500)
    assert (turn.reason, turn.decision.cached_tokens) == (DispatchReason.OWNER_LOST, 0)
    state.check()


def test_a_blip_of_the_same_life_loses_nothing(state: RouterState) -> None:
    owner = served(state, "s", 1.0, tokens=50_000).worker
    state.handle(WorkerDown(owner, Down.UNHEALTHY), 2.0)
    raise_up(state, owner)
    assert dispatched(state, "s", 3.0, prompt_bytes=4 * 50_500).reason is DispatchReason.OWNER


def test_a_restarted_owners_disk_brings_the_session_back(state: RouterState) -> None:
    owner = served(state, "s", 1.0, tokens=50_000).worker
    state.handle(Reported(unit(owner), Tier.DISK, HASH, 50_000, SessionId("s")), 2.0)
    raise_up(state, owner, life=2)
    turn = dispatched(state, "s", 3.0, prompt_bytes=4 * 50_500)
    assert (turn.worker, turn.reason) == (owner, DispatchReason.RECOVERED)
    assert turn.decision.action is PlacementAction.TAIL_RECOMPUTE
    assert turn.decision.cached_tokens == 50_000


@pytest.mark.parametrize(
    ("step_ms", "goes", "action"),
    [
        (1.5, "home", PlacementAction.TAIL_RECOMPUTE),  # ten steps: 5 ms, and the way takes 10
        (3.0, "other", PlacementAction.ARTIFACT_FETCH),
    ],
)
def test_a_restarted_owners_session_goes_home_unless_it_is_slower_by_more_than_the_way(
    policy: str, step_ms: float, goes: str, action: PlacementAction
) -> None:
    """By what both have measured; one that has not yet in its new life is taken for its like."""
    state = RouterState(make_policy(policy))
    alike = replace(ABLE, spec_digest="spec", lends=frozenset({Tier.DISK}))
    unmeasured = replace(alike, is_prefill_measured=False, are_steps_measured=False)
    raise_up(state, "w0", "w1", profile=alike)
    home = served(state, "s", 1.0, tokens=50_000).worker
    (other,) = {"w0", "w1"} - {home}
    state.handle(Reported(unit(home), Tier.DISK, HASH, 50_000, SessionId("s")), 2.0)
    slow = replace(SPEED, step_ms=step_ms)
    raise_up(state, home, profile=replace(unmeasured, speed=slow), life=2)
    turn = dispatched(state, "s", 3.0, prompt_bytes=4 * 50_500)
    assert (turn.worker, turn.reason) == (home, DispatchReason.RECOVERED)
    assert turn.decision.action is PlacementAction.TAIL_RECOMPUTE
    state.handle(Aborted(turn.receipt), 4.0)
    raise_up(state, home, profile=replace(alike, speed=slow), life=2)
    turn = dispatched(state, "s", 5.0, prompt_bytes=4 * 50_500)
    assert turn.worker == {"home": home, "other": other}[goes]
    assert (turn.reason, turn.decision.action) == (DispatchReason.RECOVERED, action)
    source = turn.decision.source
    assert source is not None
    assert (source.worker, source.tier) == (state.fleet[WorkerId(home)], Tier.DISK)
    state.check()


DEAR = replace(ABLE, speed=replace(SPEED, media={**SPEED.media, Tier.DISK: Medium(1e6, 1e6)}))
"""Loads from its disk take longer than it computes."""


def test_a_copy_that_is_dearer_than_computing_is_no_loss_and_no_recovery(
    state: RouterState,
) -> None:
    owner = served(state, "s", 1.0, tokens=50_000).worker
    raise_up(state, "w0", "w1", "w2", profile=DEAR)
    state.handle(Reported(unit(owner), Tier.DISK, HASH, 50_000, SessionId("s")), 2.0)
    raise_up(state, owner, profile=DEAR, life=2)
    turn = dispatched(state, "s", 3.0, prompt_bytes=4 * 50_500)
    assert (turn.reason, turn.decision.cached_tokens) == (DispatchReason.RECOMPUTED, 0)


@pytest.mark.parametrize(
    ("profile", "use", "reason", "expected"),
    [
        (DEAR, Use.LOADED, DispatchReason.RECOVERED, 50_000),
        (ABLE, Use.LEFT, DispatchReason.RECOMPUTED, 0),
    ],
)
def test_what_its_holder_says_that_it_does_with_a_copy_is_expected(
    profile: Profile, use: Use, reason: DispatchReason, expected: int
) -> None:
    """Whatever it would cost by the router's prices; until something new is told of the copy."""
    state = RouterState(make_policy("ownerserve"))
    raise_up(state, "w0", profile=profile)
    owner = served(state, "s", 1.0, tokens=50_000).worker
    raise_up(state, owner, profile=profile, life=2)
    held = Reported(unit(owner, 2), Tier.DISK, HASH, 50_000, SessionId("s"), use)
    state.handle(held, 2.0)
    turn = dispatched(state, "s", 3.0, prompt_bytes=4 * 50_500)
    assert (turn.reason, turn.decision.cached_tokens) == (reason, expected)
    state.handle(Aborted(turn.receipt), 4.0)
    state.handle(replace(held, use=Use.BY_PRICE), 5.0)
    again = dispatched(state, "s", 6.0, prompt_bytes=4 * 50_500)
    assert again.decision.cached_tokens == 50_000 - expected
    state.check()


def test_a_lost_owners_session_comes_back_from_the_shared_store(state: RouterState) -> None:
    owner = served(state, "s", 1.0, tokens=50_000).worker
    state.handle(Reported(unit(owner), Tier.DISK, HASH, 50_000, SessionId("s")), 2.0)
    state.handle(Reported(None, Tier.REMOTE, HASH, 49_000), 2.0)
    state.handle(WorkerDown(owner, Down.UNREACHABLE), 3.0)
    turn = dispatched(state, "s", 4.0, prompt_bytes=4 * 50_500)
    assert turn.worker != owner
    assert (turn.reason, turn.decision.action) == (
        DispatchReason.RECOVERED, PlacementAction.TAIL_RECOMPUTE,
    )  # fmt: skip
    assert turn.decision.cached_tokens == 49_000


def test_without_any_copy_it_starts_from_the_token_log(state: RouterState) -> None:
    owner = served(state, "s", 1.0, tokens=50_000).worker
    state.handle(Reported(None, Tier.REMOTE, HASH, 49_000, SessionId("s")), 2.0)
    state.handle(Gone(None, Tier.REMOTE, HASH), 2.5)
    state.handle(WorkerDown(owner, Down.UNREACHABLE), 3.0)
    turn = dispatched(state, "s", 4.0, prompt_bytes=4 * 50_500)
    assert (turn.reason, turn.prefill_tokens) == (DispatchReason.OWNER_LOST, 50_500)


def test_what_an_earlier_life_reports_is_ignored(state: RouterState) -> None:
    owner = served(state, "s", 1.0, tokens=50_000).worker
    raise_up(state, owner, life=2)
    state.handle(Reported(unit(owner, 1), Tier.DEVICE, HASH, 50_000, SessionId("s")), 2.0)
    assert dispatched(state, "s", 3.0, prompt_bytes=4 * 50_500).decision.cached_tokens == 0


def test_the_directorys_word_binds_unless_it_is_older(state: RouterState) -> None:
    owner = served(state, "s", 1.0, tokens=50_000).worker
    other = min({"w0", "w1", "w2"} - {owner})
    early, late = (Epoch(Term(1, 0), counter) for counter in (1, 2))
    state.handle(Claimed(SessionId("s"), unit(other), late), 3.0)
    state.handle(Claimed(SessionId("s"), unit(owner), early), 4.0)
    state.check()
    assert dispatched(state, "s", 5.0, prompt_bytes=4 * 50_500).worker == other


def test_models_and_adapters_have_candidates_of_their_own() -> None:
    state = RouterState(make_policy("ownerserve"))
    raise_up(state, "big", profile=Profile(model="big"))
    raise_up(state, "small", profile=Profile(model="small", adapters=frozenset({"tuned"})))
    for model, worker in (("big", "big"), ("small", "small"), ("tuned", "small")):
        assert dispatched(state, "s", 1.0, model=model).worker == worker
    assert state.handle(Arrive(SessionId("s"), 10, model="other"), 2.0) == Refuse(
        Refusal.NO_SUCH_MODEL
    )
    raise_up(state, "any", profile=Profile())
    assert dispatched(state, "s", 3.0, model="other").worker == "any"
    assert dispatched(state, "t", 3.0, model="big").worker in ("big", "any")
    state.check()


def test_state_does_not_move_between_unlike_specs() -> None:
    state = RouterState(make_policy("ear"))
    raise_up(state, "fp8", profile=Profile(spec_digest="fp8", actions=ABLE.actions))
    owner = served(state, "s", 1.0, tokens=50_000).worker
    raise_up(state, "bf16", profile=Profile(spec_digest="bf16", actions=ABLE.actions))
    busy(state, owner, 3.0)
    turn = dispatched(state, "s", 4.0, prompt_bytes=4 * 50_500)
    assert turn.decision.action is PlacementAction.COLOCATED_PREFILL
    assert turn.decision.source is None


def test_ranks_of_a_worker_are_owners_of_their_own() -> None:
    from ownerserve.kv.ids import Incarnation
    from ownerserve.router.messages import WorkerUp

    state = RouterState(make_policy("sticky"))
    for rank in (0, 1):
        state.handle(WorkerUp(WorkerId("w"), rank, Incarnation(1)), 0.0)
    ranks = {session: served(state, session, 1.0, tokens=1000).dp_rank for session in ("a", "b")}
    assert sorted(ranks.values()) == [0, 1]
    for session, rank in ranks.items():
        assert dispatched(state, session, 3.0).dp_rank == rank
    state.handle(WorkerDown(WorkerId("w"), Down.UNREACHABLE), 4.0)
    assert state.handle(Arrive(SessionId("a"), 10), 5.0) == Refuse(Refusal.NO_WORKER)


def test_names_of_prefixes_that_nobody_stands_on_do_not_pile_up() -> None:
    index, kept = PrefixIndex(), Prefix()
    index.name(kept, HASH)
    for number in range(3 * CLEAN_MIN):
        left = Prefix()
        index.name(left, PrefixHash(number.to_bytes(32, "big")))
        left.refs = 0
        assert index.get(PrefixHash(number.to_bytes(32, "big"))) is None
    assert len(index) <= CLEAN_MIN
    assert index.get(HASH) is kept


def test_a_prefix_has_one_name_at_a_time() -> None:
    index, prefix = PrefixIndex(), Prefix()
    later = PrefixHash(b"l" * 32)
    index.name(prefix, HASH)
    index.name(prefix, later)
    assert index.get(HASH) is None and index.get(later) is prefix


def test_a_late_word_does_not_bring_an_ended_session_back() -> None:
    state = RouterState(make_policy("ear"))
    raise_up(state, "w")
    owner = served(state, "s", 1.0, tokens=50_000).worker
    state.handle(SessionEnd(SessionId("s")), 2.0)
    state.handle(Reported(unit(owner), Tier.DISK, HASH, 50_000, SessionId("s")), 3.0)
    assert state.sessions.get(SessionId("s")) is None


def test_an_edited_history_has_no_copies_but_where_it_was_computed() -> None:
    state = RouterState(make_policy("ear"))
    raise_up(state, "w")
    worker = state.fleet[WorkerId("w")]
    prefix = Prefix()
    prefix.grow(worker, 50_000)
    prefix.hold(None, Tier.REMOTE, 50_000)
    prefix.grow(worker, 50_700)
    assert {copy.tier for copy in prefix.copies} == {Tier.DEVICE, Tier.REMOTE}
    prefix.grow(worker, 10_000)
    assert [(copy.worker, copy.tier, copy.tokens) for copy in prefix.copies] == [
        (worker, Tier.DEVICE, 10_000)
    ]
