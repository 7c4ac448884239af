"""Chunk ends and snapshot positions."""

import pytest

from ownerserve.engines.hf.scheduling.scheduler import chunk_end, resume_points


def ends(total: int, *, start: int = 0, block: int = 4, chunk: int = 16) -> list[int]:
    found = []
    while start < total:
        start = chunk_end(start, total, block=block, chunk=chunk)
        found.append(start)
    return found


@pytest.mark.parametrize(
    ("total", "expected"),
    [(1, [1]), (4, [4]), (5, [4, 5]), (16, [12, 16]), (23, [16, 20, 23]), (40, [16, 32, 36, 40])],
)
def test_chunks_end_on_the_grid_and_where_a_next_turn_can_resume(
    total: int, expected: list[int]
) -> None:
    assert ends(total) == expected


def test_a_resumed_prompt_meets_the_same_grid() -> None:
    assert ends(70, start=20) == [32, 48, 64, 68, 70]
    assert set(ends(70, start=20)) <= set(ends(70))


@pytest.mark.parametrize(
    ("total", "points"), [(3, (0, 0)), (8, (4, 8)), (9, (8, 8)), (12, (8, 12))]
)
def test_resume_points_cap_a_hit_at_one_token_less_than_the_prompt(
    total: int, points: tuple[int, int]
) -> None:
    assert resume_points(total, 4) == points
