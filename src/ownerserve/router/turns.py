"""What kind of turn a request is, and what is done with that kind by default (seed 000 §3.6.4).

| class | is | by default |
|---|---|---|
| new_long_prefix | nothing is known of it, and it is long | prefill apart, else on the spot |
| small_increment | a short addition, or a short new prompt | prefill at the owner |
| long_tool_output | a long addition to a known context | prefill apart, else at the owner |
| decode_continuation | next to nothing to compute | stay with the owner |
| forked_rollout | a first turn on another session's prefix | where that is held, or fetch it |
| cold_resume | back after a long gap, or its owner was lost | load what is kept, compute the rest |
"""

from __future__ import annotations

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.messages import Label
from ownerserve.router.settings import Settings


class TurnClass(Label):
    """Kinds of turns; a metric label."""

    NEW_LONG_PREFIX = "new_long_prefix"
    SMALL_INCREMENT = "small_increment"
    LONG_TOOL_OUTPUT = "long_tool_output"
    DECODE_CONTINUATION = "decode_continuation"
    FORKED_ROLLOUT = "forked_rollout"
    COLD_RESUME = "cold_resume"


_A = PlacementAction

STRATEGIES: dict[TurnClass, tuple[PlacementAction, ...]] = {
    TurnClass.NEW_LONG_PREFIX: (_A.REMOTE_PREFILL, _A.COLOCATED_PREFILL),
    TurnClass.SMALL_INCREMENT: (_A.COLOCATED_PREFILL, _A.STATE_MIGRATION, _A.ARTIFACT_FETCH,
                                _A.TAIL_RECOMPUTE),
    TurnClass.LONG_TOOL_OUTPUT: (_A.REMOTE_PREFILL, _A.COLOCATED_PREFILL, _A.STATE_MIGRATION,
                                 _A.ARTIFACT_FETCH, _A.TAIL_RECOMPUTE),
    TurnClass.DECODE_CONTINUATION: (_A.DECODE_CONTINUATION, _A.COLOCATED_PREFILL,
                                    _A.STATE_MIGRATION, _A.ARTIFACT_FETCH, _A.TAIL_RECOMPUTE),
    TurnClass.FORKED_ROLLOUT: (_A.COLOCATED_PREFILL, _A.ARTIFACT_FETCH, _A.TAIL_RECOMPUTE),
    TurnClass.COLD_RESUME: (_A.TAIL_RECOMPUTE, _A.COLOCATED_PREFILL, _A.ARTIFACT_FETCH,
                            _A.STATE_MIGRATION),
}  # fmt: skip
"""What is offered for each class, the default first; of equal prices the earlier one is taken."""


def classify(
    *, turns: int, known_tokens: int, new_tokens: int, is_cold: bool, limits: Settings
) -> TurnClass:
    """The class of a turn that adds `new_tokens` to `known_tokens` known ones.

    `is_cold`: the session was away for long, or its owner is gone.
    """
    if known_tokens == 0:
        return _NEW_LONG if new_tokens >= limits.long_tokens else _SMALL
    if turns == 0:
        return _FORKED
    if is_cold:
        return _COLD
    if new_tokens >= limits.long_tokens:
        return _LONG_OUTPUT
    return _CONTINUATION if new_tokens <= limits.continuation_tokens else _SMALL


# Looked up once: an enum's member takes as long to find as the rest of `classify`.
_NEW_LONG, _SMALL = TurnClass.NEW_LONG_PREFIX, TurnClass.SMALL_INCREMENT
_LONG_OUTPUT, _CONTINUATION = TurnClass.LONG_TOOL_OUTPUT, TurnClass.DECODE_CONTINUATION
_FORKED, _COLD = TurnClass.FORKED_ROLLOUT, TurnClass.COLD_RESUME
