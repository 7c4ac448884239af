"""What a worker states of itself, as another process reads it: well, damaged, older, newer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    RefillShare,
    SpeedStatement,
    TierStatement,
    UnitStatement,
    WorkerLoad,
    WorkerStatus,
    load_of,
    load_statement,
    read_status,
    refill_share_at,
    unit_statement,
)
from tests.support.examples import LETTERS

UNIT = RoutingUnit(WorkerId("own-name"), 1, Incarnation(1_700_000_000_123_456_789))
SHARES = (RefillShare(0, 0.0), RefillShare(8192, 0.5), RefillShare(32768, 2.5))
LOAD = WorkerLoad(UNIT, 12.5, 700, 3, 2, 20, 100, 40, SHARES, 0.75)
STATUS = WorkerStatus(
    unit=unit_statement(UNIT),
    load=load_statement(LOAD),
    profile=ProfileStatement(
        models=("tiny", "tiny-lora"),
        role="decode",
        actions=("colocated_prefill", "tail_recompute"),
        spec_digest="ab",
        kv_bytes_per_token=1024.0,
        kv_bytes_per_sequence=4096.0,
        speed=SpeedStatement(
            prefill_pass_ms=1.0,
            prefill_token_ms=0.25,
            prefill_attention_ms=0.0,
            step_ms=2.0,
            step_ms_per_sequence=0.5,
            prefill_measured_s=1.8e9,
        ),
        tiers=(TierStatement(name="disk", bytes_total=1 << 36, latency_ms=0.5, bytes_per_ms=1e6),),
        rpc="tcp://127.0.0.1:5000",
        sequence_tokens=4096,
    ),
)


def document(**changes: Any) -> bytes:
    """The record as JSON with some of its fields, named by their path, set to something else."""
    tree = msgspec.json.decode(msgspec.json.encode(STATUS))
    for path, value in changes.items():
        *parts, last = path.split("__")
        at = tree
        for part in parts:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at[last] = value
    return msgspec.json.encode(tree)


def test_what_is_written_is_read() -> None:
    read = read_status(msgspec.json.encode(STATUS))
    assert (read.status, read.problems) == (STATUS, ())
    assert read.status is not None
    heard = load_of(read.status.unit, read.status.load, worker=WorkerId("10.0.0.1:80"))
    assert heard.unit == RoutingUnit(WorkerId("10.0.0.1:80"), 1, UNIT.incarnation)
    assert msgspec.structs.replace(heard, unit=UNIT) == LOAD


def test_fields_of_a_later_version_are_ignored_and_missing_ones_have_defaults() -> None:
    assert read_status(document(profile__rpc="tcp://[::1]:5000")).problems == ()
    assert read_status(document(version=2, tomorrow={"x": 1}, load__dust=3)).problems == ()
    bare = read_status(b'{"version": 1}')
    assert bare.problems == ()
    assert bare.status == WorkerStatus(
        unit=UnitStatement(), load=LoadStatement(), profile=ProfileStatement()
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load__kv_bytes_free", -1),
        ("load__kv_bytes_total", 1 << 60),
        ("load__waiting_sequences", 2.5),
        ("load__running_sequences", True),
        ("load__pending_prefill_tokens", "many"),
        ("load__busy_share", 1.01),
        ("load__busy_share", -0.5),
        ("load__busy_share", "all"),
        ("load__refill_shares", 0.5),
        ("load__refill_shares", [[0, 0.5], [0, 0.6]]),
        ("load__refill_shares", [[8192, 0.5], [0, 0.6]]),
        ("load__refill_shares", [[0, -0.1]]),
        ("load__refill_shares", [[0, 1e9]]),
        ("load__refill_shares", [[-1, 0.1]]),
        ("load__refill_shares", [[number, 0.1] for number in range(17)]),
        ("profile__kv_bytes_per_token", -5.0),
        ("profile__kv_bytes_per_token", 1e-300),
        ("profile__kv_bytes_per_token", 0.99),
        ("profile__kv_bytes_per_sequence", 1e300),
        ("profile__kv_bytes_per_sequence", 1e-300),
        ("profile__speed__step_ms", -1.0),
        ("profile__speed__prefill_token_ms", 1e10),
        ("profile__speed__replay_tokens", -1),
        ("profile__sequence_tokens", [1]),
        ("profile__rpc", 5000),
        ("profile__rpc", "tcp://[::1"),
        ("profile__rpc", "ipc:///tmp/x"),
        ("profile__rpc", "127.0.0.1:5000"),
        ("profile__rpc", "tcp://127.0.0.1:65536"),
        ("profile__models", "tiny"),
        ("profile__models", [1]),
        ("unit__rank", -1),
        ("unit__incarnation", 1 << 80),
        ("profile", 5),
        ("load", []),
    ],
)
def test_a_bad_value_is_refused_by_its_name_and_the_rest_stands(field: str, value: Any) -> None:
    read = read_status(document(**{field: value}))
    assert [problem.partition(":")[0] for problem in read.problems] == [field.replace("__", ".")]
    assert read.status is not None
    if not field.startswith("profile"):
        assert read.status.profile == STATUS.profile


def test_a_share_that_is_not_said_is_none_and_one_that_is_refused_takes_nothing_along() -> None:
    read = read_status(document(load__busy_share=None, load__refill_shares=None))
    assert read.status is not None and read.problems == ()
    assert (read.status.load.busy_share, read.status.load.refill_shares) == (None, ())
    read = read_status(document(load__busy_share=7))
    assert read.status is not None
    assert read.status.load == msgspec.structs.replace(STATUS.load, busy_share=None)


def test_a_refill_share_is_read_between_its_sizes_and_is_the_last_one_beyond() -> None:
    """Half way from 0.5 to 2.5 the idle age is half way too: from 2 parts of what refilling takes
    to 0.4."""
    assert refill_share_at((), 100) is None
    found = [refill_share_at(SHARES, tokens) for tokens in (0, 4096, 8192, 20480, 32768, 1e9)]
    assert found == pytest.approx([0.0, 0.25, 0.5, 1 / 1.2, 2.5, 2.5])


def test_shares_that_do_not_ascend_are_not_said_wherever_they_come_from() -> None:
    crossed = msgspec.structs.replace(STATUS.load, refill_shares=SHARES[::-1])
    heard = load_of(STATUS.unit, crossed, worker=UNIT.worker)
    assert heard == msgspec.structs.replace(LOAD, refill_shares=())


def test_a_speed_with_a_refused_time_is_no_speed_and_a_tier_without_a_rate_none() -> None:
    read = read_status(document(profile__speed__step_ms=-1))
    assert read.status is not None and read.status.profile.speed is None
    read = read_status(
        document(profile__speed__prefill_token_ms=0, profile__speed__prefill_pass_ms=0)
    )
    assert read.status is not None and read.status.profile.speed is None
    read = read_status(document(profile__tiers__0__bytes_per_ms=1e-300))
    assert read.status is not None and read.status.profile.tiers == ()
    assert read.problems[0] == "profile.tiers[0].bytes_per_ms: 1e-300"
    read = read_status(document(profile__tiers__0__bytes_per_ms=0))
    assert read.status is not None and read.status.profile.tiers == ()
    assert read.problems == ("profile.tiers: disk has no name, latency or rate",)


@pytest.mark.parametrize(
    "text",
    [b"", b"nonsense", b"[]", b"{}", b'{"version": "1"}', b'{"version": NaN}', b"\xff", b"["],
)
def test_what_is_no_record_says_so(text: bytes) -> None:
    read = read_status(text)
    assert read.status is None
    assert len(read.problems) >= 1


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text(LETTERS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = sorted(
    {f"load__{name}" for name in LoadStatement.__struct_fields__}
    | {f"unit__{name}" for name in UnitStatement.__struct_fields__}
    | {f"profile__{name}" for name in ProfileStatement.__struct_fields__}
    | {f"profile__speed__{name}" for name in SpeedStatement.__struct_fields__}
    | {f"profile__tiers__0__{name}" for name in TierStatement.__struct_fields__}
)


@given(field=st.sampled_from(FIELDS), value=ANYTHING)
def test_no_value_of_any_field_raises(field: str, value: Any) -> None:
    read = read_status(document(**{field: value}))
    if read.status is not None:
        times = read.status.profile.speed
        assert times is None or times.prefill_token_ms + times.prefill_pass_ms > 0
        assert read.status.load.kv_bytes_free >= 0
