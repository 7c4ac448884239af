"""A broken line is reported with its number and the reason, and costs nothing but itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard

from ownerserve.kv.errors import InvalidInput
from ownerserve.trace.lines import Collected, Fatal
from ownerserve.trace.read import read_trace

GOOD = b'{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'
BROKEN = {
    "truncated": (b'{"timestamp": 0, "input_le\n', "truncated"),
    "missing": (b'{"timestamp": 0, "input_length": 5, "hash_ids": [0]}\n', "output_length"),
    "type": (
        b'{"timestamp": 0, "input_length": "x", "output_length": 1, "hash_ids": [0]}\n',
        "input_length",
    ),
    "negative": (
        b'{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [0]}\n',
        "input_length",
    ),
    "blocks": (
        b'{"timestamp": 0, "input_length": 5000, "output_length": 1, "hash_ids": [0]}\n',
        "do not cover",
    ),
    "bytes": (b"\xff\xfe\x00rubbish\n", "JSON"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_line_loses_only_itself(tmp_path: Path, kind: str) -> None:
    line, reason = BROKEN[kind]
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD + line + GOOD)
    problems = Collected()
    trace = read_trace(path, problems=problems)
    assert trace.request_count == 2
    assert (problems.count, problems.first[0].line) == (1, 2)
    assert reason in problems.first[0].reason


def test_only_the_first_few_problems_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD + BROKEN["missing"][0] * 100)
    problems = Collected()
    read_trace(path, problems=problems)
    assert (problems.count, len(problems.first)) == (100, Collected.KEEP)


def test_strict_reading_stops_at_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD + BROKEN["missing"][0] + GOOD)
    with pytest.raises(InvalidInput, match=r"t\.jsonl:2.*output_length"):
        read_trace(path, problems=Fatal())


def test_a_broken_first_line_does_not_hide_the_format(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(BROKEN["truncated"][0] + GOOD)
    problems = Collected()
    assert read_trace(path, problems=problems).origin == "mooncake"
    assert problems.first[0].line == 1


def test_a_session_that_contradicts_itself_is_left_out(tmp_path: Path, fixtures: Path) -> None:
    header, session, _ = (fixtures / "own.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "t.jsonl"
    path.write_bytes(header + session + session.replace(b'"after":[0,1]', b'"after":[0,2]'))
    problems = Collected()
    assert len(read_trace(path, problems=problems).sessions) == 1
    assert "after must name earlier requests" in problems.first[0].reason


def test_a_cut_zstd_file_is_reported_and_its_head_kept(tmp_path: Path) -> None:
    lines = b"".join(
        b'{"timestamp": %d, "input_length": 600, "output_length": 1, "hash_ids": [%d, %d]}\n'
        % (n, n * 7 % 9001, n * 31 % 8999)
        for n in range(6_000)
    )
    data = zstandard.ZstdCompressor().compress(lines)
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(data[: len(data) * 3 // 4])
    problems = Collected()
    trace = read_trace(path, problems=problems)
    assert 0 < trace.request_count < 6_000
    assert any("zstd" in problem.reason for problem in problems.first)


def test_concatenated_zstd_frames_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    frame = zstandard.ZstdCompressor().compress(GOOD)
    path.write_bytes(frame + frame + frame)
    assert read_trace(path).request_count == 3


def test_a_folder_is_read_file_by_file(tmp_path: Path, fixtures: Path) -> None:
    text = (fixtures / "weka_ids.json").read_text()
    for name in ("trace_2", "trace_1"):
        (tmp_path / f"{name}.json").write_text(text.replace("origin-form", name))
    assert [s.id for s in read_trace(tmp_path).sessions] == ["trace_1", "trace_2"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"hello\n", b'{"a": 1}\n', b"[1, 2]\n"])
def test_an_unknown_format_is_an_error_that_names_the_known_ones(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="mooncake"):
        read_trace(path)


def test_a_named_format_that_does_not_fit_is_an_error(fixtures: Path) -> None:
    problems = Collected()
    with pytest.raises(InvalidInput, match="no usable record of format weka"):
        read_trace(fixtures / "mooncake.jsonl", format_name="weka", problems=problems)
    assert problems.count == 4


def test_a_newer_version_of_our_format_is_refused(tmp_path: Path, fixtures: Path) -> None:
    path = tmp_path / "t.jsonl"
    text = (fixtures / "own.jsonl").read_text()
    path.write_text(text.replace('"ownerserve_trace":1', '"ownerserve_trace":2'))
    with pytest.raises(InvalidInput, match="version 2 is newer"):
        read_trace(path)


def test_our_format_is_checked_as_strictly(tmp_path: Path, fixtures: Path) -> None:
    path = tmp_path / "t.jsonl"
    text = (fixtures / "own.jsonl").read_text()
    path.write_text(text.replace('"runs":[[0,2],[4,2]]', '"runs":[[0,999]]'))
    problems = Collected()
    assert len(read_trace(path, problems=problems).sessions) == 1
    assert "do not cover" in problems.first[0].reason
    path.write_text(text.replace('"block_tokens":16', '"block_tokens":0'))
    with pytest.raises(InvalidInput, match="block_tokens"):
        read_trace(path)
