"""Makes paces: of the simulator's own folder, of any model and GPU with operator tables, of yours.

    python tools/fit_pace.py shipped [NAME ...]  src/ownerserve/sim/engine/paces/*.json, all or some
    python tools/fit_pace.py tables MODEL --system h200_sxm --gpu H200 --config qwen3-30b-a3b ...
    python tools/fit_pace.py measured steps.csv --name mine@h200 --gpu H200 --config ...

`shipped` and `tables` ask aiconfigurator-core (Apache-2.0, an option: `pip install
aiconfigurator-core==0.12.0`) for step times on a grid; its numbers interpolate measured operators,
they are not measured engine steps. `measured` takes a CSV or JSON of steps: new, prefix (or
weighted), decode_context, batch, ms.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import logging
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.sim.engine.pace import FOLDER, TIMES, PaceFile
from ownerserve.sim.engine.pace_fit import Fitted, MeasuredStep, fit_steps, read_steps

UTILIZATION = 0.9
OVERHEAD_BYTES = 3_000_000_000
"""A GPU's share of activations, graphs and collective buffers. An RTX 4090 with Llama-3.1-8B and
2,048 tokens a step had 1.2e9 (the shared vLLM 0.19 run); 8,192 tokens and more GPUs take more."""
MEMORY_BYTES = {
    "H20": 96 << 30,
    "H100": 80 << 30,
    "H200": 141 << 30,
    "RTX PRO 6000": 97887 << 20,
}
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "RTX PRO 6000": "rtx_pro_6000_server"}
COMPUTE_SHARE_H20, BANDWIDTH_SHARE_H20 = 6.7, 1.2
"""H200 over H20 by data sheet: 989 / 148 dense BF16 TFLOP/s, 4.8 / 4.0 TB/s."""
TABLES_NOTE = (
    "interpolated operator tables, not engine steps: 10-20 % off silicon where it could be checked"
)
NEXT_SHARE = 10 / 512
NEXT_FACTORS = {
    "a_ms": 48 / 40,
    "b_ms": 48 / 40 * (1 + 0.394 * (10 / 8 - 1)),
    "c_ms": 48 / 40,
    "d_ms": 48 / 40,
    "e_ms": 48 / 40,
    "experts_ms": 48 / 40 * 512 / 256,
}
"""Qwen3-Next-80B over Qwen3.5-35B-A3B by shape. Their layers are of equal size, attention, linear
attention and experts alike; there are 48 of them for 40, 10 experts a token for 8, of 512 for 256.
0.394 is the experts' part of a prefill of 8,192 tokens in the tables, on two GPUs."""
NEXT_NOTE = (
    "tables of Qwen3.5-35B-A3B on as many GPUs, scaled by shape (48 layers for 40, 10 of 512"
    " experts for 8 of 256): no tables have Qwen3-Next's experts; +-30 %, not measured"
)
H20_NOTE = "H200 tables scaled by data sheet (compute / 6.7, bandwidth / 1.2); +-30 %, not measured"


class Model(msgspec.Struct, frozen=True):
    """A model as served: `replicated` where every GPU holds all of its state (MLA latents).

    Prefills that end between `odd_lengths` are left out: the tables contradict themselves there.
    """

    tables: str
    config: str
    weight_bytes: float
    options: dict[str, Any] = {}
    replicated: bool = False
    max_context: int = 131072
    odd_lengths: tuple[int, int] = (0, 0)
    note: str = ""


V4_ODD = (4096, 32768)
V4_NOTE = (
    "; prefills that end between 4k and 32k left out: the tables are up to 70 % above those"
    " on either side there; lengths beyond 64k are the tables' own extrapolation"
)
FP8 = {"moe_quant_mode": "fp8_block", "moe_ep_size": 8}
MODELS = {
    "llama-3.1-8b": Model("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", 16.06e9),
    "qwen3-32b": Model("Qwen/Qwen3-32B", "qwen3-32b", 65.52e9),
    "qwen3-30b-a3b": Model("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", 61.06e9),
    "qwen3.5-35b-a3b": Model("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b", 70.2e9),
    "qwen3-next-80b": Model("Qwen/Qwen3.5-35B-A3B", "qwen3-next-80b", 160e9),
    "qwen3-coder-480b": Model(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b", 960.3e9, {"moe_tp_size": 8}
    ),
    "qwen3-coder-480b-fp8": Model(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        "qwen3-coder-480b",
        482.0e9,
        {"gemm_quant_mode": "fp8_block", **FP8},
    ),
    "deepseek-v3": Model(
        "deepseek-ai/DeepSeek-V3", "deepseek-v3", 674.0e9, {"moe_tp_size": 8}, replicated=True
    ),
    "deepseek-v4-flash": Model(
        "deepseek-ai/DeepSeek-V4-Flash",
        "deepseek-v4-flash",
        290.0e9,
        FP8,
        replicated=True,
        odd_lengths=V4_ODD,
        note=V4_NOTE,
    ),
    "deepseek-v4-pro": Model(
        "deepseek-ai/DeepSeek-V4-Pro",
        "deepseek-v4-pro",
        870.0e9,
        FP8,
        replicated=True,
        odd_lengths=V4_ODD,
        note=V4_NOTE
        + "; expert times are FP8's (no FP4 tables for Hopper), memory the FP4 checkpoint's",
    ),
}
GPUS_OF = {
    ("qwen3-32b", "H100"): 2,
    ("qwen3-32b", "H20"): 2,
    ("qwen3-32b", "RTX PRO 6000"): 2,
    ("qwen3.5-35b-a3b", "H100"): 2,
    ("qwen3-next-80b", "H200"): 2,
}
"""Where it is neither 1 nor the 8 of the models that name expert parallelism."""


class Deployment(msgspec.Struct, frozen=True):
    name: str
    model: Model
    gpu: str
    gpus: int
    system: str

    @property
    def kv_bytes_total(self) -> int:
        """What 0.9 of the memory leaves for state after weights and overhead; 0 or less: no fit."""
        left = MEMORY_BYTES[self.gpu] * UTILIZATION - OVERHEAD_BYTES
        left -= self.model.weight_bytes / self.gpus
        return int(left * (1 if self.model.replicated else self.gpus))

    @property
    def options(self) -> dict[str, Any]:
        found = {"tp_size": self.gpus, **self.model.options}
        if self.gpus == 2 and "A3B" in self.model.tables:
            found["moe_tp_size"] = 2
        return found


class Tables:
    """aiconfigurator's engine for one deployment. Owns the queries, and what they mean."""

    def __init__(self, deployment: Deployment, backend: str) -> None:
        try:
            from aiconfigurator_core.sdk.engine import EngineHandle
        except ImportError as error:
            raise InvalidInput(
                "aiconfigurator-core", "not installed", "pip install aiconfigurator-core==0.12.0"
            ) from error
        self._engine = EngineHandle.compile(
            deployment.model.tables, deployment.system, backend, **deployment.options
        )
        mixed = self._engine.mixed_step_breakdown_per_op(
            ctx_tokens=1024, gen_tokens=8, isl=1024, osl=2
        )
        self._attention = {name for name, *_ in mixed[1]}
        self.knows_mixed = bool(mixed[1]) and bool(mixed[2])

    def ms(self, new: int, prefix: int, batch: int, context: int) -> float:
        """One step: a chunk of `new` after `prefix`, and `batch` sequences of `context` tokens."""
        if not batch:
            return float(self._engine.predict_prefill_latency(1, prefix + new, prefix))
        if not new:
            return float(self._engine.decode_step_latency(batch, context, 2))
        shared = self._engine.mixed_step_breakdown(
            ctx_tokens=new, gen_tokens=batch, isl=context, osl=2
        )
        ops, _ = self._engine.run_static_per_op(
            batch_size=1, isl=prefix + new, osl=1, prefix=prefix, mode="static_ctx"
        )
        attention = sum(ms for name, ms, *_ in ops if name in self._attention)
        return float(shared[1] + attention + shared[3])


GRID = {
    "new": [64, 128, 256, 512, 1024, 2048, 4096, 8192],
    "prefix": [0, 4096, 16384, 32768, 49152, 65536, 122880],
    "batch": [1, 2, 4, 8, 16, 32, 64, 128, 256],
    "context": [512, 2048, 8192, 32768, 65536, 131072],
    "mixed new": [256, 1024, 4096, 8192],
    "mixed batch": [4, 16, 64, 128],
    "mixed (context, prefix)": [(2048, 0), (32768, 32768)],
}


def grid(deployment: Deployment) -> Iterator[tuple[int, int, int, int]]:
    """(new, prefix, batch, context) that the tables cover and the memory holds."""
    model = deployment.model
    geometry = Geometry.of(build_spec(read_config(find_config(model.config))))
    room = deployment.kv_bytes_total
    low, high = model.odd_lengths
    for new in GRID["new"]:
        for prefix in GRID["prefix"]:
            end = prefix + new
            if end <= model.max_context and not low < end < high:
                yield new, prefix, 0, 0
    for batch in GRID["batch"]:
        for context in GRID["context"]:
            if context <= model.max_context and batch * geometry.total_bytes(context) <= room:
                yield 0, 0, batch, context
    for new in GRID["mixed new"]:
        for batch in GRID["mixed batch"]:
            for context, prefix in GRID["mixed (context, prefix)"]:
                if (batch + 1) * geometry.total_bytes(context) <= room:
                    yield new, prefix, batch, context


REGIONS = {
    "prefill below 1,024 tokens": lambda s: s.batch == 0 and s.new < 1024,
    "prefill from 1,024 tokens": lambda s: s.batch == 0 and s.new >= 1024,
    "decode, batch to 8": lambda s: s.new == 0 and s.batch <= 8,
    "decode, batch over 8": lambda s: s.new == 0 and s.batch > 8,
    "mixed": lambda s: s.new > 0 and s.batch > 0,
}


def errors_by_region(fitted: Fitted, steps: list[MeasuredStep]) -> dict[str, dict[str, float]]:
    found = {}
    for region, holds in REGIONS.items():
        inside = [step for step in steps if holds(step)]
        if inside:
            found[region] = error_words(fitted, inside)
    return found


def error_words(fitted: Fitted, steps: list[MeasuredStep]) -> dict[str, float]:
    """Median and 90th percentile of the relative error's size, and its mean with the sign."""
    wrong = fitted.errors(steps)
    return {
        "steps": len(steps),
        "median": round(float(np.median(np.abs(wrong))), 4),
        "p90": round(float(np.quantile(np.abs(wrong), 0.9)), 4),
        "bias": round(float(wrong.mean()), 4),
    }


def fit_with_evidence(
    steps: list[MeasuredStep], share: float, held_every: int = 4
) -> tuple[Fitted, dict[str, Any]]:
    """Fitted to three steps in four; the fourth is held out. A few own rows are all fitted to."""
    held = steps[held_every - 1 :: held_every] if len(steps) >= 40 else []
    kept = [step for step in steps if step not in held]
    fitted = fit_steps(kept, expert_share=share)
    evidence: dict[str, Any] = {"fitted_to": error_words(fitted, kept)}
    if held:
        evidence["held_out"] = error_words(fitted, held)
    evidence["by_region"] = errors_by_region(fitted, steps)
    if share:
        evidence["median_error_without_expert_term"] = round(fit_steps(kept).median_error, 4)
    evidence["date"] = datetime.date.today().isoformat()
    evidence["command"] = "python tools/fit_pace.py " + shlex.join(sys.argv[1:])
    return fitted, evidence


def expert_share_of(tables: str) -> float:
    """top_k / experts from the configuration that the tables' package carries; 0 if dense."""
    import aiconfigurator_core

    folder = Path(aiconfigurator_core.__file__).parent / "model_configs"
    config = read_config(folder / f"{tables.replace('/', '--')}_config.json")
    config = config.get("text_config", config)
    experts = config.get("num_experts") or config.get("n_routed_experts")
    return config["num_experts_per_tok"] / experts if experts else 0.0


def fit_tables(deployment: Deployment, *, backend: str = "vllm") -> PaceFile:
    """A pace from the operator tables of the deployment's own GPU."""
    tables = Tables(deployment, backend)
    steps, skipped = [], 0
    for new, prefix, batch, context in grid(deployment):
        if new and batch and not tables.knows_mixed:
            skipped += 1
            continue
        ms = tables.ms(new, prefix, batch, context)
        steps.append(MeasuredStep(new, new * (prefix + new / 2), batch * context, batch, ms))
    fitted, evidence = fit_with_evidence(steps, expert_share_of(deployment.model.tables))
    version = importlib.metadata.version("aiconfigurator-core")
    evidence |= {
        "grid": GRID,
        "options": deployment.options,
        "max_context_tokens": deployment.model.max_context,
        "overhead_bytes_per_gpu": OVERHEAD_BYTES,
        "weight_bytes": deployment.model.weight_bytes,
        "versions": {"aiconfigurator-core": version, backend: "0.24.0"},
    }
    note = TABLES_NOTE + deployment.model.note
    if skipped:
        note += f"; no mixed steps ({skipped} asked: the tables drop decode attention there)"
    return PaceFile(
        name=deployment.name,
        model=deployment.name.partition("@")[0],
        gpu=deployment.gpu,
        gpus=deployment.gpus,
        engine=f"{backend} 0.24.0",
        config=deployment.model.config,
        **coefficients(fitted),
        expert_share=fitted.expert_share,
        fit_error=round(fitted.median_error, 4),
        source=f"aiconfigurator-core {version}, {deployment.model.tables} on {deployment.system}",
        error_note=note,
        kv_bytes_total=deployment.kv_bytes_total,
        evidence=evidence,
    )


def coefficients(fitted: Fitted) -> dict[str, float]:
    return {name: float(f"{getattr(fitted, name):.6g}") for name in TIMES}


def scaled_to_h20(pace: PaceFile, deployment: Deployment) -> PaceFile:
    """What an H200's pace is on an H20: `b` and `c` are arithmetic, the others memory."""
    factors = dict.fromkeys(TIMES, BANDWIDTH_SHARE_H20)
    factors["b_ms"] = factors["c_ms"] = COMPUTE_SHARE_H20
    times = {name: float(f"{getattr(pace, name) * factors[name]:.6g}") for name in TIMES}
    return msgspec.structs.replace(
        pace,
        name=deployment.name,
        gpu="H20",
        gpus=deployment.gpus,
        error_note=H20_NOTE + deployment.model.note,
        kv_bytes_total=deployment.kv_bytes_total,
        evidence={**pace.evidence, "scaled_by": factors},
        **times,
    )


def scaled_to_next(pace: PaceFile) -> PaceFile:
    """What the pace of its smaller kin is for Qwen3-Next."""
    times = {name: float(f"{getattr(pace, name) * NEXT_FACTORS[name]:.6g}") for name in TIMES}
    return msgspec.structs.replace(
        pace,
        expert_share=NEXT_SHARE,
        error_note=NEXT_NOTE,
        evidence={**pace.evidence, "scaled_by": NEXT_FACTORS},
        **times,
    )


def deployments() -> Iterator[Deployment]:
    for model_name, model in MODELS.items():
        for gpu in MEMORY_BYTES:
            usual = 8 if {"moe_tp_size", "moe_ep_size"} & set(model.options) else 1
            gpus = GPUS_OF.get((model_name, gpu), usual)
            name = f"{model_name}@{gpu.lower().replace(' ', '-')}"
            yield Deployment(name, model, gpu, gpus, SYSTEMS.get(gpu, "h200_sxm"))


def ship(wanted: list[str], console: Console) -> None:
    for deployment in deployments():
        if wanted and deployment.name not in wanted:
            continue
        if deployment.kv_bytes_total <= 0:
            console.print(f"[yellow]{deployment.name}: does not fit {deployment.gpus} GPUs")
            continue
        try:
            # An H20's memory is smaller: its grid is its own, its times are H200's.
            pace = fit_tables(deployment)
        except (RuntimeError, ValueError, KeyError) as error:  # the tables' words for no data
            console.print(f"[yellow]{deployment.name}: no data ({str(error)[:90]})")
            continue
        if deployment.model.config == "qwen3-next-80b":
            pace = scaled_to_next(pace)
        if deployment.gpu == "H20":
            pace = scaled_to_h20(pace, deployment)
        write(pace, FOLDER / f"{deployment.name}.json", console)


def write(pace: PaceFile, path: Path, console: Console) -> None:
    text = msgspec.json.format(msgspec.json.encode(pace), indent=1)
    path.write_bytes(text + b"\n")
    held = pace.evidence.get("held_out")
    words = f", held out {held['median']:.1%} (p90 {held['p90']:.1%})" if held else ""
    state = f"state {pace.kv_bytes_total / 1e9:.0f} GB"
    console.print(f"{pace.name}: median {pace.fit_error:.1%}{words}, {state}")


def measured(args: argparse.Namespace, console: Console) -> None:
    fitted, evidence = fit_with_evidence(read_steps(args.steps), args.expert_share)
    pace = PaceFile(
        name=args.name,
        model=args.name.partition("@")[0],
        gpu=args.gpu,
        gpus=args.gpus,
        engine=args.engine,
        config=args.config,
        **coefficients(fitted),
        expert_share=fitted.expert_share,
        fit_error=round(fitted.median_error, 4),
        source=f"measured: {args.steps.name}",
        error_note="own measurements",
        kv_bytes_total=args.kv_bytes,
        evidence=evidence,
    )
    write(pace, args.out, console)


def tables(args: argparse.Namespace, console: Console) -> None:
    pairs = (pair.partition("=") for pair in args.option)
    options = {key: int(value) if value.isdigit() else value for key, _, value in pairs}
    model = Model(args.model, args.config, args.weight_bytes, options, args.replicated == "yes")
    deployment = Deployment(args.name, model, args.gpu, args.gpus, args.system)
    write(fit_tables(deployment, backend=args.backend), args.out, console)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("shipped").add_argument("names", nargs="*")
    ask = commands.add_parser("tables")
    ask.add_argument("model", help="as the tables call it, e.g. Qwen/Qwen3-30B-A3B")
    ask.add_argument("--system", required=True, help="as the tables call it, e.g. h200_sxm")
    ask.add_argument("--backend", default="vllm")
    ask.add_argument("--weight-bytes", type=float, required=True)
    ask.add_argument("--replicated", choices=["yes", "no"], default="no", help="MLA under TP: yes")
    ask.add_argument("--option", action="append", default=[], metavar="moe_ep_size=8")
    own = commands.add_parser("measured")
    own.add_argument("steps", type=Path, help="CSV or JSON: new, prefix, decode_context, batch, ms")
    own.add_argument("--engine", default="unnamed")
    own.add_argument("--expert-share", type=float, default=0.0, help="top_k / experts")
    own.add_argument("--kv-bytes", type=int, required=True, help="device memory for state")
    for command in (ask, own):
        command.add_argument("--name", required=True, help="model@gpu")
        command.add_argument("--gpu", required=True, choices=list(MEMORY_BYTES))
        command.add_argument("--gpus", type=int, default=1)
        command.add_argument("--config", required=True, help="an example's name, for state sizes")
        command.add_argument("--out", type=Path, required=True)
    return top


def main() -> None:
    logging.disable(logging.WARNING)  # the tables tell of every fallback row on every query
    args, console = parser().parse_args(), Console(width=120)
    try:
        match args.command:
            case "shipped":
                ship(args.names, console)
            case "tables":
                tables(args, console)
            case _:
                measured(args, console)
    except InvalidInput as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
