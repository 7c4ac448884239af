"""Results of the demo's runs, made up."""

from __future__ import annotations

from typing import Any

import msgspec

from ownerserve.report.demo_results import PolicyResult, PressureTotals, Spread

NOTHING = Spread(0.0, 0.0, 0.0, 0.0)
RESULT = PolicyResult(
    requests=9, errors=0, prompt_tokens=1000, computed_tokens=500, cached_token_share=0.5,
    prefill_tokens_saved=500, ttft_ms=NOTHING, tpot_ms=NOTHING, hotspot_index=1.0,
    wall_clock_factor=1.0, e2e_s=NOTHING, modes={}, requests_by_worker={}, kv_bytes={},
    pressure=PressureTotals(), first_errors=[],
)  # fmt: skip


def made(**reasons: int) -> PolicyResult:
    """A result whose gateway sent turns for these reasons."""
    return changed(reasons=reasons)


def changed(**fields: Any) -> PolicyResult:
    """A result with other values in these fields."""
    return msgspec.structs.replace(RESULT, **fields)


def took(ttft_ms: float) -> PolicyResult:
    """A result whose turns and sessions took in proportion to this."""
    half, whole = Spread(ttft_ms, ttft_ms, 2 * ttft_ms, 3 * ttft_ms), ttft_ms / 1e3
    return changed(ttft_ms=half, tpot_ms=half, e2e_s=Spread(whole, whole, whole, whole))
