"""This experiment shows what a session's state is made of, and how many sessions fit (seed 000
§1.2, §2.4, §2.9).

Arithmetic of kv.geometry over the shipped example configurations; nothing is simulated.
"""

from __future__ import annotations

from typing import Any

from ownerserve.kv.geometry import Geometry, exact_replay_tokens
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.specs import Coverage, PerToken, Window
from ownerserve.kv.units import GIB
from ownerserve.report.figures.state import (
    SessionsByMemory,
    StateBreakdown,
    sessions_by_memory,
    state_breakdown,
)
from ownerserve.sim.suites.base import (
    Cell,
    Drawing,
    Experiment,
    Finding,
    Job,
    Measurement,
    Results,
    ResultTable,
    Scale,
)
from ownerserve.sim.suites.judging import all_of, first_of
from ownerserve.trace.model import Trace

MODELS = (
    "qwen3-32b",
    "deepseek-v3.2",
    "llama-3.1-8b",
    "qwen3-30b-a3b",
    "gemma-3-27b",
    "gpt-oss-120b",
    "qwen3-next-80b",
    "qwen3.5-35b-a3b",
    "deepseek-v4-pro",
    "deepseek-v4-flash",
)
V4 = ("deepseek-v4-pro", "deepseek-v4-flash")
K, M = 1024, 1 << 20
DRAWN_TOKENS = 128 * K
CONTEXTS = (8 * K, 32 * K, 128 * K, 256 * K, 512 * K, M)
HBM_BYTES = 96 * GIB
SIZES_GIB = (8, 16, 32, 64, 96, 192, 384)


def _state(trace: Trace | None) -> dict[str, Any]:
    """Return, by model, the bytes by component and context, the sessions that fit, and the
    replay."""
    return {name: _of(Geometry.of(build_spec(read_config(find_config(name))))) for name in MODELS}


def _of(geometry: Geometry) -> dict[str, Any]:
    dense = geometry.dense_bytes_per_token
    window = sum(state.entry.payload_bytes for state in _windows(geometry))
    ranged = sum(s.entry.payload_bytes / s.tokens_per_entry for s in _ranged(geometry))
    return {
        "parts": {
            component.role.value: round(component.bytes_per_token * DRAWN_TOKENS)
            + component.live_bytes
            for component in geometry.components
        },
        "bytes": [geometry.allocated_bytes(tokens) for tokens in CONTEXTS],
        "dense_bytes": [dense * tokens for tokens in CONTEXTS],
        "sessions": [geometry.sessions_that_fit(HBM_BYTES, tokens) for tokens in CONTEXTS],
        "dense_sessions": [HBM_BYTES // (dense * tokens) for tokens in CONTEXTS],
        "by_memory": [geometry.sessions_that_fit(gib * GIB, DRAWN_TOKENS) for gib in SIZES_GIB],
        "dense_by_memory": [gib * GIB // (dense * DRAWN_TOKENS) for gib in SIZES_GIB],
        "window_to_range": window / ranged if ranged else None,
        "replay_tokens": exact_replay_tokens(geometry.spec),
        "is_dense": all(isinstance(state.kind, PerToken) for state in geometry.spec.states),
        "window_layers": len(_windows(geometry)),
        "window_tokens": max((s.kind.tokens for s in _windows(geometry)), default=0),
    }


def _windows(geometry: Geometry) -> list[Any]:
    return [state for state in geometry.spec.states if isinstance(state.kind, Window)]


def _ranged(geometry: Geometry) -> list[Any]:
    return [state for state in geometry.spec.states if state.coverage is Coverage.RANGE]


def _jobs(scale: Scale) -> dict[str, Job]:
    return {"state": Measurement(_state)}


def _tables(results: Results) -> list[ResultTable]:
    state = results["state"]
    heads = [f"sessions at {_tokens(tokens)}" for tokens in CONTEXTS]
    rows: list[list[Cell]] = []
    for name in MODELS:
        rows.append([name, *map(float, state[name]["sessions"])])
        if state[name]["sessions"] != state[name]["dense_sessions"]:
            rows.append([f"{name}, dense layout", *map(float, state[name]["dense_sessions"])])
    caption = (
        f"Sessions that {HBM_BYTES // GIB} GiB hold, sharing nothing. Dense layout: every layer "
        "an entry a token, as PagedAttention keeps it."
    )
    parts: list[list[Cell]] = [
        [name, role, float(size)] for name in MODELS for role, size in state[name]["parts"].items()
    ]
    told = f"Bytes of one session at {_tokens(DRAWN_TOKENS)} tokens, by component."
    return [
        ResultTable("000-sessions-by-context", caption, ["model", *heads], rows),
        ResultTable("000-state-by-component", told, ["model", "component", "bytes"], parts),
    ]


def _figures(results: Results) -> list[Drawing]:
    state = results["state"]
    breakdown = StateBreakdown(
        DRAWN_TOKENS,
        {name: state[name]["parts"] for name in MODELS},
        {name: state[name]["dense_bytes"][CONTEXTS.index(DRAWN_TOKENS)] for name in MODELS},
    )
    lines = {}
    for name in ("deepseek-v4-flash", "deepseek-v4-pro", "gpt-oss-120b", "qwen3-30b-a3b"):
        lines[name] = _positive(state[name]["by_memory"])
        if state[name]["by_memory"] != state[name]["dense_by_memory"]:
            lines[f"{name}, dense"] = _positive(state[name]["dense_by_memory"])
    memory = SessionsByMemory(DRAWN_TOKENS, [gib * GIB for gib in SIZES_GIB], lines)
    return [
        Drawing("000-state-breakdown", state_breakdown, breakdown, "State by model and component."),
        Drawing("000-sessions-by-memory", sessions_by_memory, memory, "Sessions against memory."),
    ]


def _positive(counts: list[int]) -> list[float]:
    """Return the counts for a logarithmic axis: no point where not one session fits."""
    return [float(count) if count else float("nan") for count in counts]


def _verdicts(results: Results) -> list[Finding]:
    return [*_more_sessions(results), _tenth(results), _eight_times(results), _replay(results)]


def _more_sessions(results: Results) -> list[Finding]:
    found = []
    for name in V4:
        state = results["state"][name]
        pairs = list(zip(state["sessions"], state["dense_sessions"], CONTEXTS, strict=True))
        ratios = [own / max(dense, 1) for own, dense, _ in pairs]
        told = ", ".join(f"{own} against {dense} at {_tokens(at)}" for own, dense, at in pairs)
        found.append(
            Finding(
                f"The same HBM holds more long sessions ({name})",
                "seed 000 §2.9",
                all_of([ratio > 1 for ratio in ratios[2:]]),
                f"sessions in {HBM_BYTES // GIB} GiB, own against dense layout: {told}",
                draws=0,
            )
        )
    ratios_of = {name: _ratio(results, name) for name in MODELS if name not in V4}
    plain = [name for name in ratios_of if results["state"][name]["is_dense"]]
    gains = [ratios_of[name] < 1.01 if name in plain else ratios_of[name] > 1.5
             for name in ratios_of]  # fmt: skip
    told = ", ".join(f"{name} x{ratios_of[name]:.3g}" for name in ratios_of if name not in plain)
    found.append(
        Finding(
            "Other hybrids gain too; a dense model gains nothing",
            "seed 000 §2.9, §3.11",
            all_of(gains),
            f"bytes of the dense layout / own at {_tokens(DRAWN_TOKENS)}: {told}; dense models: "
            + ", ".join(f"{name} x{ratios_of[name]:.3g}" for name in plain),
            draws=0,
        )
    )
    return found


def _ratio(results: Results, name: str) -> float:
    at, state = CONTEXTS.index(DRAWN_TOKENS), results["state"][name]
    return float(state["dense_bytes"][at]) / float(state["bytes"][at])


def _tenth(results: Results) -> Finding:
    state = results["state"]
    share = state["deepseek-v4-pro"]["bytes"][-1] / state["deepseek-v3.2"]["bytes"][-1]
    return Finding(
        "V4-Pro's KV at 1M tokens is about 10 % of V3.2's",
        "seed 000 §1.2",
        first_of(0.07 <= share <= 0.13, 0.05 <= share <= 0.2),
        f"{100 * share:.3g} % (state of one session, each in the form its own report assumes)",
        draws=0,
    )


def _eight_times(results: Results) -> Finding:
    ratios = {name: results["state"][name]["window_to_range"] for name in V4}
    told = ", ".join(f"{name} x{ratio:.3g}" for name, ratio in ratios.items())
    return Finding(
        "SWA state of every token is about 8 times the compressed KV",
        "seed 000 §2.4",
        first_of(
            all(7 <= ratio <= 9 for ratio in ratios.values()),
            all(4 <= ratio <= 16 for ratio in ratios.values()),
        ),
        f"window entry of all layers / compressed bytes a token: {told}",
        draws=0,
    )


def _replay(results: Results) -> Finding:
    told, fits = [], []
    for name in V4:
        state = results["state"][name]
        bound = state["window_tokens"] * state["window_layers"]
        told.append(f"{name}: {state['replay_tokens']} of n_win x L = {bound}")
        if bound and state["replay_tokens"] is not None:
            fits.append(state["replay_tokens"] <= bound)
    return Finding(
        "Recomputing the last n_win x L tokens restores all windows without any stored SWA state",
        "seed 000 §2.6.7",
        all_of(fits),
        f"tokens an exact replay needs: {'; '.join(told)}",
        draws=0,
    )


def _tokens(count: int) -> str:
    return f"{count // M}M" if count >= M else f"{count // K}K"


EXPERIMENTS = [
    Experiment(
        name="000-state",
        title="State by model, and sessions in the same memory",
        source="seed 000 §1.2, §2.4, §2.9",
        about="Bytes of every component of one session's state, and how many sessions fit, for the "
        "shipped configurations: the model's own layout against one where every layer keeps an "
        "entry for every token. Arithmetic, no simulation; `ownerserve inspect` shows the same.",
        jobs=_jobs,
        verdicts=_verdicts,
        figures=_figures,
        tables=_tables,
    ),
]
