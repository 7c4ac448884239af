"""What the gateway sees of engines that say nothing of themselves but `usage`."""

from __future__ import annotations

import pytest

from tests.support.gateway.world import Play, World

BODY = b'{"messages": [{"role": "user", "content": "go on"}]}'


@pytest.mark.parametrize(
    ("first", "second", "lost"),
    [
        # prompt, output; then prompt, cached
        ((109_000, 1_000), (109_000, 1_000), 108_000),  # nothing of the output came back
        ((109_000, 1_000), (109_500, 1_000), 108_000),
        ((109_000, 1_000), (130_000, 1_000), 108_000),
        ((109_000, 9_000), (130_000, 108_992), 0),  # reasoning that a client strips is no loss
        ((109_000, 1_000), (40_000, 1_000), 0),  # a compacted history
        ((1_090, 10), (1_200, 100), 990),
        ((1_090, 10), (1_200, 0), 1_090),
        ((1_090, 10), (1_200, 528), 0),  # may be rounding: of two blocks one was given up
    ],
)
def test_what_a_plain_engine_lost_of_the_last_prompt_is_seen(
    play: Play, first: tuple[int, int], second: tuple[int, int], lost: int
) -> None:
    """A prompt no longer than the last one with its answer counted as an edited history, always."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        for prompt, output, cached in ((*first, 0), (second[0], 5, second[1])):
            engine.usage = (
                b'{"prompt_tokens": %d, "completion_tokens": %d,'
                b' "prompt_tokens_details": {"cached_tokens": %d}}' % (prompt, output, cached)
            )
            await client.post("/v1/chat/completions", BODY, x__session__id="a")
        observer = world.gateway.turns.observer
        assert (observer.reseeds, observer.lost_tokens) == (int(lost > 0), lost)

    play(scenario, engines=1)
