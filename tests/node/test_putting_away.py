"""When a session is put away, which of its state, and what that wears."""

from __future__ import annotations

import msgspec
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.prefix import PointKey, RangeKey, artifact_id, hash_prefix, pack
from ownerserve.node.retention.policy import SPILL_AFTER_S, policy_of
from ownerserve.node.vocabulary.events import FindRecords, RestoreOutcome, StoreCopy, Tick
from ownerserve.node.vocabulary.records import Cell, Inside
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.swa.adaptive import Adaptive
from ownerserve.plan.swa.checkpoints import CheckpointPolicy, TurnSpan
from ownerserve.store.format.model import meta_of
from tests.support.node.node_driver import LAYOUT, MODEL, PRICES, B, NodeDriver

LONG = list(range(10 * B + 5))
COSTS = CostModel(PRICES)


# ---- when


def spill_due_s(gaps_s: list[float], *, hold_ms_per_s: float = 1.0) -> float:
    """Seconds after its last turn's end at which a session with such gaps is copied."""
    settings = NodeSettings(record_blocks=4, spill_after_s=None, hold_ms_per_s=hold_ms_per_s)
    driver = NodeDriver(settings=settings)
    tokens = list(LONG)
    for gap_s in [0.0, *gaps_s]:
        driver.now += gap_s
        driver.turn(tokens)
        tokens += range(9000, 9000 + B)
    due_s = driver.state.idle_spills.next_due()
    assert due_s is not None
    return due_s - driver.now


def test_the_first_turns_of_a_session_wait_a_fixed_time() -> None:
    assert spill_due_s([]) == pytest.approx(SPILL_AFTER_S)
    assert spill_due_s([1.0, 1.0]) == pytest.approx(SPILL_AFTER_S)


def test_a_session_that_always_comes_back_soon_is_left_alone() -> None:
    """A load takes 2 ms: at 0.1 ms a second memory is worth holding for some 20 seconds."""
    quick = spill_due_s([1.0] * 12, hold_ms_per_s=0.1)
    slow = spill_due_s([2000.0] * 12, hold_ms_per_s=0.1)
    assert quick > 2.0, "a copy would be of no use: it is back before"
    assert slow < 1.0, "it will be away for long: the sooner the better"


def test_dear_memory_is_left_sooner() -> None:
    mixed = [1.0, 100.0, 2.0, 80.0, 1.0, 120.0]
    waits = [spill_due_s(mixed, hold_ms_per_s=price) for price in (0.01, 1.0, 100.0)]
    assert waits == sorted(waits, reverse=True) and waits[0] > waits[-1]


def test_a_given_time_is_kept_whatever_the_gaps() -> None:
    driver = NodeDriver()  # 1 s
    tokens = list(LONG)
    for _ in range(6):
        driver.now += 200.0
        driver.turn(tokens)
    assert driver.state.idle_spills.next_due() == driver.now + 1.0


def test_sessions_are_put_away_in_the_order_of_their_own_times() -> None:
    auto = NodeSettings(record_blocks=4, spill_after_s=None, hold_ms_per_s=0.1)
    driver = NodeDriver(blocks=200, settings=auto)
    for _ in range(6):
        driver.now += 2000.0
        driver.turn(LONG, "slow")
    for _ in range(6):
        driver.now += 1.0
        driver.turn(range(2000, 2000 + 4 * B), "quick")
    driver.now += 0.5
    driver.handle(Tick())
    finds = [asked for asked in driver.pending if isinstance(asked, FindRecords)]
    assert len(finds) == 1, "the slow one only, although the quick one ended later"
    due_s = driver.state.next_due()
    assert due_s is not None and due_s > driver.now + 1.0


# ---- what


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("turn-end", [10]),
        ("zero", []),
        ("full", [10]),
        ("periodic:32", [10]),
        ("periodic:64", []),
    ],
)
def test_a_policy_says_which_point_state_is_stored(text: str, stored: list[int]) -> None:
    """Of what the device has: the driver's engine keeps state at the prompt's end alone."""
    driver = NodeDriver(policy=policy_of(text, MODEL, COSTS))
    driver.turn(LONG)
    driver.now = 1.0
    driver.handle(Tick())
    driver.answer(driver.pending.popleft())
    driver.handle(Tick())
    copies = [c for c in driver.pending if isinstance(c, StoreCopy)]
    points = {c.meta.end_token // B for c in copies if c.component in LAYOUT.point_names}
    assert sorted(points) == stored
    assert {c.meta.end_token // B for c in copies} >= {4, 8, 10}, "range state always"


def test_without_point_state_in_the_store_windows_are_replayed() -> None:
    driver = NodeDriver(policy=policy_of("zero", MODEL, COSTS))
    driver.turn(LONG)
    driver.idle()
    driver.forget_device()
    turn = driver.arrive([*LONG, 1, 2])
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    begun = driver.run(turn)
    assert (begun.restored, begun.write_floor) == (8 * B, 10 * B)
    driver.check()


def test_a_prompts_interior_is_asked_of_the_engine() -> None:
    driver = NodeDriver(policy=policy_of("periodic:64", MODEL, COSTS))
    assert driver.state.checkpoints.during(32, 200) == {64, 128, 192}
    ends = NodeDriver().state.checkpoints.during(0, 200)
    assert ends == {(200 - 1) // B * B, 200 // B * B}


@pytest.mark.parametrize("text", ["", "half", "periodic", "periodic:0", "periodic:x", "full:3"])
def test_an_unknown_policy_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(InvalidInput, match="turn-end or adaptive"):
        policy_of(text, MODEL, COSTS)


class Witness(CheckpointPolicy):
    """Keeps what it is told."""

    name = "witness"

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        return turn.turn_ends()

    def observe(self, event: object) -> None:
        position = getattr(event, "position", -1)
        self.seen.append((type(event).__name__, position))


def test_a_policy_learns_of_resumes_and_branches() -> None:
    witness = Witness()
    driver = NodeDriver(policy=witness)
    driver.turn(LONG)
    driver.idle()
    driver.forget_device()
    driver.turn([*LONG, 1, 2])
    driver.idle()
    driver.forget_device()
    driver.turn([*LONG[: 6 * B], *range(500, 520)], "other")
    told = [item for item in witness.seen if item[0] != "Produced"]
    assert told == [("Resumed", 10 * B), ("Branched", 6 * B)]
    assert [name for name, _ in witness.seen].count("Produced") == 3


def test_the_account_tells_writes_from_what_they_were_good_for() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    driver.idle()
    account = driver.state.checkpoints.account
    assert account.range_payload_bytes == 10 * 2 * 32
    assert account.point_payload_bytes == 2 * 32 and account.point_read_bytes == 0
    assert account.drive_bytes == 8 * 8192, "a record is a header and a padded payload"
    assert account.write_amplification == pytest.approx(8 * 8192 / 640)
    driver.forget_device()
    driver.turn([*LONG, 1, 2])
    assert account.point_read_bytes == 2 * 32


def test_the_adaptive_policy_is_repriced_by_what_was_measured() -> None:
    policy = policy_of("adaptive", MODEL, COSTS)
    assert isinstance(policy, Adaptive)
    driver = NodeDriver(policy=policy, ms_per_token=7.0)
    driver.handle(Tick())
    assert policy.economics.ms_per_token == 7.0


# ---- under which name


def test_ids_made_in_bulk_are_the_artifacts_ids() -> None:
    driver = NodeDriver()
    names, digests = driver.names, hash_prefix(pack(LONG), B)
    identity = names.identity.digest()
    for end in (1, 4, 7, 10):
        cell = names.cell_ending_at(end)
        key = RangeKey(digests[end - 1], cell.first * B, end * B, "index")
        assert names.range_id("index", cell, digests) == artifact_id(identity, key)
        point = PointKey(digests[end - 1], end * B, "swa")
        assert names.point_id("swa", end, digests) == artifact_id(identity, point)


def test_a_cold_prompt_asks_for_its_first_cells_only() -> None:
    driver = NodeDriver(blocks=300)
    turn = driver.arrive(range(200 * B))
    [find] = driver.pending
    assert isinstance(find, FindRecords) and len(find.ids) == 16 * 4, "of 199 * 4"
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.NOTHING_STORED


def test_a_long_session_is_found_with_one_id_a_cell() -> None:
    """Cells of 4 blocks: every end of the first 4, then whole cells, then the newest points."""
    driver = NodeDriver(blocks=300)
    tokens = list(range(200 * B + 5))
    driver.turn(tokens)
    driver.idle()
    driver.forget_device()
    turn = driver.arrive([*tokens, 1])
    looks = []
    while isinstance(driver.pending[0], FindRecords):
        looks.append(driver.pending[0])
        driver.answer(driver.pending.popleft())
    assert [len(look.ids) for look in looks] == [16 * 4, 46 * 2, 64 * 2]
    assert len({id_ for look in looks for id_ in look.ids}) == 16 * 4 + 46 * 2 + 64 * 2
    driver.settle()
    assert driver.run(turn).restored == 200 * B
    driver.check()


def test_a_point_far_back_is_found_when_no_newer_one_is_there() -> None:
    driver = NodeDriver(blocks=300)
    tokens = list(range(200 * B + 5))
    driver.turn(tokens[: 50 * B])
    driver.idle()
    driver.turn(tokens)
    driver.idle()
    names, digests = driver.names, hash_prefix(pack(tokens), B)
    for depth in (199, 200):
        driver.stored.pop(names.point_id("swa", depth, digests), None)
    driver.forget_device()
    turn = driver.arrive([*tokens, 1])
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    begun = driver.run(turn)
    assert (begun.restored, begun.write_floor) != (0, 0)
    driver.check()


def test_a_branch_deep_in_a_stored_session_finds_the_cell_it_shares() -> None:
    driver = NodeDriver(blocks=300)
    tokens = list(range(200 * B + 5))
    driver.turn(tokens)
    driver.idle()
    driver.forget_device()
    shared = 101 * B + 3
    turn = driver.arrive([*tokens[:shared], *range(9000, 9000 + B)], session="other")
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert driver.run(turn).write_floor == 101 * B
    driver.check()


def test_a_hole_near_the_beginning_ends_the_look() -> None:
    driver = NodeDriver(blocks=300)
    tokens = list(range(100 * B + 5))
    driver.turn(tokens)
    driver.idle()
    driver.forget_device()
    digests = hash_prefix(pack(tokens), B)
    del driver.stored[driver.names.range_id("main", Cell(12, 16), digests)]
    turn = driver.arrive([*tokens, 1])
    driver.answer(driver.pending.popleft())
    assert not any(isinstance(asked, FindRecords) for asked in driver.pending)
    driver.settle()
    begun = driver.run(turn)
    assert begun.write_floor == 12 * B
    driver.check()


def test_a_record_of_other_weights_is_not_shared() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    driver.idle()
    names, digests = driver.names, hash_prefix(pack(LONG), B)
    meta = next(m for m in driver.metas.values() if m.end_token == 4 * B)
    mine = Inside(meta, 2, digests[1])
    assert names.shared_cell(mine, digests) == Cell(0, 2)
    renamed = msgspec.structs.replace(meta, id=b"\1" * 32)
    assert names.shared_cell(Inside(renamed, 2, digests[1]), digests) is None
    assert names.shared_cell(Inside(meta, 2, PrefixHash(bytes(32))), digests) is None
    assert names.shared_cell(Inside(meta, 11, digests[1]), digests) is None


def test_a_record_says_what_its_key_says() -> None:
    """Metadata made from a component's template is that of the artifact itself."""
    driver = NodeDriver()
    names, digests = driver.names, hash_prefix(pack(LONG), B)
    made = names.range_meta("index", Cell(4, 7), digests)
    key = RangeKey(digests[6], 4 * B, 7 * B, "index")
    wanted = meta_of(names.identity, key, tenant=names.tenant, units=3)
    inner = b"".join(digests[4:6])
    descriptor = names.descriptor("index")
    assert made == msgspec.structs.replace(wanted, descriptor=descriptor, boundaries=inner)
    point = PointKey(digests[6], 7 * B, "swa")
    wanted = meta_of(names.identity, point, tenant=names.tenant)
    descriptor = names.descriptor("swa")
    assert names.point_meta("swa", 7, digests) == msgspec.structs.replace(
        wanted, descriptor=descriptor
    )
    for depth in (0, 3, 4, 8, 10):
        ids = [
            tuple(names.range_id(name, cell, digests) for name in names.range_names)
            for cell in map(names.cell_ending_at, names.ends(depth))
        ]
        assert list(names.range_ids(names.ends(depth), digests)) == ids
