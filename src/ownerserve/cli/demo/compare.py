"""This module compares the answers of two runs of one workload, by logprobs, not by tokens.

Batch shape alone can flip an argmax between two tokens whose logits differ by less than the
numeric noise. A flip is therefore no fault when its margin is inside the tolerance; it is
reported, and the comparison of that answer ends there, since what follows had another prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ownerserve.cli.demo.drive import TurnAnswer

TOLERANCE = 1e-3
"""Largest difference of one token's logprob between two runs (fp32 tiny models: about 1e-5)."""


class Flip(msgspec.Struct):
    """A flip is where two runs chose different tokens. `margin`: how far apart the two candidates
    were."""

    session: str
    turn: int
    position: int
    margin: float


class Comparison(msgspec.Struct):
    """A comparison is `equal` where every compared logprob and every flip's margin is within
    TOLERANCE.

    `tokens_beyond` counts tokens whose logprobs differ by more; `missing` counts answers that
    failed, are absent or were cut short in one of the runs.
    """

    equal: bool = False
    answers_compared: int = 0
    tokens_compared: int = 0
    max_logprob_difference: float = 0.0
    tokens_beyond: int = 0
    flips: list[Flip] = []
    missing: int = 0


def compare(reference: Iterable[TurnAnswer], other: Iterable[TurnAnswer]) -> Comparison:
    """Compare by (session, turn); an answer missing or failed in one run counts as `missing`."""
    theirs = {(a.session, a.turn): a for a in other if not a.error}
    result = Comparison()
    for mine in reference:
        peer = theirs.get((mine.session, mine.turn))
        if mine.error or peer is None:
            result.missing += 1
            continue
        result.answers_compared += 1
        _compare_answer(mine, peer, result)
    flips_small = all(flip.margin <= TOLERANCE for flip in result.flips)
    flaws = result.tokens_beyond + result.missing
    result.equal = flips_small and not flaws and result.tokens_compared > 0
    return result


def _compare_answer(mine: TurnAnswer, peer: TurnAnswer, result: Comparison) -> None:
    if len(mine.tokens) != len(peer.tokens) and mine.tokens[: len(peer.tokens)] == peer.tokens:
        result.missing += 1  # cut short: never equal
    for position, (token, other) in enumerate(zip(mine.tokens, peer.tokens, strict=False)):
        if token != other:
            margin = mine.logprobs[position] - mine.runner_up_logprobs[position]
            result.flips.append(Flip(mine.session, mine.turn, position, margin))
            return
        difference = abs(mine.logprobs[position] - peer.logprobs[position])
        result.max_logprob_difference = max(result.max_logprob_difference, difference)
        result.tokens_beyond += not difference <= TOLERANCE  # a NaN is beyond
        result.tokens_compared += 1
