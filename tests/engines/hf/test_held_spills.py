"""Sessions take turns in a device for one and a half of them: none loses what it had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.messages import ExecutionMode  # noqa: E402
from tests.engines.hf.test_restore import node_rig  # noqa: E402
from tests.support.hf.engine_rig import Answer, assert_right, request, text  # noqa: E402

pytestmark = pytest.mark.engine

B = 16
WAIT_S = 120.0


def test_what_a_turn_left_is_stored_before_the_next_in_line_takes_its_room(tmp_path: Path) -> None:
    """Copies are due a minute after a turn's end; all three sessions are here at once, and two."""
    rig = node_rig(tmp_path, blocks=32, spill_after_s=60.0)
    prompts = {name: text(19 * B + 5, seed=seed) for seed, name in enumerate("abc")}

    async def scenario() -> list[Answer]:
        first = [request(f"{n}.0", prompt, new=1, session=n) for n, prompt in prompts.items()]
        await asyncio.wait_for(rig.ask(*first), WAIT_S)
        again = [
            request(f"{n}.1", [*prompt, *text(B, seed=9)], new=1, session=n)
            for n, prompt in prompts.items()
            if n != "c"  # nobody waited when it ended
        ]
        return await asyncio.wait_for(rig.ask(*again), WAIT_S)

    for answer in rig.play(scenario):
        assert_right(answer)
        assert answer.admitted is not None and answer.admitted.mode is ExecutionMode.FETCH
        assert answer.admitted.cached_tokens == 19 * B
