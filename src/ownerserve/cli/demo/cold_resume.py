"""A cold resume is priced and taken here: a session outlives its worker and comes back from the
store.

worker 1   a long turn, spilled ── stopped
worker 2   the session's next turn: fetched, by the plan it prints
worker 3   the same turn without a store: computed whole, for comparison
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec

from ownerserve.cli.demo.forked import forked
from ownerserve.cli.demo.processes import Child
from ownerserve.kv.wire.headers import (
    CACHED_TOKENS_HEADER,
    MODE_HEADER,
    PLAN_HEADER,
    PROMPT_TOKENS_HEADER,
    RESTORE_HEADER,
)

READY_S = 120.0
ANSWER_TOKENS = 16


class ServedTurn(msgspec.Struct, frozen=True):
    """A served turn is one turn as a worker served it."""

    mode: str
    cached_tokens: int
    prompt_tokens: int
    answer_ms: float
    restore: str
    plan: str
    tokens: list[int]
    logprobs: list[float]


class ColdResume(msgspec.Struct, frozen=True):
    """A cold resume has the same turn twice: brought back from the store, and computed from
    nothing."""

    fetched: ServedTurn
    computed: ServedTurn

    @property
    def max_logprob_difference(self) -> float:
        """The largest difference of logprobs over the tokens that both answers share."""
        same = zip(self.fetched.tokens, self.computed.tokens, strict=False)
        count = next((i for i, (a, b) in enumerate(same) if a != b), len(self.fetched.tokens))
        pairs = zip(self.fetched.logprobs[:count], self.computed.logprobs, strict=False)
        return max((abs(a - b) for a, b in pairs), default=0.0)

    def lines(self) -> list[str]:
        """Return the lines that tell people of it."""
        fetched, computed = self.fetched, self.computed
        return [
            f"a session comes back on a new worker: {fetched.mode}, {fetched.cached_tokens:,} of "
            f"{fetched.prompt_tokens:,} prompt tokens by {fetched.restore}",
            f"  plan: {fetched.plan}",
            f"  answered in {fetched.answer_ms:.0f} ms; computed from nothing in "
            f"{computed.answer_ms:.0f} ms; largest logprob difference "
            f"{self.max_logprob_difference:.1e}",
        ]


def cold_resume(folder: Path, *, model: str = "tiny-v4", context: int = 3000) -> ColdResume:
    """Run a cold resume in `folder`. Starts and stops three workers; raises PeerLost when one
    fails."""
    start = ["worker", "--model", model, "--port", "0", "--kv-memory", "16MiB"]
    start += ["--max-running", "2"]
    stored = [*start, "--store", str(folder / "kv"), "--spill-after", "0"]
    prompt = [32 + (7 * i * i + i // 11) % 95 for i in range(context)]
    first = _turn("first-life", stored, folder, prompt=prompt)
    after = [*prompt, *first.tokens, *(40 + i % 50 for i in range(64))]
    fetched = _turn("second-life", stored, folder, prompt=after)
    computed = _turn("no-store", start, folder, prompt=after)
    return ColdResume(fetched, computed)


def _turn(name: str, arguments: Sequence[str], folder: Path, *, prompt: list[int]) -> ServedTurn:
    """Run one worker's life: one turn, after a short one that warms it up."""
    child = Child(name, arguments, folder, begin=forked)
    try:
        [url] = child.wait_ready(READY_S)
        with httpx.Client(base_url=url, timeout=READY_S, trust_env=False) as http:
            _ask(http, [1, 2, 3], session=None)
            return _ask(http, prompt, session="resumed")
    finally:
        child.stop()  # SIGTERM: what is idle is put away first


def _ask(http: httpx.Client, prompt: list[int], *, session: str | None) -> ServedTurn:
    body = {
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
        **({"session_id": session} if session else {}),
    }
    started_s = time.perf_counter()
    answer = http.post("/v1/completions", json=body).raise_for_status()
    took_ms = (time.perf_counter() - started_s) * 1e3
    choice, headers = answer.json()["choices"][0], answer.headers
    return ServedTurn(
        mode=headers[MODE_HEADER],
        cached_tokens=int(headers[CACHED_TOKENS_HEADER]),
        prompt_tokens=int(headers[PROMPT_TOKENS_HEADER]),
        answer_ms=took_ms,
        restore=headers.get(RESTORE_HEADER, "prefill"),
        plan=headers.get(PLAN_HEADER, ""),
        tokens=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
    )
