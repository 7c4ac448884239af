"""Restores judged by the bytes in the engine's memory: for weights that no oracle can judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.vllm import connectors, tiny
from tests.support.vllm.rig import Rig, settle

Pages = dict[str, list[str]]
"""By layer, a digest for each block of a request's prefix; "" where the engine has let it go."""


def byte_runs(
    rig: Rig, store: Path, family: str, block: int, **engine: Any
) -> tuple[Pages, Pages, Pages]:
    """The pages of a prompt that was computed, of the same prompt restored after a restart, and of
    another. Four boundaries of `block` tokens, and four tokens more, so that the shortest window
    still reaches back over the last boundary when the request ends."""
    tokens = 4 * block
    prompts = [tiny.prompt(tokens + 4, seed=seed) for seed in (301, 302)]
    before = rig.worker(family, connectors.ours(store), **engine)
    before.hook("watch_pages", tokens=tokens)
    computed, other = (before.submit(prompt, max_tokens=1) for prompt in prompts)
    before.wait([computed, other])
    seen = before.hook("pages")
    settle(before)
    before.shutdown()
    after = rig.worker(family, connectors.ours(store), **engine)
    after.hook("watch_pages", tokens=tokens)
    again = after.submit(prompts[0], max_tokens=1)
    assert after.wait([again])[0].cached == tokens
    restored = _one(after.hook("pages"), again)
    settle(after)
    return _one(seen, computed), restored, _one(seen, other)


def assert_same_pages(one: Pages, other: Pages) -> None:
    """Every block that both still have; at least the last one before the boundary of each layer."""
    assert one.keys() == other.keys()
    for name, digests in one.items():
        assert digests[-1] and other[name][-1], name
        pairs = [pair for pair in zip(digests, other[name], strict=True) if all(pair)]
        assert all(ours == theirs for ours, theirs in pairs), name


def _one(pages: dict[str, Pages], request: str) -> Pages:
    """vLLM may add to a request's id."""
    return next(found for name, found in pages.items() if name.startswith(request))
