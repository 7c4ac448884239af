"""Paces: the shipped ones are sane and match their tables, own measurements come in and are fitted,
and what is wrong with a file is said by name.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.sim.engine.pace import Pace, PaceFile, load_pace, load_pace_file, paces
from ownerserve.sim.engine.pace_fit import MeasuredStep, fit_steps, read_steps

GPUS = ("h20", "h100", "h200", "rtx-pro-6000")
EVERYWHERE = ("llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3.5-35b-a3b")


def shipped() -> list[PaceFile]:
    folder = Path(__file__).parents[2] / "src" / "ownerserve" / "sim" / "engine" / "paces"
    return [load_pace_file(folder / f"{name}.json") for name in paces()]


def geometry_of(pace: Pace) -> Geometry:
    return Geometry.of(build_spec(read_config(find_config(pace.config))))


def prefill_ms(pace: Pace, new: int, prefix: int) -> float:
    return pace.step_ms(new, new * (prefix + new / 2), 0, 0)


def example(**changes: object) -> dict[str, object]:
    pace = msgspec.to_builtins(load_pace("qwen3-30b-a3b", "H200"))
    return {**pace, "schema": "ownerserve.pace/1", **changes}


def test_what_the_issue_names_is_shipped() -> None:
    names = set(paces())
    assert {f"{model}@{gpu}" for model in EVERYWHERE for gpu in GPUS} <= names
    large = ("deepseek-v3", "deepseek-v4-flash", "deepseek-v4-pro", "qwen3-coder-480b")
    large += ("qwen3-next-80b",)
    assert {f"{model}@h200" for model in large} <= names


@pytest.mark.parametrize("pace", shipped(), ids=lambda pace: pace.name)
def test_a_shipped_pace_says_how_it_came_about(pace: PaceFile) -> None:
    assert pace.name == f"{pace.model}@{pace.gpu.lower().replace(' ', '-')}"
    assert {"date", "command", "by_region", "held_out", "versions"} <= pace.evidence.keys()
    assert pace.error_note
    assert pace.fit_error < 0.10
    # What was held out errs as what was fitted does: the form holds between the points.
    assert pace.evidence["held_out"]["median"] < pace.fit_error + 0.03


def test_a_pace_that_is_scaled_says_from_what_and_by_how_much() -> None:
    """No tables have Qwen3-Next's experts: 512 weigh twice as much as its kin's 256."""
    [scaled] = [pace for pace in shipped() if pace.model == "qwen3-next-80b"]
    assert "not measured" in scaled.error_note and "Qwen3.5-35B-A3B" in scaled.error_note
    factors = scaled.evidence["scaled_by"]
    assert factors["experts_ms"] == 2 * factors["a_ms"] and factors["b_ms"] > factors["a_ms"]
    kin = load_pace("qwen3.5-35b-a3b", "H200")
    assert scaled.expert_share == 10 / 512 and scaled.gpus == 2
    crowd = scaled.step_ms(0, 0.0, 8192 * 256, 256)
    assert crowd > 0.5 * 1.2 * kin.step_ms(0, 0.0, 8192 * 256, 256), "two GPUs are no more than two"


@pytest.mark.parametrize("pace", shipped(), ids=lambda pace: pace.name)
def test_a_shipped_pace_behaves_as_engines_do(pace: PaceFile) -> None:
    geometry = geometry_of(pace)
    assert pace.kv_bytes_total >= geometry.total_bytes(32_768), "one long prompt fits"
    assert prefill_ms(pace, 8192, 65_536) > prefill_ms(pace, 8192, 0) > prefill_ms(pace, 512, 0)
    alone, crowd = pace.step_ms(0, 0.0, 8192, 1), pace.step_ms(0, 0.0, 8192 * 16, 16)
    assert alone < crowd < 16 * alone, "batching pays"


@pytest.mark.parametrize(
    ("model", "prefill_8k", "turn_110k", "decode_110k"),
    [("qwen3-30b-a3b", 138.0, 121.0, 7.3), ("qwen3-coder-480b", 271.0, 101.0, 8.8)],
)
def test_h200_is_near_the_published_table(
    model: str, prefill_8k: float, turn_110k: float, decode_110k: float
) -> None:
    """Spot values of research/simulators-traces.md §4, taken there by hand."""
    pace = load_pace(model, "H200")
    assert prefill_ms(pace, 8192, 0) == pytest.approx(prefill_8k, rel=0.1)
    assert prefill_ms(pace, 713, 110_000) == pytest.approx(turn_110k, rel=0.1)
    assert pace.step_ms(0, 0.0, 110_000, 1) == pytest.approx(decode_110k, rel=0.15)


def test_h20_is_an_h200_with_less_arithmetic() -> None:
    h20, h200 = load_pace("qwen3-30b-a3b", "H20"), load_pace("qwen3-30b-a3b", "H200")
    assert "not measured" in h20.error_note
    assert prefill_ms(h20, 8192, 0) > 4 * prefill_ms(h200, 8192, 0)
    assert h20.step_ms(0, 0.0, 50_000, 1) < 1.5 * h200.step_ms(0, 0.0, 50_000, 1)


def test_a_speed_prices_what_the_pace_does() -> None:
    pace = load_pace("qwen3-30b-a3b", "H200")
    speed = pace.speed(geometry_of(pace))
    steps_ms = sum(prefill_ms(pace, 8192, 8192 * i) for i in range(8))
    assert speed.prefill.ms(65_536, 0) == pytest.approx(steps_ms, rel=0.05)
    for batch in (1, 16):
        told = speed.step_ms + batch * speed.step_ms_per_sequence
        assert told == pytest.approx(pace.step_ms(0, 0.0, 50_000 * batch, batch), rel=1e-6)
    assert speed.kv_bytes_per_token == 98_304


TRUE = {"a_ms": 5.0, "b_ms": 0.01, "c_ms": 1e-6, "d_ms": 2e-5, "e_ms": 0.02, "experts_ms": 12.0}


def steps_of(seed: int, count: int, noise: float) -> list[MeasuredStep]:
    """Steps as an engine of TRUE would show them."""
    draw = random.Random(seed)
    pace = replace(load_pace("qwen3-30b-a3b", "H200"), expert_share=1 / 16, **TRUE)
    rows = []
    for _ in range(count):
        new = draw.choice([0, 0, 64, 512, 2048, 8192])
        batch = draw.choice([1, 4, 16, 64]) if new == 0 else draw.choice([0, 8, 64])
        weighted = new * (draw.choice([0, 8192, 65_536]) + new / 2)
        context = batch * draw.choice([500, 4000, 30_000])
        ms = pace.step_ms(new, weighted, context, batch) * (1 + draw.uniform(-noise, noise))
        rows.append(MeasuredStep(new, weighted, context, batch, ms))
    return rows


def test_a_fit_finds_the_coefficients_that_made_the_steps() -> None:
    fitted = fit_steps(steps_of(1, 200, 0.0), expert_share=1 / 16)
    for name, value in TRUE.items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-3), name
    assert fitted.p90_error < 1e-6


def test_noise_costs_no_more_than_itself() -> None:
    fitted = fit_steps(steps_of(2, 400, 0.05), expert_share=1 / 16)
    assert fitted.median_error < 0.04
    fresh = fitted.errors(steps_of(3, 100, 0.0))
    assert abs(fresh).max() < 0.05


def test_a_mixture_needs_its_term() -> None:
    rows = steps_of(4, 200, 0.0)
    assert fit_steps(rows).median_error > 5 * fit_steps(rows, expert_share=1 / 16).median_error


def test_no_coefficient_falls_below_zero() -> None:
    rows = [MeasuredStep(0, 0.0, 1000 * b, b, 10.0 - b / 100) for b in range(1, 9)]
    rows += [MeasuredStep(n, 0.0, 0, 0, 10.0 - n / 1000) for n in (64, 128, 256)]
    fitted = fit_steps(rows)
    assert min(fitted.b_ms, fitted.c_ms, fitted.d_ms, fitted.e_ms) == 0.0
    assert fitted.a_ms == pytest.approx(10.0, rel=0.02)


def test_own_measurements_come_in(tmp_path: Path) -> None:
    rows = steps_of(5, 60, 0.0)
    lines = ["new,weighted,decode_context,batch,ms"]
    lines += [",".join(map(str, msgspec.structs.astuple(row))) for row in rows]
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    (tmp_path / "mine.json").write_bytes(msgspec.json.encode(rows))
    assert read_steps(tmp_path / "mine.csv") == rows
    assert read_steps(tmp_path / "mine.json") == rows


def test_one_prompt_a_step_is_told_by_its_prefix(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("new,prefix,decode_context,batch,ms\n100,1000,0,0,9.5\n")
    assert read_steps(tmp_path / "mine.csv") == [MeasuredStep(100, 105_000.0, 0, 0, 9.5)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("new,prefix,decode_context,batch\n1,0,0,0\n", "row 1: ms"),
        ("new,prefix,decode_context,batch,ms\n1,0,0,0,1\n1,x,0,0,1\n", "row 2: prefix"),
        ("new,prefix,decode_context,batch,ms\n-1,0,0,0,1\n", "row 1: new"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(InvalidInput, match=says):
        read_steps(tmp_path / "mine.csv")


def test_steps_that_cannot_tell_are_refused() -> None:
    only_prefill = [MeasuredStep(n, n * n / 2, 0, 0, 5.0 + n / 100) for n in range(1, 20)]
    with pytest.raises(InvalidInput, match="decode"):
        fit_steps(only_prefill)
    with pytest.raises(InvalidInput, match="measure 8 or more"):
        fit_steps(only_prefill[:3])
    with pytest.raises(InvalidInput, match="row 1"):
        fit_steps([MeasuredStep(0, 0.0, 0, 0, 1.0), *only_prefill])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": "something/1"}, "schema"),
        ({"c_ms": -1.0}, "c_ms"),
        ({"a_ms": "fast"}, "a_ms"),
        ({"expert_share": 1.5}, "expert_share"),
        ({"kv_bytes_total": 0}, "kv_bytes_total"),
        ({"a_ms": 0.0, "d_ms": 0.0, "e_ms": 0.0, "experts_ms": 0.0}, "no time"),
    ],
)
def test_a_wrong_file_is_refused_by_field(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(example(**changes)))
    with pytest.raises(InvalidInput, match=says):
        load_pace_file(path)


def test_a_missing_pace_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="qwen3-30b-a3b@h200"):
        load_pace("qwen3-30b-a3b", "gtx-1080")
    with pytest.raises(InvalidInput, match=r"gone\.json"):
        load_pace_file(tmp_path / "gone.json")
