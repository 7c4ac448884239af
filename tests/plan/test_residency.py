"""From rows of who holds what to spans and points."""

from __future__ import annotations

from ownerserve.kv.messages import Tier
from ownerserve.plan.inputs import Piece, Point, RangeSpan
from ownerserve.plan.residency import PointRow, RangeRow, points_of, spans_of

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
BOTH = ("csa_main", "csa_index")


def test_a_position_counts_only_where_every_component_can_be_had() -> None:
    rows = [
        RangeRow("csa_main", 0, 512, DEVICE, 5120),
        RangeRow("csa_index", 0, 256, DEVICE, 1000),
        RangeRow("csa_index", 256, 1024, DISK, 3072),
        RangeRow("csa_main", 512, 768, HOST, 2560),
    ]
    assert spans_of(rows, BOTH) == (
        RangeSpan(0, 256),
        RangeSpan(256, 512, (Piece(DISK, 1024),)),
        RangeSpan(512, 768, (Piece(HOST, 2560), Piece(DISK, 1024))),
    )


def test_the_nearest_copy_is_taken_and_a_load_under_way_counts_from_where_it_lands() -> None:
    rows = [
        RangeRow("dense", 0, 256, DISK, 1000),
        RangeRow("dense", 0, 256, HOST, 1000),
        RangeRow("dense", 256, 512, DISK, 1000),
        RangeRow("dense", 256, 512, DEVICE, 1000, ready_ms=7.0),
    ]
    assert spans_of(rows, ("dense",)) == (
        RangeSpan(0, 256, (Piece(HOST, 1000),)),
        RangeSpan(256, 512, (Piece(DEVICE, 1000, 7.0),)),
    )


def test_neighbours_of_one_tier_join_and_a_hole_ends_it_all() -> None:
    rows = [
        RangeRow("dense", 0, 256, HOST, 256),
        RangeRow("dense", 256, 512, HOST, 256),
        RangeRow("dense", 640, 768, DEVICE, 128),
        RangeRow("other", 512, 640, HOST, 128),
    ]
    assert spans_of(rows, ("dense",)) == (RangeSpan(0, 512, (Piece(HOST, 512),)),)
    assert spans_of([], ("dense",)) == ()


def test_points_say_what_to_load_and_what_nobody_has() -> None:
    rows = [
        PointRow("swa", 512, DISK, 4000),
        PointRow("swa", 512, HOST, 4000),
        PointRow("csa_overlap", 512, HOST, 500),
        PointRow("swa", 256, DEVICE, 4000),
    ]
    assert points_of(rows, ("swa", "csa_overlap"), positions=[768]) == (
        Point(768, (), ("swa", "csa_overlap")),
        Point(512, (Piece(HOST, 4500),)),
        Point(256, (), ("csa_overlap",)),
    )


def test_without_components_a_point_needs_nothing() -> None:
    points = points_of([], (), positions=[256, 128])
    assert points == (Point(256), Point(128))
