"""The decisions that policies share: run it there, start it there, bring it there, split it."""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.decision import Decision, Move, Option
from ownerserve.router.extents import Copy
from ownerserve.router.messages import Reason
from ownerserve.router.request import Request
from ownerserve.router.turns import TurnClass
from ownerserve.router.worker import Worker


def run_at(
    request: Request, worker: Worker, reason: Reason, *, wanted: Move | None = None
) -> Decision:
    """Run the turn at `worker` on what its device holds; nothing is brought from elsewhere."""
    cached = request.cached_on(worker)
    is_going_on = cached > 0 and request.turn is TurnClass.DECODE_CONTINUATION
    action = _DECODE_CONTINUATION if is_going_on else _COLOCATED_PREFILL
    return Decision(worker, action, reason, cached, wanted=wanted)


def bring_to(
    request: Request,
    worker: Worker,
    reason: Reason,
    *,
    action: PlacementAction,
    source: Copy,
    wanted: Move | None = None,
) -> Decision:
    """Run it at `worker`, with the state that it lacks brought from `source` by `action`."""
    cached = min(source.tokens, request.known_tokens)
    moved = cached - request.cached_on(worker)
    return Decision(
        worker, action, reason, cached, source=source, moved_tokens=moved, wanted=wanted
    )


def start_at(request: Request, worker: Worker) -> Decision:
    """Run it at `worker` because it has no owner: a first turn, a lost owner, no session."""
    if request.session is None:
        reason = Reason.NO_SESSION
    else:
        reason = Reason.OWNER_LOST if request.turns else Reason.NEW_SESSION
    return run_at(request, worker, reason)


def split_over(request: Request, worker: Worker, prefill: Worker, *, moved_tokens: int) -> Decision:
    """Prefill at `prefill`, send the state of `moved_tokens`, decode at `worker`."""
    return Decision(
        worker,
        PlacementAction.REMOTE_PREFILL,
        Reason.SPLIT,
        request.cached_on(prefill),
        prefill=prefill,
        moved_tokens=moved_tokens,
    )


def take(
    option: Option,
    reason: Reason,
    *,
    ranked: Sequence[Option],
    wanted: Move | None = None,
) -> Decision:
    """The decision for `option`, the best of `ranked`, for `reason`."""
    return Decision(
        option.worker, option.action, reason, option.cached_tokens, option.prefill, option.source,
        option.moved_tokens, wanted, tuple(ranked),
    )  # fmt: skip


_COLOCATED_PREFILL = PlacementAction.COLOCATED_PREFILL
_DECODE_CONTINUATION = PlacementAction.DECODE_CONTINUATION
