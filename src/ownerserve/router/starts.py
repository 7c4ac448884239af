"""Where a turn without an owner starts: new, forked, its owner gone, or nobody's.

held by nobody      the least loaded; prefilled apart where that is priced lower
a fork              where the shared prefix lies, or one more read-only replica (rule 3)
the owner is gone   from a copy that outlived it, else from the token log (rule 4)
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.candidates import Candidates
from ownerserve.router.costs import Pricer
from ownerserve.router.deciding import take
from ownerserve.router.decision import Decision, Option
from ownerserve.router.messages import Reason
from ownerserve.router.request import Request
from ownerserve.router.settings import Settings
from ownerserve.router.ways import ways_at
from ownerserve.router.worker import Worker


def few(request: Request, fleet: Candidates, *, count: int) -> list[Worker]:
    """The small set that is priced: the home, the holders and the `count` least loaded."""
    home = () if request.home is None else (request.home,)
    return [*home, *request.holders(fleet), *fleet.least(count)]


def rank(
    request: Request, workers: Iterable[Worker], *, pricer: Pricer, fleet: Candidates
) -> list[Option]:
    """All ways at `workers`, the cheapest first; of equal ones, the earlier worker's."""
    options: list[Option] = []
    for worker in dict.fromkeys(workers):
        options += ways_at(request, worker, pricer=pricer, fleet=fleet)
    options.sort(key=_BY_TOTAL)
    return options


def start(request: Request, fleet: Candidates, *, pricer: Pricer, settings: Settings) -> Decision:
    """The cheapest way to start."""
    workers = few(request, fleet, count=settings.candidates)
    ranked = rank(request, workers, pricer=pricer, fleet=fleet)
    best = ranked[0]
    return take(best, _why(request, best), ranked=ranked)


_BY_TOTAL = attrgetter("total_ms")


def _why(request: Request, best: Option) -> Reason:
    if request.session is None:
        return Reason.NO_SESSION
    if request.turns:
        return Reason.RECOVERED if best.cached_tokens else Reason.OWNER_LOST
    if not request.copies:
        return Reason.NEW_SESSION
    is_on_the_spot = best.action is PlacementAction.COLOCATED_PREFILL and best.cached_tokens > 0
    return Reason.FORK if is_on_the_spot else Reason.REPLICA
