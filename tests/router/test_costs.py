"""The cost function term by term, worked out by hand for round speeds (fleets.SPEED)."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import msgspec
import pytest

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.plan.cost.prices import Medium
from ownerserve.router.decision import RoutingRequest, TurnClass
from ownerserve.router.pricing import (
    PlacementPricer,
    options_at,
    peer_copy,
    prefills_for,
    stored_copy,
)
from ownerserve.router.settings import PRIOR, Settings, derive
from ownerserve.router.worker import DEFAULT_SPEED, EVERY_ACTION, EVERY_ENGINE, Profile, Worker
from tests.support.router.fleets import (
    ABLE,
    GIB,
    SPEED,
    fleet_of,
    load,
    on,
    owned,
    request,
    status,
    stored,
)

FREE = Settings(memory_ms_per_gib=0.0, duplicate_ms_per_gib=0.0, interference=0.0)
_APART = PlacementAction.REMOTE_PREFILL
WEIGHED = Settings(memory_ms_per_gib=100.0, duplicate_ms_per_gib=10.0, interference=0.5)


def pair(profile: Profile = ABLE) -> tuple[Worker, Worker]:
    one, two = fleet_of(profile, profile)
    return one, two


def test_queue_and_compute_at_the_owner() -> None:
    owner, _ = pair()
    load(owner, pending=3000)
    option = PlacementPricer(FREE).local(owned(owner, context=10_000, new=500), owner)
    assert option.queue_ms == pytest.approx(30.0)  # 3,000 tokens at 100 a ms
    assert option.compute_ms == pytest.approx(5.0 + 100.0)  # 500 tokens, 100 steps of 1 ms
    assert option.total_ms == pytest.approx(135.0)


def test_a_fetch_pays_the_network_and_a_restore_the_tier() -> None:
    owner, other = pair()
    turn = owned(owner, context=10_000, new=500)
    fetched = PlacementPricer(FREE).bring(
        turn, other, action=PlacementAction.ARTIFACT_FETCH, source=turn.copies[0]
    )
    assert fetched.network_ms == pytest.approx(10_000 * 1000 / 5e6)
    assert (fetched.restore_ms, fetched.compute_ms) == (0.0, pytest.approx(105.0))
    disk = on(other, 10_000, Tier.DISK)
    restored = PlacementPricer(FREE).bring(
        turn, other, action=PlacementAction.TAIL_RECOMPUTE, source=disk
    )
    assert restored.restore_ms == pytest.approx(10_000 * 1000 / 1e6)
    assert restored.network_ms == 0.0


def test_a_restore_computes_the_replay_again_and_only_once() -> None:
    replaying = Profile(speed=type(SPEED)(
        prefill=SPEED.prefill, step_ms=1.0, step_ms_per_sequence=0.0, media=SPEED.media,
        kv_bytes_per_token=1000.0, replay_tokens=2000,
    ), actions=ABLE.actions)  # fmt: skip
    owner, other = pair(replaying)
    turn = owned(owner, context=10_000, new=500)
    option = PlacementPricer(FREE).bring(
        turn, other, action=PlacementAction.ARTIFACT_FETCH, source=turn.copies[0]
    )
    assert option.restore_ms == pytest.approx(20.0)
    assert option.compute_ms == pytest.approx(105.0)


def test_memory_counts_what_is_newly_taken_as_far_as_it_is_full() -> None:
    owner, other = pair()
    for worker in (owner, other):
        worker.stamp(status(worker.id, 1.0, free=25 * GIB), 1.0)  # half full
    turn = owned(owner, context=10_000, new=500)
    pricer = PlacementPricer(WEIGHED)
    at_owner = pricer.local(turn, owner)
    assert at_owner.memory_ms == pytest.approx(100.0 * 600 * 1000 / GIB * 0.5)
    assert at_owner.duplicate_ms == 0.0
    elsewhere = pricer.local(turn, other)
    assert elsewhere.memory_ms == pytest.approx(100.0 * 10_600 * 1000 / GIB * 0.5)


def test_duplicates_are_priced_apart_and_a_migration_leaves_none() -> None:
    owner, other = pair()
    owner.stamp(status("w0", 1.0, free=0), 1.0)  # full
    turn = owned(owner, context=10_000, new=500)
    pricer, source = PlacementPricer(WEIGHED), turn.copies[0]
    fetched, migrated = (
        pricer.bring(turn, other, action=action, source=source)
        for action in (PlacementAction.ARTIFACT_FETCH, PlacementAction.STATE_MIGRATION)
    )
    assert fetched.duplicate_ms == pytest.approx(10.0 * 10_000 * 1000 / GIB)
    assert migrated.duplicate_ms == 0.0
    assert fetched.total_ms - migrated.total_ms == pytest.approx(fetched.duplicate_ms)


def test_interference_is_the_prefills_time_for_each_who_decodes() -> None:
    owner, _ = pair()
    load(owner, sequences=4)
    option = PlacementPricer(WEIGHED).local(owned(owner, context=10_000, new=500), owner)
    assert option.interference_ms == pytest.approx(0.5 * 5.0 * 4)


def test_prefill_apart_spares_the_decoding_worker() -> None:
    decode, prefill = pair()
    load(decode, pending=5000, sequences=10)
    option = PlacementPricer(WEIGHED).apart(request(20_000), decode, prefill)
    assert option.queue_ms == 0.0
    assert option.interference_ms == pytest.approx(0.5 * 0.01 * 11), "of the prompt's end alone"
    assert option.network_ms == pytest.approx(20_000 * 1000 / 5e6)
    on_the_spot = PlacementPricer(WEIGHED).local(request(20_000), decode)
    assert on_the_spot.interference_ms == pytest.approx(0.5 * 200.0 * 11)
    assert option.total_ms < on_the_spot.total_ms


def test_a_prompt_computed_apart_waits_for_both_and_its_end_is_computed_on_the_spot() -> None:
    decode, prefill = pair()
    load(prefill, pending=3000)
    apart = partial(PlacementPricer(FREE).apart, request(20_000), decode, prefill)
    assert apart().queue_ms == pytest.approx(30.0)
    assert apart().compute_ms == pytest.approx(200.0 + 0.01 + 100.0)  # and 100 steps of 1 ms
    load(decode, pending=20_000)  # over when the state comes, 30 + 200 + 4 ms later
    assert apart().queue_ms == pytest.approx(30.0)
    load(decode, pending=10_000)
    assert apart().queue_ms == pytest.approx(30.0 + 300.0 - 234.0)


def test_a_prompt_that_is_freed_once_it_is_read_is_not_held_twice() -> None:
    decode, prefill = pair()
    prefill.stamp(status(prefill.id, 1.0, free=0), 1.0)  # full
    apart = partial(PlacementPricer(WEIGHED).apart, request(20_000), decode, prefill)
    kept_ms = apart().duplicate_ms
    prefill.profile = msgspec.structs.replace(prefill.profile, frees_prompts=True)
    assert apart().duplicate_ms == 0.0 and kept_ms > 0.0


def test_bytes_come_at_the_pace_that_the_reader_has_measured() -> None:
    reads = msgspec.structs.replace(SPEED, media={**SPEED.media, Tier.PEER: Medium(2.0, 1e6)})
    decode, prefill = fleet_of(Profile(speed=reads, actions=EVERY_ACTION), ABLE)
    option = PlacementPricer(FREE).apart(request(20_000), decode, prefill)
    assert option.network_ms == pytest.approx(2.0 + 20_000 * 1000 / 1e6)


@pytest.mark.parametrize(
    ("reads", "lends", "is_able"),
    [
        ((_APART,), {Tier.DEVICE}, True),
        ((), {Tier.DEVICE}, False),  # nobody can send it state
        ((_APART,), set(), False),  # a worker of ours without a node lends nothing
    ],
)
def test_who_computes_for_another_sends_and_is_read(
    reads: tuple[PlacementAction, ...], lends: set[Tier], *, is_able: bool
) -> None:
    decode, prefill = fleet_of(
        Profile(speed=SPEED, actions=EVERY_ENGINE | set(reads)),
        Profile(speed=SPEED, actions=EVERY_ENGINE, lends=frozenset(lends)),
    )
    assert prefills_for(prefill, decode) is is_able
    assert not prefills_for(decode, decode)


def test_the_defaults_come_out_of_the_procedure() -> None:
    derived, defaults = derive(DEFAULT_SPEED, PRIOR, spilled_to=Tier.DISK), Settings()
    for name in Settings.__struct_fields__:
        assert getattr(derived, name) == pytest.approx(getattr(defaults, name), rel=0.01), name


def test_the_procedure_follows_the_hardware() -> None:
    quick = type(DEFAULT_SPEED)(
        prefill=DEFAULT_SPEED.prefill.scaled(0.001), step_ms=6.0, step_ms_per_sequence=1.0,
        media=DEFAULT_SPEED.media, kv_bytes_per_token=98304.0,
    )  # fmt: skip
    slow, fast = (derive(one, spilled_to=Tier.DISK) for one in (DEFAULT_SPEED, quick))
    assert fast.hot_ms < slow.hot_ms  # computing anew has become the cheaper move
    assert fast.memory_ms_per_gib < slow.memory_ms_per_gib
    assert fast.interference < slow.interference


def test_copies_under_another_spec_are_no_way_to_run_a_turn() -> None:
    fleet = fleet_of(ABLE, ABLE)
    owner, other = fleet
    load(owner, pending=3000)
    turn = msgspec.structs.replace(
        owned(owner, context=10_000, new=500), copies=(stored(10_000), on(owner, 10_000))
    )
    foreign = msgspec.structs.replace(turn, spec_digest="before the new weights")

    def actions(asked: RoutingRequest) -> set[PlacementAction]:
        options = options_at(
            asked, other, pricer=PlacementPricer(FREE), fleet=fleet.candidates(None)
        )
        return {option.action for option in options}

    assert PlacementAction.TAIL_RECOMPUTE in actions(turn)
    assert actions(foreign) == {PlacementAction.COLOCATED_PREFILL}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_of_equally_long_copies_the_one_that_is_loaded_soonest_is_priced(
    order: tuple[int, ...],
) -> None:
    """A worker loads what its host memory has from there, wherever else it lies: it was priced as
    its disk, whichever tier was heard of first."""
    fleet = fleet_of(ABLE)
    (worker,) = fleet
    tiers = (on(worker, 50_000, Tier.HOST), on(worker, 50_000, Tier.DISK), stored(50_000))
    turn = request(
        50_500, owner=worker, turns=3, turn=TurnClass.COLD_RESUME,
        copies=tuple(tiers[at] for at in order), known_tokens=50_000,
    )  # fmt: skip
    found = stored_copy(turn, worker)
    assert found is not None and found.tier is Tier.HOST
    longer = msgspec.structs.replace(turn, copies=(tiers[0], on(worker, 50_400, Tier.DISK)))
    found = stored_copy(longer, worker)
    assert found is not None and found.tier is Tier.DISK, "more of the prompt comes first"


@pytest.mark.parametrize("tiers", list(permutations((Tier.HOST, Tier.DEVICE))))
def test_a_peer_sends_what_its_device_has_from_there(tiers: tuple[Tier, ...]) -> None:
    owner, other = pair()
    copies = tuple(on(owner, 10_000, tier) for tier in tiers)
    turn = request(10_500, owner=owner, turns=3, copies=copies, known_tokens=10_000)
    found = peer_copy(turn, other)
    assert found is not None and found.tier is Tier.DEVICE


@pytest.mark.parametrize(
    ("lends", "found"),
    [((Tier.DEVICE, Tier.HOST), Tier.HOST), ((Tier.DEVICE,), Tier.DEVICE), ((), None)],
)
def test_a_peer_sends_what_it_lends_alone(lends: tuple[Tier, ...], found: Tier | None) -> None:
    owner, other = pair()
    owner.profile = msgspec.structs.replace(owner.profile, lends=frozenset(lends))
    copies = (on(owner, 9_000, Tier.DEVICE), on(owner, 10_000, Tier.HOST))
    turn = request(10_500, owner=owner, turns=3, copies=copies, known_tokens=10_000)
    copy = peer_copy(turn, other)
    assert (None if copy is None else copy.tier) is found
