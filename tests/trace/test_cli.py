"""`ownerserve trace`: what a user and a program see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ownerserve.cli.trace import command
from ownerserve.kv.errors import InvalidInput


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=True)
    if isinstance(result.exception, InvalidInput):
        raise result.exception
    return result


def as_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def test_stats_has_the_documented_keys(fixtures: Path) -> None:
    body = as_json("stats", fixtures / "own.jsonl")
    assert body["schema"] == "ownerserve.trace.stats/1"
    for key in ("turns_per_session", "input_tokens", "output_tokens", "uncached_suffix_tokens"):
        assert {"mean", "p50", "p90", "p99"} <= body[key].keys()
    assert {"mean", "p50", "p90", "p99"} <= body["gap_s"].keys()
    assert {"any_session", "intra_session"} <= body["ideal_cached_token_share"].keys()
    assert {"top1", "top10"} <= body["input_share"].keys()
    assert (body["requests"], body["sessions"]) == (4, 2)
    assert body["input_output_ratio"] == pytest.approx(16.3)


def test_stats_prints_a_table_and_what_was_broken(fixtures: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text((fixtures / "mooncake.jsonl").read_text() + "{broken\n")
    result = run("stats", path)
    assert "1 broken record" in result.output
    assert "t.jsonl:5" in result.output
    assert "uncached, later turns" in result.output


def test_strict_makes_a_broken_line_an_error(fixtures: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text((fixtures / "mooncake.jsonl").read_text() + "{broken\n")
    with pytest.raises(InvalidInput, match=r"t\.jsonl:5"):
        run("stats", path, "--strict")


def test_stats_of_a_model(fixtures: Path, tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "examples" / "configs" / "dense-gqa-80l.json"
    body = as_json("stats", fixtures / "own.jsonl", "--model", config, "--active-params", "70B")
    model = body["model"]
    assert model["bytes_per_token"] == 327_680
    assert model["kv_bytes_per_request"]["p50"] == pytest.approx(327_680 * 38.5)
    assert 0 < model["prefill_share_of_compute_uncached"] < model["prefill_share_of_compute"] < 1


def test_convert_then_stats_is_the_same(fixtures: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl.zst"
    assert as_json("convert", fixtures / "weka_runs.jsonl", target)["requests"] == 8
    before, after = (as_json("stats", p) for p in (fixtures / "weka_runs.jsonl", target))
    assert before == after


def test_generate_then_scale(tmp_path: Path) -> None:
    made, small = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    body = as_json("generate", "swe", made, "--sessions", 5, "--seed", 9)
    assert body["sessions"] == 5
    run("convert", made, small, "--max-tokens", 512, "--turns", 4)
    stats = as_json("stats", small)
    assert stats["input_tokens"]["p99"] <= 512
    assert stats["turns_per_session"]["mean"] == 4


def test_help_teaches() -> None:
    assert "mooncake" in run("--help").output
    assert "rollouts" in run("generate", "--help").output
    assert "--active-params" in run("stats", "--help").output
