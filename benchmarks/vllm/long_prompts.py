"""Share of a first turn that is there after a restart: `copy_bytes` by session, over a real vLLM.

    PYTHONPATH=src:. python benchmarks/vllm/long_prompts.py

One request computes the whole session in steps of 2,048 tokens, the engine runs until it is idle,
ends, and a fresh process is asked for the same prompt. Prints a row for each pair.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec
from contenders import Arena, Contender

from tests.support.vllm import connectors, tiny
from tests.support.vllm.rig import settle

MIB = connectors.MIB
BUDGETS = (2 * MIB, 8 * MIB, 64 * MIB)
SESSIONS = (700, 1_900, 3_900)
BLOCK_TOKENS, TOKEN_BYTES = 32, 64 * 1024
FAMILY = "qwen3-wide"


class Shared(msgspec.Struct, frozen=True):
    """What was restored of a session, of what its last boundary allows, and what saving it took."""

    tokens: int
    allowed: int
    steps: int

    @property
    def share(self) -> float:
        return self.tokens / self.allowed


def measure(contender: Contender, model: Path, *, tokens: int, copy_bytes: int) -> Shared:
    """Store a session of `tokens` in one life, ask for it in the next."""
    given = {"record_blocks": 1, "copy_bytes": copy_bytes}
    ours = connectors.ours(contender.data / "store", host_cache_bytes=0, **given)
    log, prompt = contender.data / "worker.log", tiny.prompt(tokens, seed=tokens)
    before = contender.worker(model, log, max_model_len=4_096, **ours)
    before.generate(prompt, session="s", max_tokens=4)
    computed = before.ask("usage")["steps"]
    settle(before)
    steps = before.ask("usage")["steps"] - computed
    before.shutdown()
    after = contender.worker(model, log, max_model_len=4_096, **ours)
    cached = after.generate(prompt, session="s", max_tokens=4).cached
    after.kill()
    allowed = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return Shared(cached, allowed, int(steps))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Arena(Path(folder)) as arena:
        for tokens in SESSIONS:
            for copy_bytes in BUDGETS:
                model = arena.checkpoint(FAMILY)
                with arena.contender("ours") as ours:
                    found = measure(ours, model, tokens=tokens, copy_bytes=copy_bytes)
                sys.stdout.write(
                    f"{tokens * TOKEN_BYTES / MIB:.0f} MiB, copy_bytes {copy_bytes // MIB} MiB: "
                    f"{found.tokens} of {found.allowed} tokens, {found.share:.3f}; "
                    f"{found.steps} steps beside the turn\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
