"""Sampling by itself: distributions, seeds, penalties, log-probabilities."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ownerserve.engines.hf.model.runner import Sampler, sample, takes_state, truncate  # noqa: E402
from ownerserve.engines.hf.scheduling.requests import (  # noqa: E402
    EngineRequest,
    SaidSoFar,
    Sampling,
    Stopping,
    TextState,
)

pytestmark = pytest.mark.engine

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0])
CPU = torch.device("cpu")


def sampler(*, choice: int = 0, stopping: Stopping | None = None, **fields: Any) -> Sampler:
    request = EngineRequest(
        request_id="r",
        prompt=[1],
        stopping=stopping or Stopping(max_tokens=9),
        sampling=Sampling(**fields),
    )
    return Sampler(request, choice, CPU)


def moved(before: Sampler, written: list[int], **fields: Any) -> Sampler:
    """The sampler as it goes on at another worker."""
    request = EngineRequest(
        request_id="r",
        prompt=[1, *written],
        stopping=Stopping(max_tokens=99),
        sampling=Sampling(**fields),
        said=SaidSoFar(tuple(written), TextState(), before.state(), 0),
    )
    return Sampler(request, 0, CPU)


def draw(count: int, one: Sampler) -> list[int]:
    return [sample([LOGITS], [one])[0].token for _ in range(count)]


def test_greedy_takes_the_best() -> None:
    assert draw(3, sampler(temperature=0)) == [0, 0, 0]


def test_draws_follow_the_distribution() -> None:
    counts = Counter(draw(4000, sampler(temperature=1.0, seed=1)))
    for token, expected in enumerate(torch.softmax(LOGITS, -1).tolist()):
        # five standard deviations of a binomial share
        margin = 5 * (expected * (1 - expected) / 4000) ** 0.5
        assert abs(counts[token] / 4000 - expected) < margin + 1e-9


def test_a_seed_repeats_and_choices_differ() -> None:
    first = draw(30, sampler(seed=9))
    assert draw(30, sampler(seed=9)) == first
    assert draw(30, sampler(seed=9, choice=1)) != first


def test_neighbours_in_the_batch_do_not_disturb_a_seed() -> None:
    alone = draw(20, sampler(seed=4))
    mine, other, greedy = sampler(seed=4), sampler(seed=5), sampler(temperature=0)
    rows = [torch.flip(LOGITS, [0]), LOGITS, LOGITS]
    assert [sample(rows, [other, mine, greedy])[1].token for _ in range(20)] == alone


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.01}, [0]),
        ({"top_p": 0.8}, [0, 1]),
        ({"top_p": 0.5, "top_k": 1}, [0]),
        ({"top_k": 2, "top_p": 0.75}, [0, 1]),
    ],
)
def test_what_top_k_and_top_p_keep(fields: dict[str, Any], kept: list[int]) -> None:
    probabilities = truncate(torch.softmax(LOGITS, -1), Sampling(**fields))
    assert probabilities.nonzero().flatten().tolist() == kept


def test_penalties_count_what_was_written() -> None:
    one = sampler(temperature=0, frequency_penalty=0.6)
    # 0 leads 1 by 1.0 and 2 by 2.0; each use costs 0.6
    assert draw(4, one) == [0, 0, 1, 0]
    assert draw(3, sampler(temperature=0, presence_penalty=1.5)) == [0, 1, 0]


def test_bias_can_force_a_token() -> None:
    assert draw(2, sampler(logit_bias={4: 100.0})) == [4, 4]


def test_no_end_before_min_tokens() -> None:
    stopping = Stopping(max_tokens=9, min_tokens=2, eos_token_ids=frozenset({0}))
    assert draw(3, sampler(temperature=0, stopping=stopping)) == [1, 1, 0]


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    one = sampler(temperature=0, logprobs=2, logit_bias={3: 100.0})
    [sampled] = sample([LOGITS], [one])
    expected = torch.log_softmax(LOGITS, -1).tolist()
    assert sampled.token == 3
    assert sampled.chosen.logprob == pytest.approx(expected[3])
    assert [(t.token, t.logprob) for t in sampled.top] == [
        (0, pytest.approx(expected[0])),
        (1, pytest.approx(expected[1])),
    ]


def test_the_callers_logits_stay_as_they_are() -> None:
    before = LOGITS.clone()
    draw(3, sampler(logit_bias={0: -5.0}, frequency_penalty=1.0, top_k=2, top_p=0.9))
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 9},
        {"seed": 9, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "frequency_penalty": 0.5},
    ],
)
def test_a_sampler_that_moves_draws_what_it_would_have_drawn(fields: dict[str, Any]) -> None:
    alone = draw(30, sampler(**fields))
    before = sampler(**fields)
    first = draw(11, before)
    assert [*first, *draw(19, moved(before, first, **fields))] == alone


def test_a_generator_s_state_that_can_not_be_used_is_known_before() -> None:
    assert takes_state(sampler(seed=1).state(), CPU)
    assert not takes_state(b"", CPU) and not takes_state(bytes(16), CPU), "a device's of CUDA"
