"""Scenarios of a node in an engine that owns its blocks: what is offered, brought and saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import msgspec
import pytest

from ownerserve.cache.effects import MoveBorder
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import (
    Arrival,
    CacheRefusal,
    CacheRefused,
    Inserted,
    Match,
    NoRoom,
    Replay,
    RestorablePoint,
    Restore,
    SlotsReserved,
    Verified,
)
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import TOKEN_BYTES, Identity, Numerics, Packed, pack
from ownerserve.kv.specs import Coverage
from ownerserve.node.hosted_state import HostedNodeState
from ownerserve.node.restore.sources import Later
from ownerserve.node.retention.saves import Capture, SaveLimits, Saves
from ownerserve.node.vocabulary.events import (
    Computing,
    DeviceAsked,
    DevicePlaced,
    DropOperation,
    Effect,
    FetchAndFill,
    Filled,
    FindRecords,
    Kept,
    NotFetched,
    NotKept,
    Offer,
    Pin,
    RecordsFound,
    RestoreOutcome,
    SessionOver,
    Start,
    StoreCopy,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import (
    Inside,
    LeadForm,
    RecordNames,
    Tip,
    records_of,
)
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium, Prices
from ownerserve.plan.inputs import Abilities, ModelState, Overlap, RestoreQuery
from ownerserve.plan.outcome import RestorePlan
from ownerserve.plan.restore import Planner
from ownerserve.plan.swa.branches import Branches, PointCost
from ownerserve.plan.swa.checkpoints import CheckpointPolicy, TurnEnd
from ownerserve.store.format.model import ID_BYTES, MissReason

B = 16
CELL = 4
TURN = TurnId("t")
SESSION = SessionId("s")
LAYOUT = Layout(
    B,
    (
        Component(name="dense", coverage=Coverage.RANGE, slot_bytes=64, payload_bytes=64),
        Component(name="swa", coverage=Coverage.POINT, slot_bytes=32, payload_bytes=32),
    ),
)
WINDOWS_ONLY = Layout(
    B, (Component(name="swa", coverage=Coverage.POINT, slot_bytes=32, payload_bytes=32),)
)
GUEST = Abilities(
    can_replay=False,
    can_reserve=False,
    per_group_hit=False,
    can_insert=False,
    landing_tier=Tier.DEVICE,
    overlap=Overlap.NONE,
)
LOADS_PAY = Defaults("test", Coefficients(0.0, 10.0, 0.0), {Tier.DISK: Medium(0.1, 1e9)})


class EngineBlocks:
    """A Device that answers only after its engine did."""

    def __init__(self) -> None:
        self.layout = LAYOUT
        self.hit: int | None = None
        self.resident = 0
        self.has_blocks = False
        self.open: dict[int, Arrival] = {}
        self.held: set[int] = set()
        self._tickets = count(1)

    def match(self, turn_id: TurnId, tokens: Packed) -> Match | Later:
        if self.hit is None:
            return Later()
        points = (RestorablePoint(self.hit),) if self.hit else ()
        if self.resident > self.hit:
            points = (RestorablePoint(self.resident, LAYOUT.point_names), *points)
        return Match(max(self.hit, self.resident), points)

    def shortage(self, blocks: int) -> None:
        """The engine does not say."""

    def give_way(self, short: NoRoom) -> tuple[MoveBorder, ...]:
        return ()

    def reserve(self, turn_id: TurnId, arrival: Arrival, now: float) -> SlotsReserved | Later:
        if not self.has_blocks:
            return Later()
        assert self.hit is not None
        ticket = next(self._tickets)
        self.open[ticket] = arrival
        end = len(arrival.tokens) // TOKEN_BYTES
        points = {at: {"swa": at} for at in arrival.points}
        start = min(max(self.hit, self.resident), end - B)
        return SlotsReserved(ticket, start, tuple(range(start // B, end // B)), points)

    def commit(self, ticket: int, parts: Sequence[Verified], now: float) -> Inserted | CacheRefused:
        arrival = self.open.pop(ticket)
        if not parts or not all(part.is_as_stated for part in parts):
            return CacheRefused(CacheRefusal.DIGEST_MISMATCH)
        return Inserted(len(arrival.tokens) // TOKEN_BYTES, 0)

    def abort(self, ticket: int, now: float) -> None:
        del self.open[ticket]
        self.held.add(ticket)

    def quiet(self, ticket: int) -> None:
        self.held.remove(ticket)


class CountedPlanner(Planner):
    plans = 0

    def plan(self, query: RestoreQuery, prices: Prices) -> RestorePlan:
        self.plans += 1
        return super().plan(query, prices)


class Guest:
    """A node, its device, and a store that is a dictionary of what was copied."""

    def __init__(
        self,
        *,
        limits: SaveLimits | None = None,
        exact_end: bool = False,
        layout: Layout = LAYOUT,
        policy: CheckpointPolicy | None = None,
        lead: LeadForm | None = None,
    ) -> None:
        identity = Identity(
            model_id="m",
            weights="w",
            tokenizer="t",
            spec_digest=b"",
            numerics=Numerics(dtype="float32"),
            tenant_salt=bytes(32),
        )
        names = RecordNames(identity, layout, engine="test/1", blocks=CELL, lead=lead)
        grows = 4.0 if names.range_names else 0.0
        model = ModelState(layers=2, block_tokens=B, range_bytes_per_token=grows, point_bytes=32)
        self.planner = CountedPlanner(model, GUEST)
        self.device = EngineBlocks()
        self.stored: dict[bytes, StoreCopy] = {}
        operations = Operations()
        self.state = HostedNodeState(
            self.device,
            operations,
            planner=self.planner,
            costs=CostModel(LOADS_PAY),
            saves=Saves(
                names,
                operations,
                policy=policy or TurnEnd(),
                capture=Capture(exact_end=exact_end),
                limits=limits,
            ),
            settings=NodeSettings(record_blocks=CELL, least_fetched=1, attempts=1),
        )

    def handle(self, event: object, now: float = 0.0) -> list[Effect]:
        return self.state.handle(event, now)  # type: ignore[arg-type]

    def arrive(self, tokens: list[int]) -> None:
        """Arrival, and the store's answer to what is asked."""
        [find] = self.handle(TurnArrived(TURN, SESSION, pack(tokens)))
        while isinstance(find, FindRecords):  # it may look on
            held = {id_: Tier.DISK for id_ in find.ids if id_ in self.stored}
            inside = self._inside(find.boundaries)
            held |= {item.meta.id: Tier.DISK for item in inside}
            following = self.handle(RecordsFound(find.operation_id, held, inside))
            find = following[0] if following else None
            assert find is None or isinstance(find, FindRecords | Start) or not held

    def _inside(self, boundaries: Iterable[bytes]) -> tuple[Inside, ...]:
        """As the store's index answers: the records that hold the first boundary that any does."""
        for digest in boundaries:
            found = [
                Inside(copy.meta, 1 + at // ID_BYTES, digest)
                for copy in self.stored.values()
                for ends in (copy.meta.boundaries + copy.meta.prefix_hash,)
                for at in range(0, len(ends), ID_BYTES)
                if ends[at : at + ID_BYTES] == digest
            ]
            if found:
                return tuple(found)
        return ()

    def ask(self, hit: int) -> int | None:
        """What is offered beyond `hit`; None: nothing."""
        self.device.hit = hit
        offers = [e for e in self.handle(DeviceAsked(TURN)) if isinstance(e, Offer)]
        return offers[0].position if offers else None

    def place(self) -> FetchAndFill:
        self.device.has_blocks = True
        [bring] = self.handle(DevicePlaced(TURN))
        self.device.has_blocks = False
        assert isinstance(bring, FetchAndFill)
        return bring

    def compute(self, tokens: list[int], *steps: int) -> list[Effect]:
        """Steps that end at these positions; everything copied is kept at once."""
        effects, start = list[Effect](), 0
        for end in steps:
            known = self.state.saves.tokens(TURN) or 0
            event = Computing(TURN, start, end, pack(tokens[known:end]))
            effects += self.keep(self.handle(event))
            start = end
        return effects

    def keep(self, effects: Iterable[Effect]) -> list[Effect]:
        kept = list(effects)
        for effect in kept:
            if isinstance(effect, StoreCopy):
                assert effect.meta.id not in self.stored, "written twice"
                self.stored[effect.meta.id] = effect
                self.handle(Kept(effect.operation_id))
        return kept

    def run(self, tokens: list[int], *, prompt: int, steps: Iterable[int]) -> list[Effect]:
        """A whole turn of `tokens`, of which `prompt` are the prompt."""
        self.device.hit = None
        self.arrive(tokens[:prompt])
        effects = self.compute(tokens, *steps)
        effects += self.keep(self.handle(TurnEnded(TURN, 0, prompt, len(tokens))))
        self.handle(TurnGone(TURN))
        return effects


def copies(effects: Iterable[Effect]) -> list[tuple[str, int, int]]:
    """Component and token range (a point: twice its position) of every copy, in order."""
    found = [effect.meta for effect in effects if isinstance(effect, StoreCopy)]
    return [(meta.component, meta.first_token, meta.end_token) for meta in found]


def stored_guest(tokens: list[int]) -> Guest:
    guest = Guest()
    guest.run(tokens, prompt=len(tokens), steps=[len(tokens)])
    guest.device.hit = None
    return guest


PROMPT = list(range(1, 201))  # 12 blocks and 8 tokens


def test_an_unknown_prompt_is_looked_up_once_and_computes() -> None:
    guest = Guest()
    guest.arrive(PROMPT)
    assert guest.ask(0) is None
    assert not guest.state.is_waiting(TURN)
    report = guest.state.report(TURN)
    assert report is not None and report.outcome is RestoreOutcome.NOTHING_STORED


def test_before_the_store_has_answered_the_turn_waits_and_the_deadline_ends_it() -> None:
    guest = Guest()
    guest.handle(TurnArrived(TURN, SESSION, pack(PROMPT)), now=10.0)
    assert guest.ask(0) is None
    assert guest.state.is_waiting(TURN)
    effects = guest.handle(Tick(), now=15.0)
    assert Start(TURN) in effects and not guest.state.is_waiting(TURN)
    report = guest.state.report(TURN)
    assert report is not None and report.outcome is RestoreOutcome.LATE


def test_what_is_stored_is_offered_brought_and_counts_when_it_is_written() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive([*PROMPT, 1, 2, 3])
    assert guest.ask(0) == 192
    assert guest.ask(0) == 192, "asking again changes nothing"
    bring = guest.place()
    ids = [want.id for want in bring.wants]
    assert set(ids) <= guest.stored.keys()
    ranges = [f.slots for f in bring.fillings if f.component == "dense"]
    assert [slot for slots in ranges for slot in slots] == list(range(12))
    assert [f.slots for f in bring.fillings if f.component == "swa"] == [(192,)]
    assert guest.handle(Filled(bring.operation_id, tuple(ids))) == [Start(TURN)]
    report = guest.state.report(TURN)
    assert report is not None and report.outcome is RestoreOutcome.LOADED
    assert not guest.device.open


@pytest.mark.parametrize("more", [3, 20_000])
def test_a_model_of_windows_alone_goes_on_at_a_point(more: int) -> None:
    """No range state says how far the store reaches: the deepest point does, however far back."""
    guest = Guest(layout=WINDOWS_ONLY)
    guest.run(PROMPT, prompt=200, steps=[200])
    assert copies(guest.stored.values()) == [("swa", 192, 192)]
    guest.arrive([*PROMPT, *range(1, more)])
    assert guest.ask(0) == 192
    bring = guest.place()
    assert [f.slots for f in bring.fillings] == [(192,)]


def test_a_turn_that_waits_for_room_is_planned_once_until_the_engine_has_more_of_it() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive([*PROMPT, 1, 2, 3])
    before = guest.planner.plans
    for _ in range(3):
        assert guest.ask(0) == 192
    assert guest.planner.plans - before == 1
    assert guest.ask(64) == 192
    assert guest.planner.plans - before == 2
    assert guest.ask(192) is None


def test_a_hit_is_capped_before_the_last_token() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive(PROMPT[:192])
    offered = guest.ask(0)
    assert offered is None or offered < 192


def test_what_the_engine_has_is_not_brought_again() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive([*PROMPT, 1, 2, 3])
    assert guest.ask(96) == 192
    slots = [s for f in guest.place().fillings if f.component == "dense" for s in f.slots]
    assert slots == list(range(6, 12))


def test_an_engine_that_has_it_all_is_offered_nothing() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive([*PROMPT, 1, 2, 3])
    assert guest.ask(192) is None
    assert not guest.state.is_waiting(TURN)


def test_a_failed_load_is_remembered() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive([*PROMPT, 1, 2, 3])
    guest.ask(0)
    bring = guest.place()
    failure = NotFetched(bring.operation_id, MissReason.CORRUPT, bring.wants[0].id)
    assert guest.handle(failure) == [Start(TURN)]
    assert guest.ask(0) is None and not guest.state.is_waiting(TURN)
    assert not guest.device.open
    assert guest.handle(failure) == [], "an echo changes nothing"


def test_a_load_that_is_late_ends_in_computing_and_the_next_turn_is_offered_it_again() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive(PROMPT)
    assert guest.ask(0) == 192
    bring = guest.place()
    late = NotFetched(bring.operation_id, MissReason.DEADLINE)
    assert guest.handle(late, now=6.0) == [Start(TURN)]
    report = guest.state.report(TURN)
    assert report is not None and report.outcome is RestoreOutcome.LATE
    assert guest.ask(0) is None, "it computes all of its prompt"
    guest.handle(TurnGone(TURN))
    guest.device.hit = None
    guest.arrive(PROMPT)
    assert guest.ask(0) == 192


def test_what_could_not_be_read_is_stored_anew() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive(PROMPT)
    assert copies(guest.compute(PROMPT, 200)) == [], "all of it stands in the store"
    broken = stored_guest(PROMPT)
    broken.arrive(PROMPT)
    broken.ask(0)
    bring = broken.place()
    broken.handle(NotFetched(bring.operation_id, MissReason.CORRUPT, bring.wants[0].id))
    broken.stored.clear()
    again = copies(broken.compute(PROMPT, 200))
    assert ("dense", 0, 64) in again and ("swa", 192, 192) in again


def test_bytes_of_other_records_do_not_count() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive([*PROMPT, 1, 2, 3])
    guest.ask(0)
    bring = guest.place()
    guest.handle(Filled(bring.operation_id, tuple(want.id for want in bring.wants[1:])))
    report = guest.state.report(TURN)
    assert report is not None and report.outcome is RestoreOutcome.MISS


def test_a_turn_given_up_while_it_loads_is_dropped() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive([*PROMPT, 1, 2, 3])
    guest.ask(0)
    bring = guest.place()
    assert DropOperation(bring.operation_id) in guest.handle(TurnGone(TURN))
    assert guest.device.held, "its workers write on until they say that they are done"
    assert guest.handle(Filled(bring.operation_id, ())) == []
    assert not guest.device.open and not guest.device.held


def test_a_turn_that_waits_for_blocks_has_no_deadline() -> None:
    guest = stored_guest(PROMPT)
    guest.arrive([*PROMPT, 1, 2, 3])
    guest.ask(0)
    assert guest.handle(Tick(), now=1e6) == []
    assert guest.ask(0) == 192


def test_a_prefill_in_chunks_saves_each_cell_once_and_the_rest_at_its_end() -> None:
    guest = Guest()
    guest.arrive(PROMPT)
    assert copies(guest.compute(PROMPT, 50)) == []
    assert copies(guest.compute(PROMPT, 50, 130)) == [("dense", 0, 64), ("dense", 64, 128)]
    last = guest.keep(guest.handle(Computing(TURN, 130, 200)))
    assert copies(last) == [("swa", 192, 192), ("dense", 128, 192)]


def test_a_step_takes_the_point_that_it_passes() -> None:
    """Window rows stand only as long as the engine needs them next."""
    guest = Guest()
    guest.arrive(PROMPT)
    assert ("swa", 192, 192) in copies(guest.compute(PROMPT, 100, 195))
    assert copies(guest.handle(Computing(TURN, 195, 200))) == []


def test_recurrent_state_is_taken_only_where_a_step_ends() -> None:
    guest = Guest(exact_end=True)
    guest.arrive(PROMPT)
    assert ("swa", 192, 192) not in copies(guest.compute(PROMPT, 200))
    other = Guest(exact_end=True)
    other.arrive(PROMPT)
    assert ("swa", 192, 192) in copies(other.compute(PROMPT, 192, 200))


def test_decoding_pins_the_last_boundary_and_the_end_copies_it() -> None:
    tokens = list(range(1, 231))
    guest = Guest()
    effects = guest.run(tokens, prompt=200, steps=[200, *range(201, 231)])
    pins = [effect.position for effect in effects if isinstance(effect, Pin)]
    assert pins == [208, 224]
    assert copies(effects) == [
        ("swa", 192, 192),
        ("dense", 0, 64),
        ("dense", 64, 128),
        ("dense", 128, 192),
        ("swa", 224, 224),
        ("dense", 192, 224),
    ]


def test_the_next_turn_finds_what_the_last_one_saved_and_adds_what_is_new() -> None:
    tokens = list(range(1, 231))
    guest = Guest()
    guest.run(tokens, prompt=200, steps=[200, *range(201, 231)])
    longer = [*tokens, *range(1000, 1060)]
    guest.device.hit = None
    guest.arrive(longer)
    assert guest.ask(0) == 224
    guest.place()
    assert copies(guest.compute(longer, 224, len(longer))) == [
        ("swa", 288, 288),
        ("dense", 192, 256),
        ("dense", 256, 288),
    ]


@pytest.mark.parametrize("tokens", [200, 330, 700, 1000])
def test_a_turn_that_is_wholly_restored_copies_nothing_again(tokens: int) -> None:
    """However many looks it took to find its records: a long prompt takes three."""
    prompt = list(range(1, tokens + 1))
    guest = stored_guest(prompt)
    guest.arrive(prompt)
    offered = guest.ask(0)
    assert offered == (tokens - 1) // B * B
    bring = guest.place()
    guest.handle(Filled(bring.operation_id, tuple(want.id for want in bring.wants)))
    assert copies(guest.handle(Computing(TURN, offered, tokens))) == []
    assert copies(guest.handle(TurnEnded(TURN, offered, tokens, tokens))) == []


def test_an_aborted_turn_keeps_only_what_is_computed() -> None:
    guest = Guest()
    guest.arrive(PROMPT)
    guest.compute(PROMPT, 100)
    effects = guest.keep(guest.handle(TurnEnded(TURN, 0, 200, 100)))
    assert copies(effects) == [("dense", 64, 96)]
    assert copies(guest.handle(TurnEnded(TURN, 0, 200, 100))) == [], "it ends once"


@pytest.mark.parametrize("limit", [64, 256, 300])
def test_copies_that_do_not_fit_go_with_a_later_step(limit: int) -> None:
    guest = Guest(limits=SaveLimits(copy_bytes=limit))
    guest.arrive(PROMPT)
    first = [e for e in guest.handle(Computing(TURN, 0, 190)) if isinstance(e, StoreCopy)]
    assert copies(first) == [("dense", 0, 64)], "one always fits"
    assert copies(guest.handle(Computing(TURN, 189, 190))) == []
    guest.keep(first)
    assert copies(guest.handle(Computing(TURN, 190, 191))) == [("dense", 64, 128)]


def test_a_preempted_turn_is_looked_up_again_and_saves_nothing_twice() -> None:
    guest = Guest()
    guest.arrive(PROMPT)
    guest.compute(PROMPT, 130)
    guest.device.hit = None
    guest.arrive(PROMPT)
    assert guest.ask(0) is None, "no point was saved: it computes"
    again = guest.compute(PROMPT, 130, 200)
    assert copies(again) == [("swa", 192, 192), ("dense", 128, 192)]


def left_by(guest: Guest) -> list[Tip]:
    left, guest.state.saves.left = guest.state.saves.left, []
    return left


def test_where_a_turn_left_its_session_is_told_once_all_its_copies_are_answered_for() -> None:
    guest = Guest()
    guest.arrive(PROMPT)
    effects = guest.handle(Computing(TURN, 0, 200)) + guest.handle(TurnEnded(TURN, 0, 200, 200))
    *first, last = [effect.operation_id for effect in effects if isinstance(effect, StoreCopy)]
    for operation_id in first:
        guest.handle(Kept(operation_id))
    assert left_by(guest) == []
    guest.handle(NotKept(last))
    [tip] = left_by(guest)
    copied = {effect.meta.id for effect in effects if isinstance(effect, StoreCopy)}
    assert (tip.session_id, tip.depth) == (SESSION, 12)
    assert set(records_of(guest.state.names, tip).ids) == copied
    guest.handle(Kept(last))
    assert left_by(guest) == [], "an answer that comes twice tells nothing"


def test_a_turn_that_has_nothing_new_to_copy_tells_where_it_left_its_session() -> None:
    guest = stored_guest(PROMPT)
    [tip] = left_by(guest)
    guest.arrive([*PROMPT[:192], 1])
    guest.handle(Computing(TURN, 192, 193))
    assert copies(guest.handle(TurnEnded(TURN, 192, 193, 193))) == []
    assert left_by(guest) == [tip]


def test_a_session_that_has_ended_is_told_no_more() -> None:
    guest = Guest()
    guest.arrive(PROMPT)
    effects = guest.handle(Computing(TURN, 0, 200)) + guest.handle(TurnEnded(TURN, 0, 200, 200))
    guest.handle(SessionOver(SESSION))
    guest.keep(effects)
    assert left_by(guest) == []


def test_a_tenants_session_is_looked_for_under_its_own_names() -> None:
    guest = Guest()
    salt = b"s" * 32
    [find] = guest.handle(TurnArrived(TURN, SESSION, pack(PROMPT), tenant=salt))
    assert isinstance(find, FindRecords)
    guest.handle(RecordsFound(find.operation_id, {}))
    effects = guest.keep(guest.handle(Computing(TURN, 0, 200)))
    effects += guest.keep(guest.handle(TurnEnded(TURN, 0, 200, 200)))
    [tip] = left_by(guest)
    assert set(records_of(guest.state.names, tip).ids) == guest.stored.keys()
    records = records_of(guest.state.names, tip)
    assert records.depth(frozenset(guest.stored), can_replay=False).depth == 12


def test_what_is_given_up_is_waited_for_by_nobody() -> None:
    guest = Guest()
    guest.arrive(PROMPT)
    effects = guest.handle(Computing(TURN, 0, 200))
    assert len(guest.state.saves) == len(copies(effects)) > 0
    guest.state.saves.give_up()
    assert len(guest.state.saves) == 0
    guest.keep(effects)
    assert left_by(guest) == []


# ---- an engine that replays

REPLAY = 3 * B
REPLAYING = Planner(
    ModelState(
        layers=2,
        block_tokens=B,
        range_bytes_per_token=4.0,
        point_bytes=32,
        exact_replay_tokens=REPLAY,
    ),
    msgspec.structs.replace(GUEST, can_replay=True, per_group_hit=True),
)


def offered(guest: Guest, hit: int, *, resident: int = 0) -> Offer | None:
    guest.device.hit, guest.device.resident = hit, resident
    offers = [e for e in guest.handle(DeviceAsked(TURN)) if isinstance(e, Offer)]
    return offers[0] if offers else None


def test_range_state_alone_is_offered_to_an_engine_that_replays() -> None:
    guest = stored_guest(PROMPT)
    for id_ in [id_ for id_, copy in guest.stored.items() if copy.component == "swa"]:
        del guest.stored[id_]
    guest.arrive([*PROMPT, 1, 2, 3])
    assert guest.ask(0) is None, "it can't be gone on from without its windows"
    guest.state.use(REPLAYING)
    guest.handle(TurnGone(TURN))
    guest.device.hit = None
    guest.arrive([*PROMPT, 1, 2, 3])
    assert offered(guest, 0) == Offer(TURN, 192, 192 - REPLAY)
    assert {want.first_unit for want in guest.place().wants} == {0}


def test_a_point_is_brought_with_one_block_before_it_where_the_rest_is_on_the_device() -> None:
    """The engine knows a load by its tokens: one without any would not be waited for."""
    guest = stored_guest(PROMPT)
    guest.state.use(REPLAYING)
    guest.arrive([*PROMPT, 1, 2, 3])
    assert offered(guest, 0, resident=192) == Offer(TURN, 192, 192)
    bring = guest.place()
    assert [(filling.component, filling.slots) for filling in bring.fillings] == [
        ("dense", (11,)),
        ("swa", (192,)),
    ]


def test_a_turn_goes_on_from_range_state_that_only_the_engine_has() -> None:
    guest = Guest()
    guest.state.use(REPLAYING)
    guest.arrive(PROMPT)
    assert offered(guest, 0, resident=160) is None
    assert guest.state.resume(TURN, len(PROMPT)) == Replay(160 - REPLAY, 160)
    guest.device.hit = 160 - B
    assert guest.state.resume(TURN, len(PROMPT)) == Restore(160 - B)


CHEAP = Branches(PointCost(32, 4.0, has_lead=True))
"""As this model's point weighs beside its range state."""
BRANCH = [*PROMPT[:120], *range(900, 980)]


def test_the_first_branch_leaves_a_point_where_it_parts_and_the_second_goes_on_there() -> None:
    guest = Guest(policy=CHEAP)
    guest.run(PROMPT, prompt=200, steps=[200])
    guest.device.hit = None
    guest.arrive(BRANCH)
    assert guest.ask(0) is None
    assert guest.state.saves.junctions.of(TURN) == 112
    left = copies(guest.compute(BRANCH, 200))
    assert ("swa", 112, 112) in left and ("swa", 192, 192) in left
    guest.handle(TurnEnded(TURN, 0, 200, 200))
    guest.device.hit = None
    guest.arrive([*PROMPT[:120], *range(700, 750)])
    assert guest.ask(0) == 112


def test_a_branch_is_learnt_of_too_when_the_engine_was_asked_before_the_store_answered() -> None:
    guest = Guest(policy=CHEAP)
    guest.run(PROMPT, prompt=200, steps=[200])
    guest.device.hit = 0
    guest.arrive(BRANCH)
    assert guest.state.report(TURN) is not None, "decided with the store's answer"
    assert guest.state.saves.junctions.of(TURN) == 112


def test_recurrent_state_is_left_at_a_junction_where_a_step_ends_there() -> None:
    guest = Guest(policy=CHEAP, exact_end=True)
    guest.run(PROMPT, prompt=200, steps=[192, 200])
    guest.device.hit = None
    guest.arrive(BRANCH)
    guest.ask(0)
    assert ("swa", 112, 112) in copies(guest.compute(BRANCH, 112, 192, 200))


def test_chunk_ends_get_points_as_long_as_there_is_room_for_copies() -> None:
    """Turn ends do whatever room there is."""
    prompt = list(range(1, 20_001))
    roomy, full = Guest(policy=CHEAP), Guest(policy=CHEAP, limits=SaveLimits(copy_bytes=1))
    points = {
        guest: [first for name, first, _ in copies(guest.handle(event)) if name == "swa"]
        for guest, event in [(g, _step(g, prompt)) for g in (roomy, full)]
    }
    assert points[roomy] == [2048, 4096, 6144, 8192]
    assert points[full] == [2048]


def test_where_no_lead_is_kept_a_point_before_a_prompts_end_stands_in_for_it() -> None:
    """A prompt that leaves out the last 100 tokens goes on there; one of a few new tokens has
    none."""
    cost = PointCost(32, 4.0, has_lead=False)
    guest = Guest(policy=Branches(cost))
    guest.run(LONG, prompt=600, steps=[600])
    guest.device.hit = None
    guest.arrive([*LONG[:500], *range(900, 940)])
    assert guest.ask(0) == 336
    short = Guest(policy=Branches(cost))
    short.arrive(LONG)
    left = copies(short.handle(Computing(TURN, 176, 600, b"")))
    assert [at for name, at, _ in left if name == "swa"] == [592]


def _step(guest: Guest, prompt: list[int]) -> Computing:
    guest.arrive(prompt)
    return Computing(TURN, 0, 8192, pack(prompt[:0]))


LEAD = LeadForm(
    Component(name="swa_lead", coverage=Coverage.RANGE, slot_bytes=16, payload_bytes=16), "swa", 39
)
"""Windows of 40."""
LONG = list(range(1, 601))


def led(*steps: int, limits: SaveLimits | None = None) -> Guest:
    """A guest that has the prompt LONG, computed in these steps."""
    guest = Guest(policy=CHEAP, lead=LEAD, limits=limits)
    guest.run(LONG, prompt=600, steps=steps)
    guest.device.hit = None
    return guest


def branch(guest: Guest, at: int) -> FetchAndFill | None:
    """What is brought for a prompt that parts from LONG at this token; None: nothing."""
    guest.arrive([*LONG[:at], *range(900, 940)])
    return guest.place() if guest.ask(0) is not None else None


def test_a_lead_makes_every_boundary_of_a_prompts_last_tokens_a_point() -> None:
    """592 is the prompt's last boundary; 16 units of its lead begin at 336."""
    guest = led(600)
    assert ("swa_lead", 336, 592) in copies(guest.stored.values())
    bring = branch(guest, 583)
    assert bring is not None, "576: a block before"
    points = [(f.component, f.slots) for f in bring.fillings if f.component != "dense"]
    assert points == [("swa", (576, 592)), ("swa_lead", (576, 592))]
    wants = {want.id: (want.first_unit, want.end_unit) for want in bring.wants}
    lead_id = next(id_ for id_, copy in guest.stored.items() if copy.component == "swa_lead")
    assert wants[lead_id] == (15, 16)
    ids = tuple(want.id for want in bring.wants)
    assert guest.handle(Filled(bring.operation_id, ids)) == [Start(TURN)]


def test_further_back_all_rows_are_the_leads() -> None:
    guest = led(600)
    bring = branch(guest, 360)
    assert bring is not None
    points = [(f.component, f.slots) for f in bring.fillings if f.component != "dense"]
    assert points == [("swa_lead", (352, 592))]
    lead_id = next(id_ for id_, copy in guest.stored.items() if copy.component == "swa_lead")
    assert [(w.first_unit, w.end_unit) for w in bring.wants if w.id == lead_id] == [(1, 4)]


def test_a_lead_without_its_point_is_used_where_it_has_all_rows_and_nowhere_else() -> None:
    guest = led(600)
    for id_ in [id_ for id_, copy in guest.stored.items() if copy.component == "swa"]:
        del guest.stored[id_]
    assert branch(guest, 583) is None
    guest.handle(TurnGone(TURN))
    guest.device.hit = None
    assert branch(guest, 360) is not None


def test_a_prompt_whose_last_step_is_short_leaves_two_leads() -> None:
    """Rows before a step's own are gone: the step before leaves those of its end."""
    guest = led(512, 600)
    leads = [at[1:] for at in copies(guest.stored.values()) if at[0] == "swa_lead"]
    assert leads == [(256, 512), (512, 592)]
    assert branch(guest, 500) is not None


def test_a_lead_waits_for_room_and_is_left_out_without_it() -> None:
    guest = led(600, limits=SaveLimits(copy_bytes=1))
    kept = [at[0] for at in copies(guest.stored.values())]
    assert "swa" in kept and "swa_lead" not in kept
